"""docs/deploy/kubernetes.yaml: the resources are valid, fit each other, and describe a server that runs."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml  # type: ignore[import-untyped]
from prometheus_client.parser import text_string_to_metric_families

from teleloader import DataLoader, RemoteDataset
from tests.conftest import ROOT, ServerProcess
from tests.deploy.test_examples import DEPLOY, check, tool
from tests.end_to_end.certificates import Files

MANIFEST = (DEPLOY / "kubernetes.yaml").read_text()
PAGE = (DEPLOY / "README.md").read_text()
RESOURCES: dict[str, Any] = {one["kind"]: one for one in yaml.safe_load_all(MANIFEST)}
POD = RESOURCES["Deployment"]["spec"]["template"]
(CONTAINER,) = POD["spec"]["containers"]
TRAINING_POD = yaml.safe_load(re.search(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[1])  # type: ignore[index]
COMMANDS = re.findall(r"^#   ((?:teleloader-server|kubectl) .*?)(?:   .*)?$", MANIFEST, re.MULTILINE)
"""Commands at the top of the file."""
ADAPTER = yaml.safe_load((DEPLOY / "adapter.yaml").read_text())
PROMETHEUS = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
METRIC = RESOURCES["HorizontalPodAutoscaler"]["spec"]["metrics"][0]["pods"]
NAME = RESOURCES["Service"]["metadata"]["name"]


def arguments() -> dict[str, str]:
    """Return the server's options and their values."""
    return dict(argument.split("=", 1) for argument in CONTAINER["args"] if argument.startswith("--"))


def secrets() -> dict[str, set[str]]:
    """Return the keys of the Secrets that the commands at the top of the file create."""
    found: dict[str, set[str]] = {}
    for command in COMMANDS:
        if match := re.match(r"kubectl create secret (generic|tls) (\S+)", command):
            files = set(re.findall(r"--from-file=(\S+)", command))
            found[match[2]] = files if match[1] == "generic" else {"tls.crt", "tls.key"}
    return found


def mounted(pod: Any) -> dict[str, str]:
    """Return the Secret at each mount path of the pod's only container."""
    names = {one["name"]: one["secret"]["secretName"] for one in pod["volumes"] if "secret" in one}
    mounts = pod["containers"][0]["volumeMounts"]
    return {one["mountPath"]: names[one["name"]] for one in mounts if one["name"] in names}


# -- resources


def test_the_resources_are_valid() -> None:
    """Each resource is valid in the oldest version with all used fields, and in the tool's newest one."""
    validate = tool("kubernetes-validate")
    for version in (["--kubernetes-version", "1.26"], []):
        output = check(validate, "--strict", *version, DEPLOY / "kubernetes.yaml")
        assert output.count(" passed ") == len(RESOURCES) == 6


def test_kubectl_accepts_the_commands_for_secrets(tmp_path: Path) -> None:
    """Without a cluster, `kubectl` creates the Secrets of the commands with the keys that the pods mount."""
    kubectl = tool("kubectl")
    made = Files(tmp_path).make("server", NAME)
    for name, source in {"tokens.toml": None, "token": None, "ca.crt": None, "server.crt": 0, "server.key": 1}.items():
        (tmp_path / name).write_text("-" if source is None else Path(made[source]).read_text())
    for command in (command for command in COMMANDS if command.startswith("kubectl create")):
        shown = subprocess.run(
            [kubectl, *shlex.split(command)[1:], "--dry-run=client", "--output=yaml"],
            cwd=tmp_path, check=True, capture_output=True,
        )  # fmt: skip
        secret = yaml.safe_load(shown.stdout)
        assert set(secret["data"]) == secrets()[secret["metadata"]["name"]]


