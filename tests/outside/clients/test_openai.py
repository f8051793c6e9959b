"""The SDK `openai`: chat, tools, parsed answers, Responses, embeddings and batches, streamed and whole."""

from __future__ import annotations

import json
import math
import time
import urllib.request
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest
from openai.types import Batch
from openai.types.responses import ParsedResponse, ParsedResponseFunctionToolCall, Response, ResponseFunctionToolCall

from tests.outside.clients.results import assert_city, assert_same_vectors
from tests.outside.environments import Case, Environments

# --- openai -----------------------------------------------------------------------------------------------------------
# The `openai` SDK: tools in every choice of tools, its streaming helper, and its parser of tools and answers.


WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Paris", "Rome"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 3},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
LAMP: Any = {
    "type": "function",
    "function": {
        "name": "set_lamp",
        "parameters": {
            "type": "object",
            "properties": {"on": {"type": "boolean"}},
            "required": ["on"],
            "additionalProperties": False,
        },
    },
}
QUESTION: Any = {"role": "user", "content": "How is the weather in Rome?"}
NAMED: Any = {"type": "function", "function": {"name": "set_lamp"}}


class GetWeather(pydantic.BaseModel):
    """The weather of a city."""

    city: Literal["Paris", "Rome"]
    days: int = pydantic.Field(ge=1, le=3)


@pytest.fixture
def client(demo_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{demo_url}/v1", api_key="none", max_retries=0) as client:
        yield client


def assert_weather(arguments: str) -> None:
    GetWeather.model_validate_json(arguments, strict=True)


@pytest.mark.slow
def test_required_then_the_result_then_an_answer(client: openai.OpenAI) -> None:
    call: dict[str, Any] = {"model": "demo", "tools": [WEATHER], "seed": 1, "parallel_tool_calls": False}
    first = client.chat.completions.create(messages=[QUESTION], tool_choice="required", **call)
    [choice] = first.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert choice.message.tool_calls is not None
    [tool_call] = choice.message.tool_calls
    assert tool_call.type == "function"
    assert tool_call.function.name == "get_weather"
    assert_weather(tool_call.function.arguments)
    history = [
        QUESTION,
        choice.message,
        {"role": "tool", "tool_call_id": tool_call.id, "content": "Sunny, 24 degrees."},
    ]
    second = client.chat.completions.create(messages=history, tool_choice="none", max_tokens=30, **call)
    assert second.choices[0].message.content
    assert not second.choices[0].message.tool_calls


@pytest.mark.slow
def test_a_named_tool(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="demo",
        messages=[QUESTION],
        tools=[WEATHER, LAMP],
        tool_choice=NAMED,
        parallel_tool_calls=False,
        seed=2,
    )
    assert answer.choices[0].message.tool_calls is not None
    [call] = answer.choices[0].message.tool_calls
    assert call.type == "function"
    assert call.function.name == "set_lamp"
    assert isinstance(json.loads(call.function.arguments)["on"], bool)


@pytest.mark.slow
def test_auto_is_text_or_complete_calls(client: openai.OpenAI) -> None:
    for seed in range(3):
        answer = client.chat.completions.create(
            model="demo", messages=[QUESTION], tools=[WEATHER], tool_choice="auto", seed=seed, max_tokens=200
        )
        [choice] = answer.choices
        assert bool(choice.message.tool_calls) == (choice.finish_reason == "tool_calls")
        assert choice.message.content or choice.message.tool_calls
        for call in choice.message.tool_calls or ():
            assert call.type == "function"
            assert_weather(call.function.arguments)


@pytest.mark.slow
def test_parallel_calls_have_ids_of_their_own(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="demo", messages=[QUESTION], tools=[WEATHER], tool_choice="required", seed=3, n=2, max_tokens=300
    )
    calls = [call for choice in answer.choices for call in choice.message.tool_calls or ()]
    assert len({call.id for call in calls}) == len(calls) >= 2


@pytest.mark.slow
def test_the_streaming_helper_collects_the_call(client: openai.OpenAI) -> None:
    arguments: dict[str, Any] = {
        "model": "demo",
        "messages": [QUESTION],
        "tools": [openai.pydantic_function_tool(GetWeather)],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "seed": 4,
    }
    kinds, pieces = [], []
    with client.chat.completions.stream(**arguments) as stream:
        for event in stream:
            kinds.append(event.type)
            if event.type == "tool_calls.function.arguments.delta":
                pieces.append(event.arguments_delta)
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.done" in kinds
    [choice] = final.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls is not None
    [call] = choice.message.tool_calls
    assert isinstance(call.function.parsed_arguments, GetWeather)
    assert "".join(pieces) == call.function.arguments
    assert len(pieces) > 1
    whole = client.chat.completions.create(**arguments)
    assert whole.choices[0].message.tool_calls is not None
    whole_call = whole.choices[0].message.tool_calls[0]
    assert whole_call.type == "function"
    assert whole_call.function.arguments == call.function.arguments


@pytest.mark.slow
def test_parse_gives_a_tool_call_as_a_model(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="demo",
        messages=[QUESTION],
        tools=[openai.pydantic_function_tool(GetWeather)],
        tool_choice="required",
        parallel_tool_calls=False,
        seed=5,
    )
    assert answer.choices[0].message.tool_calls is not None
    [call] = answer.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, GetWeather)


