"""Spans, metrics and log records. Nothing in this package runs once per token.

    context      facts about the current request or job, and the log lines and metrics derived from the facts
    turn         model turns: the client span, the metrics and, only if an environment variable enables it, the messages
    tracing      all other spans, and the propagation of trace context
    metrics      all metrics, for Prometheus and OpenTelemetry, and usage by owner
    instruments  the types of metrics, and their exposition for Prometheus
    conventions  names in OpenTelemetry's semantic conventions
    setup        configuration of logging and of OpenTelemetry's SDK for our own commands

No other package imports opentelemetry or prometheus_client. By default, spans, metrics and log records contain no prompts,
answers or credentials.
"""
