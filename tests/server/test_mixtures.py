"""Registration of mixtures: sources, access to each of them, and limits; without HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any

import pytest

from teleloader_server.dispatch.grants import Grants
from teleloader_server.dispatch.records import RangeRequest
from teleloader_server.dispatch.service import LoaderService
from teleloader_server.limits import Limits
from teleloader_server.loading.datasets import HostedDataset, host
from teleloader_server.loading.tasks import Task, indices_of
from teleloader_server.permissions import ALL_SCOPES, READ, Principal
from teleloader_server.workers.factory import ObjectPools
from teleloader_shared.codec import BatchId
from teleloader_shared.errors import (
    AccessDenied,
    DatasetChanged,
    Forbidden,
    InvalidSpec,
    ServerUnavailable,
    UnknownDataset,
)
from teleloader_shared.ranges import BatchRanges
from teleloader_shared.spec import LoaderSpec

ALICE = Principal("alice", frozenset(ALL_SCOPES), 1.0)
WITHOUT_CODE = Principal("alice", frozenset({"read:web"}), 1.0)
MIXTURE: dict[str, Any] = {"sources": [["web", 10], ["code", 4]], "stages": [[0, [7, 3]]], "samples": 14}


def hosting(**options: Mapping[str, Any]) -> dict[str, HostedDataset]:
    """Host two datasets with options of `host`."""
    lengths = {"web": 10, "code": 4}
    return {name: host(range(length), name=name, **options.get(name, {})) for name, length in lengths.items()}


def spec(**fields: Any) -> LoaderSpec:
    """Return the spec of a mixture of both datasets."""
    return LoaderSpec.from_json({"dataset": "web", "mixture": MIXTURE, **fields})


def run(test: Coroutine[Any, Any, None]) -> None:
    """Run a test."""
    asyncio.run(test)


def service_of(hosted: Mapping[str, HostedDataset]) -> LoaderService:
    """Return a service without worker processes."""
    limits = Limits(num_workers=0)
    return LoaderService(ObjectPools(lambda: hosted, limits), limits)


def test_access_to_each_source_is_required() -> None:
    """A token for the first source can neither register the loader, nor use the registration of another token."""

    async def test() -> None:
        service = service_of(hosting())
        await service.start()
        try:
            with pytest.raises(Forbidden, match="read:code"):
                await service.register(spec(), WITHOUT_CODE)
            key = (await service.register(spec(), ALICE)).key
            request = RangeRequest(key=key, epoch=0, batches=BatchRanges(range(1)), consumer="c")
            with pytest.raises(Forbidden, match="read:code"):
                service.registration(key, WITHOUT_CODE)
            with pytest.raises(Forbidden, match="read:code"):
                service.batches(WITHOUT_CODE, request)
        finally:
            await service.close()

    run(test())


def test_a_request_ends_with_the_access_to_any_source() -> None:
    """After a change of tokens, the right to the last source is checked again, too."""

    async def test() -> None:
        grants = Grants()
        running = asyncio.create_task(grants.run())
        ended: asyncio.Future[AccessDenied | ServerUnavailable] = asyncio.get_running_loop().create_future()
        with grants.hold(WITHOUT_CODE, READ, spec().datasets, ended.set_result):
            grants.tokens_changed.set()
            assert "read:code" in str(await ended)
        running.cancel()

    run(test())


@pytest.mark.parametrize(
    ("fields", "options", "error", "message"),
    [
        ({"dataset": "code"}, {}, InvalidSpec, "dataset must be the first source of the mixture, 'web': got 'code'"),
        ({"fingerprint": "other"}, {}, DatasetChanged, "the loader requires other"),
        ({}, {"code": {"seeding": "sample"}}, InvalidSpec, "must have the same seeding: 'web' has 'batch'"),
        ({}, {"code": {"collate": list, "collate_name": "m:f"}}, InvalidSpec, "must have the same collate"),
        (
            {"mixture": {**MIXTURE, "sources": [["web", 9], ["code", 5]]}},
            {},
            InvalidSpec,
            "source 'web' of the mixture must have length 10, got 9",
        ),
        (
            {"mixture": {**MIXTURE, "sources": [["web", 10], ["books", 4]]}},
            {},
            UnknownDataset,
            "unknown dataset 'books'",
        ),
    ],
)
def test_invalid_sources_are_refused(
    fields: dict[str, Any], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    """Sources must be hosted, in the order of the spec, with the lengths of the spec, and be collated alike."""

    async def test() -> None:
        service = service_of(hosting(**options))
        await service.start()
        try:
            with pytest.raises(error, match=message):
                await service.register(spec(**fields), ALICE)
        finally:
            await service.close()

    run(test())


def test_the_server_prepares_no_large_tables_outside_of_workers() -> None:
    """Indices for messages are computed in the event loop, which a period of a million would block."""
    small = Task(spec(), 14, BatchId("k", 0, 0))
    large = {**MIXTURE, "stages": [[0, [2**19, 2**19]]]}
    assert len(indices_of(small)) == 1
    assert indices_of(Task(spec(mixture=large), 14, BatchId("k", 0, 0))) == []
