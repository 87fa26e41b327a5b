"""Write audit lines: who views the content of responses, and who changes something with the inspector."""

from __future__ import annotations

import logging

from .context import log_facts, present

logger = logging.getLogger("responses_mw.audit")


def audit(action: str, response_id: str = "", client: str = "", **facts: str) -> None:
    """Log an `action` of the operator, with further `facts`.

    `client` is the address that the request came from, or "" for a command.
    """
    log_facts(logger, action, present({"response": response_id, "client": client, **facts}))
