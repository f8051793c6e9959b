"""The `anthropic` SDK: a tool round trip, streams, its runner of tools and its parser."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import pydantic
import pytest

from tests.outside.clients.results import CITIES, assert_city

pytestmark = pytest.mark.slow

QUESTION: Any = {"role": "user", "content": "How is the weather in Rome?"}
WEATHER: Any = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": list(CITIES)}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
PLAIN: dict[str, Any] = {"model": "demo", "max_tokens": 100, "messages": [QUESTION], "extra_body": {"seed": 1}}
CALL: dict[str, Any] = {
    **PLAIN,
    "tools": [WEATHER],
    "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
}


class Weather(pydantic.BaseModel):
    """The city that was asked for."""

    model_config = pydantic.ConfigDict(extra="forbid")

    city: Literal["Paris", "Rome"]


@pytest.fixture
def client(demo_url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=demo_url, api_key="none", max_retries=0) as client:
        yield client


def test_a_call_then_its_result_then_an_answer(client: anthropic.Anthropic) -> None:
    first = client.messages.create(**CALL)
    assert first.stop_reason == "tool_use"
    [call] = first.content
    assert call.type == "tool_use"
    assert_city(call.input)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "Sunny."}
    history: Any = [QUESTION, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    second = client.messages.create(**{**CALL, "messages": history, "tool_choice": {"type": "none"}})
    assert second.stop_reason == "end_turn"
    [text] = second.content
    assert text.type == "text"
    assert text.text
    counted = client.messages.count_tokens(model="demo", messages=history, tools=[WEATHER])
    assert counted.input_tokens > first.usage.input_tokens


def test_a_streamed_call_is_equal_to_a_whole_one(client: anthropic.Anthropic) -> None:
    with client.messages.stream(**CALL) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        [call] = stream.get_final_message().content
    assert len(pieces) > 3
    [whole] = client.messages.create(**CALL).content
    assert call.type == whole.type == "tool_use"
    assert call.input == whole.input
    assert_city(call.input)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_the_runner_of_tools_calls_a_tool_and_sends_its_result(client: anthropic.Anthropic, is_streamed: bool) -> None:
    called = []

    @anthropic.beta_tool
    def get_weather(city: Literal["Paris", "Rome"]) -> str:
        """The weather of a city."""
        called.append(city)
        return "Sunny."

    runner: Any = client.beta.messages.tool_runner(
        **{**CALL, "tools": [get_weather]}, max_iterations=2, stream=is_streamed
    )
    messages = [one.get_final_message() if is_streamed else one for one in runner]
    assert [message.stop_reason for message in messages] == ["tool_use", "tool_use"]
    asked = [block.input["city"] for message in messages for block in message.content]
    assert called == asked
    assert set(called) <= set(CITIES)


def test_the_parser_gives_an_answer_as_a_model(client: anthropic.Anthropic) -> None:
    answer = client.messages.parse(**PLAIN, output_format=Weather)
    assert isinstance(answer.parsed_output, Weather)
