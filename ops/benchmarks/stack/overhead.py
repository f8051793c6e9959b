"""The cost of a decode step without the model.

schedule   select sequences, and allocate a block for each whose last block is full
batch      the inputs of the model, from the persistent arrays
book       bookkeeping of the computed tokens
tokens     argmax, append, check for the end, and an item for each request
metrics    record times and sizes of a step: the difference between whole steps with and without it, in alternation

python -m quire.ops.benchmarks.stack.overhead                       256 and 1,024 sequences
python -m quire.ops.benchmarks.stack.overhead --sequences 64,256

All requests are single sequences that decode greedily, with a model that computes nothing, on one thread. Prints
microseconds per step, as median and 99th percentile over the steps in which all sequences decode.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from typing import Any

import torch

from quire.shared.messages import GenerationRequest, SamplingParams
from quire.worker.engine.engine import Engine
from quire.worker.engine.limits import EngineLimits
from quire.worker.engine.step import Step
from quire.worker.engine.timing import StepTimes

VOCAB = 32
PARTS = ("schedule", "batch", "book", "sum of these", "tokens", "all")


class NoCache:
    """A KV cache without memory."""

    def copy_blocks(self, src: list[int], dst: list[int]) -> None: ...
    def swap_out(self, src: list[int], dst: list[int]) -> None: ...
    def swap_in(self, src: list[int], dst: list[int]) -> None: ...


class NoModel:
    """Returns the same logits and the same token for every row."""

    name = "none"
    weights_digest = ""
    state_bytes = 0

    def __init__(self, max_num_seqs: int, vocab_size: int = VOCAB, token: int = 1) -> None:
        self.ops = self
        self.device = torch.device("cpu")
        self.vocab_size = vocab_size
        self._logits = torch.zeros(max_num_seqs, vocab_size)
        self._tokens = torch.full((max_num_seqs,), token, dtype=torch.int32)

    def alloc_kv_cache(self, num_blocks: int, block_size: int, num_host_blocks: int = 0) -> NoCache:
        return NoCache()

    def forward(self, batch: Any, kv_cache: NoCache) -> torch.Tensor:
        return self._logits[: len(batch.logits_rows)]

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        return self._tokens[: len(logits)]


class NoTimes(StepTimes):
    """Metrics that record nothing."""

    clock = staticmethod(lambda: 0.0)

    def begin_step(self) -> None: ...
    def begin_schedule(self) -> None: ...
    def end_schedule(self) -> None: ...
    def end_execute(self) -> None: ...
    def add_sampling(self, since: float) -> None: ...
    def end_step(self, step: Step) -> None: ...


def full_engine(sequences: int, steps: int, prompt: int = 161) -> Engine:
    """An engine in which `sequences` sequences decode for at least `steps` steps."""
    limits = EngineLimits(
        num_blocks=sequences * (-(-(prompt + steps + 64) // 16) + 1),
        block_size=16,
        max_num_seqs=sequences,
        max_num_batched_tokens=max(2048, sequences),
        max_model_len=max(4096, prompt + steps + 64),
    )
    # NoModel has only the methods that the engine calls.
    engine = Engine(NoModel(sequences), limits, (), None)  # type: ignore[arg-type]
    params = SamplingParams(max_tokens=steps + 64, temperature=0.0, ignore_eos=True)
    for index in range(sequences):
        # Different lengths, so that blocks become full at different times.
        ids = tuple((index * 7 + i) % VOCAB for i in range(prompt - index % 16))
        engine.add(GenerationRequest(str(index), "none", ids, params))
    while len(engine.groups.decodes) < sequences:
        engine.step()
    gc.collect()
    gc.freeze()
    return engine


def measure_metrics(sequences: int, steps: int) -> dict[str, list[float]]:
    """Seconds of whole steps, with and without metrics. The two alternate, so that they run under equal conditions."""
    engine = full_engine(sequences, 2 * steps)
    kinds: dict[str, StepTimes] = {"with metrics": StepTimes(), "without": NoTimes()}
    found: dict[str, list[float]] = {name: [] for name in kinds}
    clock = time.perf_counter
    for _ in range(steps):
        for name, times in kinds.items():
            engine.times = times
            start = clock()
            engine.step()
            found[name].append(clock() - start)
    assert kinds["with metrics"].read().sequences.count == steps
    return found


def measure(sequences: int, steps: int) -> dict[str, list[float]]:
    """Seconds per step of each part, over `steps` steps."""
    engine = full_engine(sequences, steps)
    parts: dict[str, list[float]] = {
        name: [] for name in ("schedule", "batch", "book", "sum of these", "tokens", "all")
    }
    clock = time.perf_counter
    for _ in range(steps):
        start = clock()
        step = engine.scheduler.schedule()
        scheduled = clock()
        batch = engine.runner._build(step)
        built = clock()
        logits = engine.runner.model.forward(batch, engine.runner.kv_cache)
        forward = clock()
        inputs = engine._sampling_inputs(step, logits)
        booked = clock()
        items = engine._sample(inputs)
        end = clock()
        assert len(items) == sequences
        parts["schedule"].append(scheduled - start)
        parts["batch"].append(built - scheduled)
        parts["book"].append(booked - forward)
        parts["sum of these"].append(built - start + booked - forward)
        parts["tokens"].append(end - booked)
        parts["all"].append(end - start - (forward - built))
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", default="256,1024")
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'sequences':>9}  {'part':12} {'median us':>10} {'p99 us':>8}")
    for count in map(int, args.sequences.split(",")):
        parts = measure(count, args.steps)
        for name, seconds in {**parts, **measure_metrics(count, args.steps)}.items():
            ordered = sorted(seconds)
            p99 = ordered[int(0.99 * len(ordered))]
            print(f"{count:9}  {name:12} {1e6 * statistics.median(ordered):10.0f} {1e6 * p99:8.0f}")


if __name__ == "__main__":
    main()
