{{/*
What no schema can tell: combinations that would not work. Each message names the key and the remedy.
*/}}
{{- define "warmroute.checks" -}}
{{- $config := .Values.config -}}
{{- $settings := include "warmroute.settings" . | fromYaml -}}
{{- range (.Files.Get "files/router.json" | fromJson).secrets -}}
{{- if not (has (include "warmroute.at" (list . $config)) (list "null" `""`)) -}}
{{- fail (printf "config.%s (not shown here): a ConfigMap is no place for a secret: put it into a Secret, and name that in secrets.%s" . .) -}}
{{- end -}}
{{- end -}}
{{- if contains "@" (dig "store" "url" "" $config) -}}
{{- fail "config.store.url (not shown here) holds a user or a password, or an @: leave it out, set config.store.username, and name the password's Secret in secrets.store.password" -}}
{{- end -}}
{{- if regexMatch "^[^/]*//[^/]*@" $settings.tracing.endpoint -}}
{{- fail "config.tracing.endpoint (not shown here) holds a user or a password: leave it out, and set WARMROUTE_TRACING__ENDPOINT from a Secret with extraEnv" -}}
{{- end -}}
{{- range $name, $host := dict "config.host" $settings.host "config.admin.host" $settings.admin.host -}}
{{- if or (eq $host "localhost") (hasPrefix "127." $host) (eq $host "::1") -}}
{{- fail (printf "%s: %s is reached from inside the pod only: set 0.0.0.0, or :: where pods have IPv6 addresses" $name $host) -}}
{{- end -}}
{{- end -}}
{{- range $name, $port := dict "config.port" $settings.port "config.admin.port" $settings.admin.port -}}
{{- if eq (int64 $port) 0 -}}
{{- fail (printf "%s: 0 is any port, which no Service finds: choose one, as 8080" $name) -}}
{{- end -}}
{{- end -}}
{{- if eq (int64 $settings.port) (int64 $settings.admin.port) -}}
{{- fail (printf "config.admin.port: %d is the data port as well: choose another" (int64 $settings.port)) -}}
{{- end -}}
{{- if $settings.admin.tls.client_ca_file -}}
{{- fail "config.admin.tls.client_ca_file: the kubelet has no certificate to show, so all probes would fail: leave it out, the admin token guards the port" -}}
{{- end -}}
{{- if and .Values.engines (dig "discovery" "kubernetes" nil $config) -}}
{{- fail "engines and config.discovery.kubernetes are both set: leave one of them out" -}}
{{- end -}}
{{- with $settings.discovery -}}
{{- if not (or $settings.replicas .kubernetes .dns .file) -}}
{{- fail "engines: there is nothing to route to: name the Service of your engines, as in engines: [{service: sglang, port: http}], or set config.replicas" -}}
{{- end -}}
{{- end -}}
{{- $found := empty .Values.engines | ternary "config.discovery.kubernetes" "engines" -}}
{{- $named := dict -}}
{{- range $i, $each := $settings.discovery.kubernetes -}}
{{- $at := printf "%s[%d]" $found $i -}}
{{- if eq (empty $each.service) (empty $each.selector) -}}
{{- fail (printf "%s: set service or selector, one of the two: whose pods are the engines?" $at) -}}
{{- end -}}
{{- if and $each.url (not $each.namespace) -}}
{{- fail (printf "%s.namespace is to be set where url is: the release's own is of another cluster" $at) -}}
{{- end -}}
{{- if contains "@" ($each.url | default "") -}}
{{- fail (printf "%s.url (not shown here) holds a user or a password: leave them out, and mount a token for token_file" $at) -}}
{{- end -}}
{{- $_ := set $named (printf "%s.token_file" $at) $each.token_file -}}
{{- $_ := set $named (printf "%s.ca_file" $at) $each.ca_file -}}
{{- end -}}
{{- range $at := list "tls" "tls.replicas" "admin.tls" "store" -}}
{{- $given := include "warmroute.at" (list $at $settings) | fromJson -}}
{{- if ne (empty $given.cert_file) (empty $given.key_file) -}}
{{- fail (printf "config.%s.cert_file and config.%s.key_file go together: set both, or neither" $at $at) -}}
{{- end -}}
{{- end -}}
{{- range (.Files.Get "files/router.json" | fromJson).files -}}
{{- $_ := set $named (printf "config.%s" .) (include "warmroute.at" (list . $settings) | trimAll "\"") -}}
{{- end -}}
{{- $secrets := include "warmroute.files" . | fromJson -}}
{{- range $name, $file := $named -}}
{{- if and $file (eq (include "warmroute.isMounted" (list $file $)) "no") -}}
{{- if hasPrefix "/etc/warmroute/certificates/" $file -}}
{{- $folder := trimPrefix "/etc/warmroute/certificates/" $file | splitList "/" | first -}}
{{- if not (hasKey ($.Values.certificates | default dict) $folder) -}}
{{- fail (printf "%s: %s will not be there: name the Secret that has it, as in certificates: {%s: my-secret}" $name $file $folder) -}}
{{- end -}}
{{- else if and (hasPrefix "/etc/warmroute/secrets/" $file) (not (hasKey $secrets (trimPrefix "/etc/warmroute/secrets/" $file))) -}}
{{- fail (printf "%s: %s will not be there: name the Secret that has it, as in certificates: {mine: my-secret}, and write /etc/warmroute/certificates/mine/%s" $name $file (base $file)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and .Values.bundledStore.enabled (dig "store" "url" "" $config) -}}
{{- fail "bundledStore.enabled and config.store.url are both set: leave one of them out" -}}
{{- end -}}
{{- if and .Values.secrets.store.password.name (not $settings.store.url) -}}
{{- fail "secrets.store.password.name is set, and neither config.store.url nor bundledStore.enabled is: say where the store is, or leave it out" -}}
{{- end -}}
{{- if and .Values.secrets.store.sentinel_password.name (not (contains "+sentinel://" $settings.store.url)) -}}
{{- fail "secrets.store.sentinel_password.name is set, and config.store.url names no Sentinels: leave it out" -}}
{{- end -}}
{{- if and .Values.secrets.admin.token.name (or $settings.admin.open (dig "admin" "token_file" "" $config)) -}}
{{- fail "secrets.admin.token.name, and config.admin.open or config.admin.token_file are set: leave one of them out" -}}
{{- end -}}
{{- if and .Values.secrets.keys.file.name (dig "keys" "file" "" $config) -}}
{{- fail "secrets.keys.file.name and config.keys.file are both set: leave one of them out" -}}
{{- end -}}
{{- if ne (eq $settings.keys.credential "replace") (ne .Values.secrets.keys.replica_key.name "") -}}
{{- fail "config.keys.credential: replace and secrets.keys.replica_key.name go together: set both, or neither" -}}
{{- end -}}
{{- if and $settings.journal.path (eq (include "warmroute.isMounted" (list $settings.journal.path .)) "no") -}}
{{- fail (printf "config.journal.path: %s cannot be written, the root file system is read-only: mount a volume there with extraVolumes and extraVolumeMounts" $settings.journal.path) -}}
{{- end -}}
{{- $selector := include "warmroute.selector" (list "router" .) | fromYaml | keys -}}
{{- $labels := concat $selector (list "app.kubernetes.io/version" "app.kubernetes.io/managed-by" "helm.sh/chart") -}}
{{- range $each := list
  (list "commonLabels" .Values.commonLabels $labels)
  (list "podLabels" .Values.podLabels $selector)
  (list "metrics.labels" .Values.metrics.labels $labels)
  (list "metrics.dashboards.labels" .Values.metrics.dashboards.labels $labels)
  (list "podAnnotations" .Values.podAnnotations (list "warmroute/rolled-by")) -}}
{{- range $key, $_ := index $each 1 -}}
{{- if has $key (index $each 2) -}}
{{- fail (printf "%s: %s is the chart's own, what belongs together is found by it: leave it out" (index $each 0) $key) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $i, $each := .Values.topologySpreadConstraints -}}
{{- range $key := list "labelSelector" "matchLabelKeys" -}}
{{- if hasKey $each $key -}}
{{- fail (printf "topologySpreadConstraints[%d].%s: the chart adds the routers' own: leave it out" $i $key) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $key, $remedy := dict "type" "set service.type" "ports" "set service.port" "sessionAffinity" "set service.sessionAffinity" "selector" "leave it out, it is to find the routers" -}}
{{- if hasKey ($.Values.service.extraSpec | default dict) $key -}}
{{- fail (printf "service.extraSpec.%s: the chart gives it by itself: %s" $key $remedy) -}}
{{- end -}}
{{- end -}}
{{- $drain := include "warmroute.drain" . | int64 -}}
{{- $grace := include "warmroute.grace" . | int64 -}}
{{- if le $grace $drain -}}
{{- fail (printf "terminationGracePeriodSeconds: %d s are not longer than the %d s that a drain takes (config.drain.delay_s, config.drain.grace_s and a sleep in lifecycle.preStop): streams would be cut off: leave it out, or lower these" $grace $drain) -}}
{{- end -}}
{{- if and .Values.autoscaling.enabled (gt (int64 .Values.autoscaling.minReplicas) (int64 .Values.autoscaling.maxReplicas)) -}}
{{- fail (printf "autoscaling.minReplicas: %d is more than autoscaling.maxReplicas %d: lower it" (int64 .Values.autoscaling.minReplicas) (int64 .Values.autoscaling.maxReplicas)) -}}
{{- end -}}
{{- if and .Values.autoscaling.enabled (not .Values.autoscaling.cpu) (not .Values.autoscaling.inFlight) -}}
{{- fail "autoscaling.cpu and autoscaling.inFlight are both 0: set one of them, there is nothing to scale by" -}}
{{- end -}}
{{- if and .Values.autoscaling.enabled .Values.autoscaling.cpu (not (dig "requests" "cpu" nil (include "warmroute.resources" . | fromYaml))) -}}
{{- fail "autoscaling.cpu is a share of resources.requests.cpu, which is not set: set it, or autoscaling.cpu: 0" -}}
{{- end -}}
{{- with .Values.engineScaling -}}
{{- if .enabled -}}
{{- if not .target.name -}}
{{- fail "engineScaling.target.name: name the Deployment or StatefulSet of the engines" -}}
{{- end -}}
{{- if not .prometheus -}}
{{- fail "engineScaling.prometheus: say where Prometheus is, as in http://prometheus.monitoring:9090" -}}
{{- end -}}
{{- if not (or .liveTokens .requests) -}}
{{- fail "engineScaling.liveTokens and engineScaling.requests are both 0: set one of them, there is nothing to scale by" -}}
{{- end -}}
{{- if gt (int64 .minReplicas) (int64 .maxReplicas) -}}
{{- fail (printf "engineScaling.minReplicas: %d is more than engineScaling.maxReplicas %d: lower it" (int64 .minReplicas) (int64 .maxReplicas)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and .Values.metrics.engines.enabled (not .Values.metrics.engines.selector) -}}
{{- fail "metrics.engines.selector: give the labels of the engines' pods, as in {app: sglang}: without any, all pods would be scraped" -}}
{{- end -}}
{{- if and .Values.httpRoute.enabled (not .Values.httpRoute.parentRefs) -}}
{{- fail "httpRoute.parentRefs: name the Gateway, as in [{name: agents, namespace: gateways}]" -}}
{{- end -}}
{{- if and .Values.httpRoute.enabled $settings.tls.cert_file (not (dig "hostname" "" (.Values.httpRoute.validation | default dict))) -}}
{{- fail "httpRoute.validation: the routers speak TLS (config.tls), and a Gateway does so only where it is told by what to know them: set it, as in {hostname: llm.example.com, wellKnownCACertificates: System}, or leave out config.tls and have the Gateway do TLS" -}}
{{- end -}}
{{- if and .Values.ingress.enabled (not .Values.ingress.hosts) -}}
{{- fail "ingress.hosts: name the hosts, as in [llm.example.com]; \"\" is any" -}}
{{- end -}}
{{- end -}}
