"""``teleloader-server check``: reports problems of a dataset before it is used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.terminal import SERVER, Done, piped, terminal

CHECKED = "tests.end_to_end.checked:"
HOSTED = "tests.end_to_end.hosted:"


def check(*arguments: str) -> Done:
    """Run the command in a pipe."""
    return piped(SERVER, "check", *arguments)


def found(*arguments: str) -> tuple[int, dict[str, Any]]:
    """Return exit code and report of one dataset."""
    done = check("--output", "json", *arguments)
    assert done.out.count("\n") == 1
    (dataset,) = json.loads(done.out)["datasets"]
    return done.code, dataset


def test_a_good_dataset() -> None:
    """The report has kind, length, parts of a batch, times, memory, and reproducibility."""
    code, dataset = found(CHECKED + "dicts", "--batch-size", "4")
    assert code == 0
    assert dataset["problems"] == []
    assert (dataset["kind"], dataset["type"], dataset["length"]) == ("map", "Samples", 50)
    assert [(part["path"], part["type"], part["shape"]) for part in dataset["parts"]] == [
        ("batch['image']", "uint8", [4, 2, 3]), ("batch['label']", "int64", [4]), ("batch['weight']", "float64", [4]),
    ]  # fmt: skip
    assert dataset["sample"]["count"] == 32, "as many as 8 batches have"
    assert 0 < dataset["sample"]["p50"] <= dataset["sample"]["p95"]
    assert dataset["batch_bytes"] > 4 * (6 + 8 + 8)
    assert dataset["samples_per_second"] > 0
    assert dataset["repeatable"] is True
    assert dataset["pickled"] is None, "it holds a lambda"
    assert dataset["memory"] >= 0
    assert dataset["built_in"] > 0


def test_memory_and_pickle_are_measured() -> None:
    """A dataset of 256 MiB has this memory and pickle size in the report."""
    _, dataset = found(HOSTED + "large", "--batches", "1")
    assert dataset["memory"] == pytest.approx(2**28, rel=0.1)
    assert dataset["pickled"] == pytest.approx(2**28, rel=0.01)


@pytest.mark.parametrize(
    ("name", "what", "advice"),
    [
        (
            "OthersGenerator",
            "recomputed batches differ in batch['noise']. Probable cause: tests.end_to_end.checked.generator "
            "(numpy.random.Generator), a variable of a module",
            "__seed__(self, seed)",
        ),
        (
            "LateGenerator",
            "recomputed batches differ in batch['noise']. Probable cause: dataset.late (numpy.random.Generator), "
            "created after the first sample",
            "__seed__(self, seed)",
        ),
        ("threaded", "building the dataset starts threads: reader", 'start_method = "spawn" in [datasets.threaded]'),
        ("Replicas", "all shards start with the same samples", "with get_worker_info()"),
        ("NoLength", "the dataset has no length", "Define __len__"),
        ("empty", "the dataset is empty", "Check that the files of the dataset exist"),
    ],
)
def test_what_users_seldom_want_is_a_warning(name: str, what: str, advice: str) -> None:
    """The warning has advice; the exit code is 0, because batches are available."""
    code, dataset = found(CHECKED + name)
    (problem,) = dataset["problems"]
    assert (code, problem["severity"]) == (0, "warning")
    assert problem["what"].startswith(what)
    assert advice in problem["advice"]


def test_a_difference_without_a_known_cause() -> None:
    """The value is named; the generator of the module, from which this dataset does not draw, is not the cause."""
    _, dataset = found(CHECKED + "Unknown")
    (problem,) = dataset["problems"]
    assert problem["what"] == "recomputed batches differ in batch['noise']"


def test_a_generator_of_the_dataset_is_seeded() -> None:
    """Batches are equal, so there is no problem."""
    _, dataset = found(CHECKED + "OwnGenerator")
    assert (dataset["repeatable"], dataset["problems"]) == (True, [])


@pytest.mark.parametrize(("name", "kind"), [("Threaded", "map"), ("ThreadedStream", "iterable")])
def test_a_dataset_that_must_not_be_forked(tmp_path: Path, name: str, kind: str) -> None:
    """The check reports the danger and that batches fail; with the key that it names, there is no problem."""
    code, dataset = found(f"tests.end_to_end.spawned:{name}", "--batch-timeout", "1")
    warning, error = dataset["problems"]
    assert code == 1
    assert warning["what"].startswith("building the dataset starts threads: ")
    assert "exceeded the timeout" in error["what"]
    config = tmp_path / "loader.toml"
    config.write_text(f'[datasets.{name}]\nfactory = "tests.end_to_end.spawned:{name}"\nstart_method = "spawn"\n')
    code, dataset = found("--config", str(config), "--batch-size", "2")
    assert (code, dataset["kind"], dataset["problems"]) == (0, kind, [])
    assert dataset["samples_per_second"] > 0


def test_a_faster_decoder_is_suggested() -> None:
    """If JPEG decoding with Pillow takes most of the time, a hint says so; the dataset is fine."""
    code, dataset = found(CHECKED + "jpegs", "--batch-size", "16")
    # on a busy machine, a cache of the slow samples is suggested, too
    (problem,) = [problem for problem in dataset["problems"] if "decoder" in problem["what"]]
    assert (code, problem["severity"]) == (0, "hint")
    assert problem["what"].startswith("Pillow's JPEG decoder takes ")
    assert "simplejpeg" in problem["advice"]
    done = check(CHECKED + "jpegs", "--batch-size", "16")
    assert "jpegs: OK" in done.out
    assert "  hint: Pillow's JPEG decoder" in done.out


@pytest.mark.parametrize("name", ["pngs", "few_jpegs", "dicts"])
def test_no_decoder_is_suggested_to_others(name: str) -> None:
    """Other files, few JPEG files beside slow Python code, and arrays get no hint."""
    _, dataset = found(CHECKED + name, "--batch-size", "16", "--batches", "2")
    assert [problem for problem in dataset["problems"] if "decoder" in problem["what"]] == []


def test_a_cache_is_suggested_for_slow_samples_without_random_numbers() -> None:
    """The report names the time to fetch and to read a sample, and the size of all samples."""
    _, dataset = found(CHECKED + "few_jpegs", "--batch-size", "16", "--batches", "2")
    (problem,) = dataset["problems"]
    assert problem["severity"] == "hint"
    assert problem["what"].startswith("the first 16 samples do not depend on random numbers, and take ")
    assert "CachedDataset" in problem["advice"]
    assert "All 300 samples take about " in problem["advice"]


@pytest.mark.parametrize("name", ["dicts", "random_jpegs"])
def test_no_cache_is_suggested_for_fast_or_random_samples(name: str) -> None:
    """Reading these samples from a file would be slower, or wrong."""
    _, dataset = found(CHECKED + name, "--batch-size", "16", "--batches", "2")
    assert [problem for problem in dataset["problems"] if "CachedDataset" in problem["advice"]] == []


@pytest.mark.parametrize(
    ("target", "what", "advice"),
    [
        (HOSTED + "broken", "RuntimeError: the disk is not mounted", "would not start"),
        (HOSTED + "failing", "cannot load sample 17:\nTraceback (most recent call last):\n", 'on_error="skip"'),
        (HOSTED + "failing", "ValueError: sample 17 is damaged", "Fix the dataset"),
        (CHECKED + "nones", "The value is sample['label'].", "remove or convert the value"),
        (CHECKED + "ragged", "stack expects each tensor to be equal size", "configure a collate function"),
        (CHECKED + "crashes", "exited during the step 'building the dataset' with signal SIGSEGV", "faulthandler"),
        (CHECKED + "exits", "exited with code 3", "possible causes: a crash in C code, os._exit()"),
        ("json:dumps_it", "module 'json' has no attribute 'dumps_it'", "would not start"),
    ],
)
def test_what_ends_training_is_an_error(target: str, what: str, advice: str) -> None:
    """Errors result in exit code 1."""
    code, dataset = found(target)
    (problem,) = dataset["problems"]
    assert (code, problem["severity"]) == (1, "error")
    assert what in problem["what"]
    assert advice in problem["advice"]


def test_a_sample_that_never_comes() -> None:
    """The worker is killed after the batch timeout, and the report has its stack."""
    code, dataset = found(CHECKED + "hangs", "--batch-timeout", "1")
    (problem,) = dataset["problems"]
    assert code == 1
    assert "exceeded the timeout of 1 s" in problem["what"]
    assert "checked.py" in problem["what"]
    assert "the stack shows where the worker hung" in problem["advice"]


def test_workers_that_disturb_one_another_are_found_out() -> None:
    """Workers that share an open file compute other batches than a single worker."""
    code, dataset = found(CHECKED + "OpenFile")
    warning, error = dataset["problems"]
    assert code == 1
    assert warning["what"].startswith("building the dataset leaves files open: /")
    assert error["what"] == "batches differ between one worker and 4 concurrent workers"
    assert dataset["repeatable"] is False


def test_a_memory_mapped_file_may_stay_open() -> None:
    """Workers can share a memory-mapped file, which has no position."""
    code, dataset = found(CHECKED + "mapped")
    assert (code, dataset["problems"]) == (0, [])


def test_an_iterable_dataset_that_divides_itself() -> None:
    """A dataset that divides itself among workers has no problems."""
    code, dataset = found(CHECKED + "Shards")
    assert (code, dataset["kind"], dataset["problems"]) == (0, "iterable", [])


def test_each_dataset_is_checked_whatever_the_others_do() -> None:
    """All datasets are checked; the exit code is that of the worst one."""
    done = check("--output", "json", CHECKED + "crashes", CHECKED + "dicts", "--batches", "1")
    assert done.code == 1
    assert [bool(dataset["problems"]) for dataset in json.loads(done.out)["datasets"]] == [True, False]


def test_output_of_datasets_does_not_disturb_the_report() -> None:
    """Output of datasets goes to stderr."""
    done = check("--output", "json", CHECKED + "talkative", "--batches", "1")
    assert "{building}" in done.err
    assert "sample 7" in done.err
    assert json.loads(done.out)["datasets"][0]["problems"] == []


def test_a_configuration_file_is_the_servers_own(tmp_path: Path) -> None:
    """Settings of the server are accepted, and datasets are checked with their functions."""
    config = tmp_path / "loader.toml"
    config.write_text(
        f'[server]\nnum_workers = 3\n[datasets.squares]\nfactory = "{HOSTED}make_squares"\n'
        f'kwargs = {{ length = 64 }}\ncollate = "{CHECKED}collate_total"\n'
    )
    code, dataset = found("--config", str(config))
    assert (code, dataset["dataset"], dataset["length"]) == (0, "squares", 64)
    assert dataset["parts"][0]["path"] == "batch['total']"


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_functions_that_clients_may_select_are_called(tmp_path: Path, start_method: str) -> None:
    """For a map-style dataset, each function is a collate function; one that fails is a warning."""
    config = tmp_path / "loader.toml"
    config.write_text(
        f'[datasets.squares]\nfactory = "{HOSTED}make_squares"\nkwargs = {{ length = 64 }}\n'
        f'functions = ["{CHECKED}collate_images", "{CHECKED}collate_unfinished"]\nstart_method = "{start_method}"\n'
    )
    code, dataset = found("--config", str(config))
    (problem,) = dataset["problems"]
    assert (code, problem["severity"], dataset["unchecked"]) == (0, "warning", [])
    assert problem["what"].startswith(f"collate_fn={CHECKED}collate_unfinished fails for a list of samples:\n")
    assert problem["what"].endswith("NotImplementedError: 32 samples")


def test_functions_of_an_iterable_dataset_are_listed(tmp_path: Path) -> None:
    """Clients may also select such a function as worker_init_fn, so it is not called."""
    config, function = tmp_path / "loader.toml", f"{CHECKED}collate_unfinished"
    config.write_text(f'[datasets.shards]\nfactory = "{CHECKED}Shards"\nfunctions = ["{function}"]\n')
    done = check("--config", str(config))
    assert (done.code, "shards: OK" in done.out) == (0, True)
    assert f"  not checked functions {function}: each may be" in done.out


def test_a_registered_type_is_checked_and_summarized(tmp_path: Path) -> None:
    """Values of a library's type need not be restored for the comparison and the report."""
    config = tmp_path / "loader.toml"
    config.write_text(
        f'[datasets.squares]\nfactory = "{HOSTED}make_squares"\nkwargs = {{ length = 64 }}\n'
        f'collate = "{CHECKED}collate_images"\n'
    )
    code, dataset = found("--config", str(config), "--batch-size", "1")
    assert (code, dataset["problems"], dataset["repeatable"]) == (0, [], True)
    assert (dataset["parts"][0]["path"], dataset["parts"][0]["type"]) == ("batch['images'][0]", "PIL.Image.Image")
    assert [part["shape"] for part in dataset["parts"]][-1] == [6]


