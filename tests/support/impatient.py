"""``python -m tests.support.impatient`` is ``responses-mw`` whose silent streams are kept alive every 50 ms."""

from __future__ import annotations

from responses_mw.asgi import sse
from responses_mw.cli import main

if __name__ == "__main__":
    sse.KEEP_ALIVE_INTERVAL = 0.05
    main()
