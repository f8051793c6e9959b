"""Measured times of real engine steps on a checkpoint, and the profile that is fitted to them.

A context of N tokens is made without computing it: the engine prefills prompts with a model that computes nothing, and
the real model replaces it for the timed steps. The contents of the cache do not affect their time.
"""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quire import kernels
from quire.ops.benchmarks.paper.context import Context
from quire.ops.benchmarks.paper.profiles import Linear, StepWork
from quire.ops.benchmarks.paper.simulation import NullModel, work_of
from quire.ops.benchmarks.stack.checkpoint import make_checkpoint
from quire.shared.protocol.messages import GenerationRequest, SamplingParams
from quire.worker.device.devices import choose_dtype
from quire.worker.engine.engine import Engine
from quire.worker.engine.limits import EngineLimits
from quire.worker.models.native.decoder import Decoder

SHAPE, QUICK_SHAPE = "llama135m", "tiny"
DECODES = (1, 4, 16, 32)
CONTEXTS = (32, 512)
PREFILLS = (16, 64, 256)
MAX_TOKENS = 1 << 16  # of the cache of one engine


def load(context: Context) -> Decoder:
    """Return the random checkpoint that steps are measured on, in the type that a worker would choose."""
    shape = QUICK_SHAPE if context.quick else SHAPE
    folder = make_checkpoint(context.folder / shape, shape)
    return load_from(folder)


def load_from(folder: Path) -> Decoder:
    dtype = choose_dtype("auto", torch.device("cpu"))
    return Decoder.load(folder, kernels.select_ops("cpu", dtype), dtype, "cpu")


def make_engine(
    model: Decoder,
    num_tokens: int,
    block_size: int = 16,
    max_num_seqs: int = 64,
    num_host_blocks: int = 0,
    preemption: str = "auto",
) -> Engine:
    """Return an engine with a cache for `num_tokens` tokens, without prefix caching."""
    limits = EngineLimits(
        num_blocks=-(-num_tokens // block_size),
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=1024,
        max_model_len=model.max_model_len,
        num_host_blocks=num_host_blocks,
        prefix_caching=False,
        preemption=preemption,
    )
    return Engine(model, limits, (), None)


class Stopwatch:
    """Wraps an engine's scheduler and its steps, to record the work and the seconds of each step."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.work = StepWork()
        schedule = engine.scheduler.schedule

        def scheduled() -> Any:
            step = schedule()
            self.work = work_of(step, engine.input_batch)
            return step

        engine.scheduler.schedule = scheduled  # type: ignore[method-assign]

    def step(self) -> tuple[StepWork, float]:
        started = time.perf_counter()
        self.engine.step()
        return self.work, time.perf_counter() - started


def begin_decoding(engine: Engine, sequences: int, context: int, steps: int) -> None:
    """Bring `sequences` to where they decode with `context` tokens each, for `steps` steps, computing nothing."""
    runner = engine.runner
    model = runner.model
    # NullModel has only the methods that the engine calls.
    runner.model = NullModel(engine.limits.max_num_batched_tokens)  # type: ignore[assignment]
    for index in range(sequences):
        params = SamplingParams(steps + 2, temperature=0.0, ignore_eos=True)
        engine.add(GenerationRequest(f"{index}", "paper", (2 + index,) * context, params))
    while not all(sequence.is_decoding for group in engine.requests.values() for sequence in group.sequences):
        engine.step()
    runner.model = model


def drop_all(engine: Engine) -> None:
    for request_id in list(engine.requests):
        engine.drop(request_id)


def time_decodes(engine: Engine, sequences: int, context: int, repeat: int) -> tuple[StepWork, float]:
    """Time a decode step. Return its work and the shortest of `repeat` times, because the machine may be busy."""
    begin_decoding(engine, sequences, context, repeat + 4)
    watch = Stopwatch(engine)
    watch.step()
    timed = [watch.step() for _ in range(repeat)]
    drop_all(engine)
    return timed[repeat // 2][0], min(seconds for _, seconds in timed)


def time_prefill(engine: Engine, tokens: int, decodes: int, repeat: int) -> tuple[StepWork, float]:
    """Time a step with a new prompt of `tokens` tokens, together with sequences that decode."""
    best: tuple[StepWork, float] | None = None
    for index in range(repeat):
        if decodes:
            begin_decoding(engine, decodes, 128, 8)
        params = SamplingParams(4, temperature=0.0, ignore_eos=True)
        engine.add(GenerationRequest(f"prompt-{index}", "paper", (3,) * tokens, params))
        timed = Stopwatch(engine).step()
        assert timed[0].prefill == tokens, timed[0]
        drop_all(engine)
        best = timed if best is None or timed[1] < best[1] else best
    assert best is not None
    return best


def fit(points: list[tuple[StepWork, float]], name: str) -> tuple[Linear, list[float]]:
    """Fit a profile by least squares of relative errors, without negative coefficients. Return it and the errors."""
    features = np.array([Linear.features(work) for work, _ in points], dtype=np.float64)
    seconds = np.array([seconds for _, seconds in points])
    kept = list(range(features.shape[1]))
    while True:
        fitted, *_ = np.linalg.lstsq(features[:, kept] / seconds[:, None], np.ones(len(seconds)), rcond=None)
        if (fitted >= 0).all():
            break
        kept.pop(int(fitted.argmin()))
    coefficients = np.zeros(features.shape[1])
    coefficients[kept] = fitted
    errors = features @ coefficients / seconds - 1
    return Linear(name, tuple(float(coefficient) for coefficient in coefficients)), [float(error) for error in errors]


def fitted_profile(context: Context) -> tuple[Linear, dict[str, Any]]:
    """Measure a grid of steps on this machine and fit a profile to them; and what a report says of it."""
    model = load(context)
    repeat = 2 if context.quick else 3
    engine = make_engine(model, 1 << 13 if context.quick else MAX_TOKENS)
    room = engine.limits.num_blocks * engine.limits.block_size * 0.9
    grid = [(count, tokens) for count, tokens in itertools.product(DECODES, CONTEXTS) if count * (tokens + 32) <= room]
    points = []
    for count, tokens in grid:
        context.say(f"timing {count} decodes with {tokens} tokens of context")
        points.append(time_decodes(engine, count, tokens, repeat))
    for tokens, decodes in itertools.product(PREFILLS, (0, 8)):
        context.say(f"timing a prompt of {tokens} tokens beside {decodes} decodes")
        points.append(time_prefill(engine, tokens, decodes, repeat))
    profile, errors = fit(points, f"fitted to this machine ({model.ops.name}, {SHAPE})")
    report = {
        "name": profile.name,
        "coefficients": dict(zip(Linear.NAMES, profile.coefficients, strict=True)),
        "points": len(points),
        "mean_absolute_error": float(np.mean(np.abs(errors))),
        "largest_error": float(np.max(np.abs(errors))),
        "measured": [{**{f: getattr(w, f) for f in w.__slots__}, "seconds": s} for w, s in points],
    }
    return profile, report
