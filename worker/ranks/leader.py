"""Rank 0: a model that makes every call on all ranks, and the processes of the followers."""

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
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

import msgpack
import torch

from quire.kernels import KernelFault, Ops, RecordGraph, Replayable, SelfTestReport, replace_kernels, replaced_mask
from quire.kernels.ops import AllReduceGroup
from quire.shared.process.processes import spawn
from quire.shared.telemetry.logs import give_up
from quire.worker.device.backend import kv_cache_name
from quire.worker.device.out_of_step import OutOfStep
from quire.worker.engine.forward_batch import ForwardBatch
from quire.worker.engine.paged_model import KVCache, PagedModel
from quire.worker.interpreter import FAILED, GAVE_UP, leave
from quire.worker.models.choice import Checkpoint
from quire.worker.models.files.loader import Progress
from quire.worker.models.native.config import ModelConfig
from quire.worker.models.native.decoder import Decoder
from quire.worker.models.transformers.bridge import StatePool, TransformersConfig, TransformersModel
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
        record: RecordGraph,
        on_death: Callable[[int, int, str], None] = end_worker,
        cpus: Collection[int] = (),
    ) -> None:
        """Start the followers and wait for them. Call it on the main thread: they end with that thread.

        record: records a CUDA graph on this rank. cpus: those that all ranks together may use; by default the CPUs of
        this process.
        """
        size = settings.num_ranks
        self._closing = False
        self._died = threading.Event()
        self._release_ranks: Callable[[], None] = lambda: None
        self._on_death = on_death
        self._sockets: list[socket.socket] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        # A file in memory per follower, for the cause of its end.
        self._last_words = [os.memfd_create("quire-last-words") for _ in range(1, size)]
        file = meeting(size, ops)
        allowed = sorted(cpus or os.sched_getaffinity(0))
        types = {"dtype": str(ops.dtype)[6:], "kv_cache_dtype": kv_cache_name(ops)}
        # A command may have settings of its own besides.
        own = {field.name: getattr(settings, field.name) for field in fields(WorkerSettings)}
        first = own | {"redis_url": "", "model": str(path)} | types
        for rank in range(1, size):
            ours, theirs = socket.socketpair()
            self._sockets.append(ours)
            with theirs:
                self._processes.append(self._start(rank, theirs.fileno(), file, self._last_words[rank - 1]))
            with suppress(OSError):  # the follower has ended already; `answers` notices that
                ours.sendall(msgpack.packb([first, ops.device.type, allowed]))
        for rank, process in enumerate(self._processes, 1):
            threading.Thread(target=self._watch, args=(rank, process), name=f"rank {rank}", daemon=True).start()
        self.ranks = meet(0, size, file, ops, record if settings.self_test != "off" else None)
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
        """Receive the next number that each follower answers. Raises OutOfStep if a follower has ended."""
        try:
            numbers = [sock.recv(ANSWER_BYTES, socket.MSG_WAITALL) for sock in self._sockets]
        except OSError as error:
            raise self._ended() from error
        if any(len(number) < ANSWER_BYTES for number in numbers):
            raise self._ended()
        return list(map(int.from_bytes, numbers))

    def tell(self, *order: Any) -> None:
        """Send an order to all followers. Raises OutOfStep if a follower has ended."""
        message = msgpack.packb(order)
        try:
            for sock in self._sockets:
                sock.sendall(message)
        except OSError as error:
            raise self._ended() from error

    def wait_for_cause(self, timeout_s: float) -> None:
        """Give `on_death` time to report the cause first if a follower has died."""
        self._died.wait(timeout_s)

    def _ended(self) -> OutOfStep:
        self.wait_for_cause(END_TIMEOUT_S)
        return OutOfStep("a rank has ended")

    def close(self, timeout_s: float = END_TIMEOUT_S) -> None:
        """End the followers. A follower that does not end within `timeout_s`, as during a call, is killed."""
        self._closing = True
        for sock in self._sockets:
            sock.close()
        for process in self._processes:
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.ranks.close()


class Lifetime:
    """Lives as long as a cache of this rank refers to the caches of the followers."""


class LeadingStates(StatePool):
    """This rank's recurrent states. A slot is copied on all ranks, which all have whole states."""

    def __init__(self, pool: StatePool, copy: Callable[[int, int], None]) -> None:
        """copy: has the followers copy a slot."""
        vars(self).update(vars(pool))
        self._tell_copy = copy

    def copy(self, source: int, target: int) -> None:
        self._tell_copy(source, target)
        super().copy(source, target)


@dataclass(frozen=True)
class LeadingCache(KVCache):
    """This rank's part of the blocks. Blocks are copied and swapped on all ranks."""

    part: KVCache
    number: int
    tell: Callable[..., None]
    lifetime: Lifetime  # of the followers' parts: the caches that share it

    def copy_blocks(self, src: list[int], dst: list[int]) -> None:
        self.tell("copy_blocks", self.number, src, dst)
        self.part.copy_blocks(src, dst)

    def swap_out(self, src: list[int], dst: list[int]) -> None:
        self.tell("swap_out", self.number, src, dst)
        self.part.swap_out(src, dst)

    def swap_in(self, src: list[int], dst: list[int]) -> None:
        self.tell("swap_in", self.number, src, dst)
        self.part.swap_in(src, dst)


class LeadingGraph:
    """A graph of this rank, and its number on the followers."""

    def __init__(self, graph: Replayable, number: int, model: LeadingModel) -> None:
        self._graph, self._number, self._model = graph, number, model

    def replay(self) -> None:
        self._model.replay(self._number, self._graph)


