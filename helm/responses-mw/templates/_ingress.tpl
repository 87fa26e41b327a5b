{{/* The annotations that keep an Ingress controller from buffering or cutting streams. */}}
{{- define "responses-mw.streaming" -}}
{{- if eq .Values.ingress.streaming "nginx" -}}
nginx.ingress.kubernetes.io/proxy-buffering: "off"
nginx.ingress.kubernetes.io/proxy-request-buffering: "off"
nginx.ingress.kubernetes.io/proxy-http-version: "1.1"
nginx.ingress.kubernetes.io/proxy-read-timeout: "3600"
nginx.ingress.kubernetes.io/proxy-send-timeout: "3600"
nginx.ingress.kubernetes.io/proxy-body-size: 32m
nginx.ingress.kubernetes.io/proxy-next-upstream: error
{{- if .Values.ingress.nginxSnippet }}
{{- /* ingress-nginx sets Connection to this variable; without "upgrade" in it, no server switches protocols. */}}
nginx.ingress.kubernetes.io/configuration-snippet: |
  if ($request_method != GET) {
    set $connection_upgrade "";
  }
{{- end }}
{{- else if eq .Values.ingress.streaming "haproxy" -}}
haproxy.org/timeout-server: 3600s
haproxy.org/timeout-client: 3600s
{{- else if eq .Values.ingress.streaming "alb" -}}
alb.ingress.kubernetes.io/load-balancer-attributes: idle_timeout.timeout_seconds=3600
alb.ingress.kubernetes.io/target-type: ip
{{- end -}}
{{- end }}
