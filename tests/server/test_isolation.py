"""Decisions on the isolation of dataset code, without processes."""

from __future__ import annotations

import os
import pwd
from typing import Any

import pytest

from teleloader_server.config import ConfigError
from teleloader_server.limits import Limits
from teleloader_server.workers.isolation import NO_ISOLATION, Account, Isolation, ServerProcess
from teleloader_server.workers.procfs import Capability

WORKER = Account("loader-worker", 54321, 54322, (54322, 7), "/var/lib/worker")
ROOT = ServerProcess("linux", 0, frozenset(Capability))


def test_without_options_the_command_is_unchanged() -> None:
    """The fork server starts directly, without the program that applies restrictions."""
    assert NO_ISOLATION.command(["python", "-c", "x"]) == ["python", "-c", "x"]
    assert NO_ISOLATION.options == []


def test_restrictions_are_applied_by_an_isolated_interpreter() -> None:
    """Neither the environment nor the current folder select the modules that run with the server's privileges."""
    isolation = Isolation(user=WORKER, network="none", memory_limit=2**30, process_limit=9)
    _, *flags, program, settings, command = isolation.command(["python"])
    assert flags == ["-I", "-S"]
    assert program.endswith("/confine.py")
    assert command == "python"
    assert settings == (
        '{"uid": 54321, "gid": 54322, "groups": [54322, 7], "has_network": false, "max_data_bytes": 1073741824, '
        '"max_processes": 9}'
    )


ENVIRONMENT = {
    "PATH": "/bin", "HOME": "/root", "USER": "root", "LC_ALL": "C", "AWS_SECRET_ACCESS_KEY": "x", "HF_HOME": "/hf",
    "TELELOADER_TOKEN": "secret", "TELELOADER_SSL_KEYFILE_PASSWORD": "secret", "TELELOADER_PORT": "8000",
    "OTEL_EXPORTER_OTLP_HEADERS": "secret", "OTEL_EXPORTER_OTLP_TRACES_HEADERS": "secret", "OTEL_SERVICE_NAME": "x",
}  # fmt: skip
OPEN = {"PATH", "HOME", "USER", "LC_ALL", "AWS_SECRET_ACCESS_KEY", "HF_HOME", "OTEL_SERVICE_NAME"}


@pytest.mark.parametrize(
    ("variables", "passed"),
    [
        ((), OPEN),
        (("HF_*",), {"PATH", "HOME", "USER", "LC_ALL", "HF_HOME"}),
        (("TELELOADER_*",), {"PATH", "HOME", "USER", "LC_ALL"}),
        (("TELELOADER_TOKEN",), {"PATH", "HOME", "USER", "LC_ALL", "TELELOADER_TOKEN"}),
    ],
)
def test_workers_receive_only_permitted_variables(variables: tuple[str, ...], passed: set[str]) -> None:
    """Secrets of the server are passed only if their exact name is listed."""
    assert Isolation(variables=variables).environment(ENVIRONMENT).keys() == passed


def test_the_home_folder_is_that_of_the_workers_user() -> None:
    """Libraries write their caches there."""
    found = Isolation(user=WORKER).environment(ENVIRONMENT)
    assert (found["HOME"], found["USER"], found["LOGNAME"]) == ("/var/lib/worker", "loader-worker", "loader-worker")


def test_an_account_is_found_by_name_or_ids() -> None:
    """An account has its own groups; user and group IDs need no account."""
    known = pwd.getpwall()[-1]
    found = Account.find(known.pw_name)
    assert (found.uid, found.gid, found.home) == (known.pw_uid, known.pw_gid, known.pw_dir)
    assert found.groups == tuple(os.getgrouplist(known.pw_name, known.pw_gid))
    assert Account.find("54321:54322") == ("54321:54322", 54321, 54322, (), "/")


@pytest.mark.parametrize("name", ["no-such-user", "54321", "54321:", ":1", "-1:1"])
def test_an_unknown_user_is_an_error(name: str) -> None:
    """The message explains how to create the user."""
    with pytest.raises(ConfigError, match=rf"invalid --worker-user '{name}': no such user\. Create the user"):
        Account.find(name)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"user": Account("root", 0, 0, (), "/root")}, "invalid --worker-user 'root': dataset code would run as root"),
        ({"memory_limit": 1024}, "invalid --worker-memory-limit 1 KiB: expected at least 64 MiB"),
        ({"process_limit": 5}, "--worker-process-limit requires --worker-user"),
    ],
)
def test_an_invalid_option_is_an_error(fields: dict[str, Any], message: str) -> None:
    """Each message contains the option and its value."""
    with pytest.raises(ConfigError) as caught:
        Isolation(**fields)
    assert str(caught.value).startswith(message)


OPTIONS: list[dict[str, Any]] = [
    {"user": WORKER}, {"network": "none"}, {"memory_limit": 2**30}, {"user": WORKER, "process_limit": 5},
    {"variables": ("PATH",)},
]  # fmt: skip


@pytest.mark.parametrize("fields", OPTIONS)
def test_isolation_requires_linux(fields: dict[str, Any]) -> None:
    """On other systems, each option is refused instead of ignored."""
    with pytest.raises(ConfigError, match="not supported on darwin, only on Linux"):
        Isolation(**fields).check(ServerProcess("darwin", 501, frozenset()))
    NO_ISOLATION.check(ServerProcess("darwin", 501, frozenset()))


@pytest.mark.parametrize("fields", OPTIONS)
@pytest.mark.parametrize("limits", [Limits(num_workers=0), Limits(debug=True)])
def test_isolation_requires_workers(fields: dict[str, Any], limits: Limits) -> None:
    """Dataset code in the server's process cannot be isolated."""
    with pytest.raises(ConfigError, match="dataset code runs in the server's process"):
        Isolation(**fields).check_limits(limits)
    NO_ISOLATION.check_limits(limits)


@pytest.mark.parametrize("missing", [Capability.SETUID, Capability.SETGID, Capability.KILL])
def test_another_user_requires_capabilities(missing: Capability) -> None:
    """The server does not need to be root, and root without capabilities is not sufficient."""
    isolation = Isolation(user=WORKER)
    with pytest.raises(ConfigError, match=rf"\(user ID 0\) lacks CAP_{missing.name}\."):
        isolation.check_platform(ROOT._replace(capabilities=frozenset(Capability) - {missing}))
    isolation.check_platform(ROOT._replace(uid=1000))


def test_the_workers_user_differs_from_the_servers() -> None:
    """Otherwise the option would have no effect."""
    with pytest.raises(ConfigError, match="the server itself runs as this user"):
        Isolation(user=WORKER).check_platform(ROOT._replace(uid=WORKER.uid))


@pytest.mark.parametrize(
    ("isolation", "text"),
    [
        (NO_ISOLATION, "workers run as the server's user alice"),
        (Isolation(network="none"), "workers run as the server's user alice, without network"),
        (Isolation(user=WORKER, process_limit=2000),
         "workers run as user loader-worker, with up to 2,000 processes and threads in total"),
        (Isolation(memory_limit=2**31),
         "workers run as the server's user alice, with up to 2 GiB of private memory per process"),
    ],
)  # fmt: skip
def test_the_isolation_is_described_in_one_line(isolation: Isolation, text: str) -> None:
    """The start message contains this line."""
    assert isolation.describe("alice") == text
