"""Spans, metrics and log records. Nothing here runs per token.

    context      facts about the current request or job; log lines and counts derived from them
    turn         turns of the model: client span, metrics, messages by opt-in
    tracing      all other spans, and propagation of trace context
    metrics      all metrics, for Prometheus and OpenTelemetry, and usage by owner
    instruments  the kinds of metrics; their exposition
    conventions  names of OpenTelemetry's conventions
    setup        set-up of logs and of OpenTelemetry's SDK for our own commands

No other package imports opentelemetry or prometheus_client. Spans, metrics and log records hold no prompt, answer, credential,
path or query.
"""
