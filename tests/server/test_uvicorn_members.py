"""The members of uvicorn that the server depends on are all listed, and a missing one is reported at startup."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator

import pytest
import uvicorn
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from teleloader_server import serve
from teleloader_server.config import ConfigError
from teleloader_server.web.app import Server
from teleloader_server.web.uvicorn_members import MEMBERS, TESTED, members_of
from teleloader_server.web.websocket import WebSocketConnection
from tests.conftest import ROOT


def named_in(owner: type) -> Iterator[str]:
    """Return the names of a class's methods, and of the attributes of ``self`` and ``super()`` that they use."""
    for node in ast.walk(ast.parse(inspect.getsource(owner))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "super()"):
            yield node.attr


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(WebSocketConnection, WebSocketsSansIOProtocol), (Server, uvicorn.Server)],
)
def test_all_members_that_are_used_are_listed(ours: type, theirs: type) -> None:
    """A member of uvicorn that a subclass overrides or uses is in the list, so that its absence is noticed."""
    used = (set(named_in(ours)) & members_of(theirs)) - {"__init__"}
    assert used <= set(MEMBERS[theirs])


@pytest.mark.parametrize(("owner", "name"), [(WebSocketsSansIOProtocol, "handle_cont"), (uvicorn.Server, "on_tick")])
def test_a_missing_member_is_named_when_the_server_starts(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    """The error has the class, the member and the version to install."""
    monkeypatch.delattr(owner, name)
    monkeypatch.setattr("teleloader_server.web.uvicorn_members.MEMBERS", {owner: (name,)})
    sentence = rf"uvicorn has no {owner.__name__}\.{name}: .* pip install uvicorn=={re.escape(TESTED['uvicorn'])}$"
    with pytest.raises(ConfigError, match=sentence), serve([1], num_workers=0):
        pass


@pytest.mark.parametrize("package", TESTED)
def test_the_tested_versions_are_those_of_the_images(package: str) -> None:
    """The lock file of the server's image has exactly the version that the message recommends."""
    locked = (ROOT / "docker" / "requirements" / "server.txt").read_text()
    assert f"\n{package}=={TESTED[package]} \\\n" in locked
