{{- define "responses-mw.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{/* At most 40 characters, because a name with a suffix must fit into 63. */}}
{{- define "responses-mw.fullname" -}}
{{- $name := include "responses-mw.name" . -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end }}

{{- define "responses-mw.labels" -}}
{{ include "responses-mw.selector" . }}
app.kubernetes.io/version: {{ .Values.image.tag | default .Chart.AppVersion | trunc 63 | trimAll "-_." | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{/* The metadata of an object. In: root; optionally name, suffix (to the release's name), component, labels, annotations. */}}
{{- define "responses-mw.metadata" -}}
name: {{ .name | default (printf "%s%s" (include "responses-mw.fullname" .root) (.suffix | default "")) }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- $labels := include "responses-mw.labels" .root | fromYaml }}
  {{- with .component }}
  {{- $_ := set $labels "app.kubernetes.io/component" . }}
  {{- end }}
  {{- merge $labels (.labels | default dict) .root.Values.commonLabels | toYaml | nindent 2 }}
{{- with merge (dict) (.annotations | default dict) .root.Values.commonAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "responses-mw.selector" -}}
app.kubernetes.io/name: {{ include "responses-mw.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{/* Marks the pods that have an admin port: proxies and workers, never the sandbox. */}}
{{- define "responses-mw.observed" -}}
responses-mw/observed: "true"
{{- end }}

{{/* Selects the metrics of this release, by the labels that the Prometheus operator sets for the targets of a ServiceMonitor. */}}
{{- define "responses-mw.metrics" -}}
namespace="{{ .Release.Namespace }}", service="{{ include "responses-mw.fullname" . }}-admin"
{{- end }}

{{- define "responses-mw.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "responses-mw.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end }}

{{- define "responses-mw.image" -}}
{{- with .Values.image -}}
{{- with .registry }}{{ trimSuffix "/" . }}/{{ end }}{{ .repository -}}
{{- if .digest }}@{{ .digest }}{{ else }}:{{ .tag | default $.Chart.AppVersion }}{{ end -}}
{{- end -}}
{{- end }}

{{- define "responses-mw.replicas" -}}
{{- .Values.replicaCount | default (ternary 1 2 .Values.tryout.enabled) -}}
{{- end }}

{{/* Not empty if the inspector is on. */}}
{{- define "responses-mw.hasUI" -}}
{{- if ne .Values.ui.mode "off" -}}
yes
{{- end -}}
{{- end }}

{{/* The Secret with the token of the inspector. */}}
{{- define "responses-mw.uiSecret" -}}
{{- .Values.ui.existingSecret | default (printf "%s-ui" (include "responses-mw.fullname" .)) -}}
{{- end }}

{{- define "responses-mw.sandboxSecret" -}}
{{- .Values.sandbox.existingSecret | default (printf "%s-sandbox" (include "responses-mw.fullname" .)) -}}
{{- end }}

{{/*
The annotation that makes pods restart when a secret changes. In: root, held (whether the values contain a secret of the pod). It
is not a checksum, because anyone who may read Deployments but not Secrets could then guess passwords until one matches.
*/}}
{{- define "responses-mw.secretRevision" -}}
{{- $told := include "responses-mw.value" .root.Values.secretRevision -}}
{{- with $told | default (ternary (.root.Release.Revision | toString) "" (not (empty .held))) -}}
responses-mw/secret-revision: {{ . | quote }}
{{- end -}}
{{- end }}

{{/* The existing value of a key in a Secret, or a new random value. If the chart is only rendered, the value is always new. */}}
{{- define "responses-mw.kept" -}}
{{- $data := (lookup "v1" "Secret" .namespace .secret).data | default dict -}}
{{- with get $data .key -}}
{{- b64dec . -}}
{{- else -}}
{{- randAlphaNum 48 -}}
{{- end -}}
{{- end }}
