"""A worker registers its model, and says once if another one has registered other files."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from quire.worker.queue.model_registrar import ModelRegistrar, read_registration
from tests.support.gateway.running import write_model
from tests.support.registrations import open_registry


async def test_a_model_is_registered_until_the_worker_ends(
    redis_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_model(tmp_path / "m")
    first, second = read_registration(folder, "m", ()), read_registration(folder, "m", ("alias",))
    assert first is not None
    assert second is not None
    one, two = ModelRegistrar(redis_url, first), ModelRegistrar(redis_url, second)
    ended = asyncio.Event()
    task = asyncio.create_task(one.run(ended))
    async with open_registry(redis_url) as registry:
        async with asyncio.timeout(10):
            while await registry.registered() != {"m": first.manifest.encode()}:  # noqa: ASYNC110 - in Redis
                await asyncio.sleep(0.01)
        await two.refresh()  # it started later
        assert await registry.registered() == {"m": second.manifest.encode()}
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                await one.refresh()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "give all workers of a model the same folder" in caplog.text
    ended.set()
    await asyncio.wait_for(task, 10)
    await two.run(ended)  # closes its connection


def test_a_model_without_the_files_is_not_registered(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_model(tmp_path / "m")
    (folder / "tokenizer.json").unlink()
    with caplog.at_level(logging.WARNING):
        assert read_registration(folder, "m", ()) is None
    assert "not registered" in caplog.text
