{{/* A setting's value as an environment variable has it. Helm reads every number as a float: 1073741824 must not become 1.07e+09. */}}
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

{{/* The server's settings that are no secrets, as NAME: "value". */}}
{{- define "responses-mw.settings" -}}
{{- $settings := dict "upstream" .Values.upstream.url "host" "0.0.0.0" "port" 8080 -}}
{{- $_ := set $settings "admin_host" "0.0.0.0" -}}
{{- $_ := set $settings "admin_port" .Values.adminPort -}}
{{- if .Values.worker.enabled -}}
{{- $_ := set $settings "workers" 0 -}}
{{- end -}}
{{- if .Values.sandbox.enabled -}}
{{- $_ := set $settings "sandbox_url" (printf "http://%s-sandbox:8090/mcp" (include "responses-mw.fullname" .)) -}}
{{- end -}}
{{- if .Values.apiKeys.existingSecret -}}
{{- $_ := set $settings "api_keys_file" (printf "/etc/responses-mw/%s" .Values.apiKeys.key) -}}
{{- end -}}
{{- range $name, $value := merge (deepCopy .Values.settings) $settings }}
RESPONSES_MW_{{ upper $name }}: {{ include "responses-mw.value" $value | quote }}
{{- end }}
{{- end }}

{{/* The settings that are secrets, as NAME: "value". */}}
{{- define "responses-mw.secrets" -}}
{{- if .Values.redis.url }}
RESPONSES_MW_REDIS: {{ .Values.redis.url | quote }}
{{- end }}
{{- with .Values.secretKeys }}
RESPONSES_MW_SECRET_KEYS: {{ toJson . | quote }}
{{- end }}
{{- with .Values.mcpServers }}
RESPONSES_MW_MCP_SERVERS: {{ toJson . | quote }}
{{- end }}
{{- with .Values.connectors }}
RESPONSES_MW_CONNECTORS: {{ toJson . | quote }}
{{- end }}
{{- range $name, $value := .Values.secretSettings }}
RESPONSES_MW_{{ upper $name }}: {{ include "responses-mw.value" $value | quote }}
{{- end }}
{{- end }}

{{/* The standard variables of OpenTelemetry. Metrics are scraped from the admin port, unless telemetry.env says otherwise. */}}
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

{{- define "responses-mw.drainSeconds" -}}
{{- ternary (get .Values.settings "drain_seconds") 30 (hasKey .Values.settings "drain_seconds") -}}
{{- end }}

{{/*
The ports of all that is configured: those that the URLs name, or their scheme's. 6379 is always one: a URL may be in a Secret that we
do not see, and the master that Sentinels name has a port of its own.
*/}}
{{- define "responses-mw.ports" -}}
{{- $settings := .Values.settings -}}
{{- $urls := list .Values.upstream.url .Values.telemetry.endpoint (get $settings "cache_embedding_url") (get $settings "web_search_url") -}}
{{- if and (has (get $settings "web_search") (list "tavily" "brave")) (not (get $settings "web_search_url")) -}}
{{- $urls = append $urls "https://the-providers-own" -}}
{{- end -}}
{{- range concat (values (.Values.mcpServers | default dict)) (values (.Values.connectors | default dict)) -}}
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
