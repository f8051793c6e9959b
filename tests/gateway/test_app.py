"""The application: its log, its models, its files."""

from __future__ import annotations

import tomllib

from quire.ops.paths import PROJECT_ROOT
from tests.gateway.running import MODEL, RunningGateway


async def test_models_are_listed(gateway: RunningGateway) -> None:
    [card] = (await gateway.get("/v1/models")).json["data"]
    assert (card["id"], card["object"], card["owned_by"], card["max_model_len"]) == (MODEL, "model", "quire", 512)
    assert (await gateway.get(f"/v1/models/{MODEL}")).json == card


def test_every_static_file_is_packaged() -> None:
    with (PROJECT_ROOT / "pyproject.toml").open("rb") as file:
        patterns = tomllib.load(file)["tool"]["setuptools"]["package-data"]["*"]
    endings = {pattern.rsplit(".", 1)[1] for pattern in patterns}
    assert {path.suffix[1:] for path in (PROJECT_ROOT / "gateway" / "pages" / "static").iterdir()} <= endings
