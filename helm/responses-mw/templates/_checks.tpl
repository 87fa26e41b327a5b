{{/* Checks that a schema cannot express: values that require or exclude others. Every rendering begins here (configmap.yaml). */}}
{{- define "responses-mw.checks" -}}
{{- $values := .Values -}}
{{- include "responses-mw.checkUpstreams" . -}}
{{- include "responses-mw.checkSecrets" . -}}
{{- include "responses-mw.checkTryout" . -}}
{{- if and $values.prompts.files $values.prompts.existingConfigMap -}}
{{- fail "prompts.existingConfigMap replaces prompts.files: set only one of them" -}}
{{- end -}}
{{- if and $values.ingress.enabled (not $values.ingress.hosts) -}}
{{- fail "ingress.enabled needs ingress.hosts" -}}
{{- end -}}
{{- if and $values.httpRoute.enabled (not $values.httpRoute.parentRefs) -}}
{{- fail "httpRoute.enabled needs httpRoute.parentRefs: the Gateway to attach it to" -}}
{{- end -}}
{{- if and $values.autoscaling.enabled (gt (int $values.autoscaling.minReplicas) (int $values.autoscaling.maxReplicas)) -}}
{{- fail "autoscaling.minReplicas must not exceed autoscaling.maxReplicas" -}}
{{- end -}}
{{- if $values.worker.keda.enabled -}}
{{- if not $values.worker.enabled -}}
{{- fail "worker.keda.enabled needs worker.enabled" -}}
{{- end -}}
{{- if not $values.worker.keda.prometheus -}}
{{- fail "worker.keda.enabled needs worker.keda.prometheus: the URL of the Prometheus that scrapes these pods" -}}
{{- end -}}
{{- if gt (int $values.worker.keda.minReplicas) (int $values.worker.keda.maxReplicas) -}}
{{- fail "worker.keda.minReplicas must not exceed worker.keda.maxReplicas" -}}
{{- end -}}
{{- end -}}
{{- if and $values.sandbox.token $values.sandbox.existingSecret -}}
{{- fail "sandbox.existingSecret replaces sandbox.token: set only one of them" -}}
{{- end -}}
{{- include "responses-mw.checkUI" . -}}
{{- if hasPrefix "unix:" $values.redis.url -}}
{{- fail "redis.url must be the URL of a server, because pods cannot share a socket" -}}
{{- end -}}
{{- end }}

{{- define "responses-mw.checkUI" -}}
{{- $values := .Values -}}
{{- if and $values.ui.token $values.ui.existingSecret -}}
{{- fail "ui.existingSecret replaces ui.token: set only one of them" -}}
{{- end -}}
{{- $settings := $values.settings.ui | default dict -}}
{{- if or (hasKey $settings "mode") (hasKey $settings "actions") (dig "ui" "token" "" $values.secretSettings) (dig "ui" "token" "" $values.secretRefs) -}}
{{- fail "set ui.mode, ui.actions, and ui.token or ui.existingSecret, instead of the settings of the group ui" -}}
{{- end -}}
{{- if and (include "responses-mw.hasUI" .) $values.networkPolicy.enabled $values.serviceMonitor.enabled (not $values.networkPolicy.metricsFrom) -}}
{{- fail "ui.mode needs networkPolicy.metricsFrom if serviceMonitor is enabled: the peers of Prometheus. Otherwise, all pods of the cluster could reach the inspector" -}}
{{- end -}}
{{- end }}

{{- define "responses-mw.checkSecrets" -}}
{{- $values := .Values -}}
{{- $redis := hasKey ($values.secretRefs.redis | default dict) "url" -}}
{{- if not (or $values.redis.url $values.existingSecret $redis $values.tryout.enabled) -}}
{{- fail "redis.url is required, e.g. --set redis.url=redis://redis:6379/0. Alternatively, set secretRefs.redis.url, or existingSecret to a Secret with the key RESPONSES_MW_REDIS_URL" -}}
{{- end -}}
{{- if and $values.existingSecret (or $values.redis.url $values.secretSettings $values.secretKeys $values.mcpServers) -}}
{{- fail "existingSecret replaces redis.url, secretSettings, secretKeys and mcpServers: put them into that Secret" -}}
{{- end -}}
{{- if and $values.apiKeys.existingSecret (or (dig "auth" "api_keys" "" $values.secretSettings) (dig "auth" "api_keys" "" $values.secretRefs)) -}}
{{- fail "apiKeys.existingSecret sets auth.api_keys: leave it out of secretSettings and secretRefs" -}}
{{- end -}}
{{- $held := fromYaml (include "responses-mw.secrets" .) -}}
{{- range $group, $settings := $values.secretRefs -}}
{{- range $name, $_ := $settings -}}
{{- if hasKey $held (include "responses-mw.variable" (list $group $name)) -}}
{{- fail (printf "secretRefs.%s.%s replaces the same secret in these values: set only one of them" $group $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- define "responses-mw.checkTryout" -}}
{{- $values := .Values -}}
{{- if $values.tryout.enabled -}}
{{- if or $values.redis.url $values.existingSecret $values.secretRefs.redis -}}
{{- fail "tryout.enabled starts its own Valkey: leave out redis.url, existingSecret and secretRefs.redis" -}}
{{- end -}}
{{- if or (gt (int (include "responses-mw.replicas" .)) 1) $values.autoscaling.enabled $values.worker.enabled -}}
{{- fail "tryout.enabled supports only one replica, because each replica would have its own Valkey. To use replicaCount, autoscaling or worker, set redis.url" -}}
{{- end -}}
{{- end -}}
{{- end }}
