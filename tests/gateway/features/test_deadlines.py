"""Deadlines that cannot be met, at a gateway: the refusal in each dialect, its times, and who never gets it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from quire.gateway.features.deadlines.estimates import expected_answer
from quire.shared.protocol.broker import QueueReader, new_id
from quire.shared.protocol.messages import GenerationRequest, SamplingParams, WorkerCard
from quire.shared.protocol.pace import Pace
from tests.gateway.conftest import Start
from tests.support.gateway.fake_worker import emit
from tests.support.gateway.running import MODEL, RunningGateway, tokens, until

# A request ends every second. Half of the answers have 20 tokens or less, and take 2 seconds.
PACE = Pace(prompt_us=1, token_us=100_000, request_us=1_000_000, rows=1, answer=20, charge=50)
WORDS = {"messages": [{"role": "user", "content": "Hello"}]}
CALLS = {
    "/v1/chat/completions": WORDS,
    "/v1/completions": {"prompt": "Hello", "max_tokens": 100},
    "/v1/messages": {**WORDS, "max_tokens": 100},
    "/v1/responses": {"input": "Hello"},
}


async def make_busy(gateway: RunningGateway, waiting: int = 3) -> list[asyncio.Task[Any]]:
    """Have a worker announce its pace and run one request, while others wait."""
    broker = gateway.gateway.broker
    card = WorkerCard(
        worker_id="busy",
        incarnation="busy",
        model=MODEL,
        max_model_len=4096,
        max_num_seqs=1,
        vocab_size=100_000,
        eos_token_ids=(0,),
        block_size=16,
        total_blocks=100,
        free_blocks=100,
        running=1,
        waiting=0,
        steps=1,
        pace=PACE,
    )
    assert await broker.beat(card, slowest_step_s=1000)
    await gateway.gateway.worker_registry.refresh()
    calls = [asyncio.create_task(gateway.complete())]

    async def reached(count: int) -> bool:
        return await gateway.accepted() == count

    await until(lambda: reached(1))
    await broker.create_groups()
    [entry] = await QueueReader(broker.client, MODEL, "busy").read(1, 0)
    assert await broker.claim(entry, "busy", new_id()) is not None
    calls += [asyncio.create_task(gateway.complete()) for _ in range(waiting)]
    await until(lambda: reached(1 + waiting))
    return calls


async def end(calls: list[asyncio.Task[Any]]) -> None:
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)


@pytest.mark.parametrize("path", CALLS)
@pytest.mark.parametrize("extra", [{}, {"stream": True}, {"background": True}], ids=["whole", "stream", "background"])
async def test_each_dialect_says_when_the_call_could_be_met(
    gateway: RunningGateway, path: str, extra: dict[str, Any]
) -> None:
    if "background" in extra and path != "/v1/responses":
        return
    calls = await make_busy(gateway)
    reply = await gateway.post(path, {"model": MODEL, **CALLS[path], **extra}, X_Request_Timeout="4")
    assert reply.status == 429
    error = reply.json["error"]
    # 3 requests of a second each, and 2 seconds for the answer.
    assert error["message"] == (
        "The deadline of 4 s cannot be met: 3 requests come before this one, and it would end in 5.1 s. "
        "Send it again in 2 s, or now with a timeout of more than 5.1 s."
    )
    assert reply.headers["retry-after"] == "2"
    assert error["type"] == "rate_limit_error"
    if path != "/v1/messages":
        assert error["code"] == "deadline_unreachable"
    assert await gateway.accepted() == 4
    assert gateway.gateway.meters.refusals["deadline_unreachable"] == 1
    await end(calls)


async def test_all_gateways_decide_alike_and_the_setting_turns_it_off(start_gateway: Start) -> None:
    first, second = await start_gateway(), await start_gateway()
    lenient = await start_gateway(deadline_admission=False)
    calls = await make_busy(first)
    for gateway in (second, lenient):
        await gateway.gateway.worker_registry.refresh()
    assert [(await gateway.chat(timeout=4)).status for gateway in (first, second)] == [429, 429]
    # Calls that can be met are accepted, and the exact length counts where it is known.
    assert (await second.chat(timeout=8, max_tokens=100, ignore_eos=True)).status == 429
    calls += [
        asyncio.create_task(second.chat(timeout=8)),
        asyncio.create_task(second.chat(timeout=600, max_tokens=100, ignore_eos=True)),
        asyncio.create_task(lenient.chat(timeout=4)),
    ]

    async def accepted() -> bool:
        return await first.accepted() == 7

    await until(accepted)
    await end(calls)


async def test_a_repeated_call_joins_the_first_one_whatever_the_queue(gateway: RunningGateway) -> None:
    calls = await make_busy(gateway, waiting=0)
    body = {"model": MODEL, "prompt": "Hello", "timeout": 4}

    async def ask() -> Any:
        return await gateway.post("/v1/completions", body, Idempotency_Key="again")

    first = asyncio.create_task(ask())

    async def accepted(count: int) -> bool:
        return await gateway.accepted() == count

    await until(lambda: accepted(2))
    calls += [asyncio.create_task(gateway.complete()) for _ in range(5)]
    await until(lambda: accepted(7))
    assert (await gateway.post("/v1/completions", body)).status == 429
    second = asyncio.create_task(ask())
    async with gateway.worker(emit(tokens("a"))):
        answers = [await first, await second]
    assert [answer.status for answer in answers] == [200, 200]
    assert answers[0].json["id"] == answers[1].json["id"]
    assert await gateway.accepted() == 7
    await end(calls)


@pytest.mark.parametrize(
    ("sampling", "tokens"),
    [
        (SamplingParams(max_tokens=500), 20),
        (SamplingParams(max_tokens=5), 5),
        (SamplingParams(max_tokens=500, min_tokens=80), 80),
        (SamplingParams(max_tokens=500, ignore_eos=True), 500),
        (SamplingParams(max_tokens=500, ignore_eos=True, stop=("x",)), 20),
    ],
)
def test_the_expected_answer(sampling: SamplingParams, tokens: int) -> None:
    paces = [PACE, PACE._replace(answer=70)]
    assert expected_answer(GenerationRequest("r", MODEL, (1,), sampling), paces) == tokens
    assert expected_answer(GenerationRequest("r", MODEL, (1,), sampling, pooling="last"), paces) == 0
