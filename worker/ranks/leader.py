"""Rank 0: a decoder that makes every call on all ranks, and the processes of the followers."""

from __future__ import annotations

import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

import msgpack
import torch

from quire.kernels import Ops
from quire.shared.processes import spawn
from quire.shared.telemetry.logs import give_up
from quire.worker.device.graphs import Graph, Record, record_on_cuda
from quire.worker.interpreter import FAILED, GAVE_UP, leave
from quire.worker.models.batch import ForwardBatch
from quire.worker.models.decoder import Decoder
from quire.worker.models.loader import Progress
from quire.worker.models.paged import KVCache, PagedModel
from quire.worker.ranks.collectives import ANSWER_BYTES, BatchSizes, meet, meeting
from quire.worker.settings import WorkerSettings

log = logging.getLogger(__name__)

# The folder on the import path in which the package `quire` lies.
IMPORT_ROOT = Path(__file__).parents[3]
# Time that followers get to end by themselves.
END_TIMEOUT_S = 5.0
# Longest cause that a follower can report, in bytes.
MAX_LAST_WORDS = 4096
# Time after a failed step within which the end of a follower, which may be the cause, is noticed.
CAUSE_S = 1.0


class OutOfStep(Exception):
    """A rank failed in a call that other ranks have made. The ranks may wait for each other, so all ranks must end."""


def reason(error: BaseException) -> BaseException:
    """The cause of an OutOfStep on this rank, if there is one; else the error itself."""
    return error.__cause__ if isinstance(error, OutOfStep) and error.__cause__ else error


def end_worker(rank: int, code: int, last_words: str) -> None:
    """End this process because the process of another rank has ended."""
    if last_words:
        # The cause is to be the last line of the log, and this rank may be in the middle of work.
        logging.disable(logging.ERROR)
        give_up("quire worker", f"rank {rank}: {last_words}")
        leave(GAVE_UP)
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    log.critical("rank %d has ended (%s), so the worker ends; other workers continue its requests", rank, how)
    leave(FAILED)


class Followers:
    """The processes of all ranks but rank 0, and a socket to each.

    on_death: called on a thread, with rank, exit code and last words, when one of them ends before `close`.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        path: Path,
        ops: Ops,
        on_death: Callable[[int, int, str], None] = end_worker,
    ) -> None:
        """Start the followers and wait for them. Call it on the main thread: they end with that thread."""
        size = settings.tensor_parallel_size
        self._closing = False
        self._died = threading.Event()
        self._release_ranks: Callable[[], None] = lambda: None
        self._on_death = on_death
        self._sockets: list[socket.socket] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        # A file in memory per follower, for the cause of its end.
        self._last_words = [os.memfd_create("quire-last-words") for _ in range(1, size)]
        file = meeting(size, ops)
        first = asdict(settings) | {"redis_url": "", "model": str(path), "dtype": str(ops.dtype)[6:]}
        for rank in range(1, size):
            ours, theirs = socket.socketpair()
            self._sockets.append(ours)
            with theirs:
                self._processes.append(self._start(rank, theirs.fileno(), file, self._last_words[rank - 1]))
            with suppress(OSError):  # the follower has ended already; `answers` notices that
                ours.sendall(msgpack.packb([first, ops.device.type]))
        for rank, process in enumerate(self._processes, 1):
            threading.Thread(target=self._watch, args=(rank, process), name=f"rank {rank}", daemon=True).start()
        self.ranks = meet(0, size, file, ops)
        self._release_ranks = self.ranks.give_up

    @staticmethod
    def _start(rank: int, control: int, file: int, last_words: int) -> subprocess.Popen[bytes]:
        paths = filter(None, [str(IMPORT_ROOT), os.environ.get("PYTHONPATH", "")])
        # -P: do not import modules from the current folder.
        files = control, file, last_words
        command = [sys.executable, "-P", "-m", "quire.worker.ranks.follower", str(rank), *map(str, files)]
        environ = {name: value for name, value in os.environ.items() if not name.startswith("QUIRE_")}
        environ["PYTHONPATH"] = os.pathsep.join(paths)
        return spawn(command, environ=environ, output=None, keep=files)

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if not self._closing:
            self._release_ranks()
            said = os.pread(self._last_words[rank - 1], MAX_LAST_WORDS, 0).decode(errors="replace")
            self._on_death(rank, code, said)
            self._died.set()

    def answers(self) -> list[int]:
        """The next number that each follower answers. Raises OutOfStep if a follower has ended."""
        try:
            numbers = [one.recv(ANSWER_BYTES, socket.MSG_WAITALL) for one in self._sockets]
        except OSError as error:
            raise self._ended() from error
        if any(len(number) < ANSWER_BYTES for number in numbers):
            raise self._ended()
        return list(map(int.from_bytes, numbers))

    def tell(self, *order: Any) -> None:
        """Send an order to all followers. Raises OutOfStep if a follower has ended."""
        message = msgpack.packb(order)
        try:
            for one in self._sockets:
                one.sendall(message)
        except OSError as error:
            raise self._ended() from error

    def wait_for_cause(self, timeout_s: float) -> None:
        """If a follower has died, give `on_death` time to report the cause first."""
        self._died.wait(timeout_s)

    def _ended(self) -> OutOfStep:
        self.wait_for_cause(END_TIMEOUT_S)
        return OutOfStep("a rank has ended")

    def close(self, timeout_s: float = END_TIMEOUT_S) -> None:
        """End the followers. A follower that does not end within `timeout_s`, as during a call, is killed."""
        self._closing = True
        for one in self._sockets:
            one.close()
        for process in self._processes:
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.ranks.close()


@dataclass(frozen=True)
class LeadingCache(KVCache):
    """This rank's part of the blocks. Blocks are copied and swapped on all ranks."""

    number: int
    tell: Callable[..., None]

    def copy_blocks(self, src: list[int], dst: list[int]) -> None:
        self.tell("copy_blocks", self.number, src, dst)
        KVCache.copy_blocks(self, src, dst)

    def swap_out(self, src: list[int], dst: list[int]) -> None:
        self.tell("swap_out", self.number, src, dst)
        KVCache.swap_out(self, src, dst)

    def swap_in(self, src: list[int], dst: list[int]) -> None:
        self.tell("swap_in", self.number, src, dst)
        KVCache.swap_in(self, src, dst)


