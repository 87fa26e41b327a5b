"""How long hypothesis looks in these tests: long enough to find what it has found so far, short enough to run on every save."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "protocol", max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
settings.load_profile("protocol")
