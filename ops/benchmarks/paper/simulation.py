"""The real engine on a virtual clock: requests are added at their arrival time, and a profile gives the time of steps.

Everything except the arithmetic is real: `Engine`, `Scheduler`, and its block manager or that of a baseline.
The model computes nothing; outputs end at their traced length (`ignore_eos`). FasterTransformer has its own loop,
because it has no iteration-level scheduling.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from quire.ops.benchmarks.paper.allocators import POLICIES, OrcaManager
from quire.ops.benchmarks.paper.profiles import OPT_13B_SLOTS, Profile, StepWork
from quire.ops.benchmarks.paper.workloads import CONTEXT, Request
from quire.shared.protocol.messages import GenerationRequest, SamplingParams
from quire.worker.engine.engine import Engine
from quire.worker.engine.input_batch import InputBatch
from quire.worker.engine.limits import EngineLimits
from quire.worker.engine.runner import StepOutput
from quire.worker.engine.step import Step

QUIRE = "Quire"
FASTER_TRANSFORMER = "FasterTransformer"
ORCAS = ("Orca (Max)", "Orca (Pow2)", "Orca (Oracle)")
ALLOCATORS = (*ORCAS, QUIRE)

VOCAB = 32
# Limits of the paper's system: concurrent sequences, and tokens per step.
MAX_SEQUENCES = 256
MAX_STEP_TOKENS = 2560


class NullCache:
    """A KV cache without memory."""

    def copy_blocks(self, source: list[int], target: list[int]) -> None: ...
    def swap_out(self, source: list[int], target: list[int]) -> None: ...
    def swap_in(self, source: list[int], target: list[int]) -> None: ...


class NullModel:
    """Returns zeros for sampling, and seeded random log-probabilities for beams, so that beams branch.

    The log-probabilities of a row are those of independent normal logits with standard deviation `spread` over VOCAB
    tokens. A larger value means a more certain model, whose beams share a longer history.
    """

    vocab_size = VOCAB
    name = "null"
    state_bytes = 0

    def __init__(self, max_rows: int, spread: float = 1.0, seed: int = 0) -> None:
        self.ops = self
        self.device = torch.device("cpu")
        self._logits = torch.zeros(max_rows, VOCAB)
        self._tokens = torch.ones(max_rows, dtype=torch.int32)
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(8192, VOCAB, generator=generator) * spread
        self._values, ids = torch.log_softmax(logits, dim=-1).sort(descending=True)
        self._ids = ids.to(torch.int32)
        self._random = np.random.default_rng([seed, 4])

    def alloc_kv_cache(self, num_blocks: int, block_size: int, num_host_blocks: int = 0) -> NullCache:
        return NullCache()

    def logits(self, rows: int) -> torch.Tensor:
        return self._logits[:rows]

    def forward(self, batch: Any, kv_cache: Any) -> torch.Tensor:
        return self._logits[: len(batch.logits_rows)]

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        return self._tokens[: len(logits)]

    def top_logprobs(self, logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.from_numpy(self._random.integers(len(self._values), size=len(logits)))
        return self._values[rows, :count], self._ids[rows, :count]


class NullRunner:
    """A runner that computes nothing and records the work of each step."""

    looks_ahead = False

    def __init__(self, model: NullModel, engine: Engine) -> None:
        self.model = model
        self.input_batch = engine.input_batch
        self.work = StepWork()

    def execute(self, step: Step) -> StepOutput:
        self.work = work_of(step, self.input_batch)
        return StepOutput(self.model.logits(self.work.samples))


def work_of(step: Step, input_batch: InputBatch) -> StepWork:
    """Return the work of a step, before it is executed."""
    prefill = attended = chunk_context = sampled = 0
    for chunk in step.chunks:
        first, count = chunk.sequence.num_computed, chunk.num_tokens
        prefill += count
        attended += count * first + count * (count + 1) // 2
        chunk_context += first + count
        sampled += chunk.is_sampled
    decodes = len(step.decodes)
    context = int(input_batch.lengths[step.decodes.rows].sum()) if decodes else 0
    return StepWork(decodes, context, len(step.chunks), prefill, attended, chunk_context, decodes + sampled)


def make_engine(
    allocator: str,
    num_slots: int = OPT_13B_SLOTS,
    block_size: int = 16,
    spread: float = 1.0,
    seed: int = 0,
    num_host_blocks: int = 0,
    preemption: str = "auto",
) -> Engine:
    """Return an engine with this memory management over `num_slots` tokens of cache, and no model."""
    blocks = None
    if allocator != QUIRE:
        block_size = 1
        blocks = OrcaManager(num_slots, CONTEXT, POLICIES[allocator])
    limits = EngineLimits(
        num_blocks=num_slots // block_size,
        block_size=block_size,
        max_num_seqs=MAX_SEQUENCES,
        max_num_batched_tokens=MAX_STEP_TOKENS,
        max_model_len=CONTEXT,
        prefix_caching=False,
        num_host_blocks=num_host_blocks,
        preemption=preemption,
    )
    model = NullModel(MAX_STEP_TOKENS, spread, seed)
    # NullModel has only the methods that the engine calls.
    engine = Engine(model, limits, (), None, blocks=blocks)  # type: ignore[arg-type]
    engine.runner = NullRunner(model, engine)  # type: ignore[assignment]
    return engine


@dataclass(slots=True)
class SimulationResult:
    """The result of serving a trace."""

    normalised: list[float] = field(default_factory=list)  # end-to-end seconds / output tokens, of those that ended
    seconds: float = 0.0
    steps: int = 0
    batched: float = 0.0  # number of running requests, averaged over time
    gave_up: bool = False

    @property
    def latency(self) -> float:
        """Mean normalised latency, seconds per token; infinite if the run was given up."""
        return float("inf") if self.gave_up else sum(self.normalised) / len(self.normalised)


Observer = Callable[[Engine, float], None]


def simulate(
    engine: Engine,
    requests: list[Request],
    profile: Profile,
    sampling: dict[str, Any] | None = None,
    prefix: tuple[int, ...] = (),
    observe: Observer | None = None,
    limit: float = float("inf"),
    until_drained: bool = True,
) -> SimulationResult:
    """Serve a trace. `sampling`: fields of SamplingParams in addition to the length. `prefix`: shared by all prompts.

    `observe` is called after each step with the step's seconds. The run is given up once the mean normalised latency is
    certain to exceed `limit`. Unless `until_drained`, it ends when the last request has arrived and no request waits.
    """
    outcome = SimulationResult()
    due: dict[str, Request] = {}
    clock, at, ended = 0.0, 0, 0.0
    runner: Any = engine.runner
    bound = limit * len(requests)
    while at < len(requests) or engine.has_work:
        if not engine.has_work:
            clock = max(clock, requests[at].arrival)
        while at < len(requests) and requests[at].arrival <= clock:
            request = requests[at]
            params = SamplingParams(
                request.output_tokens, seed=at, temperature=0.0, ignore_eos=True, **(sampling or {})
            )
            prompt = prefix + (at % VOCAB,) * (request.prompt_tokens - len(prefix))
            engine.add(GenerationRequest(str(at), "null", prompt, params))
            due[str(at)] = request
            at += 1
        running = len(engine.groups.running)
        items = engine.step()
        seconds = profile.seconds(runner.work)
        clock += seconds
        outcome.steps += 1
        outcome.batched += max(running, len(engine.groups.running)) * seconds
        for item in items:
            if item.outcome is not None:
                request = due.pop(item.request_id)
                outcome.normalised.append((clock - request.arrival) / request.output_tokens)
                ended += outcome.normalised[-1]
        if observe is not None:
            observe(engine, seconds)
        if bound < float("inf") and outcome.steps % 500 == 0:
            outcome.gave_up = (
                ended + sum((clock - request.arrival) / request.output_tokens for request in due.values()) > bound
            )
            if outcome.gave_up:
                break
        if not until_drained and at == len(requests) and not any(engine.groups.waiting):
            break
    outcome.seconds = clock
    outcome.batched /= max(clock, 1e-9)
    return outcome


def faster_transformer(
    requests: list[Request], profile: Profile, num_slots: int = OPT_13B_SLOTS, limit: float = float("inf")
) -> SimulationResult:
    """Serve fixed batches in order of arrival, as large as fits with the whole context reserved for each request.

    Prompts of a batch are padded to the longest of them, and the batch runs until its longest output has ended.
    """
    outcome = SimulationResult()
    largest = num_slots // CONTEXT
    clock, at = 0.0, 0
    while at < len(requests):
        clock = max(clock, requests[at].arrival)
        batch = [request for request in requests[at : at + largest] if request.arrival <= clock]
        at += len(batch)
        size, prompt = len(batch), max(request.prompt_tokens for request in batch)
        longest = max(request.output_tokens for request in batch)
        began = clock
        pairs = size * prompt * (prompt + 1) // 2
        clock += profile.seconds(StepWork(0, 0, size, size * prompt, pairs, size * prompt, size))
        for step in range(1, longest):
            clock += profile.seconds(StepWork(decodes=size, context=size * (prompt + step), samples=size))
        outcome.steps += longest
        outcome.batched += size * (clock - began)
        outcome.normalised += [(clock - request.arrival) / request.output_tokens for request in batch]
        if sum(outcome.normalised) > limit * len(requests):
            outcome.gave_up = True
            break
    outcome.seconds = clock
    outcome.batched /= max(clock, 1e-9)
    return outcome
