"""The time of steps, and the pace of prompts."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from quire import kernels
from quire.shared.protocol.messages import GenerationRequest, SamplingParams
from quire.worker.engine.engine import Engine
from quire.worker.engine.limits import EngineLimits
from quire.worker.engine.offline import generate
from quire.worker.engine.pacing import PrefillPacer
from quire.worker.engine.sequence import SequenceGroup
from quire.worker.engine.step import DecodeBatch, PrefillChunk, Step
from quire.worker.engine.timing import BATCH, StepTimes
from quire.worker.models.native.decoder import Decoder

TARGET_S = 0.030

BLOCK = 16

LIMIT = 1024


class Machine:
    """Steps that take a known time, plus or minus noise."""

    def __init__(self, base_s: float, token_s: float, noise: float = 0.05) -> None:
        self.base_s, self.token_s, self.noise = base_s, token_s, noise
        self._draw = random.Random(3)

    def seconds(self, num_prefill_tokens: int) -> float:
        exact = self.base_s + self.token_s * num_prefill_tokens
        return exact * self._draw.uniform(1 - self.noise, 1 + self.noise)


def serve(pacer: PrefillPacer, machine: Machine, steps: int, decode_only: float = 0.3) -> list[float]:
    """Return the times of mixed steps. A share of all steps has no prompts."""
    draw, times = random.Random(4), []
    for _ in range(steps):
        tokens = 0 if draw.random() < decode_only else pacer.allowance
        seconds = machine.seconds(tokens)
        pacer.observe(8, tokens, seconds)
        if tokens:
            times.append(seconds)
    return times


@pytest.mark.parametrize(("base_s", "token_s"), [(0.002, 0.0001), (0.010, 0.0001), (0.020, 0.0003)])
def test_it_finds_the_number_of_tokens_that_meets_the_target(base_s: float, token_s: float) -> None:
    pacer = PrefillPacer(TARGET_S, BLOCK, LIMIT)
    assert pacer.allowance <= 2 * BLOCK, "nothing is known yet"
    serve(pacer, Machine(base_s, token_s), 80)
    assert pacer.allowance == pytest.approx((TARGET_S - base_s) / token_s, rel=0.15)


def test_no_step_on_the_way_there_takes_much_longer_than_the_target() -> None:
    times = serve(PrefillPacer(TARGET_S, BLOCK, LIMIT), Machine(0.010, 0.0001), 200)
    assert max(times) < 1.25 * TARGET_S
    assert sum(times) / len(times) > 0.8 * TARGET_S, "and the time that there is gets used"


def test_it_follows_a_machine_that_becomes_slower_and_one_that_becomes_faster() -> None:
    pacer = PrefillPacer(TARGET_S, BLOCK, LIMIT)
    for token_s in (0.0001, 0.0004, 0.00005):
        machine = Machine(0.010, token_s)
        serve(pacer, machine, 120)
        assert max(serve(pacer, machine, 40)) < 1.25 * TARGET_S
        assert pacer.allowance == pytest.approx(0.020 / token_s, rel=0.2)


def test_prompts_advance_by_a_block_if_the_target_cannot_be_met() -> None:
    pacer = PrefillPacer(TARGET_S, BLOCK, LIMIT)
    serve(pacer, Machine(0.050, 0.0001), 50)
    assert pacer.allowance == BLOCK


def test_it_never_exceeds_its_limit() -> None:
    pacer = PrefillPacer(TARGET_S, BLOCK, 200)
    serve(pacer, Machine(0.001, 0.000001), 50)
    assert pacer.allowance == 200
    assert PrefillPacer(TARGET_S, BLOCK, 4).allowance == 4


def test_steps_without_decodes_are_a_first_guess_and_bound_nothing() -> None:
    pacer = PrefillPacer(TARGET_S, BLOCK, LIMIT)
    pacer.observe(0, 100, 0.2)
    assert pacer.allowance == BLOCK  # 2 ms a token: fifteen fit
    pacer.observe(0, 0, 9.9)
    assert pacer.token_s == pytest.approx(0.002)


@pytest.mark.parametrize("wrong", [(0.0, 1, 1), (0.01, 0, 1), (0.01, 1, 0)])
def test_parameters_must_be_above_zero(wrong: tuple[float, int, int]) -> None:
    with pytest.raises(ValueError, match="must be above 0"):
        PrefillPacer(*wrong)
    assert PrefillPacer(0.01, 1, 1).allowance == 1


def test_steps_that_only_decode_give_the_base_and_mixed_steps_the_cost_of_a_token() -> None:
    pacer = PrefillPacer(TARGET_S, BLOCK, LIMIT)
    pacer.observe(8, 0, 0.010)
    assert pacer.base_s == 0.010
    pacer.observe(8, 0, 0.020)
    assert pacer.base_s == pytest.approx(0.012), "a fifth of the way to the newest"
    pacer.observe(8, 100, 0.032)
    assert pacer.token_s == pytest.approx(0.0002)
    assert pacer.allowance == pytest.approx(90, abs=1)
    pacer.observe(8, 50, 0.042)  # thrice as slow: it tells a little, and less for its few tokens
    assert pacer.token_s == pytest.approx((0.020 + 0.2 * 0.010) / (100 - 0.2 * 50))


def test_a_short_prompt_does_not_make_it_forget_how_many_tokens_were_fine() -> None:
    pacer = PrefillPacer(TARGET_S, BLOCK, LIMIT)
    pacer.observe(8, 200, 0.0)
    for _ in range(5):
        pacer.observe(8, 1, 0.0)
    assert pacer.allowance == int(2 * 200 * 0.95**5)
    for _ in range(100):
        pacer.observe(8, 1, 0.0)
    assert pacer.allowance == 2 * BLOCK


class Clock:
    """A clock that advances only while the model computes."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class TimedDecoder:
    """A real decoder whose steps take a known time on a simulated clock."""

    state_bytes = 0

    def __init__(self, model: Decoder, clock: Clock) -> None:
        self._model, self._clock = model, clock
        self.vocab_size, self.ops, self.alloc_kv_cache = model.vocab_size, model.ops, model.alloc_kv_cache

    def forward(self, batch, cache):  # type: ignore[no-untyped-def]
        self._clock.now += 0.004 + 0.0005 * len(batch.token_ids)
        return self._model.forward(batch, cache)


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> Decoder:
    return Decoder.load(tiny_model, kernels.select_ops("cpu", torch.float32), torch.float32, "cpu")


