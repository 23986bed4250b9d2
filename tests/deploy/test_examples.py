"""The files in docker and docs/deploy are valid for the tools that use them, and match the code."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.conftest import ROOT, StartServer
from tests.end_to_end.terminal import SERVER, piped

DEPLOY = ROOT / "docs" / "deploy"
DOCKER = ROOT / "docker"


def tool(name: str) -> str:
    """Return the path of a tool, or skip the test if the machine lacks it."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"needs {name}")
    return found


def check(*command: str | Path) -> str:
    """Run a tool that must succeed; return its output."""
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    return done.stdout


def server_options(text: str) -> set[str]:
    """Return the long options that a text passes to ``teleloader-server``."""
    return set(re.findall(r"--[a-z][a-z-]+", text))


# -- containers


@pytest.mark.parametrize("name", ["server", "trainer"])
def test_the_linter_of_dockerfiles_finds_nothing(name: str) -> None:
    """The Dockerfiles pass hadolint with all of its rules."""
    check(tool("hadolint"), DOCKER / f"{name}.Dockerfile")


@pytest.mark.parametrize("name", ["server", "trainer"])
def test_images_are_pinned(name: str) -> None:
    """Base images have exact versions, and packages have versions and hashes within pyproject.toml's ranges."""
    dockerfile = (DOCKER / f"{name}.Dockerfile").read_text()
    assert re.search(r"^ARG PYTHON=python:3\.\d+\.\d+-slim-\w+$", dockerfile, re.MULTILINE)
    assert set(re.findall(r"^FROM (\S+)", dockerfile, re.MULTILINE)) == {"${PYTHON}"}
    assert dockerfile.count("--require-hashes") == 2
    assert "\nUSER 10001:10001\n" in dockerfile
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra = {"server": "server", "trainer": "demo"}[name]
    locked = (DOCKER / "requirements" / f"{name}.txt").read_text()
    versions = dict(re.findall(r"^([\w.-]+)==(\S+) \\\n    --hash=sha256:", locked, re.MULTILINE))
    for text in (*project["dependencies"], *project["optional-dependencies"][extra]):
        wanted = Requirement(text)
        assert wanted.specifier.contains(versions[wanted.name]), f"{wanted} is not locked: make lock"


def test_secrets_are_made_once_and_fit(tmp_path: Path) -> None:
    """The loader's token file has digests of the tokens, which stay when the script runs again."""
    script = shutil.copy(DOCKER / "make-secrets.sh", tmp_path)
    check(script)
    secrets = tmp_path / "secrets"
    first = {file.name: file.read_text() for file in secrets.iterdir()}
    check(script)
    assert {file.name: file.read_text() for file in secrets.iterdir()} == first
    assert secrets.stat().st_mode & 0o077 == 0
    tokens = tomllib.loads(first["tokens.toml"])
    assert {name: table["scopes"] for name, table in tokens.items()} == {"trainer": ["read"], "prometheus": ["stats"]}
    assert not any(first[name] in first["tokens.toml"] for name in ("trainer-token", "prometheus-token"))


