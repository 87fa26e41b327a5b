{{/* A setting's value as text for an environment variable. Helm reads numbers as floats, but 1073741824 must not become 1.07e+09. */}}
{{- define "responses-mw.value" -}}
{{- if kindIs "string" . -}}
{{- . -}}
{{- else if or (kindIs "slice" .) (kindIs "map" .) -}}
{{- toJson . -}}
{{- else if kindIs "float64" . -}}
{{- ternary (int64 . | toString) (toString .) (eq (floor .) .) -}}
{{- else -}}
{{- toString . -}}
{{- end -}}
{{- end }}

{{/* The server's settings that are not secrets, as NAME: "value". */}}
{{- define "responses-mw.settings" -}}
{{- $settings := dict -}}
{{- with include "responses-mw.upstreamURL" .Values.upstream -}}
{{- $_ := set $settings "upstream" (dict "url" .) -}}
{{- end -}}
{{- $server := dict "admin_host" .Values.listenHost "admin_port" .Values.adminPort -}}
{{- if include "responses-mw.prompts" . -}}
{{- $_ := set $server "prompts_dir" "/etc/responses-mw-prompts" -}}
{{- end -}}
{{- $_ := set $settings "server" $server -}}
{{- if .Values.tryout.enabled -}}
{{- $_ := set $settings "redis" (dict "url" "redis://127.0.0.1:6379/0") -}}
{{- end -}}
{{- if .Values.worker.enabled -}}
{{- $_ := set $settings "jobs" (dict "concurrency" 0) -}}
{{- end -}}
{{- if .Values.sandbox.enabled -}}
{{- $_ := set $settings "tools" (dict "sandbox_url" (printf "http://%s-sandbox:8090/mcp" (include "responses-mw.fullname" .))) -}}
{{- end -}}
{{- if include "responses-mw.hasUI" . -}}
{{- $_ := set $settings "ui" (dict "mode" .Values.ui.mode "actions" .Values.ui.actions) -}}
{{- end -}}
{{- if .Values.apiKeys.existingSecret -}}
{{- $_ := set $settings "auth" (dict "api_keys" (printf "@/etc/responses-mw/%s" .Values.apiKeys.key)) -}}
{{- end }}
RESPONSES_MW_HOST: {{ .Values.listenHost | quote }}
RESPONSES_MW_PORT: "8080"
{{- include "responses-mw.variables" (merge (deepCopy .Values.settings) $settings) }}
{{- end }}

{{/* The environment variable of a setting. In: its group and name. */}}
{{- define "responses-mw.variable" -}}
RESPONSES_MW_{{ first . | upper }}_{{ last . | upper }}
{{- end }}

{{/* Settings by group and name, as NAME: "value". */}}
{{- define "responses-mw.variables" -}}
{{- range $group, $settings := . }}
{{- range $name, $value := $settings }}
{{ include "responses-mw.variable" (list $group $name) }}: {{ include "responses-mw.value" $value | quote }}
{{- end }}
{{- end }}
{{- end }}

{{/* The name of the ConfigMap with the prompts. Empty if there are no prompts. */}}
{{- define "responses-mw.prompts" -}}
{{- .Values.prompts.existingConfigMap | default (ternary "" (printf "%s-prompts" (include "responses-mw.fullname" .)) (empty .Values.prompts.files)) -}}
{{- end }}

{{/* Not empty if the chart generates a secret key. */}}
{{- define "responses-mw.makesKeys" -}}
{{- if not (or .Values.existingSecret .Values.secretKeys (hasKey (.Values.secretRefs.auth | default dict) "secret_keys")) -}}
yes
{{- end -}}
{{- end }}

{{/* The settings that are secrets, as NAME: "value". */}}
{{- define "responses-mw.secrets" -}}
{{- if .Values.redis.url }}
RESPONSES_MW_REDIS_URL: {{ .Values.redis.url | quote }}
{{- end }}
{{- with .Values.secretKeys }}
RESPONSES_MW_AUTH_SECRET_KEYS: {{ toJson . | quote }}
{{- end }}
{{- with .Values.mcpServers }}
RESPONSES_MW_TOOLS_MCP_SERVERS: {{ toJson . | quote }}
{{- end }}
{{- include "responses-mw.variables" .Values.secretSettings }}
{{- end }}

