"""Warm-up of an engine: the first request does not pay for first uses, such as the compilation of kernels."""

from __future__ import annotations

from contextlib import suppress

from quire.shared.protocol.messages import SamplingParams
from quire.worker.engine.engine import Engine
from quire.worker.engine.limits import RequestRefused
from quire.worker.engine.offline import generate

GREEDY = SamplingParams(max_tokens=2, ignore_eos=True, temperature=0.0)
SAMPLED = SamplingParams(max_tokens=2, ignore_eos=True, temperature=1.0)
# Operations that few requests need.
RARE = SamplingParams(max_tokens=2, ignore_eos=True, n=2, presence_penalty=1.0, logprobs=True, top_logprobs=1)


def warm_up(engine: Engine) -> None:
    """Run a prefill chunk and a decode step, greedy and sampled.

    On a GPU also with rare operations: a kernel is compiled at its first launch, during which all requests would wait.
    """
    if engine.limits.max_model_len <= 2:
        return
    prompt = (0,) * max(1, min(7, engine.limits.max_model_len - 2))  # not a whole block, so that a fork copies it
    for params in (GREEDY, SAMPLED, RARE) if engine.runner.looks_ahead else (GREEDY, SAMPLED):
        with suppress(RequestRefused):  # the engine holds one sequence only
            generate(engine, [prompt] * 2, params)
