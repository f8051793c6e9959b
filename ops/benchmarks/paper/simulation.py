"""The real engine on a virtual clock: requests are added when their time has come, a step takes what a profile says.

Everything but the arithmetic is the engine's own: `Engine`, `Scheduler`, its block manager or one of the baselines'.
The model computes nothing; outputs end at their traced length (`ignore_eos`). FasterTransformer, which has no
iteration-level scheduling, has a loop of its own.
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
from quire.shared.messages import GenerationRequest, SamplingParams
from quire.worker.engine.engine import Engine
from quire.worker.engine.input_batch import InputBatch
from quire.worker.engine.limits import EngineLimits
from quire.worker.engine.step import Step

QUIRE = "Quire"
FASTER_TRANSFORMER = "FasterTransformer"
ORCAS = ("Orca (Max)", "Orca (Pow2)", "Orca (Oracle)")
ALLOCATORS = (*ORCAS, QUIRE)

VOCAB = 32
# As the paper's system had them: sequences at once, and tokens of a step.
MAX_SEQUENCES = 256
MAX_STEP_TOKENS = 2560


class NullCache:
    """Blocks without contents."""

    def copy_blocks(self, source: list[int], target: list[int]) -> None: ...
    def swap_out(self, source: list[int], target: list[int]) -> None: ...
    def swap_in(self, source: list[int], target: list[int]) -> None: ...


class NullModel:
    """Gives zeros to whoever samples, and to beams seeded random log-probabilities, so that they branch.

    The log-probabilities of a row are those of independent normal logits with standard deviation `spread` over VOCAB
    tokens. The larger, the surer the model, and the longer beams have their history in common.
    """

    vocab_size = VOCAB
    name = "null"

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
    """Stands where the engine's runner stands: computes nothing, and notes what it would have computed."""

    looks_ahead = False

    def __init__(self, model: NullModel, engine: Engine) -> None:
        self.model = model
        self.input_batch = engine.input_batch
        self.work = StepWork()

    def execute(self, step: Step) -> torch.Tensor:
        self.work = work_of(step, self.input_batch)
        return self.model.logits(self.work.samples)


def work_of(step: Step, input_batch: InputBatch) -> StepWork:
    """What the step does, before it is done."""
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
    """An engine with this memory management over `num_slots` tokens of cache, and no model."""
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
    engine = Engine(model, limits, (), None, blocks=blocks)
    engine.runner = NullRunner(model, engine)  # type: ignore[assignment]
    return engine


@dataclass(slots=True)
class SimulationResult:
    """What became of a trace."""

    normalised: list[float] = field(default_factory=list)  # end-to-end seconds / output tokens, of those that ended
    seconds: float = 0.0
    steps: int = 0
    batched: float = 0.0  # requests that run, averaged over time
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
    """Serve a trace. `sampling`: fields of SamplingParams beside the length. `prefix`: how all prompts begin.

    `observe` is called after each step with the step's seconds. The run is given up once the mean normalised latency is
    sure to exceed `limit`; or, unless `until_drained`, ends when the last request has arrived and nobody waits.
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
            one = requests[at]
            params = SamplingParams(one.output_tokens, seed=at, temperature=0.0, ignore_eos=True, **(sampling or {}))
            prompt = prefix + (at % VOCAB,) * (one.prompt_tokens - len(prefix))
            engine.add(GenerationRequest(str(at), "null", prompt, params))
            due[str(at)] = one
            at += 1
        running = len(engine.groups.running)
        items = engine.step()
        seconds = profile.seconds(runner.work)
        clock += seconds
        outcome.steps += 1
        outcome.batched += max(running, len(engine.groups.running)) * seconds
        for item in items:
            if item.outcome is not None:
                one = due.pop(item.request_id)
                outcome.normalised.append((clock - one.arrival) / one.output_tokens)
                ended += outcome.normalised[-1]
        if observe is not None:
            observe(engine, seconds)
        if bound < float("inf") and outcome.steps % 500 == 0:
            outcome.gave_up = ended + sum((clock - one.arrival) / one.output_tokens for one in due.values()) > bound
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
    """Fixed batches, as large as fits with the whole context reserved for each request; those who came first, first.

    Prompts of a batch are padded to the longest of them, and the batch runs until its longest output has ended.
    """
    outcome = SimulationResult()
    largest = num_slots // CONTEXT
    clock, at = 0.0, 0
    while at < len(requests):
        clock = max(clock, requests[at].arrival)
        batch = [one for one in requests[at : at + largest] if one.arrival <= clock]
        at += len(batch)
        size, prompt = len(batch), max(one.prompt_tokens for one in batch)
        longest = max(one.output_tokens for one in batch)
        began = clock
        pairs = size * prompt * (prompt + 1) // 2
        clock += profile.seconds(StepWork(0, 0, size, size * prompt, pairs, size * prompt, size))
        for step in range(1, longest):
            clock += profile.seconds(StepWork(decodes=size, context=size * (prompt + step), samples=size))
        outcome.steps += longest
        outcome.batched += size * (clock - began)
        outcome.normalised += [(clock - one.arrival) / one.output_tokens for one in batch]
        if sum(outcome.normalised) > limit * len(requests):
            outcome.gave_up = True
            break
    outcome.seconds = clock
    outcome.batched /= max(clock, 1e-9)
    return outcome
