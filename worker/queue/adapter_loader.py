"""Loads LoRA adapters: those of --lora at start, and while the worker serves those that gateways announce in Redis.

An adapter is read and packed on another thread, so running requests go on; the engine's thread only takes the result
between two steps. A failure is logged, reported on the worker's card, and harms no request.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from redis.exceptions import RedisError

from quire.shared.model.adapter_names import Announcement, parse_adapters
from quire.shared.process.errors import CheckpointError, StartError
from quire.shared.protocol.broker import Broker
from quire.shared.protocol.messages.requests import MAX_ADAPTER_FAULTS, MAX_FAULT_LENGTH
from quire.worker.engine.engine import Engine
from quire.worker.engine.limits import RequestRefused
from quire.worker.engine.paged_model import PagedModel
from quire.worker.settings import WorkerSettings

if TYPE_CHECKING:
    from quire.worker.engine.sequence import Adapter
    from quire.worker.queue.engine_thread import EngineThread

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AdapterSettings:
    """The adapters that may be loaded. folder: of all of them; None forbids loading at run time."""

    folder: Path | None = None
    max_rank: int = 64


def load_adapters(settings: WorkerSettings, name: str, model: PagedModel) -> list[Adapter]:
    """Load the adapters of --lora. Raises StartError, CheckpointError.

    name: the served name of the model.
    """
    folders = parse_adapters(settings.lora, name)
    if (folders or settings.lora_dir) and (fault := model.why_no_adapters):
        raise StartError(f"{'--lora' if folders else '--lora-dir'}: {fault}")
    if settings.lora_dir and not Path(settings.lora_dir).is_dir():
        raise StartError(f"--lora-dir {settings.lora_dir} is not a folder; create it, or correct the path")
    if len(folders) > settings.max_loras:
        raise StartError(f"--lora has {len(folders)} adapters, and --max-loras is {settings.max_loras}; raise it")
    adapters = [model.load_adapter(name, folder, settings.max_lora_rank) for name, folder in folders.items()]
    if (total := sum(adapter.nbytes for adapter in adapters)) > settings.max_lora_gb * (1 << 30):
        raise StartError(
            f"--lora has adapters of {total} bytes, and --max-lora-gb is {settings.max_lora_gb:g}; raise it"
        )
    for adapter in adapters:
        log.info("adapter %s: rank %d, %d bytes, digest %s", adapter.name, adapter.rank, adapter.nbytes, adapter.digest)
    return adapters


class AdapterLoader:
    """Brings the adapters of an engine in line with the announcements."""

    def __init__(
        self, broker: Broker, engine: Engine, thread: EngineThread, settings: AdapterSettings, poll_s: float
    ) -> None:
        self._broker = broker
        self._adapters = engine.adapters
        self._model: PagedModel = engine.runner.model
        self._thread = thread
        self._settings = settings
        self._poll_s = poll_s
        self._loaded: dict[str, Announcement] = {}
        # The fault of each announcement that could not be loaded, by stamp.
        self._faults: dict[str, str] = {}
        self._lock = asyncio.Lock()

    @property
    def faults(self) -> tuple[str, ...]:
        """The faults for the worker's card: stamp, space, message."""
        lines = [f"{stamp} {fault}" for stamp, fault in self._faults.items()]
        return tuple(line[:MAX_FAULT_LENGTH] for line in lines[:MAX_ADAPTER_FAULTS])

    def holds(self, name: str, digest: str) -> bool:
        """Return whether the engine has this adapter."""
        return (name, digest) in self._adapters.held

    async def run(self, ended: asyncio.Event) -> None:
        """Follow the announcements until `ended` is set."""
        while not ended.is_set():
            try:
                await self.refresh()
            except (RedisError, OSError) as error:
                log.debug("the announced adapters cannot be read: %s", error)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._poll_s):
                    await ended.wait()

    async def refresh(self) -> None:
        """Load adapters that were announced, and unload those that were withdrawn. Raises RedisError, OSError."""
        async with self._lock:
            announced = await self._broker.announced_adapters()
            stamps = {announcement.stamp for announcement in announced.values()}
            self._faults = {stamp: fault for stamp, fault in self._faults.items() if stamp in stamps}
            for name, loaded in list(self._loaded.items()):
                if (current := announced.get(name)) is None or current.stamp != loaded.stamp:
                    del self._loaded[name]
                    await self._on_engine(lambda name=name: self._adapters.remove(name))  # type: ignore[misc]
                    log.info("adapter %s is unloaded", name)
            for name, announcement in announced.items():
                if name not in self._loaded and announcement.stamp not in self._faults:
                    await self._load(name, announcement)

    async def _load(self, name: str, announcement: Announcement) -> None:
        try:
            if any(name == held for held, _ in self._adapters.held):
                raise StartError(f"this worker was started with an adapter {name!r} (--lora); choose another name")
            adapter = await asyncio.to_thread(self._read, name, announcement.path)
            await self._on_engine(lambda: self._adapters.add(adapter))
        except (StartError, RequestRefused) as error:
            fault = " ".join(str(error).split())
        except Exception as error:
            log.exception("adapter %s could not be loaded", name)
            fault = f"the adapter could not be loaded ({type(error).__name__}); the worker's log has the cause"
        else:
            self._loaded[name] = announcement
            log.info("adapter %s is loaded: digest %s, %d bytes", name, adapter.digest, adapter.nbytes)
            return
        self._faults[announcement.stamp] = fault
        log.error("adapter %s is not loaded: %s", name, fault)

    def _read(self, name: str, path: str) -> Adapter:
        if self._settings.folder is None:
            raise StartError("this worker has no --lora-dir, so no adapter can be loaded at run time; set it")
        if fault := self._model.why_no_adapters:
            raise StartError(fault)
        root = os.path.realpath(self._settings.folder)
        folder = os.path.realpath(os.path.join(root, path))
        if os.path.commonpath([root, folder]) != root:
            raise CheckpointError(path, "this path leads out of --lora-dir", "copy the adapter into that folder")
        return self._model.load_adapter(name, Path(folder), self._settings.max_rank)

    async def _on_engine(self, change: Callable[[], None]) -> None:
        """Run a quick change of the adapters between two steps."""
        await asyncio.wrap_future(self._thread.call(lambda engine: change()))
