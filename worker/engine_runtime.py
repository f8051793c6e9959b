"""The runtime of a worker with a model of its own: the engine on its thread, its adapters and its views."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

from quire.shared.protocol.broker import Broker
from quire.shared.protocol.messages import WorkerCard
from quire.shared.protocol.messages.requests import MAX_FAULT_LENGTH
from quire.shared.telemetry.internal_server import InternalServer
from quire.worker.engine.engine import Engine
from quire.worker.inspect.admin_server import admin_server
from quire.worker.inspect.publisher import ViewPublisher
from quire.worker.queue.adapter_loader import AdapterLoader, AdapterSettings
from quire.worker.queue.engine_thread import EngineThread
from quire.worker.queue.executor import Emit
from quire.worker.queue.metrics import QueueMetrics


class EngineRuntime:
    """One engine, as a service runs it (`service.WorkerRuntime`)."""

    def __init__(
        self,
        engine: Engine,
        arithmetic: Mapping[str, str] = {},
        adapter_folder: Path | None = None,
        max_adapter_rank: int = 64,
        num_replaced_kernels: int = 0,
    ) -> None:
        """arithmetic: labels that say how the engine computes (`backend.arithmetic_labels`).

        adapter_folder: of the LoRA adapters that may be loaded; None forbids loading at run time.
        num_replaced_kernels: by the self-test at start.
        """
        self._engine = engine
        self._arithmetic = arithmetic
        self._adapter_settings = AdapterSettings(adapter_folder, max_adapter_rank)
        self._num_replaced_kernels = num_replaced_kernels
        self._thread: EngineThread
        self._loader: AdapterLoader

    def executor(self, emit: Emit, ended: Callable[[], None]) -> EngineThread:
        self._thread = EngineThread(self._engine, emit, ended)
        return self._thread

    def adapters(self, broker: Broker, poll_s: float) -> AdapterLoader:
        self._loader = AdapterLoader(broker, self._engine, self._thread, self._adapter_settings, poll_s)
        return self._loader

    def admin_server(self, listener: socket.socket, queue: QueueMetrics, model: str) -> InternalServer:
        info = {"model": model, **self._arithmetic}
        return admin_server(self._thread, listener, queue, info, self._num_replaced_kernels)

    def tasks(self, broker: Broker, worker_id: str, ended: asyncio.Event) -> Mapping[str, Coroutine[Any, Any, object]]:
        viewer = ViewPublisher(broker, self._thread, worker_id)
        return {"viewer": viewer.run(ended), "adapters": self._loader.run(ended)}

    def card(self, worker_id: str, incarnation: str, model: str) -> WorkerCard:
        engine, limits, status = self._engine, self._engine.limits, self._thread.status
        return WorkerCard(
            worker_id=worker_id,
            incarnation=incarnation,
            model=model,
            max_model_len=limits.max_model_len,
            max_num_seqs=limits.max_num_seqs,
            vocab_size=engine.vocab_size,
            eos_token_ids=tuple(sorted(engine.eos_token_ids)),
            block_size=limits.block_size,
            total_blocks=limits.num_blocks,
            free_blocks=status.free_blocks,
            running=status.running,
            waiting=status.waiting,
            steps=status.steps,
            weights_digest=engine.runner.model.weights_digest,
            adapters=tuple(f"{name}@{digest}" for name, digest in engine.adapters.held),
            adapter_faults=self._loader.faults,
            no_images=engine.no_images[:MAX_FAULT_LENGTH],
            pace=status.pace,
        )

    def close(self) -> None:
        self._engine.close()
