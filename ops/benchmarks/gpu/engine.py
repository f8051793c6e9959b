"""Measures the speed of the engine on a GPU, at published shapes with random weights, without other services."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from quire import kernels
from quire.ops.benchmarks.paper.workloads import SHAREGPT, lengths
from quire.ops.benchmarks.stack.random_model import random_decoder
from quire.shared.protocol.messages import GenerationRequest, SamplingParams
from quire.worker.device import devices
from quire.worker.device.cuda import memory_plan
from quire.worker.device.cuda.graph_capture import graph_buckets
from quire.worker.device.cuda.graphs import GREEDY, GraphBucket, Graphs
from quire.worker.device.cuda.runner import DeviceRunner
from quire.worker.engine.engine import Engine
from quire.worker.engine.limits import EngineLimits
from quire.worker.engine.runner import StepOutput
from quire.worker.engine.step import Step
from quire.worker.engine.transfers import SampledTokens
from quire.worker.inspect.snapshot import take_snapshot
from quire.worker.settings import WorkerSettings

BLOCK_SIZE = 16
MOST_FEW = 8  # sequences of a step that is measured with and without the kernels for few rows


@dataclass(frozen=True, slots=True)
class Load:
    """A workload whose requests arrive together. floor, least, aim: of an H200 (docs/benchmarks.md), in `unit`."""

    what: str
    model: str
    pairs: tuple[tuple[int, int], ...]  # prompt and output tokens
    unit: str
    floor: float
    least: float
    aim: float


def uniform_pairs(count: int, low: int, high: int) -> tuple[tuple[int, int], ...]:
    """Draw prompt and output lengths uniformly."""
    draw = random.Random(0)
    return tuple((draw.randint(low, high), draw.randint(low, high)) for _ in range(count))


SMALL, LARGE = "qwen3-0.6b", "llama-3.1-8b"
LOADS = (
    Load("256 requests, U(100,1024) in and out", SMALL, uniform_pairs(256, 100, 1024), "tok/s", 36_000, 20_000, 28_800),
    Load("batch 1, 128 in, 512 out", SMALL, ((128, 512),), "tok/s", 3_282, 700, 1_600),
    Load("1,024 requests, 128 in, 128 out", LARGE, ((128, 128),) * 1024, "tok/s", 23_400, 14_000, 18_700),
    Load("384 requests, 1,024 in, 128 out", LARGE, ((1024, 128),) * 384, "tok/s", 5_100, 3_200, 4_100),
    Load("512 requests, ShareGPT lengths", LARGE, tuple(lengths(SHAREGPT, 512, 0)), "req/s", 78, 45, 63),
    Load("batch 1, context 1k", LARGE, ((1024, 256),), "tok/s", 284, 199, 227),
)


def make_engine(
    name: str,
    device: torch.device,
    longest: int,
    graphs: bool = True,
    invariant: bool = False,
    buckets: SequenceOf[GraphBucket] | None = None,
    step: tuple[int, int] = (0, 0),
) -> Engine:
    """Make an engine with a random model, whose cache takes all memory that is left.

    longest: context length. buckets: sizes of its CUDA graphs; None: those of a worker. step: the most sequences and
    tokens of a step; 0: those of a worker.
    """
    settings = WorkerSettings(
        block_size=BLOCK_SIZE,
        cuda_graphs=graphs,
        max_num_seqs=step[0],
        max_num_batched_tokens=step[1],
    )
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    on_cpu = device.type == "cpu"
    ops = kernels.select_ops("cpu", dtype) if on_cpu else kernels.triton_ops(device, dtype, False, invariant)
    model = random_decoder(name, ops, dtype, longest)
    sequences, tokens = devices.max_num_seqs(settings, device), devices.max_num_batched_tokens(settings, device)
    room = 1 << 26
    if device.type == "cuda":
        room, _, tokens = memory_plan.plan_cuda_memory(settings, model, longest)
    limits = EngineLimits(
        num_blocks=room // model.kv_bytes_per_block(BLOCK_SIZE),
        block_size=BLOCK_SIZE,
        max_num_seqs=sequences,
        max_num_batched_tokens=tokens,
        max_model_len=longest,
        prefix_caching=False,
    )
    if buckets is None:
        buckets = graph_buckets(sequences, tokens)
    if not graphs or device.type != "cuda":
        buckets = []
    return Engine(model, limits, (), None, name, runner=partial(DeviceRunner, graph_buckets=buckets))


def measure(
    name: str,
    device: torch.device,
    longest: int,
    loads: SequenceOf[Load],
    shapes: SequenceOf[tuple[int, int]],
    graphs: bool,
    save: Callable[[dict[str, Any]], None],
    step: tuple[int, int] = (0, 0),
    steps: int = 100,
) -> dict[str, Any]:
    """Measure loads and `steps` decode steps.

    Return "rows" with a row for each load, "steps" with a row for each shape (sequences, context), those of few rows
    once more without the kernels for them, and "graphs" with the time and memory of the CUDA graphs.
    """
    results: dict[str, Any] = {"rows": [], "steps": [], "graphs": []}
    engine = make_engine(name, device, longest, graphs, step=step)
    free, started = free_bytes(device), time.perf_counter()
    while engine.prepare():
        pass
    count = engine.runner.graphs.num_captured if isinstance(engine.runner, DeviceRunner) else 0
    seconds, taken = time.perf_counter() - started, free - free_bytes(device)
    results["graphs"].append({"model": name, "count": count, "seconds": seconds, "gib": taken / 2**30})
    print(results["graphs"][-1], flush=True)
    for load in loads:
        results["rows"].append(run(engine, load) | {"graphs": graphs})
        print(results["rows"][-1], flush=True)
        save(results)
    for sequences, context in shapes:
        results["steps"].append({"model": name, **decode_steps(engine, sequences, context, steps)})
        print(results["steps"][-1], flush=True)
        save(results)
    few = [shape for shape in shapes if shape[0] <= MOST_FEW]
    replace_few_rows(engine, [sequences for sequences, _ in few])
    for sequences, context in few:
        row = {"model": name, **decode_steps(engine, sequences, context, steps), "replaced": "few_rows"}
        results["steps"].append(row)
        print(row, flush=True)
        save(results)
    return results


def replace_few_rows(engine: Engine, sizes: list[int]) -> None:
    """Compute steps of a few rows by single operations from now on. sizes: of the graphs that are captured."""
    runner = engine.runner
    assert isinstance(runner, DeviceRunner)
    assert isinstance(runner.model.ops, kernels.ReplaceableKernels)
    runner.model.ops.replace_kernel("few_rows")
    had_graphs = bool(runner.graphs.num_captured)
    buckets = [GraphBucket(GREEDY, size, size) for size in sizes if had_graphs]
    runner.graphs = Graphs(buckets, runner._stage_padding, runner._launch)
    while runner.capture_next():
        pass


def free_bytes(device: torch.device) -> int:
    """Return the free bytes of the device's memory, after torch has released its unused memory; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def requests(load: Load, vocabulary: int) -> Iterator[GenerationRequest]:
    """Yield the requests of a load, with random prompts."""
    draw = random.Random(1)
    for index, (prompt, output) in enumerate(load.pairs):
        params = SamplingParams(output, temperature=0.0, ignore_eos=True)
        yield GenerationRequest(f"{index}", "bench", tuple(draw.choices(range(2, vocabulary), k=prompt)), params)


