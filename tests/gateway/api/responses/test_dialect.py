"""Conversations of responses: items sent back, previous responses, references, truncation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

from tests.gateway.api.test_conversation import answering
from tests.gateway.conftest import Start
from tests.support.gateway.fake_worker import endless
from tests.support.gateway.response_calls import PATH, TOOL, create, prompt
from tests.support.gateway.running import MODEL, RunningGateway, tokens


async def test_a_round_trip_with_a_tool(gateway: RunningGateway, client: Any) -> None:
    """The client sends the output items back, with the result of the tool."""
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
    items: list[Any] = [{"role": "user", "content": "Weather?"}]
    async with gateway.worker(answering(call)):
        first = await client.responses.create(model=MODEL, input=items, tools=[TOOL], tool_choice="required")
    [asked] = first.output
    assert asked.type == "function_call"
    items += first.output
    items.append({"type": "function_call_output", "call_id": asked.call_id, "output": "rain"})
    async with gateway.worker(answering("It rains.")) as worker:
        second = await client.responses.create(model=MODEL, input=items, tools=[TOOL])
    assert second.output_text == "It rains."
    told = prompt(worker.claimed[0])
    assert "user\nWeather?" in told
    assert '<tool_call>weather{"city": "K' in told
    assert "<|im_start|>tool\nrain<|im_end|>" in told


async def test_previous_responses_form_a_conversation(start_gateway: Start, folder: Path) -> None:
    """Each call goes to another gateway; the instructions of earlier calls are not carried over."""
    here, there = [await start_gateway(model=str(folder), reasoning_format="think") for _ in range(2)]
    async with (
        here.worker(answering("<think>\nwhy</think>Second.")) as worker,
        here.openai() as one,
        there.openai() as two,
    ):
        first = await one.responses.create(model=MODEL, input="First.", instructions="Be brief.")
        second = await two.responses.create(model=MODEL, input="Third.", previous_response_id=first.id)
        third = await one.responses.create(model=MODEL, input="Fifth.", previous_response_id=second.id)
        listed = await two.responses.input_items.list(third.id, order="asc", limit=4)
        assert [item.type for item in listed.data] == ["message", "reasoning", "message", "message"]
        assert listed.has_more
        everything = [item async for item in listed]
        backwards = [item async for item in await one.responses.input_items.list(third.id, limit=3)]
    assert second.previous_response_id == first.id
    told = prompt(worker.claimed[2])
    assert "Be brief." not in told
    order = [told.index(text) for text in ("First.", "Second.", "Third.", "Fifth.")]
    assert order == sorted(order)
    assert told.count("Second.") == 2
    assert [item.type for item in everything] == ["message", "reasoning", "message"] * 2 + ["message"]
    assert len({item.id for item in everything}) == 7
    assert everything[2].id == first.output[1].id
    assert backwards == everything[::-1]


async def test_an_item_reference_names_an_item_of_a_stored_response(gateway: RunningGateway, client: Any) -> None:
    async with gateway.worker(answering("Blue.")) as worker:
        first = await client.responses.create(model=MODEL, input="Colour?")
        reference: Any = {"type": "item_reference", "id": first.output[0].id}
        await client.responses.create(
            model=MODEL, input=[{"role": "user", "content": "Colour?"}, reference, {"role": "user", "content": "Why?"}]
        )
        with pytest.raises(openai.BadRequestError, match=r"not found") as caught:
            await client.responses.create(
                model=MODEL, input=[{"type": "item_reference", "id": first.output[0].id + "7"}]
            )
    assert "assistant\nBlue.<|im_end|>" in prompt(worker.claimed[1])
    assert caught.value.param == "input[0].id"


@pytest.mark.parametrize("end", ["deleted", "not stored", "unknown", "running", "malformed"])
async def test_a_previous_response_that_cannot_be_continued(gateway: RunningGateway, end: str) -> None:
    async with gateway.worker(endless(70) if end == "running" else answering("x")):
        first = (await create(gateway, store=end != "not stored", background=end == "running")).json["id"]
        if end == "deleted":
            await gateway.send(b"DELETE /v1/responses/%s HTTP/1.1\r\nHost: a\r\n\r\n" % first.encode())
        named = {"unknown": "resp_" + "0" * 32, "malformed": "../x"}.get(end, first)
        reply = await create(gateway, previous_response_id=named)
    assert reply.status == 400
    assert reply.error["param"] == "previous_response_id"
    assert reply.error["code"] == f"previous_response_{'in_progress' if end == 'running' else 'not_found'}"


async def test_a_conversation_that_is_too_long_to_be_stored_is_refused(start_gateway: Start, folder: Path) -> None:
    gateway = await start_gateway(model=str(folder), max_conversation_bytes=1024)
    async with gateway.worker(answering("x" * 60)):
        reply = await create(gateway, input="y" * 300)
        for _ in range(9):
            last, reply = reply, await create(gateway, input="y", previous_response_id=reply.json["id"])
            if reply.status != 200:
                break
        assert (reply.status, reply.error["param"]) == (400, "previous_response_id")
        assert "--max-conversation-bytes" in reply.error["message"]
        assert (await create(gateway, input="y", previous_response_id=last.json["id"], store=False)).status == 200


async def test_truncation_drops_the_oldest_items(gateway: RunningGateway) -> None:
    words = [{"role": "user", "content": f"word{index} " + "x" * 40} for index in range(40)]
    items = [{"role": "system", "content": "Stay."}, *words]
    refusal = await create(gateway, input=items)
    assert (refusal.status, refusal.error["param"]) == (400, "input")
    assert refusal.error["code"] == "context_length_exceeded"
    async with gateway.worker(answering("x")) as worker:
        reply = await create(gateway, input=items, truncation="auto", max_output_tokens=100)
    assert reply.status == 200
    assert reply.json["truncation"] == "auto"
    told = prompt(worker.claimed[0])
    kept = [index for index in range(40) if f"word{index} " in told]
    assert kept == list(range(kept[0], 40))
    assert 0 < kept[0] < 40
    assert "Stay." in told
    # One item more would not have fit.
    one = len(tokens(f"<|im_start|>user\n{words[kept[0] - 1]['content']}<|im_end|>\n"))
    assert len(worker.claimed[0].prompt) + one + 100 > 512 >= len(worker.claimed[0].prompt) + 100
    whole = (await gateway.get(f"{PATH}/{reply.json['id']}/input_items?limit=100")).json["data"]
    assert len(whole) == 41
    too_long = await create(gateway, input="x" * 4000, truncation="auto")
    assert (too_long.status, too_long.error["param"]) == (400, "input")
