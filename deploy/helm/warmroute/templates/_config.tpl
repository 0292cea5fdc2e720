{{/*
What the router reads: `config`, with what the chart knows better where it is not set. As YAML.
*/}}
{{- define "warmroute.config" -}}
{{- $config := deepCopy .Values.config -}}
{{- if .Values.bundledStore.enabled -}}
{{- $url := printf "redis://%s-store:6379/0" (include "warmroute.fullname" .) -}}
{{- $_ := set $config "store" (merge (dict "url" $url) ($config.store | default dict)) -}}
{{- end -}}
{{- if ne (include "warmroute.secret" (list "store.password" .)) "{}" -}}
{{- $_ := set $config "store" (merge (dict "password_file" "/etc/warmroute/secrets/store-password") ($config.store | default dict)) -}}
{{- end -}}
{{- if .Values.secrets.keys.file.name -}}
{{- $_ := set $config "keys" (merge (dict "file" "/etc/warmroute/secrets/keys") ($config.keys | default dict)) -}}
{{- end -}}
{{- if eq .Values.configChange "roll" -}}
{{- $_ := set $config "reload" (merge (dict "watch" false) ($config.reload | default dict)) -}}
{{- end -}}
{{- with .Values.engines -}}
{{- $watched := list -}}
{{- range . -}}
{{- $here := empty .url | ternary (dict "namespace" $.Release.Namespace) dict -}}
{{- $watched = append $watched (merge (deepCopy .) $here) -}}
{{- end -}}
{{- $_ := set $config "discovery" (merge (dict "kubernetes" $watched) ($config.discovery | default dict)) -}}
{{- end -}}
{{- toYaml $config -}}
{{- end -}}

{{/* The same over the router's own defaults, to look things up in. */}}
{{- define "warmroute.settings" -}}
{{- $defaults := (.Files.Get "files/router.json" | fromJson).defaults -}}
{{- mergeOverwrite $defaults (include "warmroute.config" . | fromYaml) | toYaml -}}
{{- end -}}

{{/* What a tree has at a path with dots, (list "admin.token" $tree), as JSON. */}}
{{- define "warmroute.at" -}}
{{- $found := index . 1 -}}
{{- range splitList "." (index . 0) -}}
{{- $found = index (kindIs "map" $found | ternary $found dict) . -}}
{{- end -}}
{{- toJson $found -}}
{{- end -}}

{{/* What of the configuration makes pods be replaced when it changes, and the password of the bundled store. */}}
{{- define "warmroute.rolledBy" -}}
{{- $config := include "warmroute.config" . | fromYaml -}}
{{- if eq .Values.configChange "roll" -}}
{{- toJson $config -}}
{{- else -}}
{{- $fixed := dict -}}
{{- range (.Files.Get "files/router.json" | fromJson).restart -}}
{{- $found := include "warmroute.at" (list . $config) -}}
{{- if ne $found "null" -}}
{{- $_ := set $fixed . $found -}}
{{- end -}}
{{- end -}}
{{- toJson $fixed -}}
{{- end -}}
{{- include "warmroute.storePassword" . -}}
{{- end -}}

{{/*
The bundled store's password where the chart makes it, or nothing. One of somebody's own is not looked up: it may be short
enough to be found again from its digest.
*/}}
{{- define "warmroute.storePassword" -}}
{{- get (include "warmroute.made" . | fromJson) "store-password" -}}
{{- end -}}

{{/* Namespaces of this cluster whose EndpointSlices are watched, as a JSON list. */}}
{{- define "warmroute.watched" -}}
{{- $found := list -}}
{{- range (dig "discovery" "kubernetes" list (include "warmroute.config" . | fromYaml)) -}}
{{- if not .url -}}
{{- $found = append $found (.namespace | default $.Release.Namespace) -}}
{{- end -}}
{{- end -}}
{{- $found | uniq | sortAlpha | toJson -}}
{{- end -}}

