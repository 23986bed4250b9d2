"""Endpoints for versions of datasets: publish the configuration again, and retire a version."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request

from teleloader_server.config import ConfigError
from teleloader_server.permissions import ADMIN, needs
from teleloader_server.problems import HttpProblem
from teleloader_server.web.authentication import GuardedRoute, refuse_remote_without_token
from teleloader_server.web.batches import service_of
from teleloader_server.web.problem_responses import MAX_DETAIL
from teleloader_shared.errors import UnknownDataset
from teleloader_shared.messages import VERSIONS_PATH


def make_versions_router() -> APIRouter:
    """Create the router with the endpoints for versions, which use `service` of the application's state."""
    router = APIRouter(route_class=GuardedRoute)

    @router.post(VERSIONS_PATH, summary="Read the configuration file again, and publish new versions of its datasets")
    @needs(ADMIN)
    async def publish(request: Request) -> dict[str, list[dict[str, Any]]]:
        refuse_remote_without_token(request)
        service = service_of(request)
        service.refuse_when_draining()
        try:
            published = await service.publisher.publish()
        except ConfigError as error:
            # the end of a traceback names the error
            text = str(error)
            shown = text if len(text) <= MAX_DETAIL else f"... {text[4 - MAX_DETAIL :]}"
            raise HttpProblem(409, "CannotPublish", shown) from None
        return {"versions": [asdict(version) for version in published]}

    @router.delete(VERSIONS_PATH + "/{dataset}", summary="Retire a version, and end the requests of its loaders")
    @needs(ADMIN)
    async def retire(
        request: Request, dataset: str, version: Annotated[str, Query(description="version as in the configuration")]
    ) -> dict[str, int]:
        refuse_remote_without_token(request)
        service = service_of(request)
        if dataset not in service.datasets:
            raise UnknownDataset(f"unknown dataset {dataset[:200]!r}: GET /v1/datasets lists the hosted datasets")
        return {"loaders": await service.publisher.retire(dataset, version)}

    return router