{{/* The standard variables of OpenTelemetry. Metrics are scraped from the admin port unless telemetry.env sets an exporter for them. */}}
{{- define "responses-mw.telemetry" -}}
{{- $env := dict "OTEL_SERVICE_NAME" (.Values.telemetry.serviceName | default (include "responses-mw.fullname" .)) -}}
{{- $_ := set $env "OTEL_TRACES_EXPORTER" "none" -}}
{{- $_ := set $env "OTEL_METRICS_EXPORTER" "none" -}}
{{- with .Values.telemetry.endpoint -}}
{{- $_ := set $env "OTEL_TRACES_EXPORTER" "otlp" -}}
{{- $_ := set $env "OTEL_EXPORTER_OTLP_ENDPOINT" . -}}
{{- $_ := set $env "OTEL_EXPORTER_OTLP_PROTOCOL" "http/protobuf" -}}
{{- $_ := set $env "OTEL_TRACES_SAMPLER" "parentbased_traceidratio" -}}
{{- $_ := set $env "OTEL_TRACES_SAMPLER_ARG" $.Values.telemetry.sampleRatio -}}
{{- end -}}
{{- range $name, $value := merge (deepCopy .Values.telemetry.env) $env }}
{{ $name }}: {{ include "responses-mw.value" $value | quote }}
{{- end }}
{{- end }}

{{/* The number of seconds in server.drain_timeout, which may have a unit as in the settings of the server. */}}
{{- define "responses-mw.drainSeconds" -}}
{{- $server := .Values.settings.server | default dict -}}
{{- $value := include "responses-mw.value" (ternary (get $server "drain_timeout") 30 (hasKey $server "drain_timeout")) | trim -}}
{{- $factors := dict "none" 1 "ms" 0.001 "s" 1 "m" 60 "h" 3600 "d" 86400 "w" 604800 -}}
{{- mulf (regexFind "^[0-9.]+" $value) (get $factors (regexFind "[a-z]+$" $value | default "none")) -}}
{{- end }}

{{/*
The ports of all configured servers: the port in each URL, or the default of its scheme. The address of an object store may be in
extraEnv. 6379 is always included, because Redis's URL may be in a Secret that the chart cannot read, and because the master that
the Sentinels name may listen on this port.
*/}}
{{- define "responses-mw.ports" -}}
{{- $cache := .Values.settings.cache | default dict -}}
{{- $files := .Values.settings.files | default dict -}}
{{- $search := .Values.settings.search | default dict -}}
{{- $urls := regexSplit ",\\s*" (replace "dns+" "" (include "responses-mw.upstreamURLs" .)) -1 -}}
{{- $urls = concat $urls (list .Values.telemetry.endpoint (get $cache "embedding_url") (get $cache "judge_url") (get $search "url")) -}}
{{- $urls = concat $urls (list (get $files "embedding_url") (get $files "rerank_url") (get $files "docling_url")) -}}
{{- if regexMatch "^(s3|gs|az)://" (get $files "url" | default "") -}}
{{- $endpoints := list -}}
{{- range .Values.extraEnv -}}
{{- if regexMatch "^(AWS_ENDPOINT(_URL(_S3)?)?|AZURE_(STORAGE_)?ENDPOINT|GOOGLE_BASE_URL)$" .name -}}
{{- $endpoints = append $endpoints (get . "value") -}}
{{- end -}}
{{- end -}}
{{- $urls = concat $urls (compact $endpoints | default (list "https://the-providers-own")) -}}{{/* only its port is read */}}
{{- end -}}
{{- $provider := get $search "provider" | default "none" -}}
{{- if not (or (get $search "url") (has $provider (list "none" "searxng")) (contains "/" $provider)) -}}
{{- $urls = append $urls "https://the-providers-own" -}}
{{- end -}}
{{- range values (.Values.mcpServers | default dict) -}}
{{- $urls = append $urls (get . "url") -}}
{{- end -}}
{{- range $name, $value := .Values.telemetry.env -}}
{{- if hasSuffix "_ENDPOINT" $name -}}
{{- $urls = append $urls $value -}}
{{- end -}}
{{- end -}}
{{- $ports := append .Values.networkPolicy.egressPorts 6379 -}}
{{- range compact $urls -}}
{{- $port := regexFind ":[0-9]+$" (urlParse (toString .)).host | trimPrefix ":" -}}
{{- $ports = append $ports (int ($port | default (ternary 443 80 (hasPrefix "https:" (toString .))))) -}}
{{- end -}}
{{- range regexFindAll ":[0-9]+([,/?]|$)" (regexReplaceAll "^[^/]*//([^/]*@)?" .Values.redis.url "") -1 -}}
{{- $ports = append $ports (int (regexFind "[0-9]+" .)) -}}
{{- end -}}
{{- $sorted := list -}}
{{- range $ports -}}
{{- $sorted = append $sorted (printf "%05d" (int .)) -}}
{{- end -}}
{{- range sortAlpha (uniq $sorted) }}
- port: {{ regexReplaceAll "^0+" . "" }}
{{- end }}
{{- end }}
