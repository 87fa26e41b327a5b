"""Identifiers: a prefix that tells the kind, then 128 random bits in lower-case hexadecimal."""

from __future__ import annotations

import secrets


def random_part() -> str:
    """32 characters of ``[0-9a-f]``, from the system's source of secrets."""
    return secrets.token_hex(16)


def mint(prefix: str) -> str:
    """A new id such as ``msg_3b9f...``."""
    return f"{prefix}_{random_part()}"
