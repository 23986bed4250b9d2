"""Bounded reading of responses from other servers."""

from __future__ import annotations

import json
import ssl
from typing import Any, Final

import httpx

MAX_RESPONSE_BYTES: Final = 4096
NO_TLS: Final = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""TLS context for http URLs, which trusts no CA: httpx would create one for each client, which takes 2 ms."""


async def read_object(response: httpx.Response) -> dict[str, Any]:
    """Return the JSON object in a response; an empty one if the response is long or anything else."""
    body = bytearray()
    async for piece in response.aiter_raw():
        body += piece
        if len(body) > MAX_RESPONSE_BYTES:
            return {}
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
