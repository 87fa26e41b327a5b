"""`python -m tests.support.impatient` runs `responses-mw` with a keep-alive interval of 50 ms."""

from __future__ import annotations

from responses_mw.asgi import http_responses
from responses_mw.cli import main

if __name__ == "__main__":
    http_responses.KEEP_ALIVE_INTERVAL = 0.05
    main()
