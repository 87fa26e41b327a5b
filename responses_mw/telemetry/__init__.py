"""Record spans, metrics and logs. Nothing in this package runs once per token.

No other package imports opentelemetry or prometheus_client. By default, spans, metrics and log records contain no prompts,
answers or credentials.
"""
