"""The cases of `make bench`: prompts of random token ids, answers of a fixed length, a closed loop."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from statistics import median
from typing import Any

from quire.ops.loadgen.client import RequestRecord, clock, encode, new_session, stream
from quire.ops.loadgen.measures import percentile


@dataclass(frozen=True, slots=True)
class LoadCase:
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
        LoadCase("c1", 128, 64, requests=8, concurrency=1),
        LoadCase("c32", 128, 64, requests=64, concurrency=32),
        LoadCase("long", 512, 128, requests=16, concurrency=16),
        LoadCase("prefix", 32, 32, requests=64, concurrency=32, shared_prefix=512),
    )
}


@dataclass(frozen=True, slots=True)
class LoadResult:
    """The results of a case. Times are in milliseconds."""

    case: str
    requests: int
    output_tokens: int
    seconds: float
    output_tokens_per_s: float
    ttft_ms: float
    tpot_ms: float
    itl_ms: float
    itl_p99_ms: float


async def run_case(
    url: str, model: str, vocab_size: int, case: LoadCase, seed: int = 0, *, keep_alive: bool = True
) -> LoadResult:
    """Run a case against the server at `url`. Raise RuntimeError if a request fails or is cut short.

    keep_alive: False opens a connection for each request, for servers that close idle connections at any time.
    """
    draw = random.Random(seed)
    ids = range(2, vocab_size)
    prefix = draw.choices(ids, k=case.shared_prefix)
    prompts = [prefix + draw.choices(ids, k=case.input_tokens) for _ in range(case.requests)]
    bodies = [encode(_body(model, prompt, case.output_tokens)) for prompt in prompts]
    records = [RequestRecord(index, len(prompt), case.output_tokens) for index, prompt in enumerate(prompts)]
    gate = asyncio.Semaphore(case.concurrency)
    async with new_session(timeout_s=None, keep_alive=keep_alive) as session:

        async def send(body: bytes, record: RequestRecord) -> None:
            async with gate:
                await stream(session, f"{url}/v1/completions", body, record)

        start = clock()
        await asyncio.gather(*map(send, bodies, records))
        seconds = clock() - start
    if failed := [record for record in records if not record.ok]:
        raise RuntimeError(f"{url}: {failed[0].error}: {failed[0].message}")
    tokens = sum(record.tokens for record in records)
    if tokens != case.requests * case.output_tokens:
        raise RuntimeError(f"{case.name}: {tokens} tokens came back, not {case.requests * case.output_tokens}")
    # There is no gap if all tokens of each answer came together.
    gaps = sorted(gap for record in records for gap in record.gaps_s) or [0.0]
    return LoadResult(
        case.name,
        case.requests,
        tokens,
        seconds,
        tokens / seconds,
        1000 * median(record.ttft_s for record in records),
        1000 * median(record.tpot_s or 0.0 for record in records),
        1000 * median(gaps),
        1000 * percentile(gaps, 0.99),
    )


def _body(model: str, prompt: list[int], length: int) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": length,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
