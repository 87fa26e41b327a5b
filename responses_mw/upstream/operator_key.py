"""Checks of the operator's key: `upstream.api_key`, or a credential in `upstream.headers`.

1. The list of models alone is not enough, because some servers show it without a valid key. Until the upstream has accepted the
   key, and again after a refusal, an empty chat request decides. A server that accepts the key reports it as invalid. No model
   runs.
2. Only the list and the empty request decide. A refused chat request only leads to the next check, so that no client can make
   the key look refused.
3. A replica whose key was never accepted is not ready. A rollout with a wrong key therefore stops at its first replica. A key
   that is refused later affects all replicas, which stay ready.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import httpx

from ..telemetry.context import WarningLimit
from .caller import REFUSALS, Caller

logger = logging.getLogger(__name__)


class KeyCheck(NamedTuple):
    """The result of a check: why the key is refused, or "", and whether the upstream has ever accepted it."""

    fault: str = ""
    was_accepted: bool = True


class OperatorKey:
    """The operator's key at one upstream."""

    def __init__(self, fetch: Callable[..., Awaitable[httpx.Response]], chat_path: str, setting: str) -> None:
        """`fetch` is a method of `Upstream`. `chat_path` is the upstream's path for chats or responses.

        `setting` names the setting that contains the key.
        """
        self._setting = setting
        self._fetch = fetch
        self._chat_path = chat_path
        self._is_in_doubt = True
        self._is_refused = False
        self._warnings = WarningLimit()
        self.was_accepted = False

    def accept(self) -> None:
        """Record that the upstream has answered a request with the key."""
        if self._is_refused:
            logger.info("the upstream accepts %s", self._setting)
        self._is_in_doubt = self._is_refused = False
        self.was_accepted = True

    def doubt(self) -> None:
        """Record that the upstream has refused a request with the key."""
        self._is_in_doubt = True

    async def check(self, status: int, caller: Caller) -> str:
        """Return why the key is refused, or "" if it is accepted or if that is unknown.

        `status` is the status of the upstream's list of models. Raises `UpstreamError` if the upstream does not answer.
        """
        if status != 401 and self._is_in_doubt:
            status = (await self._fetch("POST", self._chat_path, caller, b"{}")).status_code
            if status not in REFUSALS and status < 500:
                self.accept()
        if status in REFUSALS and (status == 401 or self._is_in_doubt):
            self._refuse(status)
        return f"The upstream refuses {self._setting}." if self._is_refused else ""

    def _refuse(self, status: int) -> None:
        self._is_in_doubt = self._is_refused = True
        if self._warnings.is_due():
            remedy = "set a credential that it accepts"
            logger.warning("the upstream refuses %s (status %d): %s", self._setting, status, remedy)
