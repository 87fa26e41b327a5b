"""Read the forms of the inspector's pages."""

from __future__ import annotations

import asyncio
from urllib.parse import parse_qsl

from starlette.requests import Request

from ..errors import BadRequest, RequestTimeout

MAX_BYTES = 8 * 1024
TIMEOUT = 10.0
"""Maximum seconds for receiving a form. The login form can be sent without a token."""


async def read_form(request: Request, maximum: int = MAX_BYTES) -> dict[str, str]:
    """Return the fields of a form.

    Raises `BadRequest` if it has more than `maximum` bytes or is not `application/x-www-form-urlencoded`, and
    `RequestTimeout` if it arrives too slowly.
    """
    body = b""
    try:
        async with asyncio.timeout(TIMEOUT):
            async for chunk in request.stream():
                body += chunk
                if len(body) > maximum:
                    raise BadRequest("The form is too long.")
    except TimeoutError:
        raise RequestTimeout("The data of the form arrives too slowly.") from None
    try:
        return dict(parse_qsl(body.decode("ascii"), keep_blank_values=True, max_num_fields=20))
    except ValueError:
        raise BadRequest("The form is malformed.") from None
