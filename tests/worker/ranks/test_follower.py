"""All ranks obey the orders of the leader: graphs and caches have the same number on all ranks, and end together."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quire import kernels
from quire.worker.device.out_of_step import OutOfStep
from quire.worker.engine.forward_batch import ForwardBatch
from quire.worker.models.native.decoder import Decoder
from quire.worker.ranks.collectives import BatchSizes
from quire.worker.ranks.follower import Follower
from quire.worker.ranks.leader import LeadingDecoder
from tests.support.checkpoints import make_checkpoint


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path, "llama")


class Wire:
    """A fake connection that passes the leader's orders and batches to a follower in a thread of this process."""

    def __init__(self) -> None:
        self.orders: queue.Queue[list[Any]] = queue.Queue()
        self.batches: queue.Queue[ForwardBatch] = queue.Queue()
        self.ranks = self
        self.said: queue.Queue[int] = queue.Queue()
        self.is_asked = False

    rank, size = 0, 1

    def tell(self, *order: Any) -> None:
        self.orders.put(list(order))

    def answers(self) -> list[int]:
        return [self.said.get(timeout=60)] if self.is_asked else []

    def wait_for_cause(self, timeout_s: float) -> None:
        pass

    def told(self) -> Iterator[list[Any]]:
        while (order := self.orders.get(timeout=60)) != ["end"]:
            yield order

    def send(self, batch: ForwardBatch) -> None:
        self.batches.put(batch)

    def receive(self, sizes: BatchSizes) -> ForwardBatch:
        batch = self.batches.get(timeout=60)
        assert BatchSizes.of(batch) == sizes
        return batch

    def all_reduce(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def all_gather(self, columns: torch.Tensor, width: int) -> torch.Tensor:
        return columns[:, :width]


class Tape:
    """A graph that records its operations and counts its replays."""

    def __init__(self, log: list[str]) -> None:
        self.log, self.start = log, len(log)
        self.replays = 0

    def finish(self) -> Tape:
        self.recorded = self.log[self.start :]
        return self

    def replay(self) -> None:
        self.replays += 1


class Logged(Decoder):
    """A rank's part of a model, which logs the number of tokens in each forward pass."""

    log: list[str]

    def forward(self, batch: ForwardBatch, kv_cache: Any) -> torch.Tensor:
        self.log.append(f"forward {len(batch.token_ids)}")
        return torch.zeros(len(batch.logits_rows), self.vocab_size)


class LoggedLeader(LeadingDecoder, Logged):
    pass


@contextmanager
def a_leader_and_a_follower(
    path: Path, *recorders: Callable[..., Any]
) -> Iterator[tuple[LeadingDecoder, Follower, list[str], list[Tape]]]:
    """The follower records its graphs by these, one for each order; then, as without them, to tapes."""
    wire = Wire()
    load = path, kernels.ReferenceOps("cpu", torch.float32), torch.float32, "cpu"
    leader = LoggedLeader.lead(wire, *load)
    part = Logged.load(*load)
    leader.log, part.log = [], []
    wire.is_asked = True
    tapes: list[Tape] = []
    own = iter(recorders)

    def record(launch: Callable[[], None], pool: Any) -> tuple[Tape, Any]:
        if (recorder := next(own, None)) is not None:
            return recorder(launch, pool)
        tape = Tape(part.log)
        launch()
        tapes.append(tape.finish())
        return tape, pool

    follower = Follower(part, wire, wire.said.put, record)
    thread = threading.Thread(target=follower.obey, args=(wire.told(),))
    thread.start()
    try:
        yield leader, follower, part.log, tapes
    finally:
        wire.tell("end")
        thread.join(60)
        assert not thread.is_alive()


def graphs(follower: Follower) -> list[Any]:
    return list(follower._graphs.values())


def cache_sizes(follower: Follower) -> list[int]:
    """Return the number of blocks of each cache that a follower keeps."""
    return [cache.layers[0][0].shape[0] for cache in follower._caches.values()]


def batch(tokens: int) -> ForwardBatch:
    numbers = torch.zeros(tokens, dtype=torch.int32)
    starts = torch.tensor([0, tokens], dtype=torch.int32)
    return ForwardBatch(numbers, numbers, numbers, torch.zeros(1, 3, dtype=torch.int32), starts[1:], starts, starts[:1])


def test_a_graph_is_recorded_and_replayed_on_all_ranks(path: Path) -> None:
    with a_leader_and_a_follower(path) as (leader, follower, log, tapes):
        cache = leader.alloc_kv_cache(4, 8)
        own = Tape([])

        def record(launch: Callable[[], None], pool: Any) -> tuple[Tape, Any]:
            launch()
            return own, pool

        leader.forward(batch(5), cache)
        graph, _ = leader.record(lambda: leader.forward(batch(7), cache), None, record)
        leader.forward(batch(6), cache)
        for _ in range(3):
            graph.replay()
        assert own.replays == 3
    assert log == ["forward 5", "forward 7", "forward 6"]
    assert [(tape.recorded, tape.replays) for tape in tapes] == [(["forward 7"], 3)]
    assert graphs(follower) == tapes


def test_a_graph_that_the_leader_cannot_record_is_forgotten_everywhere(path: Path) -> None:
    with a_leader_and_a_follower(path) as (leader, follower, log, tapes):
        cache = leader.alloc_kv_cache(4, 8)

        def record(launch: Callable[[], None], pool: Any) -> Any:
            launch()
            raise RuntimeError("the driver says no")

        with pytest.raises(RuntimeError, match="says no"):
            leader.record(lambda: leader.forward(batch(7), cache), None, record)
        leader.forward(batch(6), cache)  # ranks are still in step
        leader.check()
    assert log == ["forward 7", "forward 6"]
    assert len(tapes) == 1
    assert graphs(follower) == []


@pytest.mark.parametrize("is_launched", [True, False])
def test_a_graph_that_another_rank_cannot_record_is_none_anywhere(path: Path, is_launched: bool) -> None:
    replays: list[None] = []

    def fails(launch: Callable[[], None], pool: Any) -> Any:
        if is_launched:
            launch()
        raise RuntimeError("the driver says no")

    with a_leader_and_a_follower(path, fails) as (leader, follower, log, _):
        cache = leader.alloc_kv_cache(4, 8)

        def record(launch: Callable[[], None], pool: Any) -> tuple[Any, Any]:
            launch()
            return SimpleNamespace(replay=lambda: replays.append(None)), pool

        with pytest.raises(RuntimeError, match="another rank"):
            leader.record(lambda: leader.forward(batch(7), cache), None, record)
        if not is_launched:
            leader.followers.batches.get(timeout=60)  # the batch that the follower did not take
        leader.forward(batch(6), cache)  # ranks are still in step
        graph, _ = leader.record(lambda: None, None, record)
        graph.replay()
    assert log == (["forward 7"] if is_launched else []) + ["forward 6"]
    assert len(graphs(follower)) == len(replays) == 1


def test_what_the_leader_no_longer_refers_to_is_gone_everywhere(path: Path) -> None:
    with a_leader_and_a_follower(path) as (leader, follower, _, _):
        first = leader.alloc_kv_cache(4, 8)
        graph, _ = leader.record(lambda: None, None, lambda launch, pool: (Tape([]), pool))
        second = leader.alloc_kv_cache(9, 8)
        del first, graph
        leader.forward(batch(1), second)
    assert cache_sizes(follower) == [9]
    assert graphs(follower) == []


def test_graphs_share_a_pool_where_those_of_the_leader_do(path: Path) -> None:
    pools: list[int | None] = []

    def noted(launch: Callable[[], None], pool: int | None) -> tuple[Tape, int]:
        launch()
        pools.append(pool)
        return Tape([]), pool or len(pools)

    def fails(*_: Any) -> Any:
        raise torch.OutOfMemoryError("no more memory")

    with a_leader_and_a_follower(path, *[noted] * 6) as (leader, _, _, _):
        of_runners = []
        for _ in range(2):  # a graph to measure memory, and the graph that stays
            with pytest.raises(torch.OutOfMemoryError):
                leader.record(lambda: None, None, fails)
            graph, pool = leader.record(lambda: None, None, lambda launch, pool: (Tape([]), "pool"))
            of_runners.append([graph, leader.record(lambda: None, pool, lambda launch, pool: (Tape([]), pool))[0]])
    assert pools == [None, None, 2, None, None, 5]


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_dropped_elsewhere_while_a_graph_is_recorded(path: Path, fails: bool) -> None:
    with a_leader_and_a_follower(path) as (leader, follower, _, _):
        caches = [leader.alloc_kv_cache(4, 8), leader.alloc_kv_cache(9, 8)]
        orders: list[str] = []
        tell = leader.followers.tell

        def noted(*order: Any) -> None:
            orders.append(order[0])
            tell(*order)

        leader.followers.tell = noted

        def record(launch: Callable[[], None], pool: Any) -> Any:
            caches.pop(0)
            launch()
            if fails:
                raise RuntimeError("the driver says no")
            return Tape([]), pool

        with pytest.raises(RuntimeError) if fails else nullcontext():
            leader.record(lambda: leader.forward(batch(7), caches[-1]), None, record)
        leader.forward(batch(6), caches[0])
    assert orders[:3] == ["capture", "forward", "captured"]
    assert cache_sizes(follower) == [9]


def test_the_cache_is_as_large_as_the_rank_with_least_memory_allows(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = iter((10, 7))
    monkeypatch.setattr(Decoder, "least_free_memory", lambda self: next(free))
    with a_leader_and_a_follower(path) as (leader, _, _, _):
        assert leader.least_free_memory() == 7


def test_a_step_that_fails_on_one_rank_ends_all(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with a_leader_and_a_follower(path) as (leader, _, _, _):
        cache = leader.alloc_kv_cache(4, 8)

        def fails(*_: Any) -> None:
            raise torch.OutOfMemoryError("no more memory")

        monkeypatch.setattr(Logged, "forward", fails)
        leader.followers.tell = lambda *order: None  # else the follower would wait for its part of the step
        for _ in range(2):
            with pytest.raises(OutOfStep, match="failed on one rank"):
                leader.forward(batch(1), cache)
        with pytest.raises(OutOfStep):
            leader.check()
        del leader.followers.tell
        leader.followers.batches.get(timeout=60)


def test_a_replay_that_fails_on_one_rank_ends_all(path: Path) -> None:
    class Broken(Tape):
        def replay(self) -> None:
            raise torch.OutOfMemoryError("no more memory")  # the first one sends the graph to the device

    with a_leader_and_a_follower(path) as (leader, follower, _, tapes):
        graph, _ = leader.record(lambda: None, None, lambda launch, pool: (Broken([]), pool))
        with pytest.raises(OutOfStep, match="failed on one rank"):
            graph.replay()
        with pytest.raises(OutOfStep):
            leader.check()
        with pytest.raises(OutOfStep):
            graph.replay()
    assert [tape.replays for tape in tapes] == [1]
    assert graphs(follower) == tapes


class Replaceable(kernels.ReferenceOps):
    """Plain torch, of which two operations count as kernels that can be replaced."""

    replaceable = ("embed", "rms_norm")

    def __init__(self, wrong: float = 1.0) -> None:
        super().__init__()
        self.replaced: frozenset[str] = frozenset()
        self.wrong = wrong

    def replacement(self, kernel: str) -> str:
        return "torch" if kernel in self.replaceable else ""

    def replace_kernel(self, kernel: str) -> None:
        self.replaced |= {kernel}

    def rms_norm(self, *given: Any) -> torch.Tensor:
        return super().rms_norm(*given) * (1.0 if "rms_norm" in self.replaced else self.wrong)


@pytest.mark.parametrize("who", ["leader", "follower"])
def test_a_kernel_that_is_wrong_on_one_rank_is_replaced_on_all(path: Path, who: str) -> None:
    with a_leader_and_a_follower(path) as (leader, follower, _, _):
        leader.ops = Replaceable(1.1 if who == "leader" else 1.0)
        follower._model.ops = Replaceable(1.1 if who == "follower" else 1.0)
        report = leader.self_test("quick", 16, None)
    assert [(fault.kernel, fault.replacement) for fault in report.faults] == [("rms_norm", "torch")]
    for ops in (leader.ops, follower._model.ops):
        assert isinstance(ops, Replaceable)
        assert ops.replaced == {"rms_norm"}


def test_ranks_that_do_not_add_up_fail_the_self_test(path: Path) -> None:
    with a_leader_and_a_follower(path) as (leader, follower, _, _):
        follower._handlers["self_test"] = lambda *_: follower._answer(0)
        leader.followers.all_reduce = lambda values: values + 1
        with pytest.raises(OutOfStep) as failed:
            leader.self_test("quick", 16, None)
        assert isinstance(failed.value.__cause__, kernels.WrongKernel)
        assert str(failed.value.__cause__).startswith("all-reduce (1 ranks, 64 features, float32) is wrong here")
        follower.answers_left = leader.followers.said.get(timeout=60)
