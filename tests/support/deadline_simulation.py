"""A lane with one worker in simulated time: the real scripts, the real engine without a model, calls with deadlines.

Redis gets its time from a key that the simulation sets, and each step advances it, so a run depends on its seed alone.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from quire.gateway.features.deadlines.estimates import Deadlines
from quire.ops.benchmarks.stack.clockwork import NoModel
from quire.shared.protocol.broker import Admission, Claim, DeadlineUnreachable, QueueBounds, StepCommit, new_id
from quire.shared.protocol.messages import GenerationRequest, SamplingParams, StepItem
from quire.shared.protocol.states import COMPLETE
from quire.worker.engine.engine import Engine
from quire.worker.engine.limits import EngineLimits
from quire.worker.engine.pace import PaceMeter
from quire.worker.queue.estimates import EstimateErrors, Started
from tests.support.fair_model import ANYBODY, Share
from tests.support.protocol_driver import Lane, finished
from tests.support.redis_server import RedisServer

NOW = "simulation:now"
CLOCK = (("local time = redis.call('TIME')", f"local time = {{0, 1000 * redis.call('GET', '{NOW}')}}"),)
BOUNDS = QueueBounds(10**6, 10**9)
STEP_S, TOKEN_S = 0.01, 0.0001
# Tokens of the mean prompt and answer, and the duration of such a call at an idle worker.
PROMPT, ANSWER = 105, 100
ALONE_S = PROMPT * TOKEN_S + ANSWER * (STEP_S + TOKEN_S)
# Interval at which gateways learn of the pace.
CARD_S = 1.0


@dataclass(frozen=True)
class Call:
    """A call that arrives at a time, in seconds. answer: its length; is_exact: the gateway knows it."""

    at: float
    prompt: int
    answer: int
    timeout_s: float
    share: Share = ANYBODY
    is_exact: bool = False
    priority: str = "standard"


@dataclass
class Result:
    """How many calls of each tenant were met, late, dropped and refused; and the refusals."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    refusals: list[DeadlineUnreachable] = field(default_factory=list)

    def __getitem__(self, what: str) -> int:
        return sum(count for (_, name), count in self.counts.items() if name == what)


class _Model(NoModel):
    """A model whose steps take simulated time."""

    def __init__(self, rows: int, spend: Any, noise: float) -> None:
        super().__init__(rows)
        self._spend = spend
        self._noise = noise
        self._chance = random.Random(7)
        self._drift = 0.0

    def forward(self, batch: Any, kv_cache: Any) -> Any:
        # Noise of steps, and a speed that wanders as on a shared machine: its logarithm returns within 100 steps.
        self._drift = 0.99 * self._drift + self._noise * self._chance.gauss(0, 0.14)
        factor = math.exp(self._drift + self._noise * self._chance.gauss(0, 1) - self._noise**2)
        self._spend(factor * (STEP_S + TOKEN_S * len(batch.token_ids)))
        return super().forward(batch, kv_cache)