class LeadingModel(PagedModel):
    """A model like any other to its runner. All ranks compute its calls together.

    Another base class of a derived class computes the part of rank 0.
    """

    followers: Followers
    # Loading computes on all ranks too, and each follower loads its part without orders.
    _leads = False
    _numbers: itertools.count[int]
    _dropped: list[tuple[str, int]]  # caches and graphs that this rank no longer refers to
    _is_capturing: bool
    _failure: BaseException | None

    def _take_lead(self, followers: Followers) -> Self:
        """Wait until the followers have loaded their parts, and make every later call on all ranks."""
        self.followers = followers
        self._numbers = itertools.count()
        self._dropped = []
        self._is_capturing = False
        self._failure = None
        followers.answers()
        self._leads = True
        return self

    @property
    def num_ranks(self) -> int:
        return self.followers.ranks.size

    def alloc_kv_cache(self, num_blocks: int, block_size: int, num_host_blocks: int = 0) -> KVCache:
        if not self._leads:
            return super().alloc_kv_cache(num_blocks, block_size, num_host_blocks)  # type: ignore[safe-super]
        number = next(self._numbers)
        self._tell("cache", number, num_blocks, block_size, num_host_blocks)
        cache = super().alloc_kv_cache(num_blocks, block_size, num_host_blocks)  # type: ignore[safe-super]
        parts = {field.name: getattr(cache, field.name) for field in fields(KVCache)}
        lifetime = Lifetime()
        weakref.finalize(lifetime, self._dropped.append, ("drop_cache", number))
        return LeadingCache(**parts, part=cache, number=number, tell=self._tell, lifetime=lifetime)

    def alloc_states(self, kv_cache: KVCache, num_slots: int) -> KVCache:
        if not self._leads:
            return super().alloc_states(kv_cache, num_slots)
        assert isinstance(kv_cache, LeadingCache), "the cache belongs to another model"
        number = kv_cache.number
        self._tell("states", number, num_slots)
        part = super().alloc_states(kv_cache.part, num_slots)
        assert isinstance(part.states, StatePool)
        states = LeadingStates(part.states, lambda source, target: self._tell("copy_state", number, source, target))
        return replace(kv_cache, part=part, states=states)

    def forward(self, batch: ForwardBatch, kv_cache: KVCache) -> torch.Tensor:
        if not self._leads:
            return super().forward(batch, kv_cache)  # type: ignore[safe-super]
        self._begin_forward(batch, kv_cache)
        if self._is_capturing:  # nothing is computed yet: a failure gives up the graph only
            return self._forward(batch, kv_cache)
        with self._in_step():
            return self._forward(batch, kv_cache)

    def forward_pooled(self, batch: ForwardBatch, kv_cache: KVCache) -> tuple[torch.Tensor, torch.Tensor]:
        if not self._leads:
            return super().forward_pooled(batch, kv_cache)
        self._begin_forward(batch, kv_cache)
        with self._in_step():
            self.followers.ranks.send(batch)
            return super().forward_pooled(batch, kv_cache)

    def _begin_forward(self, batch: ForwardBatch, kv_cache: KVCache) -> None:
        assert isinstance(kv_cache, LeadingCache), "the cache belongs to another model"
        self.check()
        self._tell("forward", kv_cache.number, *BatchSizes.of(batch))

    def replay(self, number: int, graph: Replayable) -> None:
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
        return super().forward(batch, kv_cache)  # type: ignore[safe-super]

    def record(self, launch: Callable[[], None], pool: Any, record: RecordGraph) -> tuple[Replayable, Any]:
        """Record the kernels that a function launches, on all ranks. record: records those of this rank.

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

    def self_test(
        self, level: str, block_size: int, record: RecordGraph | None, ranks: AllReduceGroup | None = None
    ) -> SelfTestReport:
        """Test the kernels on all ranks at once. A kernel that is replaced on one rank is replaced on all."""
        self._tell("self_test", level, block_size, record is not None)
        with self._in_step():
            report = super().self_test(level, block_size, record, self.followers.ranks)
        mask = replaced_mask(self.ops)
        for other in self.followers.answers():
            mask |= other
        self._tell("replace_kernels", mask)
        for kernel, how in replace_kernels(self.ops, mask):
            report.faults.append(KernelFault(kernel, how, "it is wrong on another rank"))
        return report

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


class LeadingDecoder(LeadingModel, Decoder):
    """Quire's own decoder on several ranks."""

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
        bits: int | str = 0,
    ) -> Self:
        """Call `load` for the part of rank 0, and wait until the followers have loaded theirs."""
        model = cls.load(path, ops, dtype, device, max_model_len, progress, followers.ranks, bits)
        return model._take_lead(followers)


class LeadingTransformersModel(LeadingModel, TransformersModel):
    """A model that Transformers computes on several ranks."""

    @classmethod
    def lead(
        cls,
        followers: Followers,
        config: TransformersConfig,
        ops: Ops,
        device: torch.device | str,
        max_model_len: int = 0,
        read: Progress | None = None,
        packed: Progress | None = None,
    ) -> Self:
        """Call `load` for the part of rank 0, and wait until the followers have loaded theirs."""
        model = cls.load(config, ops, device, max_model_len, read, packed, followers.ranks)
        return model._take_lead(followers)


def lead(
    followers: Followers,
    path: Path,
    config: Checkpoint,
    ops: Ops,
    device: torch.device,
    max_model_len: int,
    read: Progress,
    packed: Progress,
    bits: int | str,
) -> PagedModel:
    """Load the part of rank 0, and wait until the followers have loaded theirs. Arguments of `choice.load_model`."""
    if isinstance(config, ModelConfig):
        return LeadingDecoder.lead(followers, path, ops, ops.dtype, device, max_model_len, read, bits)
    return LeadingTransformersModel.lead(followers, config, ops, device, max_model_len, read, packed)
