"""Small JSON request bodies, read without the memory budget of large bodies."""

from __future__ import annotations

import json
from typing import Any

from fastapi import Request

from teleloader_server.problems import HttpProblem


async def read_object(request: Request, max_bytes: int) -> dict[str, Any]:
    """Return the JSON object in the body of a request; an empty one if the body is anything else.

    Raises:
        HttpProblem: If the body exceeds `max_bytes` (status 413).
    """
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > max_bytes:
            raise HttpProblem(
                413, "BodyTooLarge", f"the body exceeds {max_bytes:,} bytes: send only the fields in docs/protocol.md"
            )
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
