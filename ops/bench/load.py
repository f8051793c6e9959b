"""A load client for any OpenAI-compatible server: streams completions and reads the clock at every token."""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import dataclass, field
from statistics import median

import aiohttp


@dataclass(frozen=True, slots=True)
class Case:
    """A workload: prompts of random token ids, a fixed output length, and how many requests are open at once."""

    name: str
    input_tokens: int
    output_tokens: int
    requests: int
    concurrency: int
    shared_prefix: int = 0


CASES = {
    case.name: case
    for case in (
        Case("c1", 128, 64, requests=8, concurrency=1),
        Case("c32", 128, 64, requests=64, concurrency=32),
        Case("long", 512, 128, requests=16, concurrency=16),
        Case("prefix", 32, 32, requests=64, concurrency=32, shared_prefix=512),
    )
}


@dataclass(slots=True)
class Timing:
    """One request: when it was sent, and when each token came."""

    sent: float
    tokens: list[float] = field(default_factory=list)
    completion_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Result:
    """What a case measured. Times in milliseconds."""

    case: str
    requests: int
    output_tokens: int
    seconds: float
    output_tokens_per_s: float
    ttft_ms: float
    tpot_ms: float
    itl_ms: float
    itl_p99_ms: float


async def run_case(url: str, model: str, vocab_size: int, case: Case, seed: int = 0) -> Result:
    """Run a case against the server at `url`. Raises RuntimeError if a request fails or is cut short."""
    draw = random.Random(seed)
    ids = range(2, vocab_size)
    prefix = draw.choices(ids, k=case.shared_prefix)
    prompts = [prefix + draw.choices(ids, k=case.input_tokens) for _ in range(case.requests)]
    gate = asyncio.Semaphore(case.concurrency)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:

        async def one(prompt: list[int]) -> Timing:
            async with gate:
                return await _stream(session, url, model, prompt, case.output_tokens)

        start = time.perf_counter()
        timings = await asyncio.gather(*(one(prompt) for prompt in prompts))
        seconds = time.perf_counter() - start
    tokens = sum(timing.completion_tokens for timing in timings)
    if tokens != case.requests * case.output_tokens:
        raise RuntimeError(f"{case.name}: {tokens} tokens came back, not {case.requests * case.output_tokens}")
    gaps = sorted(b - a for t in timings for a, b in zip(t.tokens, t.tokens[1:], strict=False))
    per_token = [(t.tokens[-1] - t.tokens[0]) / (t.completion_tokens - 1) for t in timings]
    return Result(
        case.name,
        case.requests,
        tokens,
        seconds,
        tokens / seconds,
        1000 * median(t.tokens[0] - t.sent for t in timings),
        1000 * median(per_token),
        1000 * median(gaps),
        1000 * gaps[int(0.99 * (len(gaps) - 1))],
    )


async def _stream(session: aiohttp.ClientSession, url: str, model: str, prompt: list[int], length: int) -> Timing:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": length,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    timing = Timing(time.perf_counter())
    async with session.post(f"{url}/v1/completions", json=body) as response:
        if response.status != 200:
            raise RuntimeError(f"{url}: status {response.status}: {(await response.text())[:300]}")
        async for line in response.content:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            now = time.perf_counter()
            event = json.loads(line[6:])
            if event.get("choices") and event["choices"][0]["text"]:
                timing.tokens.append(now)
            if event.get("usage"):
                timing.completion_tokens = event["usage"]["completion_tokens"]
    return timing