class LeadingGraph:
    """A graph of this rank, and its number on the followers."""

    def __init__(self, graph: Graph, number: int, model: LeadingDecoder) -> None:
        self._graph, self._number, self._model = graph, number, model

    def replay(self) -> None:
        self._model.replay(self._number, self._graph)


class LeadingDecoder(Decoder):
    """A decoder like any other to its runner. All ranks compute its calls together."""

    followers: Followers

    @classmethod
    def lead(
        cls,
        followers: Followers,
        path: Path,
        ops: Ops,
        dtype: torch.dtype,
        device: torch.device | str,
        max_model_len: int = 0,
        progress: Progress | None = None,
    ) -> Self:
        """`load` the part of rank 0, and wait until the followers have loaded theirs."""
        model = cls.load(path, ops, dtype, device, max_model_len, progress, followers.ranks)
        model.followers = followers
        model._numbers = itertools.count()
        model._dropped = []
        model._is_capturing = False
        model._failure = None
        followers.answers()
        return model

    _numbers: itertools.count[int]
    _dropped: list[tuple[str, int]]  # caches and graphs that this rank no longer refers to
    _is_capturing: bool
    _failure: BaseException | None

    def alloc_kv_cache(self, num_blocks: int, block_size: int, num_host_blocks: int = 0) -> KVCache:
        number = next(self._numbers)
        self._tell("cache", number, num_blocks, block_size, num_host_blocks)
        cache = super().alloc_kv_cache(num_blocks, block_size, num_host_blocks)
        parts = {one.name: getattr(cache, one.name) for one in fields(KVCache)}
        leading = LeadingCache(**parts, number=number, tell=self._tell)
        weakref.finalize(leading, self._dropped.append, ("drop_cache", number))
        return leading

    def forward(self, batch: ForwardBatch, kv_cache: KVCache) -> torch.Tensor:
        assert isinstance(kv_cache, LeadingCache), "the cache belongs to another model"
        self.check()
        self._tell("forward", kv_cache.number, *BatchSizes.of(batch))
        if self._is_capturing:  # nothing is computed yet: a failure gives up the graph only
            return self._forward(batch, kv_cache)
        with self._in_step():
            return self._forward(batch, kv_cache)

    def replay(self, number: int, graph: Graph) -> None:
        """Replay a graph of this rank, and the graph with this number on the followers."""
        self.check()
        self._tell("replay", number)
        with self._in_step():
            graph.replay()

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        """Mark a failure inside as OutOfStep: the followers make the same call, and would wait for this rank."""
        try:
            yield
        except BaseException as error:
            self._failure = error
            self.followers.wait_for_cause(CAUSE_S)
            raise OutOfStep(f"a step failed on one rank ({type(error).__name__}: {error})") from error

    def _forward(self, batch: ForwardBatch, kv_cache: KVCache) -> torch.Tensor:
        self.followers.ranks.send(batch)
        return super().forward(batch, kv_cache)

    def record(self, launch: Callable[[], None], pool: Any, record: Record = record_on_cuda) -> tuple[Graph, Any]:
        """Record the kernels that a function launches, on all ranks: a `graphs.Record`.

        Raises RuntimeError if a rank cannot record them.
        """
        number = -1
        self._tell("capture", pool is None)
        self._is_capturing = True
        try:
            graph, pool = record(launch, pool)
            number = next(self._numbers)
        finally:
            self._tell("captured", number)  # before orders to drop: followers would record these
            self._is_capturing = False
            is_everywhere = all(self.followers.answers())
        if not is_everywhere:
            self._dropped.append(("drop_graph", number))
            raise RuntimeError("another rank could not record the CUDA graph")
        leading = LeadingGraph(graph, number, self)
        weakref.finalize(leading, self._dropped.append, ("drop_graph", number))
        return leading, pool

    def least_free_memory(self) -> int:
        self._tell("free_memory")
        return min([super().least_free_memory(), *self.followers.answers()])

    def check(self) -> None:
        """Raise OutOfStep if a step has failed."""
        if self._failure is not None:
            raise OutOfStep("a step failed on one rank") from self._failure

    def close(self) -> None:
        """End the followers. No step may be in progress."""
        self.followers.close(END_TIMEOUT_S if self._failure is None else 0.0)

    def _tell(self, *order: Any) -> None:
        try:
            while self._dropped and not self._is_capturing:
                self.followers.tell(*self._dropped.pop())
            self.followers.tell(*order)
        except OutOfStep as error:
            self._failure = error
            raise


def recorder(model: PagedModel) -> Record:
    """The function that records CUDA graphs of a model."""
    return model.record if isinstance(model, LeadingDecoder) else record_on_cuda