@pytest.mark.slow
def test_parse_gives_an_answer_as_a_model(client: openai.OpenAI) -> None:
    for parse in (client.chat.completions.parse, client.beta.chat.completions.parse):
        answer = parse(model="demo", messages=[QUESTION], response_format=GetWeather, seed=6)
        assert isinstance(answer.choices[0].message.parsed, GetWeather)


@pytest.mark.slow
async def test_the_asynchronous_client_streams_a_call(demo_url: str) -> None:
    names: list[str] = []
    arguments = ""
    async with openai.AsyncOpenAI(base_url=f"{demo_url}/v1", api_key="none", max_retries=0) as client:
        stream = await client.chat.completions.create(
            model="demo",
            messages=[QUESTION],
            tools=[WEATHER],
            tool_choice="required",
            parallel_tool_calls=False,
            stream=True,
            seed=7,
        )
        async for chunk in stream:
            for call in chunk.choices[0].delta.tool_calls or () if chunk.choices else ():
                assert call.function is not None
                names += [call.function.name] if call.function.name else []
                arguments += call.function.arguments or ""
    assert names == ["get_weather"]
    assert_weather(arguments)


# --- openai responses -------------------------------------------------------------------------------------------------
# The `openai` SDK on Responses: tools, its streaming helper, its parser, kept conversations and the background.


PLAIN: dict[str, Any] = {
    "model": "demo",
    "input": [QUESTION],
    "max_output_tokens": 100,
    "extra_body": {"seed": 1},
}


class StrictWeather(pydantic.BaseModel):
    """The weather of a city."""

    model_config = pydantic.ConfigDict(extra="forbid")

    city: Literal["Paris", "Rome"]


CALL: dict[str, Any] = {
    **PLAIN,
    "tools": [openai.pydantic_function_tool(StrictWeather, name="get_weather")["function"] | {"type": "function"}],
    "tool_choice": "required",
    "parallel_tool_calls": False,
}


def call_of(response: Response | ParsedResponse[Any]) -> ResponseFunctionToolCall:
    [call] = response.output
    assert isinstance(call, ResponseFunctionToolCall)
    assert call.name == "get_weather"
    assert_city(call.arguments)
    return call


@pytest.mark.slow
def test_a_call_then_its_result_then_an_answer(client: openai.OpenAI) -> None:
    """With all items in the request, and with those that the server keeps."""
    first = client.responses.create(**CALL)
    result: Any = {"type": "function_call_output", "call_id": call_of(first).call_id, "output": "Sunny."}
    rest = {**CALL, "tool_choice": "none"}
    whole = client.responses.create(**{**rest, "input": [QUESTION, *first.output, result]})
    continued = client.responses.create(**{**rest, "input": [result]}, previous_response_id=first.id)
    assert whole.output_text == continued.output_text != ""
    kept = client.responses.input_items.list(continued.id, order="asc")
    assert [item.type for item in kept] == ["message", "function_call", "function_call_output"]


@pytest.mark.slow
def test_the_streaming_helper_collects_a_text(client: openai.OpenAI) -> None:
    with client.responses.stream(**PLAIN) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    delta = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert delta == final.output_text == client.responses.create(**PLAIN).output_text != ""
    assert client.responses.retrieve(final.id).output_text == delta


@pytest.mark.slow
def test_the_streaming_helper_collects_a_call(client: openai.OpenAI) -> None:
    with client.responses.stream(**CALL) as stream:
        pieces = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
        call = call_of(stream.get_final_response())
    assert len(pieces) > 3
    assert "".join(pieces) == call.arguments == call_of(client.responses.create(**CALL)).arguments


@pytest.mark.slow
def test_parse_gives_an_item_as_a_model(client: openai.OpenAI) -> None:
    assert isinstance(
        client.responses.parse(**PLAIN, text_format=StrictWeather).output_parsed,
        StrictWeather,
    )
    with client.responses.stream(**PLAIN, text_format=StrictWeather) as stream:
        assert isinstance(stream.get_final_response().output_parsed, StrictWeather)


