{{/* The pod of a proxy or a worker. In: root, component, arguments, grace (seconds), resources; true for what it has: preStop, http. */}}
{{- define "responses-mw.pod" -}}
{{- $root := .root -}}
{{- $values := $root.Values -}}
{{- $name := include "responses-mw.fullname" $root -}}
metadata:
  labels:
    {{- include "responses-mw.selector" $root | nindent 4 }}
    {{- include "responses-mw.observed" $root | nindent 4 }}
    app.kubernetes.io/component: {{ .component }}
    {{- with $values.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    checksum/config: {{ printf "%s%s" (include "responses-mw.settings" $root) (include "responses-mw.telemetry" $root) | sha256sum }}
    {{- $held := or (include "responses-mw.secrets" $root | trim) $values.sandbox.token }}
    {{- include "responses-mw.secretRevision" (dict "root" $root "held" $held) | nindent 4 }}
    {{- with $values.podAnnotations }}
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
  securityContext:
    {{- include "responses-mw.podSecurity" $root | nindent 4 }}
  containers:
    - name: {{ .component }}
      image: {{ include "responses-mw.image" $root | quote }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      args: {{ toJson .arguments }}
      envFrom:
        - configMapRef:
            name: {{ $name }}
        {{- if $values.existingSecret }}
        - secretRef:
            name: {{ $values.existingSecret }}
        {{- else }}
        {{- if not $values.secretKeys }}
        - secretRef:
            name: {{ $name }}-keys
        {{- end }}
        - secretRef:
            name: {{ $name }}
        {{- end }}
      {{- if or $values.sandbox.enabled (eq .component "worker") }}
      env:
        {{- if eq .component "worker" }}
        - name: RESPONSES_MW_JOBS_CONCURRENCY
          value: {{ $values.worker.concurrency | quote }}
        {{- end }}
        {{- if $values.sandbox.enabled }}
        - name: RESPONSES_MW_TOOLS_SANDBOX_TOKEN
          valueFrom:
            secretKeyRef:
              name: {{ include "responses-mw.sandboxSecret" $root }}
              key: token
        {{- end }}
      {{- end }}
      ports:
        {{- if .http }}
        - name: http
          containerPort: 8080
        {{- end }}
        - name: admin
          containerPort: {{ $values.adminPort }}
      startupProbe:
        httpGet:
          path: /livez
          port: admin
        periodSeconds: 2
        failureThreshold: 30
      livenessProbe:
        httpGet:
          path: /livez
          port: admin
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 6
      readinessProbe:
        httpGet:
          path: /readyz
          port: admin
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: 2
      {{- if .preStop }}
      lifecycle:
        preStop:
          exec:
            command: ["sleep", {{ $values.preStopSeconds | toString | quote }}]
      {{- end }}
      resources:
        {{- toYaml .resources | nindent 8 }}
      securityContext:
        {{- include "responses-mw.containerSecurity" $root | nindent 8 }}
      volumeMounts:
        - name: tmp
          mountPath: /tmp
        {{- if $values.apiKeys.existingSecret }}
        - name: api-keys
          mountPath: /etc/responses-mw
          readOnly: true
        {{- end }}
        {{- with $values.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    - name: tmp
      emptyDir:
        sizeLimit: 64Mi
    {{- if $values.apiKeys.existingSecret }}
    - name: api-keys
      secret:
        secretName: {{ $values.apiKeys.existingSecret }}
        items:
          - key: {{ $values.apiKeys.key }}
            path: {{ $values.apiKeys.key }}
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

{{- define "responses-mw.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "responses-mw.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
runAsUser: 65532
capabilities:
  drop: [ALL]
seccompProfile:
  type: RuntimeDefault
{{- end }}
