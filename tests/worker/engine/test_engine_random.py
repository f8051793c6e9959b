"""The engine under random requests, shortages, cancels and limits: every text is the one that its request determines.

Requests of every decoding method meet in an engine that is too small for them, in every mode of preemption, with and
without prefix caching. No request starves, nothing leaks, and each result equals that of the request alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from quire.kernels import StepInterrupted
from quire.shared.protocol.messages import POOLINGS, CacheBreakpoint, Delta, GenerationRequest, SamplingParams, StepItem
from quire.worker.device.cuda.runner import DeviceRunner
from quire.worker.engine.engine import Engine
from quire.worker.engine.features.drafts.drafter import Drafter
from quire.worker.engine.features.drafts.drafts import AnyDrafter, Drafts
from quire.worker.engine.features.spill.block_file import ENTRY, PAGE
from quire.worker.engine.limits import RequestRefused
from quire.worker.engine.runner import Runner, StepOutput
from quire.worker.engine.sequence import GroupState, Sequence
from quire.worker.engine.step import Step
from quire.worker.pinned_prefixes import pin
from tests.support.guesses import knowing
from tests.support.mock_model import DEAD_ENDS, ENDLESS, alone, assert_idle, final, graphed, make_engine, request
from tests.support.spills import assert_no_place_lost, attach
from tests.worker.engine.features.test_pooling import embed, embedding
from tests.worker.engine.features.test_pooling import expected as vector

MAX_MODEL_LEN = 48
# Prompts begin alike, so that prefixes are found; they differ from somewhere on.
BEGINNINGS = [tuple((7 * start + i) % 96 + 1 for i in range(40)) for start in range(3)]

PROMPTS = st.builds(
    lambda beginning, shared, tail: beginning[:shared] + tail,
    st.sampled_from(BEGINNINGS),
    st.sampled_from([0, 1, 4, 7, 8, 9, 12, 16, 20, 24]),
    st.lists(st.integers(1, 96), min_size=1, max_size=6).map(tuple),
)
METHODS = st.one_of(
    st.fixed_dictionaries({"n": st.integers(1, 4)}),
    st.fixed_dictionaries({"n": st.integers(1, 4), "temperature": st.just(1.0), "seed": st.integers(0, 3)}),
    st.fixed_dictionaries(
        {"n": st.integers(1, 2), "best_of": st.integers(3, 4), "temperature": st.just(1.0), "seed": st.integers(0, 3)}
    ),
    st.integers(1, 4).flatmap(
        lambda width: st.fixed_dictionaries(
            {
                "beam_width": st.just(width),
                "n": st.integers(1, width),
                "length_penalty": st.sampled_from([0.0, 1.0, 2.0]),
                "early_stopping": st.sampled_from(["false", "true", "never"]),
            }
        )
    ),
)
EXTRAS = st.one_of(
    st.just({}),
    st.just({}),
    st.just({"ignore_eos": True}),
    st.just({"min_tokens": 6}),
    st.just({"presence_penalty": 0.7, "frequency_penalty": 0.5}),
    st.just({"repetition_penalty": 1.4}),
    st.just({"logit_bias": ((5, 3.0), (9, -100.0)), "min_tokens": 3}),
    st.just({"allowed_token_ids": (0, *range(3, 97, 4))}),
    st.just({"bad_words": ("b", "cd", "ef", "xyz"), "presence_penalty": 1.5}),
    st.just({"grammar": ENDLESS}),
    st.just({"grammar": DEAD_ENDS, "n": 1}),
    st.just({"grammar": ENDLESS, "frequency_penalty": 0.5, "logprobs": True, "top_logprobs": 2}),
    st.fixed_dictionaries({"logprobs": st.just(True), "top_logprobs": st.integers(0, 3)}),
)
STOPS = st.sampled_from([(), (), ("a",), ("b", "cd")])


@lru_cache(maxsize=4096)
def undisturbed(prompt: tuple[int, ...], params: SamplingParams) -> tuple[Delta, ...]:
    """Return the result of a request that runs alone."""
    return tuple(alone(GenerationRequest("alone", "mock", prompt, params), branches=True))


class Stumbling(DeviceRunner):
    """A runner that has no memory for every second step."""

    num_tries = 0

    def execute(self, step: Step) -> StepOutput | None:
        self.num_tries += 1
        if self.num_tries % 2:
            return super().execute(step)
        self.move_blocks(step)
        return None


class Interrupted(Runner):
    """A runner that interrupts every second step of batch lines, after it has moved blocks."""

    num_steps = 0

    def execute(self, step: Step) -> StepOutput | None:
        self.num_steps += self.interrupt is not None
        if self.interrupt is None or self.num_steps % 2:
            return super().execute(step)
        self.move_blocks(step)
        raise StepInterrupted


def answer_of(sequence: Sequence) -> tuple[int, ...]:
    answers = undisturbed(sequence.group.prompt, sequence.group.sampling)
    return answers[sequence.choice % len(answers)].token_ids if answers else ()


class SpillKind(NamedTuple):
    """Places of the pool in host memory, and blocks of the file; 0: no file."""

    num_places: int
    num_blocks: int


class EngineUnderLoad(RuleBasedStateMachine):
    engine: Engine
    has_states = False

    def __init__(self) -> None:
        super().__init__()
        self.requests: dict[str, GenerationRequest] = {}
        self.items: list[StepItem] = []
        self.ended: set[str] = set()  # from outside
        self.num_asked = 0
        self.num_pinned = 0
        self.folder = TemporaryDirectory(prefix="quire-spill-")

    @initialize(
        slots=st.integers(40, 90),
        block_size=st.sampled_from([1, 2, 4, 4, 8]),
        num_host_blocks=st.sampled_from([0, 4, 8, 16, 40]),
        max_num_seqs=st.integers(4, 8),
        extra_budget=st.integers(0, 16),
        max_prefill_tokens=st.sampled_from([0, 0, 1, 5]),
        preemption=st.sampled_from(["auto", "swap", "recompute"]),
        prefix_caching=st.booleans(),
        pinned=st.sampled_from([(), (), (5,), (8, 11)]),
        runner=st.sampled_from([Runner, DeviceRunner, graphed, Stumbling, Interrupted]),
        drafter=st.sampled_from([None, Drafter, knowing(answer_of), knowing(answer_of)]),
        call_pins=st.sampled_from([(0, 0), (3, 2), (12, 12)]),
        spill=st.sampled_from(
            [None, SpillKind(3, 0), SpillKind(40, 0), SpillKind(3, 12), SpillKind(40, 4), SpillKind(40, 200)]
        ),
    )
    def start(
        self,
        slots: int,
        block_size: int,
        num_host_blocks: int,
        max_num_seqs: int,
        extra_budget: int,
        max_prefill_tokens: int,
        preemption: str,
        prefix_caching: bool,
        pinned: tuple[int, ...],
        runner: Callable[..., Runner],
        drafter: Callable[..., AnyDrafter] | None,
        call_pins: tuple[int, int],
        spill: SpillKind | None,
    ) -> None:
        spills = {"spills": True} if spill is not None and prefix_caching and not self.has_states else {}
        self.engine = self.make_engine(
            runner,
            num_blocks=-(-slots // block_size),
            block_size=block_size,
            num_host_blocks=num_host_blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + extra_budget,
            max_model_len=MAX_MODEL_LEN,
            max_prefill_tokens=max_prefill_tokens,
            preemption=preemption,
            prefix_caching=prefix_caching,
            max_pinned_blocks=call_pins[0],
            max_owner_pinned_blocks=call_pins[1],
            **spills,
        )
        # A second of the pins passes with each step.
        self.engine.groups.blocks.cached.clock = lambda: float(self.engine.num_steps)
        if spill is not None and spills:
            folder = Path(self.folder.name) if spill.num_blocks else None
            attach(self.engine, folder, spill.num_places, max_bytes=4 * PAGE + spill.num_blocks * (PAGE + ENTRY.size))
        if drafter is not None and not self.engine.runner.model.state_bytes:
            self.engine.drafts = Drafts(self.engine.groups, None, drafter)
        for i, length in enumerate(pinned):
            try:
                pin(self.engine, f"p{i}", BEGINNINGS[i][:length])
            except RequestRefused:
                continue
            self.num_pinned += 1

    def make_engine(self, runner: Callable[..., Runner], **limits: Any) -> Engine:
        return make_engine(True, runner, **limits)

    @rule(
        prompt=PROMPTS,
        method=METHODS,
        extras=EXTRAS,
        stop=STOPS,
        max_tokens=st.integers(1, 20),
        salt=st.sampled_from(["", "", "s"]),
        priority=st.integers(0, 2),
        breakpoints=st.lists(st.builds(CacheBreakpoint, st.integers(1, 30), st.integers(1, 30)), max_size=2),
        pinned_for=st.sampled_from("ab"),
    )
    def ask(
        self,
        prompt: tuple[int, ...],
        method: dict,
        extras: dict,
        stop: tuple[str, ...],
        max_tokens: int,
        salt: str,
        priority: int,
        breakpoints: list[CacheBreakpoint],
        pinned_for: str,
    ) -> None:
        params = method | extras | {"max_tokens": max_tokens}
        if "beam_width" not in params:
            params["stop"] = stop
        else:
            for name in ("logprobs", "grammar"):
                params.pop(name, None)
        self.num_asked += 1
        asked = request(f"r{self.num_asked}", prompt, salt, **params)
        asked = replace(asked, breakpoints=tuple(breakpoints), pinned_for=pinned_for)
        try:
            self.engine.add(asked, priority=priority)
        except RequestRefused:
            return
        self.requests[asked.id] = asked

    @rule(
        prompt=PROMPTS,
        pooling=st.sampled_from(POOLINGS),
        salt=st.sampled_from(["", "", "s"]),
        priority=st.integers(0, 2),
    )
    def embed(self, prompt: tuple[int, ...], pooling: str, salt: str, priority: int) -> None:
        self.num_asked += 1
        asked = embed(f"r{self.num_asked}", prompt, pooling, salt)
        try:
            self.engine.add(asked, priority=priority)
        except RequestRefused:
            return
        self.requests[asked.id] = asked

    @precondition(lambda self: self.engine.has_work)
    @rule(count=st.integers(1, 8))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.step_once()

    @precondition(lambda self: self.engine.requests)
    @rule(which=st.integers(0, 50), is_cancelled=st.booleans())
    def leave(self, which: int, is_cancelled: bool) -> None:
        """The client disconnects, or another worker takes over the request."""
        name = sorted(self.engine.requests)[which % len(self.engine.requests)]
        if is_cancelled:
            item = self.engine.finish(name, "cancelled")
            if item is None:
                assert self.engine.runner.looks_ahead, "only a step under way can have ended it"
                return
            self.items.append(item)
            self.ended.add(name)
        else:
            self.engine.drop(name)
            del self.requests[name]
        self.engine.check_integrity()

    def step_once(self) -> None:
        if not self.engine.requests:
            self.items += self.engine.step()
            return
        first = min(self.engine.requests.values(), key=lambda group: group.order)
        was_running, had = first.state is GroupState.RUNNING, progress(self.engine, first.request_id)
        interrupted = self.engine.num_interrupted_steps
        self.items += self.engine.step()
        self.engine.check_integrity()
        if was_running and self.engine.num_interrupted_steps == interrupted:
            assert progress(self.engine, first.request_id) > had, "the first in line had no turn"

    def teardown(self) -> None:
        try:
            if hasattr(self, "engine"):
                self.check_end()
                if self.engine.scheduler.spill is not None:
                    self.engine.scheduler.spill.close()
                    assert_no_place_lost(self.engine.scheduler.spill)
        finally:
            self.folder.cleanup()

    def check_end(self) -> None:
        # One token of one sequence per step at the very least.
        for _ in range(3_000):
            if not self.engine.has_work:
                break
            self.step_once()
        assert not self.engine.has_work, "a request starves"
        assert_idle(self.engine)
        assert len(self.engine.scheduler.blocks.pinned) == self.num_pinned
        for name, asked in self.requests.items():
            mine = [item for item in self.items if item.request_id == name]
            if asked.pooling:
                if name not in self.ended:
                    assert embedding(mine, name) == vector(asked.prompt, asked.pooling)
                continue
            expected = undisturbed(asked.prompt, asked.sampling)
            got = final(mine, name)
            if name in self.ended:
                for delta in got:
                    assert delta.token_ids == expected[delta.choice].token_ids[: len(delta.token_ids)]
                continue
            assert [plain(delta) for delta in got] == [plain(delta) for delta in expected]
            assert [delta.score for delta in got] == pytest.approx([delta.score for delta in expected], abs=1e-4)


def progress(engine: Engine, name: str) -> tuple[int, int, int]:
    """Return a measure that grows with each step of a request: choices ended, tokens of output, tokens computed."""
    group = engine.requests.get(name)
    if group is None:
        return 10**9, 0, 0
    ended = sum(sequence.is_finished for sequence in group.sequences)
    drawn = max(sequence.num_output_tokens for sequence in group.sequences)
    total = sum(sequence.num_output_tokens for sequence in group.sequences)
    computed = sum(sequence.num_computed + bool(sequence.block_table) for sequence in group.sequences)
    return ended, total * 100 + drawn, computed


def plain(delta: Delta) -> Delta:
    """Return the deltas without scores, which depend on the order of additions."""
    return delta._replace(score=None)


TestEngineUnderLoad = EngineUnderLoad.TestCase
TestEngineUnderLoad.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