@pytest.mark.slow
def test_parse_gives_a_call_as_a_model(client: openai.OpenAI) -> None:
    [call] = client.responses.parse(**CALL).output
    assert isinstance(call, ParsedResponseFunctionToolCall)
    assert_city(call.parsed_arguments)


@pytest.mark.slow
def test_a_schema_with_tools_gives_a_call_or_an_answer(client: openai.OpenAI) -> None:
    """Asks until the model has chosen both. The demo model likes to call tools and seldom starts an answer in JSON."""
    kinds: set[str] = set()
    for seed in range(60):
        asked = {**CALL, "input": "Hello!", "tool_choice": "auto", "temperature": 2.0, "extra_body": {"seed": seed}}
        [item] = client.responses.parse(**asked, text_format=StrictWeather).output
        kinds.add(item.type)
        if isinstance(item, ResponseFunctionToolCall):
            assert_city(item.arguments)
        else:
            assert item.type == "message"
            [part] = item.content
            assert part.type == "output_text"
            assert isinstance(part.parsed, StrictWeather)
        if len(kinds) == 2:
            break
    assert kinds == {"function_call", "message"}


@pytest.mark.slow
def test_a_response_in_the_background_is_read_from_any_event_on(client: openai.OpenAI) -> None:
    response = client.responses.create(**CALL, background=True)
    with client.responses.retrieve(response.id, stream=True) as stream:
        events = list(stream)
    assert events[-1].type == "response.completed"
    call = call_of(events[-1].response)
    middle = len(events) // 2
    with client.responses.retrieve(response.id, stream=True, starting_after=middle) as stream:
        assert list(stream) == events[middle + 1 :]
    assert call_of(client.responses.retrieve(response.id)) == call
    with client.responses.stream(response_id=response.id) as helper:
        assert call_of(helper.get_final_response()).arguments == call.arguments
    with client.responses.stream(response_id=response.id, starting_after=middle) as helper:
        rest = [event.sequence_number for event in helper]
        assert rest == list(range(middle + 1, len(events)))
        assert call_of(helper.get_final_response()).arguments == call.arguments


@pytest.mark.slow
async def test_the_asynchronous_client_streams_a_call_as_an_item(demo_url: str) -> None:
    async with (
        openai.AsyncOpenAI(base_url=f"{demo_url}/v1", api_key="none", max_retries=0) as client,
        client.responses.stream(**CALL) as stream,
    ):
        kinds = [event.type async for event in stream]
        call_of(await stream.get_final_response())
    assert kinds[-1] == "response.completed"


# --- openai embeddings ------------------------------------------------------------------------------------------------
# The `openai` SDK on `/v1/embeddings` of the demo model: texts and token ids, both encodings, shorter vectors.


TEXTS = ["A fox.", "A boat on the sea.", "A fox. A boat on the sea."]


def embed(client: openai.OpenAI, given: Any = TEXTS, **options: Any) -> list[list[float]]:
    answer = client.embeddings.create(model="demo", input=given, **options)
    assert [one.index for one in answer.data] == list(range(len(answer.data)))
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 0
    return [one.embedding for one in answer.data]


def token_ids(url: str, text: str) -> list[int]:
    body = json.dumps({"model": "demo", "prompt": text}).encode()
    request = urllib.request.Request(f"{url}/tokenize", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as reply:
        ids: list[int] = json.load(reply)["tokens"]
    return ids


@pytest.mark.slow
def test_one_text_and_several(client: openai.OpenAI) -> None:
    together = embed(client)
    assert_same_vectors([embed(client, text)[0] for text in TEXTS], together)


@pytest.mark.slow
def test_both_encodings(client: openai.OpenAI) -> None:
    """The SDK asks for base64 by itself, and decodes it."""
    assert_same_vectors(embed(client), embed(client, encoding_format="float"))


@pytest.mark.slow
def test_token_ids_are_as_good_as_their_text(client: openai.OpenAI, demo_url: str) -> None:
    ids = [token_ids(demo_url, text) for text in TEXTS]
    assert_same_vectors(embed(client, ids), embed(client))
    assert_same_vectors(embed(client, ids[0]), embed(client, TEXTS[0]))


@pytest.mark.slow
def test_shorter_vectors(client: openai.OpenAI) -> None:
    long = embed(client)
    short = embed(client, dimensions=64)
    cut = [vector[:64] for vector in long]
    assert_same_vectors(short, [[number / math.hypot(*vector) for number in vector] for vector in cut])


@pytest.mark.slow
def test_a_token_id_of_another_model_is_named(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="999999") as caught:
        embed(client, [[1, 999_999]])
    assert caught.value.param == "input[0][1]"


@pytest.mark.slow
async def test_the_asynchronous_client(demo_url: str, client: openai.OpenAI) -> None:
    async with openai.AsyncOpenAI(base_url=f"{demo_url}/v1", api_key="none", max_retries=0) as other:
        answer = await other.embeddings.create(model="demo", input=TEXTS)
    assert_same_vectors([one.embedding for one in answer.data], embed(client))


# --- openai batches ---------------------------------------------------------------------------------------------------
# The `openai` SDK on `/v1/files` and `/v1/batches` of the demo model, with the storage that `quire serve` sets up.


CHAT = "/v1/chat/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Tell me a story about a fox."}], "max_tokens": 20},
    "/v1/completions": {"prompt": "Once upon a time", "max_tokens": 20},
    "/v1/responses": {"input": "Tell me a story about a fox.", "max_output_tokens": 20},
    "/v1/embeddings": {"input": ["A fox.", "A boat."], "dimensions": 8},
}


