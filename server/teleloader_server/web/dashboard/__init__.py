"""Dashboard at ``/``: a web page that shows the statistics of ``/stats`` and previews batches.

Its files in the folder ``static`` are served unchanged, without a build step and without third-party content.
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
    # the page shows text from clients and datasets: even if a browser interpreted it as HTML, no script could run
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
"""Media types by file suffix. Not `mimetypes`, whose table depends on the machine: browsers reject scripts of another
type.
"""


def add_dashboard(app: FastAPI) -> None:
    """Add routes to an application: the dashboard page at ``/``, and the dashboard's files at ``/dashboard/...``.

    All files are read immediately and kept in memory (about 220 KB).
    """
    files = {path.relative_to(STATIC).as_posix(): path for path in STATIC.rglob("*") if path.is_file()}
    answers = {name: (path.read_bytes(), MEDIA_TYPES[path.suffix]) for name, path in files.items()}

    @needs(UNCHECKED)  # the page discloses nothing about this server, and is needed to sign in
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

    # plain routes, which handle HEAD as well; not part of the API, so not in its OpenAPI description
    app.add_route("/", answer, include_in_schema=False)
    app.add_route("/dashboard/{name:path}", answer, include_in_schema=False)
