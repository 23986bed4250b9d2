"""Ray Train with examples/with_ray_train.py; apart, because Ray has an environment of its own in .ci/checks.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import ServerProcess, StartServer
from tests.examples.running import need_framework, run_example

RAYS_OWN = ("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning")
"""Warnings of Ray on its own settings, and on files that it does not close."""


def train(server: ServerProcess, *arguments: str) -> tuple[str, str]:
    """Run the example; return the line on the steps, and the line on the model."""
    printed = run_example("examples/with_ray_train.py", "--url", server.url, *arguments, ignore=RAYS_OWN)
    # workers print to the same terminal
    steps, model = (line for line in printed.splitlines() if line.startswith(("started at step", "loss")))
    return steps, model


@pytest.mark.timeout(600)
def test_ray_train_resumes_where_it_left(start_server: StartServer, tmp_path: Path) -> None:
    """A run in two parts, of which the first one has a failed worker, ends with the model of an uninterrupted run."""
    need_framework("ray")
    server = start_server("--demo", "--num-workers", "2")
    steps, model = train(server, "--folder", str(tmp_path / "whole"))
    assert steps == "started at step 0, ended at step 75"
    run = "--folder", str(tmp_path / "run")
    steps, _ = train(server, *run, "--fail-at", "50", "--steps", "60")
    # Ray registers a checkpoint in the background: the last one may be missing
    assert steps in [f"started at step {start}, ended at step 60" for start in (20, 40)]
    assert train(server, *run) == ("started at step 60, ended at step 75", model)