def test_for_people_it_is_a_paragraph_for_each_dataset() -> None:
    """The report has name, diagnosis, facts and problems with advice, and no colors in a pipe."""
    done = check(CHECKED + "dicts", CHECKED + "threaded")
    first, second = done.out.strip().split("\n\n")
    assert first.splitlines()[:2] == ["dicts: OK", "  dataset     map-style, Samples, 50 samples"]
    assert "  repeatable  yes, recomputed batches are bit-identical" in first
    assert second.startswith("threaded: 1 warning\n")
    assert (
        "  warning: building the dataset starts threads: reader\n    -> threads and connections do not work in forked"
        in second
    )
    assert "\x1b" not in done.out + done.err


def test_in_a_terminal_it_says_what_it_does_and_ends_by_ctrl_c() -> None:
    """The command shows progress; Ctrl-C leaves no traceback and no process."""
    with terminal(SERVER, "check", CHECKED + "hangs", columns=80) as screen:
        screen.await_text("hangs: fetching samples ...")
        screen.press_ctrl_c()
        assert screen.wait() == 130
    assert "Traceback" not in screen.text


def test_no_dataset_is_a_usage_error() -> None:
    """A missing argument results in exit code 2, as for the server."""
    done = check()
    assert done.code == 2
    assert "pass at least one as module:name" in done.err
