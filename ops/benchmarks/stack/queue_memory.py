"""The memory of requests and their output in Redis: python -m quire.ops.benchmarks.stack.queue_memory

The benchmark starts its own Redis, submits requests as a gateway does, and commits items as a worker does, with one
token per step.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from random import Random

from quire.gateway.stream.call_metadata import CallMetadata
from quire.ops.local.embedded_redis import EmbeddedRedis
from quire.shared.broker import Broker, QueueBounds, QueueReader, StepCommit, new_id
from quire.shared.messages import Delta, GenerationRequest, SamplingParams, StepItem
from quire.shared.redis.clients import command_client

PROMPT_TOKENS = (0, 128, 1024, 8192)
OUTPUT_TOKENS = (128, 512, 2048)
REQUESTS = 400
STREAMS = 40
# Few tokenizers have more tokens. An id takes 1 to 5 bytes in an item, depending on its size.
VOCABULARY = 128_000
BOUNDS = QueueBounds(10**7, 10**12)


async def measure(url: str) -> tuple[dict[int, float], dict[int, float]]:
    """Bytes per waiting request by prompt tokens, and bytes per output token by tokens of the answer."""
    random = Random(0)
    client = command_client(url)
    broker = Broker(client, "demo")

    async def used() -> int:
        return int((await client.info("memory"))["used_memory"])

    async def submit(prompt_tokens: int, max_tokens: int) -> str:
        prompt = tuple(random.randrange(VOCABULARY) for _ in range(prompt_tokens))
        request = GenerationRequest(new_id(), "demo", prompt, SamplingParams(max_tokens, seed=random.getrandbits(64)))
        metadata = CallMetadata("chat", 1_800_000_000, 1, True, (), prompt_tokens, 1, False)
        gateway = "0" * 32
        return await broker.submit(
            request.id, request.encode(), gateway=gateway, cost=request.cost, bounds=BOUNDS, metadata=metadata.encode()
        )

    waiting: dict[int, float] = {}
    answers: dict[int, float] = {}
    try:
        await broker.create_groups()
        for tokens in PROMPT_TOKENS:
            await submit(tokens, 128)
            before = await used()
            for _ in range(REQUESTS):
                await submit(tokens, 128)
            waiting[tokens] = (await used() - before) / REQUESTS
            await client.flushdb()
            await broker.create_groups()
        for tokens in OUTPUT_TOKENS:
            for _ in range(STREAMS):
                await submit(0, tokens)
            reader = QueueReader(client, "demo", "worker")
            claims = [
                claim
                for delivery in await reader.read(STREAMS, 0)
                if (claim := await broker.claim(delivery, "worker", new_id()))
            ]
            assert len(claims) == STREAMS
            before = await used()
            for step in range(tokens):
                items = [
                    StepItem(claim.request_id, step, (Delta(0, (random.randrange(VOCABULARY),)),)) for claim in claims
                ]
                pairs = zip(claims, items, strict=True)
                await broker.commit_step("worker", [StepCommit(claim.attempt, item) for claim, item in pairs])
            answers[tokens] = (await used() - before) / (STREAMS * tokens)
            await client.flushdb()
            await broker.create_groups()
    finally:
        await client.aclose()
    return waiting, answers


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="quire-") as folder:
        server = EmbeddedRedis(Path(folder))
        server.start()
        try:
            waiting, answers = asyncio.run(measure(server.url))
        finally:
            server.stop()
    for tokens, size in waiting.items():
        print(f"a request that waits, prompt of {tokens:>4} tokens: {size:>7,.0f} bytes")
    for tokens, size in answers.items():
        print(f"a token of an answer of {tokens:>4} tokens: {size:>6.1f} bytes")


if __name__ == "__main__":
    main()
