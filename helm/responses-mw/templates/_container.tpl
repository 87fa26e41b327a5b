{{/* The container of a proxy or a worker. In: the arguments of the pod's template. */}}
{{- define "responses-mw.container" -}}
{{- $root := .root -}}
{{- $values := $root.Values -}}
image: {{ include "responses-mw.image" $root | quote }}
imagePullPolicy: {{ $values.image.pullPolicy }}
args: {{ toJson .arguments }}
envFrom:
  {{- include "responses-mw.envFrom" $root | nindent 2 }}
{{- with include "responses-mw.env" . | trim }}
env:
  {{- . | nindent 2 }}
{{- end }}
ports:
  {{- if .http }}
  - name: http
    containerPort: 8080
  {{- end }}
  - name: admin
    containerPort: {{ $values.adminPort }}
startupProbe:
  {{- include "responses-mw.probe" (dict "path" "/livez" "times" $values.probes.startup) | nindent 2 }}
livenessProbe:
  {{- include "responses-mw.probe" (dict "path" "/livez" "times" $values.probes.liveness) | nindent 2 }}
readinessProbe:
  {{- $required := join "," $values.readiness.require }}
  {{- $path := ternary (printf "/readyz?require=%s" $required) "/readyz" (ne $required "") }}
  {{- include "responses-mw.probe" (dict "path" $path "times" $values.probes.readiness) | nindent 2 }}
{{- if .preStop }}
lifecycle:
  preStop:
    exec:
      command: ["sleep", {{ $values.preStopSeconds | toString | quote }}]
{{- end }}
resources:
  {{- toYaml .resources | nindent 2 }}
{{- with $values.securityContext }}
securityContext:
  {{- toYaml . | nindent 2 }}
{{- end }}
volumeMounts:
  - name: tmp
    mountPath: /tmp
  {{- if $values.apiKeys.existingSecret }}
  - name: api-keys
    mountPath: /etc/responses-mw
    readOnly: true
  {{- end }}
  {{- if include "responses-mw.prompts" $root }}
  - name: prompts
    mountPath: /etc/responses-mw-prompts
    readOnly: true
  {{- end }}
  {{- with $values.extraVolumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}

{{- define "responses-mw.probe" -}}
httpGet:
  path: {{ .path }}
  port: admin
{{- with .times }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "responses-mw.envFrom" -}}
{{- $name := include "responses-mw.fullname" . -}}
- configMapRef:
    name: {{ $name }}
{{- if include "responses-mw.makesKeys" . }}
- secretRef:
    name: {{ $name }}-keys
{{- end }}
{{- if include "responses-mw.secrets" . | trim }}
- secretRef:
    name: {{ $name }}
{{- end }}
{{- with .Values.existingSecret }}
- secretRef:
    name: {{ . }}
{{- end }}
{{- with .Values.extraEnvFrom }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "responses-mw.env" -}}
{{- if eq .component "worker" }}
- name: RESPONSES_MW_JOBS_CONCURRENCY
  value: {{ .root.Values.worker.concurrency | quote }}
{{- end }}
{{- if .root.Values.sandbox.enabled }}
- name: RESPONSES_MW_TOOLS_SANDBOX_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ include "responses-mw.sandboxSecret" .root }}
      key: token
{{- end }}
{{- if include "responses-mw.hasUI" .root }}
- name: RESPONSES_MW_UI_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ include "responses-mw.uiSecret" .root }}
      key: token
{{- end }}
{{- range $group, $settings := .root.Values.secretRefs }}
{{- range $name, $ref := $settings }}
- name: {{ include "responses-mw.variable" (list $group $name) }}
  valueFrom:
    secretKeyRef:
      {{- toYaml $ref | nindent 6 }}
{{- end }}
{{- end }}
{{- include "responses-mw.upstreamEnv" .root }}
{{- with .root.Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* The Valkey in the pod of a try-out. It keeps its data as long as the pod exists. */}}
{{- define "responses-mw.valkey" -}}
image: {{ .Values.tryout.image | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
args: [valkey-server, --bind, 127.0.0.1, --dir, /data, --appendonly, "yes", --save, "", --maxmemory, 200mb, --maxmemory-policy, noeviction]
readinessProbe:
  exec:
    command: [valkey-cli, ping]
resources:
  requests:
    cpu: 50m
    memory: 64Mi
  limits:
    cpu: 500m
    memory: 512Mi
{{- with .Values.securityContext }}
securityContext:
  {{- toYaml . | nindent 2 }}
{{- end }}
volumeMounts:
  - name: valkey
    mountPath: /data
{{- end }}