def longest_gap(model: Decoder, target_s: float) -> float:
    """Return the longest time between two tokens of a stream while eight prompts of 200 tokens are computed."""
    clock = Clock()
    engine = Engine(TimedDecoder(model, clock), EngineLimits(200, 8, 12, 160, 256), (), None)
    engine.pacer = PrefillPacer(target_s, 8, 160, clock) if target_s else None
    draw = random.Random(1)
    engine.add(GenerationRequest("stream", "tiny", (1, 2, 3), SamplingParams(250, temperature=0)))
    engine.step()
    for i in range(8):
        prompt = tuple(draw.randrange(model.vocab_size) for _ in range(200))
        engine.add(GenerationRequest(f"long-{i}", "tiny", prompt, SamplingParams(4, temperature=0)))
    last, gaps = clock.now, []
    while engine.has_work:
        ids = [item.request_id for item in engine.step()]
        if "stream" in ids:
            gaps.append(clock.now - last)
            last = clock.now
    return max(gaps)


def test_a_stream_keeps_to_the_target_while_long_prompts_are_computed(model: Decoder) -> None:
    assert longest_gap(model, 0) > 0.080
    assert longest_gap(model, 0.030) < 0.036
    assert longest_gap(model, 0.015) < 0.018


def test_time_is_measured_only_if_a_target_is_set(model: Decoder) -> None:
    engine = Engine(model, EngineLimits(50, 8, 4, 64, 256), (), None)
    assert engine.pacer is None
    generate(engine, [(1, 2, 3)], SamplingParams(4))
    assert engine.scheduler.max_prefill_tokens == 64


class SetClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> StepTimes:
    made = StepTimes()
    monkeypatch.setattr(StepTimes, "clock", staticmethod(SetClock()))
    return made


def step(decodes: int, *chunks: int) -> Step:
    group = SequenceGroup("r", (1,), SamplingParams(1, n=max(1, decodes)))
    group.start()
    leader = group.sequences[0]
    batch = DecodeBatch.of(group.sequences[:decodes])
    return Step(batch, [PrefillChunk(leader, count, is_sampled=False) for count in chunks])


def run(
    times: StepTimes, one: Step, collect: float, schedule: float, execute: float, sample: float, rest: float
) -> None:
    """A step whose parts take these seconds."""
    clock = times.clock
    assert isinstance(clock, SetClock)
    times.begin_step()
    clock.now += collect
    times.begin_schedule()
    clock.now += schedule
    times.end_schedule()
    clock.now += execute
    times.end_execute()
    began = clock.now
    clock.now += sample
    times.add_sampling(began)
    clock.now += rest
    times.end_step(one)


def test_phases_add_up_to_the_step(times: StepTimes) -> None:
    run(times, step(3), collect=1.0, schedule=2.0, execute=4.0, sample=8.0, rest=16.0)
    run(times, step(3), collect=0.0, schedule=2.0, execute=4.0, sample=8.0, rest=0.5)
    read = times.read()
    assert {name: one.sum for name, one in read.phases.items()} == {
        "schedule": 4.0,
        "execute": 8.0,
        "sample": 16.0,
        "commit": 17.5,
    }
    assert read.seconds["decode"].sum == 45.5


def test_steps_are_counted_by_kind_and_size(times: StepTimes) -> None:
    for one in (step(3), step(1), step(0, 1), step(4, 6, 7)):
        run(times, one, 0, 0, 1, 0, 0)
    read = times.read()
    assert {kind: one.count for kind, one in read.seconds.items()} == {"decode": 2, "prefill": 1, "mixed": 1}
    assert (read.sequences.count, read.sequences.sum) == (4, 3 + 1 + 1 + 6)
    assert (read.tokens["decode"].count, read.tokens["decode"].sum) == (3, 8)
    assert (read.tokens["prefill"].count, read.tokens["prefill"].sum) == (2, 14)


def test_sampling_between_two_steps_belongs_to_none(times: StepTimes) -> None:
    clock = times.clock
    assert isinstance(clock, SetClock)
    began = clock.now
    clock.now += 5.0
    times.add_sampling(began)
    run(times, step(1), 0, 1, 1, 2, 0)
    assert times.read().phases["sample"].sum == 2.0


def test_what_is_read_does_not_change_with_later_steps(times: StepTimes) -> None:
    run(times, step(1), 0, 0, 1, 0, 0)
    read = times.read()
    for _ in range(BATCH):
        run(times, step(1), 0, 0, 1, 0, 0)
    assert read.sequences.count == 1
    assert times.sequences.count == BATCH + 1  # sorted without being read
