"""Answers of the Responses API: the body, its items, and the events of a stream."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import openai
import pytest
from jsonschema import Draft202012Validator

from quire.gateway.api.responses.body import ANSWERS as SHAPES
from quire.gateway.api.responses.body import ResponseBody
from quire.gateway.api.responses.events import ResponseEvents
from quire.gateway.api.responses.output_items import ItemStatus, OutputItems
from quire.gateway.api.responses.parameters import RESPONSES
from quire.gateway.api.responses.store import item_place
from quire.gateway.errors.api_errors import ApiError
from quire.gateway.features.openapi.parameter_schemas import schema_of
from quire.gateway.model.served_model import ServedModel, load_model
from quire.gateway.model.token_texts import TokenTexts
from quire.gateway.output.parts import AnswerPart, PartKind
from quire.gateway.stream.call_metadata import CallMetadata
from quire.gateway.stream.choice_text import ScoredTokens
from tests.gateway.api.test_conversation import answering
from tests.gateway.conftest import Start
from tests.gateway.test_tool_loops import INPUT, TURN
from tests.support.gateway.fake_worker import endless
from tests.support.gateway.response_calls import PATH, TOOL, WHOLE, create, prompt, raw_events
from tests.support.gateway.running import MODEL, RunningGateway, tokens
from tests.support.tokenizers import byte_level

# --- Conversations of responses: items sent back, previous responses, references, truncation --------------------------


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


async def test_a_previous_response_that_cannot_be_continued(gateway: RunningGateway) -> None:
    for end in ["deleted", "not stored", "unknown", "running", "malformed"]:
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


# --- The Response object in each status -------------------------------------------------------------------------------


ABOUT = CallMetadata("response", 5, 1, False, (), 3, 1, False, echo='{"store":true,"user":null}')
USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


@pytest.fixture
def output() -> OutputItems:
    output = OutputItems("a", TokenTexts(byte_level()))
    list(output.push([AnswerPart(PartKind.CONTENT, "x")]))
    return output


@pytest.fixture
def body() -> ResponseBody:
    class Named:
        name = MODEL

    model: Any = Named()
    served: ServedModel = model
    return ResponseBody("a", served, ABOUT)


@pytest.mark.parametrize(
    ("reason", "status", "details"),
    [("stop", "completed", None), ("tool_calls", "completed", None), ("length", "incomplete", "max_output_tokens")],
)
def test_an_ended_response(
    body: ResponseBody, output: OutputItems, reason: str, status: str, details: str | None
) -> None:
    list(output.finish(reason))
    ended = json.loads(body.ended(output, USAGE | {"prompt_tokens_details": {"cached_tokens": 1}}))
    assert (ended["status"], ended["error"]) == (status, None)
    assert ended["incomplete_details"] == (details and {"reason": details})
    assert ended["usage"]["input_tokens_details"] == {"cached_tokens": 1, "cache_write_tokens": 0}
    assert (ended["usage"]["input_tokens"], ended["usage"]["output_tokens"]) == (3, 2)


# --- Typed events: numbers, and errors that end the response or only its stream ---------------------------------------


ABOUT_CALL = CallMetadata("response", 5, 1, False, (), 3, 1, False, echo='{"store":true}')


@pytest.fixture(scope="module")
def model(model_folder: Path) -> ServedModel:
    return load_model(str(model_folder), "", False)


def data(event: str) -> Any:
    return json.loads(event.split("\ndata: ")[1])


def test_an_error_of_the_gateway_ends_only_the_stream(model: ServedModel) -> None:
    form = ResponseEvents("a" * 32, model, ABOUT_CALL)
    opening = form.opening({})
    [event] = form.failure(ApiError("Internal error.", code="internal"))
    assert data(event) == {
        "type": "error",
        "sequence_number": len(opening) - 1,  # of the event after which a client resumes
        "code": "internal",
        "message": "Internal error.",
        "param": None,
    }


# --- Output items from parts: order, ids, statuses, log-probabilities -------------------------------------------------


CONTENT, REASONING = PartKind.CONTENT, PartKind.REASONING


@pytest.fixture
def collected() -> OutputItems:
    return OutputItems("0" * 32, TokenTexts(byte_level()))


def push(
    collected: OutputItems, *parts: AnswerPart, scored: ScoredTokens | None = None
) -> list[tuple[str, str | None, bool]]:
    return [(change.item.id[:3], change.delta, change.is_end) for change in collected.push(parts, scored)]


def scored(text: str) -> ScoredTokens:
    ids = tokens(text)
    return ScoredTokens(tuple(ids), b"".join(struct.pack("<f", -1.0) for _ in ids), (0,) * len(ids))


def test_items_begin_grow_and_end_in_order(collected: OutputItems) -> None:
    assert push(collected, AnswerPart(REASONING, "a")) == [("rs_", None, False), ("rs_", "a", False)]
    assert push(collected, AnswerPart(REASONING, "b"), AnswerPart(CONTENT, "c")) == [
        ("rs_", "b", False),
        ("rs_", None, True),
        ("msg", None, False),
        ("msg", "c", False),
    ]
    assert push(collected, AnswerPart(CONTENT, "")) == []
    assert push(collected, AnswerPart(PartKind.CALL, "f", 0, "call_1"), AnswerPart(PartKind.ARGUMENTS, "{}", 0)) == [
        ("msg", None, True),
        ("fc_", None, False),
        ("fc_", "{}", False),
    ]
    assert push(collected, AnswerPart(PartKind.CALL, "g", 1, "call_2")) == [
        ("fc_", None, True),
        ("fc_", None, False),
    ]
    assert push(collected, AnswerPart(PartKind.ARGUMENTS, "{}", 1)) == [("fc_", "{}", False)]
    assert [change.is_end for change in collected.finish("stop")] == [True]
    items = json.loads(collected.json())
    assert [item["id"] for item in items] == [
        f"{kind}_{'0' * 32}_{at}" for at, kind in enumerate(("rs", "msg", "fc", "fc"))
    ]
    assert items[0]["content"] == [{"type": "reasoning_text", "text": "ab"}]
    assert items[1]["content"][0]["text"] == "c"
    assert (items[2]["call_id"], items[2]["name"], items[2]["arguments"]) == ("call_1", "f", "{}")
    assert {item["status"] for item in items} == {"completed"}


@pytest.mark.parametrize("reason", ["length", "stop", "failure"])
def test_only_the_open_item_is_incomplete(collected: OutputItems, reason: str) -> None:
    push(collected, AnswerPart(REASONING, "a"), AnswerPart(CONTENT, "c"))
    if reason == "failure":
        collected.fail()
    else:
        assert len(list(collected.finish(reason))) == 1
    last = ItemStatus.COMPLETED if reason == "stop" else ItemStatus.INCOMPLETE
    assert [item.status for item in collected.items] == [ItemStatus.COMPLETED, last]


@pytest.mark.parametrize(
    ("reason", "arguments", "status"),
    [
        ("stop", '{"a": ', ItemStatus.INCOMPLETE),
        ("stop", "", ItemStatus.INCOMPLETE),
        ("length", '{"a": ', ItemStatus.INCOMPLETE),
        ("length", "{}", ItemStatus.COMPLETED),
        ("tool_calls", "{}", ItemStatus.COMPLETED),
    ],
)
def test_a_function_call_is_complete_if_its_arguments_are(
    collected: OutputItems, reason: str, arguments: str, status: ItemStatus
) -> None:
    push(
        collected,
        AnswerPart(PartKind.CALL, "f", 0, "call_1"),
        AnswerPart(PartKind.ARGUMENTS, arguments, 0),
    )
    list(collected.finish(reason))
    assert collected.items[0].status == status
    assert collected.is_cut == (status == ItemStatus.INCOMPLETE or reason == "length")


def test_an_answer_without_parts_has_no_items(collected: OutputItems) -> None:
    assert list(collected.finish("stop")) == []
    assert collected.json() == "[]"


def test_log_probabilities_belong_to_the_text_of_a_message(collected: OutputItems) -> None:
    push(collected, AnswerPart(REASONING, "a"), scored=scored("a"))
    push(collected, scored=scored("</think>"))  # a marker
    push(collected, scored=scored("<"))  # held back, because it may begin a marker
    push(collected, AnswerPart(CONTENT, "<x"), scored=scored("x"))
    push(collected, scored=scored("<"))
    push(collected, AnswerPart(CONTENT, "<y"), scored=scored("y"))
    push(collected, scored=scored("</s>"))
    list(collected.finish("stop"))
    message = json.loads(collected.json())[1]
    assert [one["token"] for one in message["content"][0]["logprobs"]] == ["<", "x", "<", "y"]


def test_an_id_tells_the_place_of_its_item(collected: OutputItems) -> None:
    push(collected, AnswerPart(CONTENT, "a"), AnswerPart(PartKind.CALL, "f"))
    assert item_place(collected.items[1].id) == ("0" * 32, 1)
    for other in ("", "msg", "msg_", "msg_1", "msg__1", "msg_a_-1", "msg_a_1234567", "msg_a_x"):
        assert item_place(other) is None, other


# --- The schemas of /openapi.json describe real bodies, answers and events of the Responses API -----------------------


PARAMETERS = {name: schema_of(one.schema) for name, one in RESPONSES.items() if one.schema is not None}
ANSWERS = schema_of(SHAPES)


def validator(name: str) -> Draft202012Validator:
    return Draft202012Validator({"$ref": f"#/components/schemas/{name}", "components": {"schemas": ANSWERS}})


@pytest.mark.parametrize("schema", [*PARAMETERS.values(), *ANSWERS.values()])
def test_a_schema_is_one(schema: Any) -> None:
    Draft202012Validator.check_schema(schema)
    assert not Draft202012Validator(schema).is_valid(None)


def test_the_body_of_a_coding_agent_follows_the_schemas() -> None:
    for name, value in {**TURN, "input": INPUT}.items():
        Draft202012Validator(PARAMETERS.get(name, {})).validate(value)


async def test_answers_and_events_follow_the_schemas(gateway: RunningGateway) -> None:
    asked = {"tools": [TOOL, {"type": "web_search"}], "metadata": {"a": "b"}}
    async with gateway.worker(answering(WHOLE)):
        whole = (await create(gateway, **asked)).json
        events = await raw_events(gateway, PATH, {"model": MODEL, "input": "Hello", "stream": True, **asked})
    queued = (await create(gateway, background=True)).json
    for response in (whole, queued):
        validator("Response").validate(response)
    for event in events:
        validator("ResponseEvent").validate(event)
    validator("ResponseItems").validate((await gateway.get(f"{PATH}/{whole['id']}/input_items")).json)
    counted = await gateway.post(f"{PATH}/input_tokens", {"model": MODEL, "input": "Hello"})
    validator("ResponseTokens").validate(counted.json)
    deleted = await gateway.send(f"DELETE {PATH}/{whole['id']} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
    validator("ResponseDeletion").validate(deleted.json)
    assert not validator("Response").is_valid({**whole, "status": "other"})
