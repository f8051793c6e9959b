"""CUDA graphs: padding and replays, captures at start within a time limit, and their memory."""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from quire.shared.protocol.messages import StepItem
from quire.worker import build
from quire.worker.device import devices
from quire.worker.device.cuda.graph_capture import capture_graphs, graph_buckets, measure_graphs
from quire.worker.device.cuda.graphs import DRAWN, GREEDY, MIXED, GraphBucket, Graphs, record_on_cuda
from quire.worker.device.cuda.runner import DeviceRunner
from quire.worker.engine.engine import Engine
from quire.worker.engine.input_batch import InputBatch
from quire.worker.engine.limits import EngineLimits
from quire.worker.settings import WorkerSettings
from tests.support.kernels.implementations import HAS_TRITON
from tests.support.mock_model import CalledAgain, MockModel, make_engine, record, request, run

# --- graphs of a runner: the order of their capture, the one that a step takes, and captures that fail ----------------


class Launched:
    """Records the buckets that are launched, in order; some do not fit into memory."""

    def __init__(self, too_large: tuple[GraphBucket, ...] = ()) -> None:
        self.captured: list[GraphBucket] = []
        self.too_large = too_large

    def __call__(self, bucket: GraphBucket) -> None:
        if bucket in self.too_large:
            raise torch.OutOfMemoryError
        if bucket not in self.captured:
            self.captured.append(bucket)


def graphs(launched: Launched, *buckets: GraphBucket) -> Graphs:
    return Graphs(buckets, lambda bucket: None, launched, lambda launch, pool: (CalledAgain(launch), "pool"))


SMALL, MIDDLE, LARGE = GraphBucket(MIXED, 16, 8), GraphBucket(MIXED, 64, 8), GraphBucket(MIXED, 128, 8)


def test_graphs_are_captured_largest_first_and_the_smallest_that_fits_is_taken() -> None:
    launched = Launched()
    made = graphs(launched, MIDDLE, LARGE, SMALL)
    assert made.find(MIXED, 1, 1) is None
    assert made.capture_next()
    assert launched.captured == [LARGE]
    assert made.find(MIXED, 1, 1) == (LARGE, made._graphs[LARGE])  # rather than to capture while requests run
    while made.capture_next():
        pass
    assert launched.captured == [LARGE, MIDDLE, SMALL]
    for tokens, sequences, expected in ((16, 8, SMALL), (17, 1, MIDDLE), (65, 1, LARGE)):
        found = made.find(MIXED, tokens, sequences)
        assert found is not None
        assert found[0] == expected
    assert made.find(MIXED, 129, 1) is made.find(MIXED, 1, 9) is made.find(GREEDY, 1, 1) is None


def test_the_largest_is_captured_first_for_its_memory_then_decodes() -> None:
    launched = Launched()
    decodes = [GraphBucket(kind, size, size) for kind in (GREEDY, DRAWN) for size in (1, 2)]
    made = graphs(launched, SMALL, *decodes, LARGE, MIDDLE)
    while made.capture_next():
        pass
    assert launched.captured == [LARGE, *(decodes[at] for at in (1, 3, 0, 2)), MIDDLE, SMALL]


def test_a_graph_that_does_not_fit_into_memory_is_left_out_and_smaller_ones_are_not(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    handled: list[Any] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: handled.append(sys.exc_info()[0]))
    made = graphs(Launched(too_large=(LARGE,)), MIDDLE, LARGE, SMALL)
    while made.capture_next():
        pass
    assert (made.num_captured, made.num_missing) == (2, 0)
    assert made.find(MIXED, 65, 1) is None
    assert "out of device memory for the CUDA graph of 128 tokens" in caplog.text
    assert handled == [None]  # while an error is handled, what its traceback holds cannot be freed