class Simulation:
    """One worker with `rows` rows. is_on: calls that cannot be met are refused and dropped."""

    def __init__(self, server: RedisServer, rows: int, is_on: bool = True, noise: float = 0.0) -> None:
        self.now = 1000.0
        self.lane = Lane(server, (), CLOCK)
        self.reader = self.lane.reader("w")
        limits = EngineLimits(
            num_blocks=rows * 257,
            block_size=16,
            max_num_seqs=rows,
            max_num_batched_tokens=4096,
            max_model_len=4096,
        )
        self.engine = Engine(_Model(rows, self._spend, noise), limits, (), None)  # type: ignore[arg-type]
        self.engine.pace = PaceMeter(rows, clock=lambda: self.now)
        self.errors = EstimateErrors()
        self._live = SimpleNamespace(workers=(SimpleNamespace(pace=self.engine.pace.read()),))
        self._card_at = self.now
        self._deadlines = Deadlines(self._live, is_on)  # type: ignore[arg-type]
        self._claims: dict[str, tuple[Claim, Call, Started]] = {}
        self._calls: dict[str, Call] = {}
        self.result = Result()

    def _spend(self, seconds: float) -> None:
        self.now += seconds

    def run(self, calls: list[Call]) -> Result:
        """Serve calls until all have ended. Their times begin now."""
        began, arrivals = self.now, sorted(calls, key=lambda call: call.at)
        while arrivals or self.engine.has_work or self._calls:
            while arrivals and began + arrivals[0].at <= self.now:
                self._submit(arrivals.pop(0), began)
            self._take(began)
            if self.engine.has_work:
                self._commit(self.engine.step(), began)
            elif arrivals:
                self.now = max(self.now, began + arrivals[0].at)
        return self.result

    def _set_clock(self) -> None:
        self.lane.client.set(NOW, round(1000 * self.now))
        if self.now - self._card_at >= CARD_S:
            self._card_at = self.now
            self._live.workers = (SimpleNamespace(pace=self.errors.corrected(self.engine.pace.read())),)

    def _submit(self, call: Call, began: float) -> None:
        self._set_clock()
        sampling = SamplingParams(
            max_tokens=call.answer if call.is_exact else 2000, ignore_eos=call.is_exact, temperature=0.0
        )
        request = GenerationRequest(new_id(), "m", (7,) * call.prompt, sampling)
        terms = Admission(
            gateway="g",
            bounds=BOUNDS,
            cost=request.cost,
            prompt_tokens=call.prompt,
            priority_class=call.priority,
            deadline_ms=round(1000 * call.timeout_s),
            **call.share._asdict(),
        )
        terms = self._deadlines.estimated([request], terms)
        try:
            finished(self.lane.broker.submit(request.id, request.encode(), terms))
            self._calls[request.id] = call
        except DeadlineUnreachable as error:
            self.result.refusals.append(error)
            self.result.counts[call.share.tenant, "refused"] += 1

    def _take(self, began: float) -> None:
        self._set_clock()
        while (free := self.engine.groups.num_free_rows()) > 0:
            entries = finished(self.reader.read(free, 0))
            if not entries:
                return
            for entry in entries:
                pace = self.engine.pace.read()
                claim = finished(self.lane.broker.claim(entry, "w", new_id(), "", self.errors.corrected(pace)))
                call = self._calls.pop(entry.request_id)
                if claim is None:
                    self.result.counts[call.share.tenant, "dropped"] += 1
                    continue
                request = GenerationRequest.decode(claim.body)
                self._claims[request.id] = claim, call, Started(self.now, call.prompt, pace)
                sampling = replace(request.sampling, max_tokens=call.answer)
                self.engine.add(replace(request, sampling=sampling))

    def _commit(self, items: list[StepItem], began: float) -> None:
        self._set_clock()
        commits = [StepCommit(self._claims[item.request_id][0].attempt, item) for item in items]
        reply = finished(self.lane.broker.commit_step("w", commits))
        for item in items:
            if item.outcome is not None:
                _, call, started = self._claims.pop(item.request_id)
                if item.outcome.name in COMPLETE:
                    self.errors.note(started, item.end, self.engine.pace.read(), self.now)
                is_met = item.outcome.name in COMPLETE and self.now - began - call.at <= call.timeout_s
                self.result.counts[call.share.tenant, "met" if is_met else "late"] += 1
        if ended := [item for name in reply.expired if (item := self.engine.finish(name, "deadline")) is not None]:
            self._commit(ended, began)

    def close(self) -> None:
        self.lane.close()


def poisson(
    rate: float, seconds: float, seed: int, share: Share = ANYBODY, timeouts: tuple[float, float] = (2, 5), **kind: Any
) -> list[Call]:
    """Return calls that arrive at a rate. timeouts: shortest and longest, in durations of a mean call when idle."""
    chance, calls, at = random.Random(seed), [], 0.0
    while (at := at + chance.expovariate(rate)) < seconds:
        prompt, answer = chance.randint(10, 200), chance.randint(20, 180)
        calls.append(Call(at, prompt, answer, ALONE_S * chance.uniform(*timeouts), share, **kind))
    return calls


def capacity(rows: int) -> float:
    """Return the calls of `poisson` that a worker serves per second."""
    step_s = STEP_S + TOKEN_S * rows
    return 1 / (105 * TOKEN_S + 100 * step_s / rows)
