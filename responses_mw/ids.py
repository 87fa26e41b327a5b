"""Identifiers.

An id is a prefix that tells the kind, a tag that tells the conversation, and random letters: an id alone finds its keys.

    resp_<tag><random>          a response; its chain shares the tag, and with it one Redis Cluster slot
    conv_<tag>                  a conversation
    msg_<tag><random><n>        the n-th item of response resp_<tag><random>, its input items counted first

Tag and random part have 128 bits each, so that nobody guesses an id, and letters and digits only, so that a tag may stand in
the name of a key.
"""

from __future__ import annotations

import secrets
from itertools import count

TAG_LENGTH = 25
RANDOM_LENGTH = 25
_LETTERS = b"0123456789abcdefghijklmnopqrstuvwxyz"  # 36 ** 25 > 2 ** 128
# Bytes become letters, 7 of them each; the 4 that are left over are dropped, so that no letter is likelier than another.
_EVEN = 256 - 256 % len(_LETTERS)
_AS_LETTERS = bytes(_LETTERS[byte % len(_LETTERS)] for byte in range(256))
_LEFT_OVER = bytes(range(_EVEN, 256))


def random_part() -> str:
    """25 characters of ``[0-9a-z]``: more than 128 bits from the system's source of secrets."""
    letters = b""
    while len(letters) < RANDOM_LENGTH:
        letters += secrets.token_bytes(32).translate(_AS_LETTERS, _LEFT_OVER)
    return letters[:RANDOM_LENGTH].decode()


new_tag = random_part
"""The tag of a new chain or conversation."""


def mint(prefix: str) -> str:
    """A free-standing id such as ``call_3b9f...``."""
    return f"{prefix}_{random_part()}"


class RunIds:
    """The ids of one run: its response's, and one for each of its items in the order of asking."""

    __slots__ = ("_count", "_stem", "response")

    def __init__(self, tag: str | None = None, *, response: str | None = None, used: int = 0) -> None:
        """``tag`` is the parent's or the conversation's; a new chain gets one of its own. Of a run that goes on: the id of its
        ``response``, and how many items have been given theirs (``used``)."""
        self.response = response or f"resp_{tag or new_tag()}{random_part()}"
        self._stem = self.response.removeprefix("resp_")
        self._count = count(used)

    def item(self, prefix: str) -> str:
        """The next item's id, final from now on."""
        return f"{prefix}_{self._stem}{next(self._count)}"
