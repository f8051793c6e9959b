"""The engine gives its usual results on a simulated device that runs every operation as late as possible."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

from quire.worker.device.cuda import staging
from quire.worker.device.cuda.graphs import DRAWN, GraphBucket, record_on_cuda
from quire.worker.device.cuda.runner import DeviceRunner
from quire.worker.engine import transfers
from quire.worker.engine.engine import Engine
from quire.worker.engine.forward_batch import ForwardBatch
from quire.worker.engine.input_batch import InputBatch
from quire.worker.engine.limits import EngineLimits
from quire.worker.engine.runner import Runner
from tests.support.mock_model import (
    VOCAB,
    MockCache,
    MockModel,
    MockOps,
    continuation,
    graphed,
    make_engine,
    record,
    request,
    run,
    steps,
    text,
)
from tests.support.simulated_cuda.driver import CUDA, Driver, simulated_cuda
from tests.worker.engine.test_engine_random import EngineUnderLoad, Interrupted
from tests.worker.engine.test_in_flight import FEATURES, SCARCE, add_mixed, long_text, results


class LateOps(MockOps):
    """Each operation is one launch. Only `penalise` is several operations of torch."""

    device = CUDA

    def __init__(self, late: Driver) -> None:
        self._late = late

    def argmax(self, logits: Any) -> Any:
        return self._late.call(self._late.empty(len(logits), dtype=torch.int32), super().argmax, logits)

    def sample(self, logits: Any, *columns: Any) -> Any:
        return self._late.call(self._late.empty(len(logits), dtype=torch.int32), super().sample, logits, *columns)

    def logprobs_of(self, logits: Any, ids: Any) -> Any:
        return self._late.call(self._late.empty(len(logits)), super().logprobs_of, logits, ids)

    def top_logprobs(self, logits: Any, count: int) -> Any:
        best, late = super().top_logprobs, self._late
        values, ids = late.empty(len(logits), count), late.empty(len(logits), count, dtype=torch.int32)
        late.call(values, lambda memory: best(memory, count)[0], logits)
        return values, late.call(ids, lambda memory: best(memory, count)[1], logits)


class LateCache(MockCache):
    """Copies the block ids when a move is launched, as kernels/gpu/block_moves.py does."""

    def __init__(self, late: Driver, *shape: int) -> None:
        super().__init__(*shape)
        for name in ("copy_blocks", "swap_out", "swap_in"):
            setattr(self, name, partial(self._submit, late, getattr(self, name)))

    @staticmethod
    def _submit(late: Driver, move: Callable[..., None], src: list[int], dst: list[int]) -> None:
        late.submit(partial(move, list(src), list(dst)))


class LateModel(MockModel):
    """A step is one launch."""

    def __init__(self, late: Driver, branches: bool = False) -> None:
        super().__init__(LateOps(late), branches)
        self.late = late

    def alloc_kv_cache(self, num_blocks: int, block_size: int, num_host_blocks: int = 0) -> MockCache:
        return LateCache(self.late, num_blocks, block_size, num_host_blocks)

    def forward(self, batch: ForwardBatch, cache: MockCache) -> Any:
        memory = ForwardBatch(*(part.memory for part in batch.parts()))
        forward = super().forward
        return self.late.call(self.late.empty(len(batch.logits_rows), VOCAB), lambda: forward(memory, cache))

    def forward_pooled(self, batch: ForwardBatch, cache: MockCache) -> Any:
        assert batch.pooled_rows is not None
        late, forward = self.late, super().forward_pooled
        memory = ForwardBatch(*(part.memory for part in batch.parts()))
        hidden: list[torch.Tensor] = []

        def compute() -> torch.Tensor:
            logits, found = forward(memory, cache)
            hidden.append(found)
            return logits

        logits = late.call(late.empty(len(batch.logits_rows), VOCAB), compute)
        return logits, late.call(late.empty(len(batch.pooled_rows), self.hidden_size), hidden.pop)


def make_late_engine(model: LateModel, runner: Callable[..., Runner] = DeviceRunner, **limits: Any) -> Engine:
    if runner is graphed:
        runner = partial(graphed, record=record_on_cuda)
    if runner in (Runner, Interrupted):  # these compute on the host
        runner = DeviceRunner
    return make_engine(runner=runner, model=model, **limits)


@pytest.mark.parametrize("runner", [DeviceRunner, graphed], ids=["launched", "replayed"])
def test_texts_are_unchanged_and_a_steady_step_waits_only_for_the_previous_one(runner: Callable[..., Runner]) -> None:
    prompts = {f"r{i}": tuple(range(i + 1, i + 8 + i % 5)) for i in range(6)}
    with simulated_cuda() as late:
        engine = make_late_engine(LateModel(late), runner)
        for name, prompt in prompts.items():
            engine.add(request(name, prompt, max_tokens=40, ignore_eos=True))
        items = [item for _ in range(12) for item in engine.step()]
        before = late.num_waits
        items += [item for _ in range(10) for item in engine.step()]
        assert late.num_waits - before == 10, "the host waits for more than the tokens of the step before"
        items += run(engine)
        assert bool(late.num_replays) is (runner is graphed)
    for name, prompt in prompts.items():
        assert text(items, name) == continuation(prompt, 40, ignore_eos=True)


@pytest.mark.parametrize("runner", [DeviceRunner, graphed], ids=["launched", "replayed"])
@pytest.mark.parametrize("many", [False, True], ids=["a block for a row", "more changes than rows"])
def test_changes_of_block_tables_go_with_the_inputs_of_a_decode(
    runner: Callable[..., Runner], many: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decodes get a block every four steps. Only changes of which there are more than rows have copies of their own."""
    sent: list[int] = []  # the number of entries of each such copy
    staged: list[int] = []  # the number of entries of each decode
    send_cells, decode_columns = DeviceRunner._send_cells, DeviceRunner._decode_columns

    def watched_cells(self: DeviceRunner, cells: np.ndarray, blocks: np.ndarray) -> None:
        sent.append(len(cells))
        send_cells(self, cells, blocks)

    def watched_columns(self: DeviceRunner, *arguments: Any) -> dict[str, staging.Column]:
        staged.append(len(arguments[3]))
        return decode_columns(self, *arguments)

    with simulated_cuda() as late:
        engine = make_late_engine(LateModel(late), runner)
        for name in ("r", "s"):
            engine.add(request(name, (1, 2, 3), max_tokens=40, ignore_eos=True))
        items = steps(engine, 3)
        monkeypatch.setattr(DeviceRunner, "_send_cells", watched_cells)
        monkeypatch.setattr(DeviceRunner, "_decode_columns", watched_columns)
        while engine.has_work:
            if many and engine.input_batch.changes is not None:
                engine.input_batch.changes.append((np.repeat(np.arange(8), 2), np.tile(np.arange(2), 8)))
            items += engine.step()
        for name in ("r", "s"):
            assert text(items, name) == continuation((1, 2, 3), 40, ignore_eos=True)
    assert bool(sent) is many
    assert max(staged) == (0 if many else 2)
    assert all(entries >= 16 for entries in sent)