def run(engine: Engine, load: Load) -> dict[str, Any]:
    """Serve a workload to its end. Return time, rate and the use of the cache."""
    for request in requests(load, engine.vocab_size):
        engine.add(request)
    tokens = steps = 0
    used, wasted = [], []
    started = time.perf_counter()
    while engine.has_work:
        tokens += sum(len(delta.token_ids) for item in engine.step() for delta in item.deltas)
        steps += 1
        if steps % 50 == 0:
            now = take_snapshot(engine).usage()
            held = now.blocks_used * now.block_size
            if held:
                used.append(now.slots_filled / held)
                wasted.append(1 - now.slots_filled / held)
    seconds = time.perf_counter() - started
    assert tokens == sum(output for _, output in load.pairs), "tokens are missing"
    rate = tokens / seconds if load.unit == "tok/s" else len(load.pairs) / seconds
    return {
        "what": load.what,
        "model": load.model,
        "unit": load.unit,
        "rate": rate,
        "seconds": seconds,
        "output_tokens": tokens,
        "steps": steps,
        "floor": load.floor,
        "least": load.least,
        "aim": load.aim,
        "preemptions": engine.groups.num_preemptions,
        "used_percent": 100 * sum(used) / len(used) if used else None,
        "wasted_percent": 100 * sum(wasted) / len(wasted) if wasted else None,
    }