def run(client: openai.OpenAI, lines: list[dict[str, Any]], endpoint: Any) -> Batch:
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    file = client.files.create(file=("calls.jsonl", content), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window="24h", metadata={"job": "test"}
    )
    deadline = time.monotonic() + 60
    while batch.status in ("validating", "in_progress", "finalizing", "cancelling"):
        assert time.monotonic() < deadline, batch
        time.sleep(0.05)
        batch = client.batches.retrieve(batch.id)
    return batch


@pytest.mark.slow
@pytest.mark.parametrize("endpoint", BODIES)
def test_a_batch_of_each_endpoint(client: openai.OpenAI, endpoint: str) -> None:
    sampling = {} if endpoint == "/v1/embeddings" else {"temperature": 0}
    body = {"model": "demo", **sampling, **BODIES[endpoint]}
    lines = [{"custom_id": str(n), "method": "POST", "url": endpoint, "body": body} for n in range(5)]
    batch = run(client, lines, endpoint)
    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert (batch.request_counts.total, batch.request_counts.completed) == (5, 5)
    assert batch.metadata == {"job": "test"}
    assert batch.output_file_id is not None
    found = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    assert [one["custom_id"] for one in found] == list("01234")
    # The calls are equal, and so are the answers, but for ids.
    bodies = [one["response"]["body"] for one in found]
    assert len({json.dumps(body.get("choices") or body.get("data"), sort_keys=True) for body in bodies}) == 1
    assert batch.id in [one.id for one in client.batches.list(limit=10)]


@pytest.mark.slow
def test_a_wrong_line_is_reported_before_anything_runs(client: openai.OpenAI) -> None:
    line = {"custom_id": "a", "method": "POST", "url": CHAT, "body": {"model": "demo", "messages": []}}
    batch = run(client, [line], CHAT)
    assert batch.status == "failed"
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert (batch.errors.data[0].line, batch.errors.data[0].param) == (1, "body.messages")


@pytest.mark.slow
def test_cancel(client: openai.OpenAI) -> None:
    body = {"model": "demo", **BODIES[CHAT], "max_tokens": 200, "ignore_eos": True}
    lines = [{"custom_id": str(n), "method": "POST", "url": CHAT, "body": body} for n in range(300)]
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    file = client.files.create(file=("calls.jsonl", content), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    while client.batches.retrieve(batch.id).status == "validating":
        time.sleep(0.05)
    assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    while (batch := client.batches.retrieve(batch.id)).status == "cancelling":
        time.sleep(0.05)
    assert batch.status == "cancelled"
    assert batch.error_file_id is not None
    errors = [json.loads(line) for line in client.files.content(batch.error_file_id).text.splitlines()]
    assert {one["error"]["code"] for one in errors} == {"batch_cancelled"}
    assert batch.request_counts is not None
    assert batch.request_counts.completed + len(errors) == 300


# --- WebSockets -------------------------------------------------------------------------------------------------------
# The connection of the SDK, and the session that reads whole responses from it.


@pytest.fixture(scope="module")
def websocket_cases(environments: Environments, demo_url: str) -> dict[str, Case]:
    return environments.run_python("openai_websocket_program.py", demo_url, ["openai[realtime]==3.52.0"])


def test_a_websocket_continues_a_response_that_is_not_stored(websocket_cases: dict[str, Case]) -> None:
    result = websocket_cases["chain"].value()
    [(first, tokens), (second, more_tokens)] = result["answers"]
    assert first == websocket_cases["posted"].value()
    assert second
    assert more_tokens > tokens + 20
    assert result["error"] == ["error", 400, "invalid_value", "temperature"]


def test_a_session_over_a_websocket_reads_a_whole_response(websocket_cases: dict[str, Case]) -> None:
    assert websocket_cases["session"].value() == websocket_cases["posted"].value()
