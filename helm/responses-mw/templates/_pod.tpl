{{/* The pod of a proxy or a worker. In: root, component, arguments, grace (seconds), resources, and the flags preStop and http. */}}
{{- define "responses-mw.pod" -}}
{{- $root := .root -}}
{{- $values := $root.Values -}}
metadata:
  labels:
    {{- include "responses-mw.selector" $root | nindent 4 }}
    {{- include "responses-mw.observed" $root | nindent 4 }}
    app.kubernetes.io/component: {{ .component }}
    {{- with merge (dict) $values.podLabels $values.commonLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    checksum/config: {{ printf "%s%s" (include "responses-mw.settings" $root) (include "responses-mw.telemetry" $root) | sha256sum }}
    {{- $held := or (include "responses-mw.secrets" $root | trim) $values.sandbox.token }}
    {{- include "responses-mw.secretRevision" (dict "root" $root "held" $held) | nindent 4 }}
    {{- with merge (dict) $values.podAnnotations $values.commonAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  serviceAccountName: {{ include "responses-mw.serviceAccount" $root }}
  automountServiceAccountToken: false
  enableServiceLinks: false  # a Service named responses-mw would set RESPONSES_MW_PORT
  terminationGracePeriodSeconds: {{ .grace }}
  {{- with $values.imagePullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with $values.podSecurityContext }}
  securityContext:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.initContainers }}
  initContainers:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - name: {{ .component }}
      {{- include "responses-mw.container" . | nindent 6 }}
    {{- if $values.tryout.enabled }}
    - name: valkey
      {{- include "responses-mw.valkey" $root | nindent 6 }}
    {{- end }}
    {{- with $values.sidecars }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  volumes:
    - name: tmp
      emptyDir:
        sizeLimit: 64Mi
    {{- with $values.apiKeys }}
    {{- if .existingSecret }}
    - name: api-keys
      secret:
        secretName: {{ .existingSecret }}
        items:
          - key: {{ .key }}
            path: {{ .key }}
    {{- end }}
    {{- end }}
    {{- with include "responses-mw.prompts" $root }}
    - name: prompts
      configMap:
        name: {{ . }}
    {{- end }}
    {{- if $values.tryout.enabled }}
    - name: valkey
      emptyDir: {}
    {{- end }}
    {{- with $values.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with $values.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- if $values.topologySpread.enabled }}
  topologySpreadConstraints:
    {{- $component := .component }}
    {{- range $values.topologySpread.keys }}
    - topologyKey: {{ . }}
      maxSkew: {{ $values.topologySpread.maxSkew }}
      whenUnsatisfiable: {{ $values.topologySpread.whenUnsatisfiable }}
      labelSelector:
        matchLabels:
          {{- include "responses-mw.selector" $root | nindent 10 }}
          app.kubernetes.io/component: {{ $component }}
    {{- end }}
  {{- end }}
{{- end }}
