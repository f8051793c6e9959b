"""POST /v1/responses/compact and `context_management` through the OpenAI SDK."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import openai
import pytest

from quire.shared.accounts.limits import AccountLimits
from quire.shared.protocol.messages import GenerationRequest
from tests.gateway.api.test_conversation import answering
from tests.support.gateway.fake_worker import Script, Steps, endless
from tests.support.gateway.response_calls import PATH, TOOL, events_of, prompt, raw_events
from tests.support.gateway.running import MODEL, RunningGateway, tokens

SUMMARY = "They greeted each other."
ITEMS = [
    {"role": "developer", "content": "Be kind."},
    {"role": "user", "content": "Hello, I am Ada."},
    {"role": "assistant", "content": "Good day, Ada, what a long story."},
    {"role": "user", "content": "Go on."},
]


def summarising(answer: str) -> Script:
    """Return a script that writes SUMMARY if it is asked for a summary, else the answer."""

    def script(request: GenerationRequest) -> Steps:
        return answering(SUMMARY if "Write a summary" in prompt(request) else answer)(request)

    return script


async def test_a_compacted_conversation_is_the_input_of_a_later_call(gateway: RunningGateway, client: Any) -> None:
    async with gateway.worker(summarising("Then what?")) as worker:
        compacted = await client.responses.compact(model=MODEL, input=ITEMS, instructions="Be brief.")
        assert compacted.object == "response.compaction"
        *kept, compaction = compacted.output
        assert [(item.role, item.content[0].text) for item in kept] == [
            (item["role"], item["content"]) for item in ITEMS if item["role"] != "assistant"
        ]
        assert compaction.type == "compaction"
        assert compacted.usage.input_tokens == len(worker.claimed[0].prompt)
        output = [item.model_dump(exclude_unset=True, warnings=False) for item in compacted.output]
        response = await client.responses.create(model=MODEL, input=[*output, {"role": "user", "content": "And?"}])
        # A compacted conversation can be compacted again, also that of a stored response.
        again = await client.responses.compact(model=MODEL, previous_response_id=response.id)
    assert "Good day, Ada" in prompt(worker.claimed[0])
    assert prompt(worker.claimed[0]).startswith("<|im_start|>system\nBe brief.\n\nBe kind.")
    seen = prompt(worker.claimed[1])
    assert SUMMARY in seen
    assert "Hello, I am Ada." in seen
    assert "Good day" not in seen
    assert SUMMARY in prompt(worker.claimed[2])
    assert [item.type for item in again.output] == ["message"] * 4 + ["compaction"]


async def test_a_repeated_key_is_one_summary(gateway: RunningGateway, client: Any) -> None:
    async with gateway.worker(summarising("")) as worker:
        asked = {"model": MODEL, "input": ITEMS, "extra_headers": {"Idempotency-Key": "one"}}
        first = await client.responses.compact(**asked)
        again = await client.responses.compact(**asked)
    assert first.id == again.id
    assert first.output[-1] == again.output[-1]
    assert len(worker.claimed) == 1


async def test_a_summary_ends_when_its_client_leaves(gateway: RunningGateway, client: Any) -> None:
    rule = [{"type": "compaction", "compact_threshold": 60}]
    async with gateway.worker(endless(tokens("x")[0])) as worker:
        asking = asyncio.create_task(client.responses.create(model=MODEL, input=ITEMS, context_management=rule))
        await worker.claims(1)
        asking.cancel()
        async with asyncio.timeout(10):
            assert await worker.cancelled.get() == worker.claimed[0].id


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_prompt_over_the_threshold_is_compacted_before_the_answer(
    gateway: RunningGateway, client: Any, is_streamed: bool
) -> None:
    rule = [{"type": "compaction", "compact_threshold": 60}]
    asked: Any = {"model": MODEL, "input": ITEMS, "context_management": rule}
    async with gateway.worker(summarising("Fine.")) as worker:
        if is_streamed:
            events = await events_of(await client.responses.create(stream=True, **asked))
            response = events[-1].response
            assert [event.sequence_number for event in events] == list(range(len(events)))
            resumed = await raw_events(gateway, f"{PATH}/{response.id}?stream=true&starting_after=3")
            assert [event["sequence_number"] for event in resumed] == list(range(4, len(events)))
        else:
            response = await client.responses.create(**asked)
        compaction, message = response.output
        assert (compaction.type, message.content[0].text) == ("compaction", "Fine.")
        assert (await client.responses.retrieve(response.id)).output == response.output
        assert len(worker.claimed) == 2
        assert "Write a summary" in prompt(worker.claimed[0])
        assert "Go on." not in prompt(worker.claimed[0])
        seen = prompt(worker.claimed[1])
        assert SUMMARY in seen
        assert "Good day" not in seen
        assert seen.startswith("<|im_start|>system\nBe kind.")
        assert "user\nGo on.<|im_end|>" in seen
        # All ways to go on tell the model the same.
        later = {"role": "user", "content": "Bye"}
        output = [item.to_dict() for item in response.output]
        head = ITEMS[0]
        await client.responses.create(model=MODEL, previous_response_id=response.id, input=[later])
        await client.responses.create(model=MODEL, input=[*ITEMS, *output, later])
        await client.responses.create(model=MODEL, input=[head, *output, later])
        prompts = [prompt(request) for request in worker.claimed[2:]]
    assert len(set(prompts)) == 1
    assert prompts[0].startswith(seen.removesuffix("<|im_start|>assistant\n"))
    assert "assistant\nFine." in prompts[0]


async def test_the_last_step_of_a_tool_loop_stays_whole(gateway: RunningGateway, client: Any) -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Bonn"}'}
    output = {"type": "function_call_output", "call_id": "c1", "output": "sunny"}
    rule = [{"type": "compaction", "compact_threshold": 10}]
    conversation = await client.conversations.create(items=ITEMS)
    async with gateway.worker(summarising("Fine.")) as worker:
        response = await client.responses.create(
            model=MODEL, conversation=conversation.id, input=[call, output], tools=[TOOL], context_management=rule
        )
        await client.responses.create(model=MODEL, conversation=conversation.id, input="Bye")
    assert response.output[0].type == "compaction"
    for request in worker.claimed[1:]:
        assert "Bonn" in prompt(request)
        assert "sunny" in prompt(request)
        assert "Ada" not in prompt(request)
    types = [item.type async for item in client.conversations.items.list(conversation.id, order="asc")]
    assert types[4:] == ["function_call", "function_call_output", "compaction", "message", "message", "message"]


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_the_answer_to_a_trigger_is_a_compaction(gateway: RunningGateway, client: Any, is_streamed: bool) -> None:
    """Codex sends the item `compaction_trigger` with its tools, and goes on with its messages and the compaction."""
    text = f"<think>\nHm.</think>\n{SUMMARY}"
    asked: Any = {"model": MODEL, "input": [*ITEMS, {"type": "compaction_trigger"}], "tools": [TOOL], "store": True}
    async with gateway.worker(answering(text)) as worker:
        if is_streamed:
            events = await events_of(await client.responses.create(stream=True, **asked))
            response = events[-1].response
            assert [event.sequence_number for event in events] == list(range(len(events)))
            kinds = [event.type.removeprefix("response.") for event in events]
            assert list(dict.fromkeys(kinds)) == [
                "created",
                "in_progress",
                "output_item.added",
                "compaction.compacting",
                "output_item.done",
                "completed",
            ]
        else:
            response = await client.responses.create(**asked)
        [compaction] = response.output
        assert (response.status, compaction.type) == ("completed", "compaction")
        assert await client.responses.retrieve(response.id) == response
        output = compaction.to_dict()
        await client.responses.create(model=MODEL, input=[ITEMS[1], output, {"role": "user", "content": "Bye"}])
        # A stored conversation goes on with the summary alone.
        chained = {"model": MODEL, "previous_response_id": response.id}
        second = await client.responses.create(input=[{"type": "compaction_trigger"}], **chained)
        chained["previous_response_id"] = second.id
        await client.responses.create(input="Bye", **chained)
    first, later, _, last = map(prompt, worker.claimed)
    assert "Write a summary" in first
    assert "weather" not in first
    assert SUMMARY in later
    assert "Hello, I am Ada." in later
    assert SUMMARY in last
    assert "Ada" not in last


async def test_the_summary_is_charged_to_the_key_of_the_call(gateway: RunningGateway) -> None:
    _, secret = await gateway.gateway.process.keys.ring.store.create("acme", "web", "test", AccountLimits())
    key = {"Authorization": f"Bearer {secret}"}
    rule = [{"type": "compaction", "compact_threshold": 1}]
    body = {"model": MODEL, "input": ITEMS, "context_management": rule}
    async with gateway.worker(summarising("Fine.")) as worker:
        assert (await gateway.post(PATH, body, **key)).status == 200
        assert (await gateway.post(f"{PATH}/compact", {"model": MODEL, "input": ITEMS}, **key)).status == 200
    [row] = (await gateway.get("/v1/usage", **key)).json["data"]
    assert row["requests"] == len(worker.claimed) == 3
    assert row["prompt_tokens"] == sum(len(request.prompt) for request in worker.claimed)


async def test_a_short_prompt_is_not_compacted(gateway: RunningGateway, client: Any) -> None:
    rule = [{"type": "compaction", "compact_threshold": 1000}]
    async with gateway.worker(summarising("Fine.")) as worker:
        response = await client.responses.create(model=MODEL, input=ITEMS, context_management=rule)
        # The last step is never replaced.
        rule[0]["compact_threshold"] = 1
        alone = await client.responses.create(model=MODEL, input="Hello", context_management=rule)
    assert [item.type for item in (*response.output, *alone.output)] == ["message", "message"]
    assert len(worker.claimed) == 2


async def test_a_model_that_writes_no_summary_is_an_error(gateway: RunningGateway, client: Any) -> None:
    async with gateway.worker(answering("")):
        with pytest.raises(openai.InternalServerError, match="no summary"):
            await client.responses.compact(model=MODEL, input=ITEMS)


def packed(fields: Any) -> str:
    return "quire-1." + base64.b64encode(json.dumps(fields).encode()).decode()


@pytest.mark.parametrize(
    "content",
    [
        "quire-1.?",
        packed([]),
        packed({"summary": 5}),
        packed({"summary": "x", "kept": 5}),
        packed({"summary": "x", "kept": [5]}),
        packed({"summary": "x", "kept": [{"type": "message"}]}),
        packed({"summary": "x", "kept": [{"type": "compaction", "encrypted_content": packed({"summary": "x"})}]}),
        packed({"summary": "x", "more": 1}),
        "quire-1." + base64.b64encode(b'{"summary": "x", "kept": [' + b"[" * 100_000 + b"]}").decode(),
        packed({"summary": "\ud800"}),
    ],
)
async def test_a_forged_compaction_is_refused(gateway: RunningGateway, content: str) -> None:
    item = {"type": "compaction", "encrypted_content": content}
    reply = await gateway.post(PATH, {"model": MODEL, "input": [item]})
    assert reply.status == 400
    assert reply.error["param"].startswith("input[0].encrypted_content")


async def test_the_compaction_of_another_server_is_left_out(gateway: RunningGateway, client: Any) -> None:
    async with gateway.worker(answering("Hi")) as worker:
        item = {"type": "compaction", "encrypted_content": "gAAAAABpM0Yj"}
        response = await client.responses.create(model=MODEL, input=[item, {"role": "user", "content": "Hello"}])
    assert response.to_dict()["warnings"][0]["param"] == "input[0]"
    assert "gAAA" not in prompt(worker.claimed[0])


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (PATH, {"context_management": [{"type": "other"}]}, "context_management[0]"),
        (PATH, {"context_management": [{"type": "compaction"}]}, "context_management[0].compact_threshold"),
        (PATH, {"context_management": [{"type": "compaction", "compact_threshold": 0}]}, None),
        (PATH, {"context_management": {}}, "context_management"),
        (PATH, {"input": [{"type": "compaction_trigger"}]}, "input"),
        (PATH, {"input": [{"type": "compaction_trigger"}, {"role": "user", "content": "x"}]}, "input[0].type"),
        (f"{PATH}/compact", {"input": ""}, "input"),
        (f"{PATH}/compact", {"stream": True}, "stream"),
        (f"{PATH}/compact", {"previous_response_id": "resp_x"}, "previous_response_id"),
        (f"{PATH}/compact", {"input": "x" * 10_000}, "input"),
    ],
)
async def test_wrong_parameters_are_named(gateway: RunningGateway, path: str, body: Any, param: str | None) -> None:
    reply = await gateway.post(path, {"model": MODEL, "input": "Hello", **body})
    assert reply.status == 400, reply.body
    assert param is None or reply.error["param"] == param
    assert await gateway.accepted() == 0
