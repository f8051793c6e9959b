"""Adapters and the registered model."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quire.shared.model.adapter_names import Announcement
from quire.shared.process.errors import CheckpointError
from quire.shared.protocol.broker import Broker
from quire.shared.redis.clients import command_client
from quire.worker.engine.features.adapters import Adapters
from quire.worker.queue.adapter_loader import AdapterLoader, AdapterSettings
from quire.worker.queue.model_registrar import ModelRegistrar, read_registration
from tests.support.gateway.running import write_model
from tests.support.registrations import open_registry


class Thread:
    """An engine's thread that runs calls at once."""

    def call(self, function: Callable[[Any], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(function(None))
        except Exception as error:
            future.set_exception(error)
        return future


class Model:
    """Loads an adapter from any folder that is not called broken."""

    implementation = "quire"
    why_no_adapters = ""

    def __init__(self) -> None:
        self.folders: list[Path] = []

    def load_adapter(self, name: str, folder: Path, max_rank: int) -> Any:
        self.folders.append(folder)
        if folder.name == "broken":
            raise CheckpointError(folder, "tensor x is missing", "copy the adapter again")
        if folder.name == "bug":
            raise KeyError("x")
        return SimpleNamespace(name=name, digest=f"of-{folder.name}", nbytes=1)


def make(broker: Broker, folder: Path | None, limit: int = 2) -> tuple[AdapterLoader, Adapters, Model]:
    adapters, model = Adapters(limit), Model()
    engine: Any = SimpleNamespace(adapters=adapters, runner=SimpleNamespace(model=model))
    thread: Any = Thread()
    return AdapterLoader(broker, engine, thread, AdapterSettings(folder), 0.01), adapters, model


async def test_adapters_are_loaded_replaced_and_unloaded(redis_url: str, tmp_path: Path) -> None:
    client = command_client(redis_url)
    broker = Broker(client, "m")
    loader, adapters, model = make(broker, tmp_path)
    await broker.announce_adapter(Announcement("a", "x", "1"))
    await loader.refresh()
    await loader.refresh()
    assert adapters.held == (("a", "of-x"),)
    assert loader.holds("a", "of-x")
    assert not loader.holds("a", "of-y")
    assert model.folders == [tmp_path / "x"]
    await broker.withdraw_adapter("a")
    await broker.announce_adapter(Announcement("a", "y", "2"))
    await loader.refresh()
    assert adapters.held == (("a", "of-y"),)
    await broker.withdraw_adapter("a")
    await loader.refresh()
    assert adapters.held == ()
    await client.aclose()


async def test_a_failure_is_reported_until_it_is_withdrawn(redis_url: str, tmp_path: Path) -> None:
    client = command_client(redis_url)
    broker = Broker(client, "m")
    loader, adapters, model = make(broker, tmp_path, limit=1)
    (tmp_path / "link").symlink_to("/etc")
    for stamp, path in enumerate(("broken", "link", "bug", "good", "more")):
        await broker.announce_adapter(Announcement(path, path, str(stamp)))
    await loader.refresh()
    await loader.refresh()
    faults = dict(fault.split(" ", 1) for fault in loader.faults)
    assert faults["0"] == f"{tmp_path}/broken: tensor x is missing; copy the adapter again"
    assert "link: this path leads out of --lora-dir" in faults["1"]
    assert "could not be loaded (KeyError)" in faults["2"]
    assert "would be number 2, and --max-loras is 1" in faults.get("4", faults.get("3", ""))
    assert len(adapters.held) == 1
    assert len(model.folders) == 4
    await broker.withdraw_adapter("broken")
    await loader.refresh()
    assert "0" not in dict(fault.split(" ", 1) for fault in loader.faults)
    await client.aclose()


async def test_adapters_of_the_start_are_neither_replaced_nor_unloaded(redis_url: str, tmp_path: Path) -> None:
    client = command_client(redis_url)
    broker = Broker(client, "m")
    loader, adapters, _ = make(broker, tmp_path)
    started: Any = SimpleNamespace(name="a", digest="start", nbytes=1)
    adapters.add(started)
    await broker.announce_adapter(Announcement("a", "x", "1"))
    await loader.refresh()
    assert "was started with an adapter 'a'" in loader.faults[0]
    await broker.withdraw_adapter("a")
    await loader.refresh()
    assert adapters.held == (("a", "start"),)
    await client.aclose()


async def test_without_a_folder_nothing_is_loaded(redis_url: str) -> None:
    client = command_client(redis_url)
    broker = Broker(client, "m")
    loader, adapters, model = make(broker, None)
    await broker.announce_adapter(Announcement("a", "x", "1"))
    ended = asyncio.Event()
    task = asyncio.create_task(loader.run(ended))
    await loader.refresh()
    ended.set()
    await task
    assert "no --lora-dir" in loader.faults[0]
    assert (adapters.held, model.folders) == ((), [])
    await client.aclose()


async def test_a_model_without_adapters_gives_its_reason(redis_url: str, tmp_path: Path) -> None:
    client = command_client(redis_url)
    broker = Broker(client, "m")
    loader, adapters, model = make(broker, tmp_path)
    model.why_no_adapters = "no adapters for layers with experts; merge the adapter"
    await broker.announce_adapter(Announcement("a", "x", "1"))
    await loader.refresh()
    assert loader.faults == ("1 no adapters for layers with experts; merge the adapter",)
    assert (adapters.held, model.folders) == ((), [])
    await client.aclose()


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
        async with asyncio.timeout(60):
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
    await asyncio.wait_for(task, 60)
    await two.run(ended)  # closes its connection


def test_a_model_without_the_files_is_not_registered(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_model(tmp_path / "m")
    (folder / "tokenizer.json").unlink()
    with caplog.at_level(logging.WARNING):
        assert read_registration(folder, "m", ()) is None
    assert "not registered" in caplog.text
