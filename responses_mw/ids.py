"""Identifiers.

An id is a prefix that tells the kind, a tag that tells the conversation, and random letters: an id alone finds its keys.

    resp_<tag><random>          a response; its chain shares the tag, and with it one Redis Cluster slot
    conv_<tag>                  a conversation
    msg_<tag><random><n>        the n-th item of response resp_<tag><random>, its input items counted first

The random part has 128 bits, so that nobody guesses an id; the tag has 64, so that chains spread over the slots.
"""

from __future__ import annotations

import secrets
from itertools import count

TAG_LENGTH = 16
RANDOM_LENGTH = 32


def random_part() -> str:
    """32 characters of ``[0-9a-f]``: 128 bits from the system's source of secrets."""
    return secrets.token_hex(RANDOM_LENGTH // 2)


def new_tag() -> str:
    """16 characters of ``[0-9a-f]``, the tag of a new chain or conversation."""
    return secrets.token_hex(TAG_LENGTH // 2)


def mint(prefix: str) -> str:
    """A free-standing id such as ``call_3b9f...``."""
    return f"{prefix}_{random_part()}"


class RunIds:
    """The ids of one run: its response's, and one for each of its items in the order of asking."""

    __slots__ = ("_count", "_stem", "response")

    def __init__(self, tag: str | None = None) -> None:
        """``tag`` is the parent's or the conversation's; a new chain gets one of its own."""
        self._stem = (tag or new_tag()) + random_part()
        self._count = count()
        self.response = f"resp_{self._stem}"

    def item(self, prefix: str) -> str:
        """The next item's id, final from now on."""
        return f"{prefix}_{self._stem}{next(self._count)}"