def test_the_resources_select_the_pods() -> None:
    """Service, Deployment, disruption budget and network policy select the pods, and the autoscaler the Deployment."""
    labels = POD["metadata"]["labels"]
    selectors = [
        RESOURCES["Service"]["spec"]["selector"],
        *(RESOURCES[kind]["spec"]["selector"]["matchLabels"] for kind in ("Deployment", "PodDisruptionBudget")),
        RESOURCES["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"],
    ]
    assert all(selector.items() <= labels.items() for selector in selectors)
    scaled = RESOURCES["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]
    assert (scaled["kind"], scaled["name"]) == ("Deployment", RESOURCES["Deployment"]["metadata"]["name"])
    assert "replicas" not in RESOURCES["Deployment"]["spec"], "kubectl apply would undo the autoscaler's decisions"


def test_clients_reach_every_server() -> None:
    """The headless Service and the network policy have the port of the container and of the image, as has the page."""
    service = RESOURCES["Service"]["spec"]
    assert service["clusterIP"] == "None"
    (port,) = {one["port"] for one in service["ports"]} | {one["containerPort"] for one in CONTAINER["ports"]}
    assert f"TELELOADER_PORT={port}" in (ROOT / "docker" / "server.Dockerfile").read_text()
    (ingress,) = RESOURCES["NetworkPolicy"]["spec"]["ingress"]
    assert [one["port"] for one in ingress["ports"]] == [one["name"] for one in CONTAINER["ports"]]
    assert TRAINING_POD["metadata"]["labels"] in [
        one["podSelector"]["matchLabels"] for one in ingress["from"] if "namespaceSelector" not in one
    ]
    assert f'RemoteDataset("dns+https://{NAME}:{port}", "train")' in PAGE


def test_secrets_have_the_keys_that_are_read() -> None:
    """The commands create the Secrets that the pods mount, with the keys of the paths in arguments and variables."""
    for pod in (POD["spec"], TRAINING_POD["spec"]):
        container, at = pod["containers"][0], mounted(pod)
        values = [*container.get("args", ()), *(one["value"] for one in container["env"])]
        paths = [Path(value[value.find("=") + 1 :]) for value in values if "/run/" in value]
        assert {str(path.parent) for path in paths} == set(at)
        assert all(path.name in secrets()[at[str(path.parent)]] for path in paths)
    (scrape,) = PROMETHEUS["scrape_configs"]
    assert scrape["tls_config"]["server_name"] == NAME


def test_a_pod_has_limits_and_time_to_drain() -> None:
    """A pod's memory is limited, and the cluster's grace period is longer than the server's."""
    assert CONTAINER["resources"]["limits"]["memory"] == CONTAINER["resources"]["requests"]["memory"]
    assert CONTAINER["resources"]["requests"]["cpu"] == arguments()["--num-workers"]
    assert POD["spec"]["terminationGracePeriodSeconds"] >= int(arguments()["--shutdown-grace"]) + 10


def test_the_autoscaler_adds_a_server_before_all_workers_are_busy() -> None:
    """The target is below the number of workers, also with the autoscaler's default tolerance of 10 %."""
    assert float(METRIC["target"]["averageValue"]) * 1.1 < int(arguments()["--num-workers"])
    (rule,) = ADAPTER["rules"]["custom"]
    assert rule["seriesQuery"].partition("{")[0] == METRIC["metric"]["name"]


def test_training_loops_of_unknown_demand_add_no_servers(tmp_path: Path) -> None:
    """A benchmark keeps all workers busy: it counts up to the target, and does not hide the demand of other loops."""
    promtool = tool("promtool")
    (rule,) = ADAPTER["rules"]["custom"]
    metric, target = METRIC["metric"]["name"], float(METRIC["target"]["averageValue"])
    query = rule["metricsQuery"].replace("<<.Series>>", metric).replace("<<.GroupBy>>", "pod")
    cases = {
        "busy": (24, 0, 24), "benchmark": (8, 8, target), "both": (9, 5, target), "most": (12, 4, 8), "idle": (1, 1, 1),
    }  # fmt: skip
    series = [
        {"series": f'{name}{{pod="{pod}",namespace="default"}}', "values": f"{value}x3"}
        for pod, (demand, unmeasured, _) in cases.items()
        for name, value in {metric: demand, f"{metric}_unmeasured": unmeasured}.items()
    ]
    expected = [{"labels": f'{{pod="{pod}"}}', "value": value} for pod, (_, _, value) in cases.items()]
    query = query.replace("<<.LabelMatchers>>", 'namespace="default"')
    tests = [
        {"input_series": series, "promql_expr_test": [{"expr": query, "eval_time": "1m", "exp_samples": expected}]}
    ]
    (tmp_path / "test.yml").write_text(yaml.safe_dump({"tests": tests}))
    check(promtool, "test", "rules", tmp_path / "test.yml")


def test_no_token_is_sent_in_clear() -> None:
    """The server, its probes, the clients and Prometheus use TLS."""
    assert {"--ssl-certfile", "--ssl-keyfile"} <= arguments().keys()
    assert {CONTAINER[name]["httpGet"]["scheme"] for name in CONTAINER if name.endswith("Probe")} == {"HTTPS"}
    assert PROMETHEUS["scrape_configs"][0]["scheme"] == "https"
    assert "http://" not in PAGE


# -- a server with the container's arguments


@pytest.fixture(scope="module")
def secret_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the commands for tokens, and return a folder with the Secrets as subfolders of their mount paths."""
    folder = tmp_path_factory.mktemp("kubernetes")
    certificates = Files(folder)
    certificate, key = certificates.make("server", NAME)
    shutil.copy(certificate, folder / "tls.crt")
    shutil.copy(key, folder / "tls.key")
    shutil.copy(certificates.ca, folder / "ca.crt")
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for command in COMMANDS:
        if command.startswith("teleloader-server"):
            subprocess.run(shlex.split(command), cwd=folder, env=environment, check=True)
    for name, keys in secrets().items():
        (folder / name).mkdir()
        for each in keys:
            shutil.copy(folder / each, folder / name / each)
    return folder


def locally(text: str, pod: Any, secret_files: Path) -> str:
    """Replace the mount path at the beginning of a text by the folder of its Secret."""
    for path, name in mounted(pod).items():
        if text.startswith(f"{path}/"):
            return f"{secret_files / name}{text.removeprefix(path)}"
    return text


@pytest.fixture(scope="module")
def server(secret_files: Path) -> Iterator[ServerProcess]:
    """Start a server as the pod does."""
    options = [f"{name}={locally(value, POD['spec'], secret_files)}" for name, value in arguments().items()]
    datasets = [argument for argument in CONTAINER["args"] if not argument.startswith("--")]
    variables = {one["name"]: locally(one["value"], POD["spec"], secret_files) for one in CONTAINER["env"]}
    environment = {**os.environ, **variables, "TELELOADER_HOST": "127.0.0.1", "TELELOADER_PORT": "0"}
    running = ServerProcess(*datasets, *options, folder=ROOT / "tests" / "docs", environment=environment)
    yield running
    with suppress(ProcessLookupError):
        running.end(signal.SIGKILL)


@pytest.fixture
def probe(server: ServerProcess, secret_files: Path) -> Iterator[httpx.Client]:
    """Return an HTTPS client of the server."""
    context = ssl.create_default_context(cafile=secret_files / "ca.crt")
    context.check_hostname = False  # probes and Prometheus connect to the IP address
    with httpx.Client(base_url=server.url, verify=context) as client:
        yield client


def test_the_probes_succeed(probe: httpx.Client) -> None:
    """The server responds to each probe without a token."""
    probes = [CONTAINER[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "readiness", "liveness")]
    assert [probe.get(path).status_code for path in probes] == [200, 200, 200]


def test_prometheus_reads_the_metric_of_the_autoscaler(probe: httpx.Client, secret_files: Path) -> None:
    """The token with the scope `stats` reads the metrics that the autoscaler and the page name."""
    headers = {"Authorization": f"Bearer {(secret_files / 'prometheus-token').read_text().strip()}"}
    metrics = probe.get("/metrics", headers=headers).raise_for_status().text
    exported = {sample.name for family in text_string_to_metric_families(metrics) for sample in family.samples}
    assert {METRIC["metric"]["name"], *re.findall(r"`(teleloader_\w+)", PAGE)} <= exported


def test_a_training_pod_receives_batches(
    server: ServerProcess, secret_files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client with the variables of the training pod verifies the server by the DNS name of the Service."""
    resolved = socket.getaddrinfo

    def resolve(host: str, port: int, *more: Any, **options: Any) -> Any:
        return resolved("127.0.0.1" if host == NAME else host, port, *more, **options)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    for one in TRAINING_POD["spec"]["containers"][0]["env"]:
        monkeypatch.setenv(one["name"], locally(one["value"], TRAINING_POD["spec"], secret_files))
    dataset = RemoteDataset(f"dns+https://{NAME}:{httpx.URL(server.url).port}", "train")
    assert len(list(DataLoader(dataset, batch_size=64, seed=7, output="numpy"))) == 10


def test_a_pod_ends_within_its_grace_period(server: ServerProcess) -> None:
    """On SIGTERM, the server exits with code 0."""
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(POD["spec"]["terminationGracePeriodSeconds"]) == 0
