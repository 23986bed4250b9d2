"""Routes for frequent requests, which bypass FastAPI's middleware, routing and parameter validation.

These take several times as long as everything else that the server does for a request of a computed small batch.
A direct route is a FastAPI route, so that it is part of the OpenAPI description and of the tests of all routes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Generic, Literal, TypeVar
from urllib.parse import parse_qsl

from fastapi import FastAPI, Request
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from teleloader_server.permissions import need_of
from teleloader_server.problems import HttpProblem
from teleloader_server.web.authentication import Authentication, GuardedRoute, enter

_Value = TypeVar("_Value")

_INTEGER: Final = re.compile("[0-9]{1,19}")
_BOOLEANS: Final = {
    **dict.fromkeys(("true", "1", "t", "yes", "y", "on"), True),
    **dict.fromkeys(("false", "0", "f", "no", "n", "off"), False),
}


@dataclass(frozen=True, slots=True)
class Parameter(Generic[_Value]):
    """Parameter of a direct route: its validation and its OpenAPI description."""

    place: Literal["path", "query", "header"]
    name: str
    schema: Mapping[str, object]
    parse: Callable[[str], _Value]
    """Function that parses the text of the parameter; raises ValueError with the expected format."""
    default: _Value | None = None
    """Value of a missing parameter; None if the parameter is required."""
    description: str = ""

    def of(self, values: Mapping[str, str]) -> _Value:
        """Return the value of the parameter.

        Args:
            values: Texts of the parameters at this place, by name; of headers, in lower case.

        Raises:
            HttpProblem: If the parameter is missing or invalid (status 422).
        """
        text = values.get(self.name.lower())
        if text is None:
            if self.default is None:
                raise self._problem("missing, and required")
            return self.default
        try:
            return self.parse(text)
        except ValueError as error:
            raise self._problem(f"{error}, got {text!r:.100}") from None

    def _problem(self, reason: str) -> HttpProblem:
        return HttpProblem(422, "InvalidRequest", f"{self.place}.{self.name}: {reason}")

    @property
    def openapi(self) -> dict[str, Any]:
        """OpenAPI description of the parameter."""
        described = {"name": self.name, "in": self.place, "required": self.default is None}
        schema = dict(self.schema) if self.default is None else {**self.schema, "default": self.default}
        return {**described, "schema": schema, **({"description": self.description} if self.description else {})}


def integer(below: int) -> Callable[[str], int]:
    """Return a parser of integers in [0, `below`)."""

    def parse(text: str) -> int:
        if _INTEGER.fullmatch(text) is None or (value := int(text)) >= below:
            raise ValueError(f"expected an integer in [0, {below})")
        return value

    return parse


def boolean(text: str) -> bool:
    """Parse a boolean, as FastAPI does."""
    value = _BOOLEANS.get(text.lower())
    if value is None:
        raise ValueError("expected true or false")
    return value


def string(max_length: int) -> Callable[[str], str]:
    """Return a parser that accepts any text of at most `max_length` characters."""

    def parse(text: str) -> str:
        if len(text) > max_length:
            raise ValueError(f"expected at most {max_length} characters, not {len(text)}")
        return text

    return parse


def query_of(scope: Scope) -> dict[str, str]:
    """Return the query parameters of a request by name; the last one if a name is repeated."""
    text: str = scope["query_string"].decode("latin-1")
    if "%" in text or "+" in text:
        return dict(parse_qsl(text, keep_blank_values=True))
    return {name: value for name, _, value in (pair.partition("=") for pair in text.split("&") if pair)}


def headers_of(scope: Scope) -> dict[str, str]:
    """Return the headers of a request by name in lower case; the first one if a name is repeated."""
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(scope["headers"])}


class DirectRoute(GuardedRoute):
    """Route whose endpoint parses the request itself and returns an ASGI application, the response.

    Args:
        path: Path with parameters in braces.
        endpoint: Coroutine function of a `Request`; declares its requirement with `needs`.
        parameters: Parameters that the endpoint parses, for the OpenAPI description.
        openapi_extra: Further fields of the OpenAPI description.
        options: Further arguments of `fastapi.routing.APIRoute`.
    """

    def __init__(
        self,
        path: str,
        endpoint: Callable[..., Any],
        *,
        parameters: Iterable[Parameter[Any]] = (),
        openapi_extra: Mapping[str, object] | None = None,
        **options: Any,
    ) -> None:
        described = {**(openapi_extra or {}), "parameters": [parameter.openapi for parameter in parameters]}
        super().__init__(path, endpoint, response_model=None, openapi_extra=described, **options)
        self._need = need_of(endpoint)

    def serves(self, method: str) -> bool:
        """Return True if the route serves requests with this method."""
        return method in (self.methods or ())

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Authorize a request and run the endpoint; respond with status 405 to another method."""
        if not self.serves(scope["method"]):
            await super().handle(scope, receive, send)
            return
        request = Request(scope, receive, send)
        await enter(request, self._need)
        response: ASGIApp = await self.endpoint(request)
        await response(scope, receive, send)


class Application(FastAPI):
    """FastAPI application that serves direct routes first.

    Direct routes have the authentication and the exception handlers of the application, and none of its other
    middleware.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._direct_routes: list[DirectRoute] = []
        self._direct: ASGIApp = self.router

    def add_direct_routes(self, routes: Iterable[DirectRoute], authentication: Mapping[str, Any]) -> None:
        """Add routes, after all exception handlers.

        Args:
            routes: The routes.
            authentication: Arguments of the `Authentication` middleware.
        """
        self._direct_routes += routes
        self.router.routes += self._direct_routes
        handlers = dict(self.exception_handlers)
        failed = handlers.pop(Exception, None)
        app = Authentication(ExceptionMiddleware(_handle, handlers), **authentication)
        self._direct = ServerErrorMiddleware(app, failed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request by the direct route that matches its method and path, or else as FastAPI does."""
        if scope["type"] == "http":
            for route in self._direct_routes:
                match = route.path_regex.match(scope["path"]) if route.serves(scope["method"]) else None
                if match is not None:
                    scope.update(app=self, route=route, path_params=match.groupdict())
                    await self._direct(scope, receive, send)
                    return
        await super().__call__(scope, receive, send)


async def _handle(scope: Scope, receive: Receive, send: Send) -> None:
    await scope["route"].handle(scope, receive, send)
