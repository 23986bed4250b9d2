"""The dashboard at ``/``: a page that shows the statistics of ``/stats`` and previews batches.

Its files are in ``static`` and served unchanged: there is no build step, and no third-party content.
"""

from __future__ import annotations

import hashlib
from http import HTTPStatus
from pathlib import Path
from typing import Final

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from teleloader_server.permissions import UNCHECKED, needs

STATIC: Final = Path(__file__).parent / "static"

HEADERS: Final = {
    # the page shows text of clients and datasets: even if some were interpreted as HTML, it could run nothing
    "content-security-policy": (
        "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    # cached and revalidated each time, so that page and server have the same version
    "cache-control": "no-cache",
}

MEDIA_TYPES: Final = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
    "": "text/plain",
}
"""By the file's ending. Python's own table depends on the machine, and browsers run no script of another type."""


def add_dashboard(app: FastAPI) -> None:
    """Let `app` answer ``GET /`` with the page, and ``GET /dashboard/...`` with its files.

    All of them are read now and kept in memory; they are about 250 KB.
    """
    files = {path.relative_to(STATIC).as_posix(): path for path in STATIC.rglob("*") if path.is_file()}
    answers = {name: (path.read_bytes(), MEDIA_TYPES[path.suffix]) for name, path in files.items()}

    @needs(UNCHECKED)  # it says nothing of this server, and whoever is to sign in needs it
    async def answer(request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        if name not in answers:
            raise HTTPException(HTTPStatus.NOT_FOUND)
        content, media_type = answers[name]
        etag = f'"{hashlib.blake2b(content, digest_size=16).hexdigest()}"'
        headers = {**HEADERS, "etag": etag}
        if etag in request.headers.get("if-none-match", ""):
            return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
        return Response(content, headers=headers, media_type=media_type)

    # not a part of the API: these answer HEAD as well, and stay out of its description
    app.add_route("/", answer, include_in_schema=False)
    app.add_route("/dashboard/{name:path}", answer, include_in_schema=False)
