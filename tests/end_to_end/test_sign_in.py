"""Sign-in to the dashboard in a real browser, and protection against cross-site requests."""

from __future__ import annotations

import contextlib
import functools
import http.server
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from teleloader_shared.messages import NO_PAGE_HEADER
from tests.conftest import ServerProcess, StartServer
from tests.end_to_end.browser import Visit, violations
from tests.end_to_end.test_access import TokenTable

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

NUMBERS = "tests.end_to_end.hosted:numbers"
PHONE = {"width": 360, "height": 780}
UNAUTHORIZED = "401 (Unauthorized)"


@pytest.fixture
def table(tmp_path: Path) -> TokenTable:
    """Create tokens for statistics and batches, for batches only, and for announcements."""
    made = TokenTable(tmp_path / "tokens.toml")
    made.add("anna")
    made.add("trainer", "read")
    made.add("fleet", "announce")
    made.write()
    return made


@pytest.fixture
def server(table: TokenTable, start_server: StartServer) -> ServerProcess:
    """Run a server with these tokens."""
    return start_server(NUMBERS, "--num-workers", "1", "--tokens", str(table.path))


Open = Callable[..., Visit]


@pytest.fixture
def visit(browser: Browser, server: ServerProcess) -> Iterator[Open]:
    """Open the page, which must have no errors until the end except those that a test forgives."""
    opened = []

    def go(**options: Any) -> Visit:
        one = Visit(browser, **options)
        opened.append(one)
        one.page.goto(server.url)
        return one

    yield go
    for one in opened:
        one.end(server.url)


def sign_in(page: Page, token: str) -> None:
    """Enter a token and submit the form."""
    page.get_by_label("Token").fill(token)
    page.get_by_role("button", name="Sign in").click()


def until(page: Page, selector: str, text: str) -> None:
    """Wait until an element contains a text."""
    from playwright.sync_api import expect

    expect(page.locator(selector)).to_contain_text(text, timeout=20_000)


def test_a_person_signs_in_and_out(visit: Open, table: TokenTable, server: ServerProcess) -> None:
    """Statistics are visible while signed in, also after a reload; no URL or script has the token."""
    one = visit()
    page, token = one.page, table.secrets["anna"]
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    until(page, "#state", "Signed out")
    assert not page.locator("#answer").is_visible()
    sign_in(page, token)
    until(page, "#facts", "version")
    page.reload()
    until(page, "#facts", "version")
    assert not page.locator("#sign-in").is_visible()
    page.get_by_role("button", name="Show").click()
    until(page, "#looked", "Batch 0,")
    assert page.evaluate("document.cookie") == ""
    assert page.evaluate("JSON.stringify([Object.entries(localStorage), Object.entries(sessionStorage)])") == "[[],[]]"
    (cookie,) = page.context.cookies()
    assert (cookie["httpOnly"], cookie["sameSite"], cookie["path"]) == (True, "Strict", "/")
    assert token not in page.content() + page.url + repr(asked) + repr(cookie)
    page.get_by_role("button", name="Sign out anna").click()
    until(page, "#state", "Signed out")
    assert page.context.cookies() == []
    session = httpx.Cookies({cookie["name"]: cookie["value"]})
    with httpx.Client(base_url=server.url, cookies=session) as client:
        assert client.get("/stats").status_code == 401, "the session has ended on the server too"
    assert not any(token in line for line in server.log)


def test_a_wrong_token_is_reported(visit: Open, table: TokenTable) -> None:
    """The form shows the error and is empty again; the right token is then accepted."""
    one = visit()
    until(one.page, "#state", "Signed out")
    sign_in(one.page, "not-one-of-the-servers-tokens")
    until(one.page, "#sign-in-status", "may have been revoked")
    assert one.page.get_by_label("Token").input_value() == ""
    one.forgive(UNAUTHORIZED)
    sign_in(one.page, f"  {table.secrets['anna']} ")
    until(one.page, "#facts", "version")


def test_a_token_without_the_scope_stats_is_reported(visit: Open, table: TokenTable) -> None:
    """The page shows the missing scope; a signed-in user can sign out."""
    page = visit().page
    until(page, "#state", "Signed out")
    sign_in(page, table.secrets["trainer"])
    until(page, "#sign-in-status", "The token trainer lacks the scope stats.")
    for _ in range(2):  # also when the page is loaded again
        until(page, "#state", "Signed in without the scope stats")
        assert page.get_by_role("button", name="Sign out trainer").is_visible()
        page.reload()
    page.get_by_role("button", name="Sign out trainer").click()
    until(page, "#state", "Signed out")
    assert not page.get_by_role("button", name="Sign out").is_visible()