# Requests with all features are always tried. CI tries each alone, too, and `make test-all` also without graphs.
@pytest.mark.parametrize(
    ("feature", "runner"),
    [
        *(pytest.param(one, graphed, marks=() if one == "all" else pytest.mark.slow, id=one) for one in FEATURES),
        *(
            pytest.param(one, DeviceRunner, marks=() if one == "all" else pytest.mark.soak, id=f"{one}, launched")
            for one in FEATURES
        ),
    ],
)
def test_a_late_device_gives_the_results_of_an_engine_that_waits_for_each_step(
    runner: Callable[..., Runner], feature: str
) -> None:
    plain = make_engine(branches=True, **SCARCE)
    assert add_mixed(plain, feature)
    expected = run(plain)
    with simulated_cuda() as late:
        engine = make_late_engine(LateModel(late, branches=True), runner, **SCARCE)
        assert add_mixed(engine, feature)
        assert results(run(engine)) == results(expected)


@pytest.mark.parametrize(
    "feature",
    [pytest.param(one, marks=() if one == "all" else pytest.mark.slow) for one in FEATURES if one != "dead ends"],
)
def test_a_step_with_this_request_waits_only_for_the_results_of_the_step_before(feature: str) -> None:
    with simulated_cuda() as late:
        engine = make_late_engine(LateModel(late, branches=True))
        engine.add(request("r", (1, 2, 3), **long_text(feature)))
        engine.add(request("other", (4, 5), max_tokens=40, ignore_eos=True))
        steps(engine, 5)
        for _ in range(10):
            waits, launched = late.num_waits, engine.num_prefill_tokens + engine.num_decode_tokens
            steps(engine, 1)
            assert late.num_waits - waits == 1
            assert engine.runner.model.num_computed == launched, "the step that was just launched has run, too"


