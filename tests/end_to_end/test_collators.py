"""Callables without a name of their own as `collate_fn`, against real servers."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from teleloader import DataLoader, RemoteDataset
from tests.conftest import StartServer
from tests.end_to_end import collators

MODULE = "tests.end_to_end.collators"


def configured(tmp_path: Any, factory: str, functions: list[str]) -> str:
    """Return the path of a configuration file with one dataset."""
    file = tmp_path / "loader.toml"
    file.write_text(f'[datasets.train]\nfactory = "{factory}"\nfunctions = {functions!r}\n')
    return str(file)


def test_a_server_collates_with_the_variables_that_it_allows(start_server: StartServer, tmp_path: Any) -> None:
    """An instance, a partial and a bound method collate on the server, passed as objects or by name."""
    names = {name: f"{MODULE}:{name}" for name in ("instance", "partial", "bound")}
    config = configured(tmp_path, f"{MODULE}:lists", [*names.values()])
    server = start_server("--config", config, "--num-workers", "1")
    dataset = RemoteDataset(server.url)
    for variable, name in names.items():
        function = getattr(collators, variable)
        for given in (function, name):
            (batch,) = DataLoader(dataset, 3, collate_fn=given, output="numpy")
            assert batch.tolist() == function(collators.lists).tolist()
    with pytest.raises(ValueError, match=r"collate_fn=.*Padded.* runs on the server"):
        DataLoader(dataset, 3, collate_fn=collators.Padded(-1))


def test_a_server_collates_with_a_data_collator_of_transformers(start_server: StartServer, tmp_path: Any) -> None:
    """Data collators, also one with a tokenizer, are found by the name of their variable."""
    pytest.importorskip("transformers")
    module = importlib.import_module("tests.end_to_end.transformers_collator")
    names = [f"{module.__name__}:{name}" for name in ("collate", "plain")]
    server = start_server("--config", configured(tmp_path, f"{module.__name__}:tokens", names), "--num-workers", "1")
    dataset = RemoteDataset(server.url)
    assert DataLoader(dataset, 4, collate_fn=module.collate).spec.collate == names[0]
    for given in (module.plain, names[1]):
        for batch, samples in zip(
            DataLoader(dataset, 4, collate_fn=given), (module.tokens[:4], module.tokens[4:]), strict=True
        ):
            expected = module.plain(samples)
            assert {key: value.tolist() for key, value in batch.items()} == {
                key: value.tolist() for key, value in expected.items()
            }
