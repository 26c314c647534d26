{{- define "dflash.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 63 | trimSuffix "-" }}{{ else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 63 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "dflash.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "dflash.labels" -}}
{{ include "dflash.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "dflash.scheme" -}}
{{ if .Values.openai.tlsSecretName }}HTTPS{{ else }}HTTP{{ end }}
{{- end }}

{{- /* A setting as text: helm reads numbers of a values file as floating point, and prints a million as 1e+06. */}}
{{- define "dflash.text" -}}
{{- if and (kindIs "float64" .) (eq (floor .) .) }}{{ int64 . }}{{ else }}{{ . }}{{ end }}
{{- end }}

{{- /* How many engines a pod has, each of which has the next one of some ports. */}}
{{- define "dflash.engines" -}}
{{- $settings := .Values.settings }}
{{- if hasKey $settings "data_parallel_size" }}{{ include "dflash.text" $settings.data_parallel_size }}
{{- else if hasKey $settings "tensor_parallel_size" }}1
{{- else }}{{ max 1 (int .Values.gpus) }}
{{- end }}
{{- end }}

{{- /* Whether requests are taken: 503, or from Triton 400, while no engine takes any. */}}
{{- define "dflash.ready" -}}
{{- if .Values.openai.enabled -}}
{path: /health/ready, port: openai, scheme: {{ include "dflash.scheme" . }}}
{{- else -}}
{path: /v2/models/dflash/ready, port: http}
{{- end }}
{{- end }}

{{- define "dflash.live" -}}
{{- if .Values.openai.enabled -}}
{path: /health/live, port: openai, scheme: {{ include "dflash.scheme" . }}}
{{- else -}}
{path: /v2/health/live, port: http}
{{- end }}
{{- end }}

{{- /* Fails for an option that probes, ports or the grace period would not know of. */}}
{{- define "dflash.checkArguments" -}}
{{- $instead := dict
  "--port" "openai.enabled" "--openai-port" "openai.enabled"
  "--tls-cert" "openai.tlsSecretName" "--tls-key" "openai.tlsSecretName"
  "--ssl-certfile" "openai.tlsSecretName" "--ssl-keyfile" "openai.tlsSecretName"
  "--exit-timeout" "exitTimeout" "--api-key-file" "apiKeys.secretName" "--api-key" "apiKeys.secretName" }}
{{- $fixed := list "--host" "--triton-host" "--metrics-host" "--http-port" "--grpc-port" "--metrics-port" "--model-name" }}
{{- range $argument := .Values.extraArgs }}
{{- $option := first (splitList "=" $argument) }}
{{- if hasKey $instead $option }}
{{- fail (printf "extraArgs: %s is for the chart to say; set %s" $option (get $instead $option)) }}
{{- else if has $option $fixed }}
{{- fail (printf "extraArgs: %s would move what probes and the service look for" $option) }}
{{- else if has $option (list "--tls-client-ca" "--ssl-ca-certs") }}
{{- fail (printf "extraArgs: %s would shut out the probes, which have no certificate; let a proxy ask clients for theirs" $option) }}
{{- end }}
{{- end }}
{{- end }}

{{- /* Fails for a setting or a variable that ports, probes or the network policy would not know of. */}}
{{- define "dflash.checkSettings" -}}
{{- $values := .Values }}
{{- $instead := dict "kv_events_endpoint" "kvEvents.enabled" "kv_events_replay_endpoint" "kvEvents.enabled"
  "kv_events_topic" "kvEvents.topic" "kv_transfer_host" "kvTransfer.port" "kv_transfer_port" "kvTransfer.port" }}
{{- range $name, $_ := $values.settings }}
{{- if hasKey $instead $name }}
{{- fail (printf "settings: %s is for the chart to say; set %s" $name (get $instead $name)) }}
{{- end }}
{{- end }}
{{- range $values.extraEnv }}
{{- $name := lower (trimPrefix "DFLASH_" .name) }}
{{- if eq .name "DFLASH_API_KEYS" }}
{{- fail "extraEnv: DFLASH_API_KEYS is for the chart to say; set apiKeys.secretName" }}
{{- else if hasPrefix "DFLASH_SERVE_" .name }}
{{- fail (printf "extraEnv: %s would move what probes and the service look for" .name) }}
{{- else if and $values.kvTransfer.port (hasPrefix "kv_transfer_" $name) (hasKey $instead $name) }}
{{- fail (printf "extraEnv: %s is for the chart to say; set kvTransfer.port" .name) }}
{{- end }}
{{- end }}
{{- $prefills := has (get $values.settings "kv_role") (list "prefill" "both") }}
{{- $opens := or $values.kvTransfer.port $values.networkPolicy.extraIngress }}
{{- if and $prefills $values.networkPolicy.enabled (not $opens) }}
{{- fail "settings: decode servers read this kv_role's KV at a port, and the NetworkPolicy opens none; set kvTransfer.port" }}
{{- end }}
{{- end }}
