"""The `openai` SDK on Responses: tools, its streaming helper, its parser, kept conversations and the background."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest
from openai.types.responses import ParsedResponse, ParsedResponseFunctionToolCall, Response, ResponseFunctionToolCall

from tests.outside.clients.results import assert_city

QUESTION: Any = {"role": "user", "content": "How is the weather in Rome?"}
PLAIN: dict[str, Any] = {"model": "demo", "input": [QUESTION], "max_output_tokens": 100, "extra_body": {"seed": 1}}


class GetWeather(pydantic.BaseModel):
    """The weather of a city."""

    model_config = pydantic.ConfigDict(extra="forbid")

    city: Literal["Paris", "Rome"]


CALL: dict[str, Any] = {
    **PLAIN,
    "tools": [openai.pydantic_function_tool(GetWeather, name="get_weather")["function"] | {"type": "function"}],
    "tool_choice": "required",
    "parallel_tool_calls": False,
}


@pytest.fixture
def client(demo_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{demo_url}/v1", api_key="none", max_retries=0) as client:
        yield client


def call_of(response: Response | ParsedResponse[Any]) -> ResponseFunctionToolCall:
    [call] = response.output
    assert isinstance(call, ResponseFunctionToolCall)
    assert call.name == "get_weather"
    assert_city(call.arguments)
    return call


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


def test_the_streaming_helper_collects_a_text(client: openai.OpenAI) -> None:
    with client.responses.stream(**PLAIN) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    delta = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert delta == final.output_text == client.responses.create(**PLAIN).output_text != ""
    assert client.responses.retrieve(final.id).output_text == delta


def test_the_streaming_helper_collects_a_call(client: openai.OpenAI) -> None:
    with client.responses.stream(**CALL) as stream:
        pieces = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
        call = call_of(stream.get_final_response())
    assert len(pieces) > 3
    assert "".join(pieces) == call.arguments == call_of(client.responses.create(**CALL)).arguments


def test_parse_gives_an_answer_as_a_model(client: openai.OpenAI) -> None:
    assert isinstance(client.responses.parse(**PLAIN, text_format=GetWeather).output_parsed, GetWeather)
    with client.responses.stream(**PLAIN, text_format=GetWeather) as stream:
        assert isinstance(stream.get_final_response().output_parsed, GetWeather)


def test_parse_gives_a_call_as_a_model(client: openai.OpenAI) -> None:
    [call] = client.responses.parse(**CALL).output
    assert isinstance(call, ParsedResponseFunctionToolCall)
    assert_city(call.parsed_arguments)


def test_a_schema_with_tools_gives_a_call_or_an_answer(client: openai.OpenAI) -> None:
    """Asks until the model has chosen both. The demo model likes to call tools and seldom starts an answer in JSON."""
    kinds: set[str] = set()
    for seed in range(60):
        asked = {**CALL, "input": "Hello!", "tool_choice": "auto", "temperature": 2.0, "extra_body": {"seed": seed}}
        [item] = client.responses.parse(**asked, text_format=GetWeather).output
        kinds.add(item.type)
        if isinstance(item, ResponseFunctionToolCall):
            assert_city(item.arguments)
        else:
            assert item.type == "message"
            [part] = item.content
            assert part.type == "output_text"
            assert isinstance(part.parsed, GetWeather)
        if len(kinds) == 2:
            break
    assert kinds == {"function_call", "message"}


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


async def test_the_asynchronous_client_streams_a_call(demo_url: str) -> None:
    async with (
        openai.AsyncOpenAI(base_url=f"{demo_url}/v1", api_key="none", max_retries=0) as client,
        client.responses.stream(**CALL) as stream,
    ):
        kinds = [event.type async for event in stream]
        call_of(await stream.get_final_response())
    assert kinds[-1] == "response.completed"
