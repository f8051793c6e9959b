"""A worker whose log entries and published frames a test chooses separately."""

from __future__ import annotations

import asyncio
from typing import Any

from quire.shared.protocol.broker import Claim, QueueReader, StepCommit, new_id
from quire.shared.protocol.messages import Delta, Outcome, StepItem
from quire.shared.protocol.sampling_params import MAX_CHOICES
from tests.support.gateway.running import MODEL, RunningGateway, texts, tokens, until

TEXT = "The quick brown fox 😀 jumps over the lazy dog."
IDS = tokens(TEXT)
BODY = {"model": MODEL, "prompt": "x", "stream": True, "max_tokens": 100}


def one_each(request_id: str, outcome: str = "stop") -> list[StepItem]:
    """Return an item per token; the last item is terminal."""
    last = len(IDS) - 1
    return [
        StepItem(
            request_id,
            index,
            (Delta(0, (token,), outcome if index == last else None),),
            Outcome(outcome) if index == last else None,
        )
        for index, token in enumerate(IDS)
    ]


class HandWorker:
    """Logs one request's tokens with the real scripts, to a channel without subscribers. The test publishes by hand."""

    def __init__(self, gateway: RunningGateway) -> None:
        self.broker = gateway.gateway.broker
        self.channel = self.broker.keys.channel(gateway.gateway.id)

    async def claim(self) -> Claim:
        await self.broker.create_groups()
        reader = QueueReader(self.broker.client, MODEL, "hand")
        deliveries: list[Any] = []

        async def some() -> bool:
            deliveries.extend(await reader.read(1, 0, widest=MAX_CHOICES))
            return bool(deliveries)

        await until(some)
        claim = await self.broker.claim(deliveries[0], "hand", new_id())
        assert claim is not None
        await self.broker.client.hset(self.broker.keys.request(claim.request_id), "gateway", "nobody")
        return claim

    async def log(self, claim: Claim, items: list[StepItem]) -> None:
        for item in items:
            await self.broker.commit_step("hand", [StepCommit(claim.attempt, item)])

    async def publish(self, data: bytes) -> None:
        assert await self.broker.client.publish(self.channel, data) == 1


async def run(gateway: RunningGateway, act: Any) -> str:
    """Return the text that a client gets while `act(worker, claim, items)` plays the worker."""
    worker = HandWorker(gateway)
    call = asyncio.create_task(gateway.events("/v1/completions", BODY))
    claim = await worker.claim()
    await act(worker, claim, one_each(claim.request_id))
    events = await asyncio.wait_for(call, 60)
    assert events[-1].data == "[DONE]"
    assert events[-1].id.tokens == len(IDS)
    assert [event.id for event in events] == sorted(event.id for event in events)
    return "".join(texts(events))