def test_servers_are_listed_after_sign_in(
    visit: Open, table: TokenTable, server: ServerProcess, start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page requests them from its own server only, as verified after each test."""
    monkeypatch.setenv("TELELOADER_ANNOUNCE_TOKEN", table.secrets["fleet"])
    other = start_server(NUMBERS, "--num-workers", "1", "--announce", f"registry+{server.url}")
    page = visit().page
    until(page, "#state", "Signed out")
    assert not page.locator("#servers").is_visible()
    sign_in(page, table.secrets["anna"])
    until(page, "#server-list", other.url)
    until(page, "#servers-title", "2 servers")
    assert page.get_by_role("link", name=other.url).get_attribute("href") == other.url


def test_the_form_comes_back_when_the_token_is_removed(visit: Open, table: TokenTable) -> None:
    """An open page returns to the form when its token is revoked."""
    one = visit()
    until(one.page, "#state", "Signed out")
    sign_in(one.page, table.secrets["anna"])
    until(one.page, "#facts", "version")
    table.remove("anna")
    table.write()
    until(one.page, "#state", "Signed out")
    assert not one.page.locator("#answer").is_visible()
    one.forgive("ERR_INCOMPLETE_CHUNKED_ENCODING")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [PHONE, {"width": 1280, "height": 800}], ids=["phone", "desk"])
def test_the_form_can_be_read_and_used_anywhere(visit: Open, scheme: str, viewport: dict[str, int]) -> None:
    """The form works by keyboard, in light and dark mode, and on a phone."""
    page = visit(color_scheme=scheme, viewport=viewport).page
    until(page, "#state", "Signed out")
    assert violations(page) == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate("document.activeElement.name") == "token"
    box = page.get_by_role("button", name="Sign in").bounding_box()
    assert box is not None
    assert box["height"] >= 30


# -- pages of other sites

ATTACK = """
<!doctype html><title>elsewhere</title><body><script>
const target = new URLSearchParams(location.search).get("target");
async function attack() {
  const told = [];
  const note = async (what, promise) => told.push([what, await promise.then((a) => a.type, () => "failed")]);
  const spec = JSON.stringify({ dataset: "numbers", batch_size: 4, session: "forged", num_workers: 1 });
  await note("read", fetch(target + "/stats", { credentials: "include" }));
  await note("simple post", fetch(target + "/v1/loaders", { method: "POST", mode: "no-cors", body: spec }));
  await note("post", fetch(target + "/v1/loaders", { method: "POST", credentials: "include", body: spec }));
  await note("sign in", fetch(target + "/session", { method: "POST", mode: "no-cors", body: '{"token": "x"}' }));
  const image = new Image();
  await new Promise((done) => { image.onload = image.onerror = done; image.src = target + "/dashboard/icon.svg"; });
  told.push(["image", image.naturalWidth]);
  return told;
}
</script>
"""


@contextmanager
def elsewhere(folder: Path) -> Iterator[str]:
    """Run another site's page."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base's name
            pass

    (folder / "index.html").write_text(ATTACK)
    (folder / "favicon.ico").touch()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder))) as site:
        thread = threading.Thread(target=site.serve_forever)
        thread.start()
        try:
            yield f"http://localhost:{site.server_address[1]}"
        finally:
            site.shutdown()
            thread.join()


def test_pages_of_other_sites_can_do_nothing(browser: Browser, tmp_path: Path, start_server: StartServer) -> None:
    """Other sites can neither register loaders nor read or embed anything, even without tokens."""
    server = start_server(NUMBERS, "--num-workers", "1")
    (tmp_path / "site").mkdir()
    with elsewhere(tmp_path / "site") as site:
        context = browser.new_context()
        page = context.new_page()
        page.goto(f"{site}/?target={server.url}")
        told = {what: rest for what, *rest in page.evaluate("attack()")}
        page.goto(f"{site}/?target={server.url}")
        page.evaluate(f"document.body.append(Object.assign(document.createElement('a'), {{href: '{server.url}/'}}))")
        page.locator("a").evaluate("link => link.click()")
        until(page, "#facts", "version")
        context.close()
    assert told["read"] == ["failed"]
    assert told["post"] == ["failed"]
    assert told["image"] == [0]
    stats = server.stats()
    assert stats["server"]["num_workers"] == 1
    assert len(stats["workers"]) == 1, "no session was begun"
    server.await_line("rejected requests: .*CrossSite")


def test_streams_of_figures_are_left_to_others(server: ServerProcess, table: TokenTable) -> None:
    """One token has at most half of the streams."""
    other = table.add("bob")
    table.write()
    with httpx.Client(base_url=server.url) as client, contextlib.ExitStack() as stack:

        def opened(token: str) -> int:
            headers = {"Authorization": f"Bearer {token}"}
            return stack.enter_context(client.stream("GET", "/stats/stream", headers=headers)).status_code

        assert [opened(table.secrets["anna"]) for _ in range(10)] == [200] * 8 + [503] * 2
        while client.get("/stats", headers={"Authorization": f"Bearer {other}"}).status_code == 401:
            pass
        assert opened(other) == 200


