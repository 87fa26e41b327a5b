"""Ids of responses, conversations and items. An id determines the object's Redis keys.

    resp_<tag><random>          a response; all responses of a history have the same tag, hence the same Redis Cluster slot
    conv_<tag>                  a conversation
    msg_<tag><random><n>        item `n` of the response resp_<tag><random>, counted from 0, beginning with its input items

An item that is added to a conversation directly has the conversation's tag, and the random part of the request that added it.

The tag and the random part have at least 128 bits of entropy each, so that ids cannot be guessed. They consist of lower-case
letters and digits, because the tag is part of key names.
"""

from __future__ import annotations

import secrets
from itertools import count

TAG_LENGTH = 25
RANDOM_LENGTH = 25
_ALPHABET = b"0123456789abcdefghijklmnopqrstuvwxyz"  # 36 ** 25 > 2 ** 128
# 7 byte values map to each character, and 4 byte values are discarded, so that all characters are equally likely.
_UNBIASED = 256 - 256 % len(_ALPHABET)
_TABLE = bytes(_ALPHABET[byte % len(_ALPHABET)] for byte in range(256))
_DISCARDED = bytes(range(_UNBIASED, 256))


def random_part() -> str:
    """Return 25 characters of `[0-9a-z]` from the system's secure random source."""
    letters = b""
    while len(letters) < RANDOM_LENGTH:
        letters += secrets.token_bytes(32).translate(_TABLE, _DISCARDED)
    return letters[:RANDOM_LENGTH].decode()


new_tag = random_part
"""Return the tag of a new history or conversation."""


class RunIds:
    """The ids of a run: `response` is the id of its response, and `item` generates the ids of its items."""

    __slots__ = ("_count", "_stem", "response")

    def __init__(self, tag: str | None = None, *, response: str | None = None, used: int = 0) -> None:
        """`tag` is the tag of the history or conversation that the run continues. If it is None, a new tag is generated.

        To resume a run, pass the id of its `response` and the number of item ids that have been `used`.
        """
        self.response = response or f"resp_{tag or new_tag()}{random_part()}"
        self._stem = self.response.removeprefix("resp_")
        self._count = count(used)

    @property
    def tag(self) -> str:
        """The tag of the history or conversation."""
        return self._stem[:TAG_LENGTH]

    @property
    def random(self) -> str:
        """The random part that all ids of the run share."""
        return self._stem[-RANDOM_LENGTH:]

    def item(self, prefix: str) -> str:
        return f"{prefix}_{self._stem}{next(self._count)}"
