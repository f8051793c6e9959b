"""A rank that follows: it has a part of the model, and does what rank 0 says until that is gone.

    python -m quire.worker.ranks.follower RANK CONTROL FILE LAST_WORDS

CONTROL is the descriptor of a socket to rank 0: first the settings come from there, then one message per call of the
model. FILE is that of the file by which ranks find each other; into LAST_WORDS goes why this one cannot go on, which
rank 0 says.
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
from quire.shared.telemetry.logs import setup_logging
from quire.worker.device import backend, devices
from quire.worker.device.graphs import Graph, Record, record_on_cuda
from quire.worker.errors import WorkerStartError
from quire.worker.interpreter import leave
from quire.worker.models import loader
from quire.worker.models.decoder import Decoder
from quire.worker.models.errors import CheckpointError
from quire.worker.models.paged import KVCache
from quire.worker.queue.watchdog import EXIT_CODE
from quire.worker.ranks.collectives import ANSWER_BYTES, GAVE_UP, BatchSizes, Collectives, meet
from quire.worker.settings import WorkerSettings

log = logging.getLogger(__name__)

Orders = Iterator[list[Any]]


class Follower:
    """A part of a model and its caches."""

    def __init__(
        self, model: Decoder, ranks: Collectives, answer: Callable[[int], None], record: Record = record_on_cuda
    ) -> None:
        """answer: says a number to rank 0."""
        self._model, self._ranks, self._answer, self._record = model, ranks, answer, record
        self._caches: dict[int, KVCache] = {}
        self._graphs: dict[int, Graph] = {}
        self._pool: Any = None
        self._does: dict[str, Callable[..., None]] = {
            "forward": self._forward,
            "replay": lambda number: self._graphs[number].replay(),
            "copy_blocks": lambda number, src, dst: self._caches[number].copy_blocks(src, dst),
            "swap_out": lambda number, src, dst: self._caches[number].swap_out(src, dst),
            "swap_in": lambda number, src, dst: self._caches[number].swap_in(src, dst),
            "cache": self._cache,
            "free_memory": lambda: answer(model.least_free_memory()),
            "drop_cache": lambda number: self._caches.pop(number),
            "drop_graph": lambda number: self._graphs.pop(number, None),  # some ranks may have recorded none
        }

    def obey(self, orders: Orders) -> None:
        """Do all that rank 0 says, until it ends."""
        with torch.inference_mode():
            for name, *arguments in orders:
                if name == "capture":
                    self._capture(orders, *arguments)
                else:
                    self._does[name](*arguments)

    def _cache(self, number: int, *sizes: int) -> None:
        self._caches[number] = self._model.alloc_kv_cache(*sizes)

    def _forward(self, number: int, *sizes: int) -> None:
        batch = self._ranks.receive(BatchSizes(*sizes))
        self._model.forward(batch, self._caches[number])

    def _capture(self, orders: Orders, needs_pool: bool) -> None:
        """Record what is done up to `captured`, which has the number of the graph; -1 if rank 0 has given it up.
        Rank 0 is told whether that could be done: 1, or 0.

        needs_pool: into a new pool, since rank 0 does. Torch refuses the one of graphs that are gone.
        """
        number: int | None = None

        def launch(does_it: bool = True) -> None:
            nonlocal number
            for name, *arguments in orders:
                if name == "captured":
                    (number,) = arguments
                    return
                if does_it:
                    self._does[name](*arguments)

        try:
            graph, self._pool = self._record(launch, None if needs_pool else self._pool)
        except RuntimeError:
            log.exception("a CUDA graph cannot be captured on this rank")
            if number is None:
                launch(does_it=False)
            self._answer(0)
            return
        if number is not None and number >= 0:
            self._graphs[number] = graph
        self._answer(1)


def received(control: socket.socket) -> Orders:
    """Messages of rank 0, until it closes the socket or ends."""
    unpacker = msgpack.Unpacker(max_buffer_size=2**26)
    while data := control.recv(2**16):
        unpacker.feed(data)
        yield from unpacker


def run(rank: int, control: socket.socket, file: int) -> None:
    orders = received(control)
    fields, device_type = next(orders)
    settings = WorkerSettings(**fields)
    names = {"worker": settings.name, "rank": str(rank)}
    setup_logging(f"worker {settings.name} rank {rank}", settings.log_level, settings.log_format, **names)
    for module in (loader, kernels):  # rank 0 reads the same files, chooses the same kernels, and warns of both
        logging.getLogger(module.__name__).setLevel(logging.ERROR)
    size = settings.tensor_parallel_size
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device(device_type)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dtype = devices.DTYPES[settings.dtype]
    ops = backend.make_ops(settings, device, dtype)
    backend.set_threads(settings, ops)
    ranks = meet(rank, size, file, ops)
    model = Decoder.load(Path(settings.model), ops, dtype, device, settings.max_model_len, ranks=ranks)
    if isinstance(ops, kernels.CpuOps):
        torch.set_num_threads(1)

    def answer(number: int) -> None:
        control.sendall(number.to_bytes(ANSWER_BYTES))

    answer(0)
    Follower(model, ranks, answer).obey(orders)


def main() -> None:
    rank, control, file, last_words = map(int, sys.argv[1:])
    # Rank 0 is told to stop, and ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    own = socket.socket(fileno=control)  # open to the end: rank 0 takes its end for that of this process
    try:
        run(rank, own, file)
    except torch.OutOfMemoryError as error:
        os.pwrite(last_words, f"out of its GPU's memory ({error}); end what else uses it".encode(), 0)
        leave(GAVE_UP)
    except (WorkerStartError, CheckpointError) as error:
        os.pwrite(last_words, str(error).encode(), 0)
        leave(GAVE_UP)
    except BaseException:
        log.exception("rank %d failed", rank)
        leave(EXIT_CODE)
    leave(0)


if __name__ == "__main__":
    main()
