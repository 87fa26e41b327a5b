"""The search module that `scripts/search-module` fetches."""

from __future__ import annotations

from pathlib import Path

PATH = Path(__file__).parents[2] / ".venv" / "cache" / "redisearch.so"