def test_batches_behind_a_token_are_for_no_shared_cache(server: ServerProcess, table: TokenTable) -> None:
    """Cache-Control is private, because a shared cache would serve batches to other users."""
    headers = {"Authorization": f"Bearer {table.secrets['anna']}"}
    with httpx.Client(base_url=server.url, headers=headers) as client:
        key = client.post("/v1/loaders", json={"dataset": "numbers", "batch_size": 4}).json()["key"]
        answer = client.get(f"/v1/loaders/{key}/epochs/0/batches/0")
    assert answer.headers["cache-control"].startswith("private,")


def test_a_path_with_a_slash_too_many_is_nothing(server: ServerProcess) -> None:
    """A redirect would reveal existing paths without a token, and lead to any forged Host."""
    for path in ("/stats/", "/v1/datasets/"):
        assert httpx.get(f"{server.url}{path}", headers={"Host": "evil.example"}).status_code in (404, 421)


@pytest.mark.parametrize("path", ["/stats", "/v1/datasets", "/metrics", "/docs", "/session"])
def test_a_forged_host_or_origin_is_refused(server: ServerProcess, table: TokenTable, path: str) -> None:
    """The request is rejected with or without a valid token."""
    for headers in ({}, {"Authorization": f"Bearer {table.secrets['anna']}"}):
        host = httpx.get(f"{server.url}{path}", headers={**headers, "Host": "evil.example"})
        assert (host.status_code, host.json()["code"]) == (421, "UnknownHost")
        assert "--allowed-host" in host.json()["detail"]
        origin = httpx.get(f"{server.url}{path}", headers={**headers, "Origin": "http://evil.example"})
        assert (origin.status_code, origin.json()["code"]) == (403, "CrossSite")
        assert "access-control-allow-origin" not in origin.headers


def test_clients_may_call_the_server_by_any_name(server: ServerProcess, table: TokenTable) -> None:
    """Clients send a header that scripts of pages cannot send; an Origin is checked anyway."""
    headers = {"Authorization": f"Bearer {table.secrets['anna']}", "Host": "loader.example", NO_PAGE_HEADER: "1"}
    assert httpx.get(f"{server.url}/v1/datasets", headers=headers).status_code == 200
    headers["Origin"] = "http://evil.example"
    assert httpx.get(f"{server.url}/v1/datasets", headers=headers).status_code == 403


def test_a_name_can_be_allowed(start_server: StartServer) -> None:
    """Host names of services can be allowed, with wildcards."""
    server = start_server(NUMBERS, "--num-workers", "1", "--allowed-host", "loader", "--allowed-host", "*.internal")
    for name, status in (("loader:8000", 200), ("a.b.internal", 200), ("internal", 421), ("other", 421)):
        assert httpx.get(f"{server.url}/v1/datasets", headers={"Host": name}).status_code == status
        assert httpx.get(f"{server.url}/readyz", headers={"Host": name}).status_code == 200


def test_every_response_has_security_headers(server: ServerProcess, table: TokenTable) -> None:
    """Errors and pages have the security headers, and none may be embedded elsewhere."""
    with httpx.Client(base_url=server.url) as client:
        asked = [client.get(path) for path in ("/", "/dashboard/main.js", "/stats", "/nothing", "/healthz", "/session")]
        asked.append(client.get("/stats", headers={"Authorization": f"Bearer {table.secrets['anna']}"}))
        asked.append(client.get("/stats", headers={"X": "x" * 70_000}))
        asked.append(client.request("PROPFIND", "/stats"))
    for answer in asked:
        assert answer.headers["x-content-type-options"] == "nosniff", answer.url
        assert answer.headers["x-frame-options"] == "DENY"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["cross-origin-resource-policy"] == "same-origin"
        assert "access-control-allow-origin" not in answer.headers
        assert "server" not in answer.headers


def test_wrong_tokens_cost_the_others_nothing(server: ServerProcess, table: TokenTable) -> None:
    """After many invalid tokens, a user with a valid one signs in immediately, and the log stays short."""
    stop = threading.Event()
    statuses: list[int] = []

    def guess() -> None:
        with httpx.Client(base_url=server.url) as client:
            while not stop.is_set():
                statuses.append(client.post("/session", json={"token": secrets.token_urlsafe(24)}).status_code)

    guessing = [threading.Thread(target=guess) for _ in range(8)]
    for thread in guessing:
        thread.start()
    with httpx.Client(base_url=server.url) as client:
        for _ in range(20):
            assert client.post("/session", json={"token": table.secrets["anna"]}).status_code == 200
            assert client.get("/stats").status_code == 200
    while not statuses:
        pass
    stop.set()
    for thread in guessing:
        thread.join()
    assert set(statuses) == {401}
    for body in (b"", b"[]", b'{"token": 5}', b"\xff", b"[" * 24_000):
        assert httpx.post(f"{server.url}/session", content=body).status_code == 422
    assert httpx.post(f"{server.url}/session", content=b"x" * 25_000).status_code == 413
    assert len(server.log) < 40
