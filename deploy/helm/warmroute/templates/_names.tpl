{{- define "warmroute.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else if contains "warmroute" .Release.Name -}}
{{- .Release.Name | trunc 53 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-warmroute" .Release.Name | trunc 53 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* What a selector goes by; with another component than the router: (list "store" $). */}}
{{- define "warmroute.selector" -}}
{{- $component := index . 0 -}}
{{- $root := index . 1 -}}
app.kubernetes.io/name: warmroute
app.kubernetes.io/instance: {{ $root.Release.Name | quote }}
app.kubernetes.io/component: {{ $component }}
{{- end -}}

{{/* Of an object, with those that are given for its kind beside the common ones: (list "store" $ .labels). */}}
{{- define "warmroute.labels" -}}
{{- $root := index . 1 -}}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" }}
{{ include "warmroute.podLabels" . }}
{{- end -}}

{{/* Of a pod, which no version of the chart shall replace; otherwise the same. */}}
{{- define "warmroute.podLabels" -}}
{{- $given := deepCopy ((index . 1).Values.commonLabels | default dict) -}}
{{- range slice . 2 -}}
{{- $given = mergeOverwrite $given (. | default dict) -}}
{{- end -}}
{{ include "warmroute.selector" . }}
{{- with $given }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "warmroute.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- .Values.serviceAccount.name | default (include "warmroute.fullname" .) -}}
{{- else -}}
{{- .Values.serviceAccount.name | default "default" -}}
{{- end -}}
{{- end -}}

{{- define "warmroute.image" -}}
{{- with .Values.image -}}
{{- if .digest -}}
{{- printf "%s@%s" .repository .digest -}}
{{- else -}}
{{- printf "%s:%s" .repository (.tag | default $.Chart.AppVersion) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/*
Of Roles, which may have 253 characters: in a namespace of engines, releases of several namespaces may meet. The digest is
for those whose names are alike when put together, as `a-b` in `c` and `a` in `b-c`.
*/}}
{{- define "warmroute.accessName" -}}
{{- $name := include "warmroute.fullname" . -}}
{{- printf "%s-%s-%s" $name .Release.Namespace (printf "%s/%s" .Release.Namespace $name | sha256sum | trunc 8) -}}
{{- end -}}