def test_the_secrets_open_a_server(tmp_path: Path, start_server: StartServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The training processes' token authorizes requests for batches, and that of Prometheus for metrics."""
    secrets = tmp_path / "secrets"
    check(shutil.copy(DOCKER / "make-secrets.sh", tmp_path))
    server = start_server("--demo", "--num-workers", "1", "--tokens", str(secrets / "tokens.toml"))
    from_client = "import sys, teleloader; print(len(teleloader.RemoteDataset(sys.argv[1], 'digits-test')))"
    done = piped(from_client, server.url, TELELOADER_TOKEN_FILE=str(secrets / "trainer-token"))
    assert done.out == "256\n", done.err
    done = piped(from_client, server.url, TELELOADER_TOKEN_FILE=str(secrets / "prometheus-token"))
    assert "Forbidden" in done.err


def test_the_compose_file_is_valid() -> None:
    """No service may write to its root file system or gain privileges."""
    composed = check(tool("docker-compose"), "config")
    assert composed.count("image: ") == composed.count("read_only: true") == 5
    assert composed.count("no-new-privileges:true") == composed.count("cap_drop:") == 5
    assert "shm_size" not in composed


def test_containers_have_limits() -> None:
    """The compose file limits the memory and the processes of all services."""
    compose = (ROOT / "docker-compose.yml").read_text()
    shared = compose.partition("x-hardened:")[2].partition("\n\n")[0]
    assert re.search(r"^  mem_limit: \d+g\b", shared, re.MULTILINE)
    assert re.search(r"^  pids_limit: \d+$", shared, re.MULTILINE)
    services = compose.partition("\nservices:\n")[2].partition("\nsecrets:\n")[0]
    names = re.findall(r"^  [\w-]+:$", services, re.MULTILINE)
    assert len(re.findall(r"^    <<: \*(?:hardened|trainer)$", services, re.MULTILINE)) == len(names) == 5
    assert "x-trainer: &trainer\n  <<: *hardened\n" in compose


def test_what_is_mounted_is_there() -> None:
    """Each file that the compose file mounts exists, and the script creates each of its secrets."""
    compose = (ROOT / "docker-compose.yml").read_text()
    mounted = re.findall(r"^      - (\./\S+?):", compose, re.MULTILINE)
    assert len(mounted) == 5
    assert all((ROOT / path).is_file() for path in mounted)
    made = (DOCKER / "make-secrets.sh").read_text()
    for secret in re.findall(r"file: docker/secrets/(\S+)", compose):
        assert secret in made


def test_grafana_finds_its_data_and_its_dashboard() -> None:
    """The dashboard uses a data source of the provisioned type, and is in the provisioned folder."""
    dashboard = json.loads((ROOT / "docs" / "grafana.json").read_text())
    source = next(one for one in dashboard["templating"]["list"] if one["type"] == "datasource")
    assert f"type: {source['query']}\n" in (DOCKER / "grafana" / "datasource.yml").read_text()
    folder = re.search(r"path: (\S+)", (DOCKER / "grafana" / "dashboards.yml").read_text())
    assert folder is not None
    assert f"./docs/grafana.json:{folder[1]}/teleloader.json:ro" in (ROOT / "docker-compose.yml").read_text()


# -- Prometheus


def test_prometheus_takes_its_configurations(tmp_path: Path) -> None:
    """The scrape configurations for docker compose and for a cluster pass promtool's check."""
    promtool = tool("promtool")
    check(promtool, "check", "config", "--syntax-only", DOCKER / "prometheus.yml")
    # Debian's promtool is built without Kubernetes
    text = (DEPLOY / "prometheus.yml").read_text()
    known, count = re.subn(r"    kubernetes_sd_configs:\n(      .*\n)+", "", text)
    assert count == 1
    (tmp_path / "prometheus.yml").write_text(known)
    check(promtool, "check", "config", "--syntax-only", tmp_path / "prometheus.yml")


def test_alerts_fire(tmp_path: Path) -> None:
    """Alerts fire under the right conditions."""
    promtool = tool("promtool")
    rules = DEPLOY / "prometheus-rules.yml"
    check(promtool, "check", "rules", rules)
    cases = (ROOT / "tests" / "deploy" / "rules.test.yml").read_text()
    (tmp_path / "rules.test.yml").write_text(cases.replace("RULES", str(rules)))
    check(promtool, "test", "rules", tmp_path / "rules.test.yml")


# -- systemd


@pytest.mark.skipif(sys.platform != "linux", reason="needs systemd")
def test_the_unit_is_valid_and_exposes_little(tmp_path: Path) -> None:
    """The unit is valid and has an exposure below 2 of 10; Python replaces the command, which is not installed."""
    analyze = tool("systemd-analyze")
    unit = tmp_path / "teleloader.service"
    text = (DEPLOY / "teleloader.service").read_text()
    unit.write_text(text.replace("/opt/teleloader/bin/teleloader-server", sys.executable))
    assert check(analyze, "verify", unit) == ""
    check(analyze, "security", "--offline=true", "--threshold=20", unit)


def test_examples_give_the_server_options_that_it_has() -> None:
    """Options in the compose file and the unit exist."""
    known = server_options(piped(SERVER, "--help").out)
    unit = (DEPLOY / "teleloader.service").read_text()
    command = re.search(r"ExecStart=((?:.*\\\n)*.*)", unit)
    composed = re.search(r"command: (\[--demo.*)", (ROOT / "docker-compose.yml").read_text())
    for found in (command, composed):
        assert found is not None
        assert server_options(found[1])
        assert server_options(found[1]) <= known
