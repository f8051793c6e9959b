"""The application: its log, its models, its files."""

from __future__ import annotations

import tomllib

import pytest

from quire.ops.paths import PROJECT_ROOT
from tests.support.gateway.running import MODEL, RunningGateway


async def test_models_are_listed(gateway: RunningGateway) -> None:
    [card] = (await gateway.get("/v1/models")).json["data"]
    assert (card["id"], card["object"], card["owned_by"], card["max_model_len"]) == (MODEL, "model", "quire", 512)
    assert (await gateway.get(f"/v1/models/{MODEL}")).json == card


@pytest.mark.parametrize("project", ["pyproject.toml", "gateway/pyproject.toml"])
def test_every_static_file_is_packaged(project: str) -> None:
    with (PROJECT_ROOT / project).open("rb") as file:
        patterns = tomllib.load(file)["tool"]["setuptools"]["package-data"]["quire.gateway"]
    gateway = PROJECT_ROOT / "gateway"
    packaged = {path for pattern in patterns for path in gateway.glob(pattern)}
    static = {path for path in (gateway / "pages" / "static").rglob("*") if path.is_file()}
    assert static
    assert static <= packaged