def test_a_capture_that_fails_leaves_stream_and_memory_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []

    @contextmanager
    def stream(one: str) -> Iterator[None]:
        try:
            yield
        finally:
            done.append(one)

    @contextmanager
    def capture(graph: Any, **options: Any) -> Iterator[None]:
        yield
        done.append(options["pool"])
        raise RuntimeError("the capture is invalid")

    class Graph:
        """A graph that must stay alive after its failure, because torch still asks it."""

        def __del__(self) -> None:
            done.append("gone")

    fakes = {"CUDAGraph": Graph, "graph_pool_handle": lambda: "pool", "current_device": lambda: 0}
    fakes |= {"stream": stream, "current_stream": lambda: "stream", "graph": capture}
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        monkeypatch.setattr(torch._C, name, lambda *at, name=name: done.append((name, *at)), raising=False)
    with pytest.raises(RuntimeError, match="the capture is invalid"):
        record_on_cuda(lambda: None, None)
    ended = [("_cuda_endAllocateToPool", 0, "pool"), ("_cuda_releasePool", 0, "pool")]
    assert done == ["pool", "stream", *ended]


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
def test_an_error_of_triton_in_a_capture_is_one_line_and_steps_run_without_graphs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Errors of Triton are not RuntimeErrors."""
    from triton.runtime.errors import OutOfResources

    def record(launch: Any, pool: Any) -> Any:
        raise OutOfResources(172160, 101376, "shared memory")

    made = Graphs([SMALL, LARGE], lambda bucket: None, lambda bucket: None, record)
    assert made.capture_next()
    assert not made.capture_next()
    assert made.find(MIXED, 1, 1) is None
    [said] = [one for one in caplog.records if one.levelno == logging.ERROR]
    assert "a CUDA graph of 128 tokens cannot be captured: a Triton kernel " in said.message
    assert "Required: 172160" in said.message
    assert said.exc_info is None


# --- cUDA graphs are captured at start within a time limit, and their memory is measured before the cache is sized ----


@pytest.mark.parametrize(("sequences", "tokens"), [(1, 16), (8, 24), (64, 256), (256, 8192), (256, 300), (4096, 8192)])
def test_every_step_within_the_limits_has_a_graph_that_is_not_much_larger(sequences: int, tokens: int) -> None:
    buckets = graph_buckets(sequences, tokens)
    draw = random.Random(0)
    for _ in range(2000):
        many = draw.randint(2, tokens)
        few = draw.randint(1, min(sequences, many - 1))
        fitting = [one for one in buckets if one.kind == MIXED and one.num_tokens >= many and one.num_sequences >= few]
        assert fitting, (many, few)
        assert min(one.num_tokens for one in fitting) <= max(many + 64, many * 1.27)
    for count in range(1, sequences + 1):
        assert any(one.kind == GREEDY and one.num_sequences >= count for one in buckets)
    assert all(one.num_tokens > one.num_sequences for one in buckets if one.kind == MIXED)


def test_an_engine_whose_graphs_cannot_be_captured_runs_without(caplog: pytest.LogCaptureFixture) -> None:
    left = 2

    def refused(launch: Any, pool: Any) -> Any:
        nonlocal left
        left -= 1
        if not left:
            raise RuntimeError("operation not permitted when stream is capturing")
        return record(launch, pool)

    def runner(model: Any, limits: EngineLimits, rows: InputBatch) -> DeviceRunner:
        return DeviceRunner(model, limits, rows, graph_buckets(limits.max_num_seqs, 16), refused)

    engine = make_engine(runner=runner)
    while engine.prepare():
        pass
    assert isinstance(engine.runner, DeviceRunner)
    assert (engine.runner.graphs.num_captured, engine.runner.graphs.num_missing, left) == (1, 0, 0)
    assert "not permitted when stream is capturing" in caplog.text
    engine.add(request("r", (1, 2, 3), ignore_eos=True))
    plain = make_engine()
    plain.add(request("r", (1, 2, 3), ignore_eos=True))
    assert texts(run(engine)) == texts(run(plain))


def texts(items: list[StepItem]) -> list[int]:
    return [token for item in items for delta in item.deltas for token in delta.token_ids]


def test_reference_kernels_take_no_graphs() -> None:
    limits = EngineLimits(num_blocks=9, block_size=4, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=32)
    for settings, takes in (
        (WorkerSettings(), True),
        (WorkerSettings(kernels="triton"), True),
        (WorkerSettings(kernels="reference"), False),
        (WorkerSettings(cuda_graphs=False), False),
    ):
        assert devices.uses_graphs(settings) is takes
        assert bool(build.graph_buckets(settings, limits)) is takes


class Card:
    """The memory of a device, as torch reports it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free = 1000
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (self.free, 2000))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)


@pytest.mark.slow
def test_the_memory_of_all_graphs_is_measured_with_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    card, model, taken = Card(monkeypatch), MockModel(), [100, 9, 8, 4, 0, 4]  # it is told in coarse steps
    model.ops.device = torch.device("cpu")

    def weighed(launch: Any, pool: Any) -> Any:
        card.free -= taken.pop(0)
        return record(launch, pool)

    limits = EngineLimits(num_blocks=500, block_size=4, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=128)
    left = len(graph_buckets(8, 64)) - 6
    assert measure_graphs(model, limits, weighed) == 100 + 9 + 8 + 8 + left * 8 // 3  # type: ignore[arg-type]
    assert not taken


def test_rare_operations_have_run_once_before_the_worker_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(runner=DeviceRunner)
    cache, ops, ran = engine.runner.kv_cache, engine.sampler.ops, []
    for owner, name in ((cache, "copy_blocks"), (ops, "logprobs_of"), (ops, "top_logprobs")):
        run_it = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *of, run_it=run_it, name=name: (ran.append(name), run_it(*of))[1])
    monkeypatch.setattr(ops, "penalise", lambda *of: ran.append("penalise"), raising=False)
    build.warm_up(engine)
    assert set(ran) == {"copy_blocks", "logprobs_of", "top_logprobs", "penalise"}
    assert not engine.has_work
    build.warm_up(make_engine(runner=DeviceRunner, max_num_seqs=1))


def waiting_engine() -> Engine:
    """Return an engine whose graphs are all yet to be captured."""

    def runner(model: Any, limits: EngineLimits, rows: InputBatch) -> DeviceRunner:
        return DeviceRunner(model, limits, rows, graph_buckets(limits.max_num_seqs, 16), record)

    return make_engine(runner=runner)


@pytest.mark.slow
def test_all_graphs_are_captured_before_the_worker_is_ready(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    Card(monkeypatch)
    caplog.set_level(logging.INFO)
    engine = waiting_engine()
    count = len(graph_buckets(8, 16))
    capture_graphs(engine)
    assert not engine.prepare()
    assert f"captured {count} of {count} CUDA graphs" in caplog.text
    capture_graphs(make_engine())  # a runner that has none


@pytest.mark.slow
def test_captures_beyond_the_time_limit_happen_while_idle_and_steps_run_without_these_graphs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    Card(monkeypatch)
    caplog.set_level(logging.INFO)
    engine = waiting_engine()
    now = iter(range(0, 10_000, 4))
    capture_graphs(engine, clock=lambda: next(now))
    runner = engine.runner
    assert isinstance(runner, DeviceRunner)
    assert 0 < runner.graphs.num_captured < 4
    assert runner.graphs.num_missing
    assert "captured 1 of" in caplog.text
    assert "the rest follow while nothing runs" in caplog.text
    captured = runner.graphs.num_captured
    engine.add(request("r", (1, 2, 3), ignore_eos=True))
    run(engine)
    assert runner.graphs.num_captured == captured
    assert engine.prepare()
    assert runner.graphs.num_captured == captured + 1
