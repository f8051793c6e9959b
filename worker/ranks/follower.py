"""The process of a follower: it holds a part of the model, and carries out the orders of rank 0 until rank 0 ends.

    python -m quire.worker.ranks.follower RANK CONTROL FILE LAST_WORDS

CONTROL is the descriptor of a socket to rank 0, which sends the settings and then one message per call of the model.
FILE is the descriptor of the file by which ranks find each other. Into the file LAST_WORDS the follower writes why it
cannot continue, and rank 0 reports it.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import torch

from quire import kernels
from quire.shared.process.errors import StartError
from quire.shared.telemetry.logs import setup_logging
from quire.worker.device import backend, devices
from quire.worker.device.cuda import record_on_cuda
from quire.worker.device.self_test import refusal
from quire.worker.engine.paged_model import KVCache, PagedModel
from quire.worker.interpreter import FAILED, GAVE_UP, leave
from quire.worker.models.choice import choose_model, load_model
from quire.worker.ranks.collectives import ANSWER_BYTES, BatchSizes, Collectives, meet
from quire.worker.settings import WorkerSettings

log = logging.getLogger(__name__)

Orders = Iterator[list[Any]]


class Follower:
    """A part of a model, with its caches and CUDA graphs, that carries out orders."""

    def __init__(
        self, model: PagedModel, ranks: Collectives, answer: Callable[[int], None], record: kernels.RecordGraph
    ) -> None:
        """answer: sends a number to rank 0. record: records a CUDA graph."""
        self._model, self._ranks, self._answer, self._record = model, ranks, answer, record
        self._caches: dict[int, KVCache] = {}
        self._graphs: dict[int, kernels.Replayable] = {}
        self._pool: Any = None  # a handle whose type torch keeps private
        self._handlers: dict[str, Callable[..., object]] = {
            "forward": self._forward,
            "replay": lambda number: self._graphs[number].replay(),
            "copy_blocks": lambda number, src, dst: self._caches[number].copy_blocks(src, dst),
            "swap_out": lambda number, src, dst: self._caches[number].swap_out(src, dst),
            "swap_in": lambda number, src, dst: self._caches[number].swap_in(src, dst),
            "copy_state": self._copy_state,
            "cache": self._cache,
            "states": self._states,
            "self_test": self._self_test,
            "replace_kernels": lambda mask: kernels.replace_kernels(model.ops, mask),
            "free_memory": lambda: answer(model.least_free_memory()),
            "drop_cache": lambda number: self._caches.pop(number),
            "drop_graph": lambda number: self._graphs.pop(number, None),  # this rank may have failed to record it
        }

    def obey(self, orders: Orders) -> None:
        """Carry out orders until rank 0 ends."""
        with torch.inference_mode():
            for name, *arguments in orders:
                if name == "capture":
                    self._capture(orders, *arguments)
                else:
                    self._handlers[name](*arguments)

    def _cache(self, number: int, *sizes: int) -> None:
        self._caches[number] = self._model.alloc_kv_cache(*sizes)

    def _states(self, number: int, num_slots: int) -> None:
        self._caches[number] = self._model.alloc_states(self._caches[number], num_slots)

    def _copy_state(self, number: int, source: int, target: int) -> None:
        states = self._caches[number].states
        assert states is not None
        states.copy(source, target)

    def _self_test(self, level: str, block_size: int, has_graphs: bool) -> None:
        """Test the kernels, together with rank 0. Answers which kernels this rank has replaced."""
        self._model.self_test(level, block_size, self._record if has_graphs else None, self._ranks)
        self._answer(kernels.replaced_mask(self._model.ops))

    def _forward(self, number: int, *sizes: int) -> None:
        batch = self._ranks.receive(BatchSizes(*sizes))
        if batch.pooled_rows is None:
            self._model.forward(batch, self._caches[number])
        else:
            self._model.forward_pooled(batch, self._caches[number])

    def _capture(self, orders: Orders, needs_pool: bool) -> None:
        """Record the orders up to `captured`, which names the number of the graph; -1 if rank 0 has given it up.

        Answers 1, or 0 if this rank could not record it. needs_pool: record into a new pool, as rank 0 does, because
        torch refuses the pool of graphs that are gone.
        """
        number: int | None = None

        def launch(carries_out: bool = True) -> None:
            nonlocal number
            for name, *arguments in orders:
                if name == "captured":
                    (number,) = arguments
                    return
                if carries_out:
                    self._handlers[name](*arguments)

        try:
            graph, self._pool = self._record(launch, None if needs_pool else self._pool)
        except RuntimeError:
            log.exception("a CUDA graph cannot be captured on this rank")
            if number is None:
                launch(carries_out=False)
            self._answer(0)
            return
        if number is not None and number >= 0:
            self._graphs[number] = graph
        self._answer(1)


def received(control: socket.socket) -> Orders:
    """Yield the messages of rank 0 until it closes the socket or ends."""
    unpacker = msgpack.Unpacker(max_buffer_size=2**26)
    while data := control.recv(2**16):
        unpacker.feed(data)
        yield from unpacker


def load_part(settings: WorkerSettings, ops: kernels.Ops, device: torch.device, ranks: Collectives) -> PagedModel:
    """Load this rank's part of the model. All ranks load at the same time."""
    path = Path(settings.model)
    config = choose_model(path, settings.model_impl)
    bits = devices.quantized_bits(settings)
    return load_model(path, config, ops, device, settings.max_model_len, ranks=ranks, bits=bits)


def run(rank: int, control: socket.socket, file: int) -> None:
    """Load this rank's part of the model, and follow rank 0."""
    orders = received(control)
    fields, device_type, cpus = next(orders)
    os.sched_setaffinity(0, cpus)  # this process has inherited those of rank 0 alone
    settings = WorkerSettings(**fields)
    process = f"worker {settings.name} rank {rank}"
    setup_logging(process, settings.log_level, settings.log_format, worker=settings.name, rank=str(rank))
    # Rank 0 reads the same files, chooses the same kernels, and logs their warnings.
    for package in ("quire.kernels", "quire.worker.models"):
        logging.getLogger(package).setLevel(logging.ERROR)
    size = settings.num_ranks
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device(device_type)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dtype = devices.DTYPES[settings.dtype]
    ops = backend.make_ops(settings, device, dtype)
    backend.place_threads(settings, ops, rank)
    ranks = meet(rank, size, file, ops, record_on_cuda if settings.self_test != "off" else None)
    model = load_part(settings, ops, device, ranks)
    if isinstance(ops, kernels.CpuOps) and not model.multiplies_in_torch:
        torch.set_num_threads(1)

    def answer(number: int) -> None:
        control.sendall(number.to_bytes(ANSWER_BYTES))

    answer(0)
    Follower(model, ranks, answer, record_on_cuda).obey(orders)


def main() -> None:
    rank, control, file, last_words = map(int, sys.argv[1:])
    # Signals to stop are for rank 0, which ends its followers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    own = socket.socket(fileno=control)  # open until the process ends: rank 0 takes its end for that of the process
    try:
        run(rank, own, file)
    except torch.OutOfMemoryError as error:
        os.pwrite(last_words, f"its GPU is out of memory ({error}); end other processes on it".encode(), 0)
        leave(GAVE_UP)
    except StartError as error:
        os.pwrite(last_words, str(error).encode(), 0)
        leave(GAVE_UP)
    except kernels.WrongKernel as error:
        os.pwrite(last_words, refusal(error).encode(), 0)
        leave(GAVE_UP)
    except BaseException:
        log.exception("rank %d failed", rank)
        leave(FAILED)
    leave(0)


if __name__ == "__main__":
    main()
