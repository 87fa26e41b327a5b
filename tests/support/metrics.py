"""Metrics of this process."""

from __future__ import annotations

from responses_mw.telemetry.instruments import REGISTRY


def sample_value(name: str, labels: dict[str, str] | None = None) -> float | None:
    """Return the value of a sample, or None if there is none. Only its own metric is collected, because there are many."""
    families = REGISTRY.restricted_registry([name]).collect()
    samples = (one for family in families for one in family.samples)
    return next((one.value for one in samples if one.name == name and one.labels == (labels or {})), None)