def reuses_a_buffer_at_once(patch: pytest.MonkeyPatch) -> None:
    send = staging.Staging.send

    def hasty(self: staging.Staging, columns: dict[str, staging.Column]) -> None:
        self._hosts = deque([(*self._hosts[0][:2], transfers.StreamMark(torch.device("cpu")))])
        send(self, columns)

    patch.setattr(staging.Staging, "send", hasty)


def looks_at_tokens_too_early(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        transfers.SampledTokens,
        "wait",
        lambda tokens: np.clip(tokens._host[: tokens._count].numpy(), 0, VOCAB - 1).copy(),
    )


@pytest.mark.parametrize("mistake", [reuses_a_buffer_at_once, looks_at_tokens_too_early])
def test_a_runner_that_does_not_wait_is_found_out(
    mistake: Callable[[pytest.MonkeyPatch], None],
) -> None:
    """The late device exists to find these mistakes."""
    with simulated_cuda() as late, pytest.MonkeyPatch.context() as patch:
        mistake(patch)
        engine = make_late_engine(LateModel(late))
        with pytest.raises(AssertionError):
            two_alike(engine)


def two_alike(engine: Engine) -> None:
    for name in ("r", "s"):
        engine.add(request(name, (1, 2, 3), max_tokens=20, ignore_eos=True))
    items = run(engine)
    assert text(items, "r") == text(items, "s") == continuation((1, 2, 3), 20, ignore_eos=True)


class Watched(MockModel):
    """A model that records the parameters of all draws."""

    def __init__(self) -> None:
        super().__init__()
        self.top_ps: list[list[float]] = []
        sample = self.ops.sample

        def noted(logits: Any, temperatures: Any, top_ks: Any, top_ps: Any, *rest: Any) -> Any:
            self.top_ps.append(top_ps.tolist())
            return sample(logits, temperatures, top_ks, top_ps, *rest)

        self.ops.sample = noted


def test_a_row_of_padding_has_the_cheapest_draw() -> None:
    limits = EngineLimits(num_blocks=64, block_size=4, max_num_seqs=8, max_num_batched_tokens=16, max_model_len=128)

    def runner(model: Any, limits: EngineLimits, rows: InputBatch) -> DeviceRunner:
        return DeviceRunner(model, limits, rows, [GraphBucket(DRAWN, 8, 8)], record)

    model = Watched()
    engine = Engine(model, limits, (), None, runner=runner)
    assert engine.prepare()
    assert model.top_ps == [[1.0] * 8] * 3
    engine.add(request("r", (1, 2, 3), temperature=1.0, top_p=0.5, ignore_eos=True))
    run(engine)
    assert model.top_ps[-1] == [0.5, *[1.0] * 7]


def test_a_lost_device_is_found_out_by_waiting_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(device: torch.device) -> None:
        raise RuntimeError(f"{device} is lost")

    monkeypatch.setattr(torch.cuda, "synchronize", wait)
    runner = make_engine(runner=DeviceRunner).runner
    assert isinstance(runner, DeviceRunner)
    runner.check()
    runner.device = torch.device("cuda")
    with pytest.raises(RuntimeError, match="cuda is lost"):
        runner.check()


class EngineOnALateDevice(EngineUnderLoad):
    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()

    def make_engine(self, runner: Callable[..., Runner], **limits: Any) -> Engine:
        draw = random.Random(limits["num_blocks"]) if limits["num_blocks"] % 2 else None
        late = self.stack.enter_context(simulated_cuda(draw=draw))
        return make_late_engine(LateModel(late, branches=True), runner, **limits)

    def teardown(self) -> None:
        with self.stack:
            super().teardown()


TestEngineOnALateDevice = pytest.mark.slow(EngineOnALateDevice.TestCase)
TestEngineOnALateDevice.settings = settings(
    max_examples=10, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
del EngineUnderLoad  # it runs where it is defined
