"""A certified OpenID provider (npm: oidc-provider) issues the tokens of a training process.

Runs if TELELOADER_TEST_IDENTITY_PROVIDER is the folder of the npm package, as in the nightly checks.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import httpx
import pytest

from teleloader import DataLoader, RemoteDataset
from tests.conftest import StartServer, eventually
from tests.end_to_end.terminal import SERVER, piped
from tests.end_to_end.test_identity import MANY, status
from tests.issuers import write

PACKAGE: Final = os.environ.get("TELELOADER_TEST_IDENTITY_PROVIDER", "")
AUDIENCE: Final = "https://loader.example"
LIFETIME_S: Final = 5

pytestmark = pytest.mark.skipif(not PACKAGE, reason="TELELOADER_TEST_IDENTITY_PROVIDER is not set")

NewToken = Callable[[], str]


@pytest.fixture(params=["RS256", "PS256", "ES256"])
def provider(request: pytest.FixtureRequest, free_port: int) -> Iterator[str]:
    """Run a provider whose tokens have one signature algorithm; return its URL."""
    url = f"http://127.0.0.1:{free_port}"
    script = Path(__file__).with_name("identity_provider.mjs")
    command = ["node", str(script), str(Path(PACKAGE).absolute()), url, AUDIENCE, str(LIFETIME_S), request.param]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert "ready\n" in iter(running.stdout.readline, "")
        yield url
        running.terminate()


def new_token(provider: str) -> str:
    """Request an access token by the client credentials grant."""
    form = {"grant_type": "client_credentials", "scope": "batches", "resource": AUDIENCE}
    found = httpx.post(f"{provider}/token", data=form, auth=("trainer", "a-secret-of-a-test"), trust_env=False)
    token: str = found.raise_for_status().json()["access_token"]
    return token


def test_an_epoch_with_the_tokens_of_a_provider(
    provider: str, start_server: StartServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keys are found by discovery; the epoch continues with new tokens when old ones have expired."""
    identity = write(tmp_path / "identity.toml", f"""
        [issuers.provider]
        issuer = "{provider}"
        audience = "{AUDIENCE}"
        leeway = 0
        [[issuers.provider.rules]]
        match = {{ client_id = "trainer", scope = "batches" }}
        scopes = ["read", "stats"]
    """)  # fmt: skip
    current = tmp_path / "token"
    token = new_token(provider)
    write(current, token)
    checked = piped(SERVER, "token", "check", "--identity", identity, "--token-file", str(current), "-o", "json")
    assert (checked.code, json.loads(checked.out)["principal"]) == (0, "provider:trainer"), checked
    server = start_server(MANY, "--num-workers", "1", "--identity", identity)
    monkeypatch.setenv("TELELOADER_TOKEN_FILE", str(current))
    write(current, new_token(provider))
    batches = iter(
        DataLoader(RemoteDataset(server.url, "many"), 1000, num_workers=1, prefetch_factor=2, output="numpy")
    )
    seen = next(batches).tolist()
    token = current.read_text()
    eventually(lambda: status(server.url, token) == 401)
    write(current, new_token(provider))
    seen += [index for batch in batches for index in batch.tolist()]
    assert seen == list(range(100_000))