def decode_steps(engine: Engine, sequences: int, context: int, steps: int = 100) -> dict[str, float | None]:
    """Measure decode steps in a steady state. Returns milliseconds:

    step_ms: of a step. busy_ms: of its graph, replayed alone. wait_ms: the difference. gap_ms: of the time between two
    steps in which the device had nothing to do, because the host had not launched the next one.
    """
    for index in range(sequences):
        prompt = tuple((7 * index + i) % (engine.vocab_size - 2) + 2 for i in range(context))
        params = SamplingParams(steps + 200, temperature=0.0, ignore_eos=True)
        engine.add(GenerationRequest(f"d{index}", "bench", prompt, params))
    while len(engine.groups.decodes) < sequences:
        engine.step()
    for _ in range(steps // 5):
        engine.step()
    runner = engine.runner
    assert isinstance(runner, DeviceRunner)
    wall, gap = _timed_steps(engine, runner, steps)
    busy: float | None = None
    if captured := runner.graphs.find(GREEDY, sequences, sequences):
        graph = captured[1]
        begin, end = _event(), _event()
        begin.record()
        for _ in range(steps):
            graph.replay()
        end.record()
        end.synchronize()
        busy = begin.elapsed_time(end) / steps
    mixed = _mixed_launch_ms(engine, prompts=min(8, steps)) if sequences < engine.limits.max_num_seqs else None
    for name in list(engine.requests):
        engine.drop(name)
    return {
        "sequences": sequences,
        "context": context,
        "step_ms": wall,
        "mixed_launch_ms": mixed,
        "busy_ms": busy,
        "wait_ms": None if busy is None else max(0.0, wall - busy),
        "gap_ms": gap,
    }


def _timed_steps(engine: Engine, runner: DeviceRunner, steps: int) -> tuple[float, float]:
    """Return milliseconds of a step, and of the gap before it."""
    decode, marks = runner.decode, []

    def marked(step: Step) -> SampledTokens | None:
        begin, end = _event(), _event()
        begin.record()
        tokens = decode(step)
        end.record()
        marks.append((begin, end))
        return tokens

    runner.decode = marked  # type: ignore[method-assign]
    torch.cuda.synchronize()
    started = time.perf_counter()
    try:
        for _ in range(steps):
            engine.step()
        torch.cuda.synchronize()
    finally:
        del runner.decode
    wall = 1e3 * (time.perf_counter() - started) / steps
    return wall, statistics.mean(end.elapsed_time(begin) for (_, end), (begin, _) in pairwise(marks))


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _mixed_launch_ms(engine: Engine, prompts: int = 8, length: int = 100) -> float:
    """Return the median milliseconds in which the host launches a step of decodes and one new prompt.

    A step whose work on the device is shorter than this time waits for the host.
    """
    runner, spent = engine.runner, []
    execute = runner.execute

    def timed(step: Step) -> StepOutput | None:
        started = time.perf_counter()
        output = execute(step)
        if step.chunks:
            spent.append(time.perf_counter() - started)
        return output

    runner.execute = timed  # type: ignore[method-assign]
    try:
        for index in range(prompts):
            prompt = tuple((11 * index + i) % (engine.vocab_size - 2) + 2 for i in range(length))
            params = SamplingParams(2, temperature=0.0, ignore_eos=True)
            engine.add(GenerationRequest(f"m{index}", "bench", prompt, params))
            while f"m{index}" in engine.requests:
                engine.step()
    finally:
        del runner.execute
    return 1e3 * statistics.median(spent)
