{{/* The URLs of an upstream, with commas between them. In: its values. */}}
{{- define "responses-mw.upstreamURL" -}}
{{- if .headlessService -}}
dns+http://{{ .headlessService }}
{{- else if kindIs "slice" .url -}}
{{- join "," .url -}}
{{- else -}}
{{- .url -}}
{{- end -}}
{{- end }}

{{/* The URLs of all upstreams, with commas between them. */}}
{{- define "responses-mw.upstreamURLs" -}}
{{- $urls := list (include "responses-mw.upstreamURL" .Values.upstream) -}}
{{- range .Values.upstreams -}}
{{- $urls = append $urls (include "responses-mw.upstreamURL" .) -}}
{{- end -}}
{{- join "," (compact $urls) -}}
{{- end }}

{{/*
The variables of named upstreams: their API keys, and the setting upstreams as JSON. Kubernetes replaces $(NAME) in it by the key.
*/}}
{{- define "responses-mw.upstreamEnv" -}}
{{- $upstreams := dict -}}
{{- range $name, $values := .Values.upstreams -}}
{{- $settings := omit $values "headlessService" "apiKeySecret" -}}
{{- $_ := set $settings "url" (include "responses-mw.upstreamURL" $values) -}}
{{- with $values.apiKeySecret -}}
{{- $_ := set $settings "api_key" (printf "$(UPSTREAM_API_KEY_%s)" $name) }}
- name: UPSTREAM_API_KEY_{{ $name }}
  valueFrom:
    secretKeyRef:
      {{- toYaml . | nindent 6 }}
{{- end -}}
{{- $_ := set $upstreams $name $settings -}}
{{- end }}
{{- if $upstreams }}
- name: RESPONSES_MW_UPSTREAMS
  value: {{ toJson $upstreams | quote }}
{{- end }}
{{- end }}

{{- define "responses-mw.checkUpstreams" -}}
{{- $values := .Values -}}
{{- if not (include "responses-mw.upstreamURLs" .) -}}
{{- fail "upstream.url is required: the Chat Completions server, e.g. --set upstream.url=http://vllm:8000. Alternatively, set upstream.headlessService or upstreams" -}}
{{- end -}}
{{- if and $values.upstream.url $values.upstream.headlessService -}}
{{- fail "upstream.headlessService replaces upstream.url: set only one of them" -}}
{{- end -}}
{{- $keyed := "" -}}
{{- $count := len $values.upstreams -}}
{{- if include "responses-mw.upstreamURL" $values.upstream -}}
{{- $count = add1 $count -}}
{{- end -}}
{{- range $name, $upstream := $values.upstreams -}}
{{- if eq (empty $upstream.url) (empty $upstream.headlessService) -}}
{{- fail (printf "upstreams.%s needs either url or headlessService" $name) -}}
{{- end -}}
{{- if $upstream.apiKeySecret -}}
{{- $keyed = $name -}}
{{- end -}}
{{- end -}}
{{- $has := or $values.apiKeys.existingSecret $values.existingSecret (dig "auth" "api_keys" "" $values.secretSettings) (dig "auth" "api_keys" "" $values.secretRefs) -}}
{{- if and $keyed (gt (int $count) 1) (not $has) -}}
{{- fail (printf "upstreams.%s has an API key, and there are several upstreams: your callers need API keys too (apiKeys.existingSecret)" $keyed) -}}
{{- end -}}
{{- end }}
