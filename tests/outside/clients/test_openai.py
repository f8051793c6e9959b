"""The `openai` SDK: tools in every choice of tools, its streaming helper, and its parser of tools and answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest

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


def test_parallel_calls_have_ids_of_their_own(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="demo", messages=[QUESTION], tools=[WEATHER], tool_choice="required", seed=3, n=2, max_tokens=300
    )
    calls = [call for choice in answer.choices for call in choice.message.tool_calls or ()]
    assert len({call.id for call in calls}) == len(calls) >= 2


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


def test_parse_gives_an_answer_as_a_model(client: openai.OpenAI) -> None:
    for parse in (client.chat.completions.parse, client.beta.chat.completions.parse):
        answer = parse(model="demo", messages=[QUESTION], response_format=GetWeather, seed=6)
        assert isinstance(answer.choices[0].message.parsed, GetWeather)


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