{{/* The Secret and the key of a setting, (list "admin.token" $), as JSON; {} when there is none. */}}
{{- define "warmroute.secret" -}}
{{- $setting := index . 0 -}}
{{- $root := index . 1 -}}
{{- $path := splitList "." $setting -}}
{{- $given := index $root.Values.secrets (first $path) (last $path) -}}
{{- $own := include "warmroute.fullname" $root -}}
{{- if $given.name -}}
{{- pick $given "name" "key" | toJson -}}
{{- else if eq $setting "identity.secret" -}}
{{- dict "name" $own "key" "identity-secret" | toJson -}}
{{- else if and (eq $setting "admin.token") (not (dig "admin" "open" false $root.Values.config)) (not (dig "admin" "token_file" "" $root.Values.config)) -}}
{{- dict "name" $own "key" "admin-token" | toJson -}}
{{- else if and (eq $setting "store.password") $root.Values.bundledStore.enabled -}}
{{- dict "name" $own "key" "store-password" | toJson -}}
{{- else -}}
{}
{{- end -}}
{{- end -}}

{{/*
What the chart's own Secret has, by key, as JSON: what it had before, or else something new. It is made once and kept
beside the values, as all that is rendered is to be of the same.
*/}}
{{- define "warmroute.made" -}}
{{- if not (hasKey . "made") -}}
{{- $name := include "warmroute.fullname" . -}}
{{- $before := dig "data" dict (lookup "v1" "Secret" .Release.Namespace $name | default dict) -}}
{{- $made := dict -}}
{{- range $setting := list "admin.token" "identity.secret" "store.password" -}}
{{- with include "warmroute.secret" (list $setting $) | fromJson -}}
{{- if eq .name $name -}}
{{- $_ := set $made .key (get $before .key | b64dec | default (randAlphaNum 43)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $_ := set . "made" $made -}}
{{- end -}}
{{- toJson .made -}}
{{- end -}}

{{/* Files in /etc/warmroute/secrets: their Secrets and keys by name, as JSON. */}}
{{- define "warmroute.files" -}}
{{- $files := dict -}}
{{- range $file, $setting := dict "admin-token" "admin.token" "store-password" "store.password" "keys" "keys.file" -}}
{{- with include "warmroute.secret" (list $setting $) | fromJson -}}
{{- $_ := set $files $file . -}}
{{- end -}}
{{- end -}}
{{- $files | toJson -}}
{{- end -}}

{{/* Whether a file is in a volume of extraVolumeMounts, (list "/var/log/j" $): yes or no. */}}
{{- define "warmroute.isMounted" -}}
{{- $file := index . 0 -}}
{{- $found := "no" -}}
{{- range (index . 1).Values.extraVolumeMounts -}}
{{- if or (eq $file .mountPath) (hasPrefix (printf "%s/" (trimSuffix "/" .mountPath)) $file) -}}
{{- $found = "yes" -}}
{{- end -}}
{{- end -}}
{{- $found -}}
{{- end -}}

{{/* What one router needs: a core for each worker, where nothing else is said. As YAML. */}}
{{- define "warmroute.resources" -}}
{{- $resources := deepCopy (.Values.resources | default dict) -}}
{{- if and $resources.requests (not $resources.requests.cpu) -}}
{{- $_ := set $resources.requests "cpu" ((include "warmroute.settings" . | fromYaml).workers | int64 | toString) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{/* The port that clients use. */}}
{{- define "warmroute.port" -}}
{{- .Values.service.port | default (empty (include "warmroute.settings" . | fromYaml).tls.cert_file | ternary 80 443) | int64 -}}
{{- end -}}

{{/* Seconds that a pod may take from the signal on before Kubernetes kills it. */}}
{{- define "warmroute.drain" -}}
{{- $drain := (include "warmroute.settings" . | fromYaml).drain -}}
{{- $sleep := dig "preStop" "sleep" "seconds" 0 (.Values.lifecycle | default dict) -}}
{{- addf $drain.delay_s $drain.grace_s $sleep | ceil | int64 -}}
{{- end -}}
{{- define "warmroute.grace" -}}
{{- $drain := include "warmroute.drain" . | int64 -}}
{{- if kindIs "invalid" .Values.terminationGracePeriodSeconds -}}
{{- add $drain 45 -}}
{{- else -}}
{{- .Values.terminationGracePeriodSeconds | int64 -}}
{{- end -}}
{{- end -}}

{{/* Most routers that there are at a time, rollouts aside. */}}
{{- define "warmroute.routers" -}}
{{- .Values.autoscaling.enabled | ternary .Values.autoscaling.maxReplicas .Values.replicaCount | int64 -}}
{{- end -}}
