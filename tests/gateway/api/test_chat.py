"""Chats: prompts, answers and streams."""

from __future__ import annotations

import asyncio
import json
import struct
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from quire.gateway.api.chat import ChatAnswer
from quire.gateway.api.chat_messages import read_messages
from quire.gateway.output.parts import AnswerPart, PartKind
from quire.gateway.stream.call_metadata import CallMetadata
from quire.shared.protocol.messages import BY_TOKEN, Delta, GenerationRequest, Outcome
from tests.gateway.conftest import Start
from tests.support.gateway.fake_worker import Steps, emit
from tests.support.gateway.running import (
    MODEL,
    RunningGateway,
    chat_body,
    running_gateway,
    texts,
    tokens,
    until,
)

# --- Chat completions, through the OpenAI SDK and through a plain HTTP client -----------------------------------------


TEXT = "Hello wörld 😀, how are you?"
HELLO = [{"role": "user", "content": "Hello"}]


async def test_the_sdk_gets_an_answer_in_one_piece(gateway: RunningGateway) -> None:
    async with gateway.worker(emit(tokens(TEXT))), gateway.openai() as client:
        answer = await client.chat.completions.create(model=MODEL, messages=HELLO)  # type: ignore[arg-type]
    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"
    assert answer.model == MODEL
    [choice] = answer.choices
    assert (choice.index, choice.message.role, choice.message.content) == (0, "assistant", TEXT)
    assert (choice.message.refusal, choice.message.annotations) == (None, [])
    assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(tokens(TEXT))
    assert answer.usage.prompt_tokens == len(tokens("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"))
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


async def test_events_carry_their_place_in_the_stream(gateway: RunningGateway) -> None:
    ids = tokens("a😀b")
    async with gateway.worker(emit(ids)):
        events = await gateway.events("/v1/chat/completions", chat_body(stream=True))
    assert [str(event.id) for event in events] == ["0.1", "1", "5", "6", "6.1", "6.2"]
    assert texts(events) == ["a", "😀", "b"]
    assert events[-1].data == "[DONE]"
    assert "usage" not in events[1].data
    assert events[1].data == {
        "id": events[0].data["id"],
        "object": "chat.completion.chunk",
        "created": events[0].data["created"],
        "model": MODEL,
        "system_fingerprint": events[0].data["system_fingerprint"],
        "choices": [{"index": 0, "delta": {"content": "a"}, "logprobs": None, "finish_reason": None}],
    }


async def test_without_usage_asked_for_no_chunk_mentions_it_and_with_it_all_do(gateway: RunningGateway) -> None:
    for path, body in (("chat/completions", chat_body()), ("completions", {"model": MODEL, "prompt": "x"})):
        async with gateway.worker(emit(tokens("abc"))):
            plain = await gateway.events(f"/v1/{path}", {**body, "stream": True})
            asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
            events = await gateway.events(f"/v1/{path}", asked)
        assert not any("usage" in event.data for event in plain[:-1])
        assert [event.data["usage"] for event in events[:-2]] == [None] * len(events[:-2])
        assert events[-2].data["choices"] == []
        assert events[-2].data["usage"]["completion_tokens"] == 3


async def test_several_choices_each_have_their_own_text(gateway: RunningGateway) -> None:
    first, second = tokens("one 😀"), tokens("two")

    async def script(request: GenerationRequest) -> Steps:
        for a, b in zip(first[:3], second, strict=True):
            yield (Delta(0, (a,)), Delta(1, (b,), "stop" if b is second[-1] else None)), None
        yield (Delta(0, tuple(first[3:]), "length"),), Outcome("length")

    async with gateway.worker(script):
        events = await gateway.events("/v1/chat/completions", chat_body(stream=True, n=2))
        whole = (await gateway.chat(n=2)).json
    assert "".join(texts(events, 0)) == "one 😀"
    assert "".join(texts(events, 1)) == "two"
    roles = [event.data["choices"][0]["delta"].get("role") for event in events[:2]]
    assert roles == ["assistant", "assistant"]
    assert [choice["message"]["content"] for choice in whole["choices"]] == ["one 😀", "two"]
    assert [choice["finish_reason"] for choice in whole["choices"]] == ["length", "stop"]
    assert whole["usage"]["completion_tokens"] == len(first) + len(second)


async def test_the_worker_gets_every_parameter_as_it_was_given(gateway: RunningGateway) -> None:
    given = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "seed": 42,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.1,
        "min_tokens": 2,
        "ignore_eos": True,
        "stop": ["x", "y"],
        "bad_words": ["a", "b c"],
        "n": 2,
    }
    async with gateway.worker(emit(tokens("abc"))) as worker:
        assert (await gateway.chat(**given, max_completion_tokens=9)).status == 200
    [request] = worker.claimed
    assert request.model == MODEL
    assert list(request.prompt) == tokens("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")
    sampling = request.sampling
    assert {name: getattr(sampling, name) for name in given} == {
        **given,
        "stop": ("x", "y"),
        "bad_words": ("a", "b c"),
    }
    assert sampling.max_tokens == 9


async def test_null_means_absent(gateway: RunningGateway) -> None:
    nothing = dict.fromkeys(["temperature", "n", "stop", "max_tokens", "stream", "stream_options", "tools", "user"])
    async with gateway.worker(emit(tokens("abc"))) as worker:
        assert (await gateway.chat(**nothing)).status == 200
    [request] = worker.claimed
    assert request.sampling.temperature == 1.0
    assert request.sampling.n == 1


async def test_seeds_are_drawn_where_none_is_given_and_kept_where_one_is(gateway: RunningGateway) -> None:
    async with gateway.worker(emit(tokens("abc"))) as worker:
        for seed in (None, None, 7, -1):
            await gateway.chat(seed=seed)
    seeds = [request.sampling.seed for request in worker.claimed]
    assert seeds[0] != seeds[1]
    assert seeds[2:] == [7, 2**64 - 1]


async def test_a_chat_without_max_tokens_may_use_the_rest_of_the_context(gateway: RunningGateway) -> None:
    async with gateway.worker(emit(tokens("abc"))) as worker:
        await gateway.chat()
    [request] = worker.claimed
    assert len(request.prompt) + request.sampling.max_tokens == 512


async def test_a_stop_token_counts_but_is_no_text(gateway: RunningGateway) -> None:
    ids = tokens("abcZ")

    async def script(request: GenerationRequest) -> Steps:
        yield (Delta(0, tuple(ids[:2])),), None
        yield (Delta(0, tuple(ids[2:]), "stop", ""),), Outcome("stop")

    async with gateway.worker(script) as worker:
        answer = (await gateway.chat(stop_token_ids=[ids[-1], 7, 7])).json
        events = await gateway.events("/v1/chat/completions", chat_body(stream=True, stop_token_ids=[ids[-1]]))
    assert answer["choices"][0]["message"]["content"] == "".join(texts(events)) == "abc"
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 4
    assert [one.sampling.stop_token_ids for one in worker.claimed] == [(ids[-1], 7), (ids[-1],)]


@pytest.mark.parametrize("step", [1, 7])
@pytest.mark.parametrize("logprobs", [False, True])
async def test_a_stop_string_stays_in_the_text_if_it_is_asked_for(
    start_gateway: Start, step: int, logprobs: bool
) -> None:
    """Text after the stop string is cut. A gateway that reads the call from Redis returns the same text."""
    here, there = await start_gateway(), await start_gateway()
    ids = tokens("Hello <stop> and more")
    asked: dict[str, Any] = {"stop": "<stop>", "include_stop_str_in_output": True, "n": 2, "logprobs": logprobs}

    async def script(request: GenerationRequest) -> Steps:
        for at in range(0, len(ids), step):
            last = at + step >= len(ids)
            some = tuple(ids[at : at + step])
            records = struct.pack("<f", -1.0) * len(some) if request.sampling.logprobs else None
            end = ("stop", "<stop>") if last else (None, None)
            yield (
                tuple(Delta(choice, some, *end, None, records) for choice in range(2)),
                (Outcome("stop") if last else None),
            )

    async with here.worker(script) as worker:
        whole = (await here.chat(**asked)).json
        headers = {"Idempotency_Key": "key"}
        async with here.stream("/v1/chat/completions", chat_body(stream=True, **asked), **headers) as stream:
            events = await stream.rest()
        async with there.stream("/v1/chat/completions", chat_body(stream=True, **asked), **headers) as stream:
            assert await stream.rest() == events
    assert len(worker.claimed) == 2
    assert [request.sampling.include_stop_str_in_output for request in worker.claimed] == [True, True]
    assert [choice["message"]["content"] for choice in whole["choices"]] == 2 * ["Hello <stop>"]
    for choice in (0, 1):
        assert "".join(texts(events, choice)) == "Hello <stop>"


async def test_a_stop_token_is_text_if_it_is_asked_for_and_the_end_token_is_not(gateway: RunningGateway) -> None:
    ids = tokens("abc!")
    for last, stop in ((ids[-1], BY_TOKEN), (2, None)):

        async def script(request: GenerationRequest, last: int = last, stop: str | None = stop) -> Steps:
            yield (Delta(0, (*ids[:-1], last), "stop", stop),), Outcome("stop")

        async with gateway.worker(script):
            answer = (await gateway.chat(stop_token_ids=[ids[-1]], include_stop_str_in_output=True)).json
        assert answer["choices"][0]["message"]["content"] == ("abc!" if stop is not None else "abc")


async def test_the_sdk_survives_comments_between_events(start_gateway: Start) -> None:
    """The SDK reads a blank line after an event with an id as one more event, and fails to parse its empty data."""
    gateway = await start_gateway(keepalive_s=0.05)
    comments = asyncio.Event()

    async def pausing(request: GenerationRequest) -> Steps:
        yield (Delta(0, tuple(tokens("a"))),), None
        await comments.wait()
        yield (Delta(0, tuple(tokens("b")), "length"),), Outcome("length")

    async with gateway.worker(pausing), gateway.openai() as client:
        stream = await client.completions.create(model=MODEL, prompt="x", stream=True, max_tokens=9)
        pieces = [(await anext(stream)).choices[0].text]
        body = {"model": MODEL, "prompt": "y", "stream": True}  # a second stream shows when comments are sent
        async with (
            aiohttp.ClientSession() as session,
            session.post(gateway.url + "/v1/completions", json=body) as other,
        ):
            while (await other.content.readline()) != b": keep-alive\n":
                pass
        comments.set()
        pieces += [chunk.choices[0].text async for chunk in stream]
    assert "".join(pieces) == "ab"


async def test_a_client_that_cuts_at_blank_lines_finds_json_in_every_piece(gateway: RunningGateway) -> None:
    """Load generators that use plain aiohttp cut so. A client that accepts text/event-stream gets event ids."""
    body = {"model": MODEL, "prompt": "x", "stream": True, "stream_options": {"include_usage": True}}
    async with gateway.worker(emit(tokens("abc"))):
        async with (
            aiohttp.ClientSession() as session,
            session.post(gateway.url + "/v1/completions", json=body) as answer,
        ):
            pieces = (await answer.text()).strip().split("\n\n")
        marked = await gateway.events("/v1/completions", body)
    assert pieces[-1] == "data: [DONE]"
    assert [json.loads(piece.removeprefix("data: "))["object"] for piece in pieces[:-1]] == ["text_completion"] * 5
    assert [str(event.id) for event in marked] == ["1", "2", "3", "3.1", "3.2", "3.3"]


async def test_a_stream_that_is_open_when_the_gateway_is_told_to_end_is_finished(start_gateway: Start) -> None:
    go_on = asyncio.Event()

    async def script(request: GenerationRequest) -> Steps:
        yield (Delta(0, tuple(tokens("first "))),), None
        await go_on.wait()
        yield (Delta(0, tuple(tokens("second")), "stop"),), Outcome("stop")

    async def begun() -> bool:
        return ending.gateway.subscription.frames > 0

    first = await start_gateway()
    async with first.worker(script):
        async with running_gateway(first.settings) as ending:
            call = asyncio.create_task(ending.events("/v1/chat/completions", chat_body(stream=True)))
            await until(begun)
            asyncio.get_running_loop().call_later(0.1, go_on.set)
        events = await call
    assert "".join(texts(events)) == "first second"
    assert events[-1].data == "[DONE]"


@pytest.mark.parametrize("kind", [PartKind.CONTENT, PartKind.REASONING, PartKind.ARGUMENTS])
def test_one_part_is_the_same_event_as_its_pieces(kind: PartKind) -> None:
    """One part, the common case, is written without merging."""
    metadata = CallMetadata("chat", 0, 2, True, (), 1, 1, False)
    model: Any = SimpleNamespace(name=MODEL, token_texts=None)
    form = ChatAnswer("chatcmpl-1", model, metadata)
    call = 0 if kind is PartKind.ARGUMENTS else -1
    [whole] = form.parts(1, [AnswerPart(kind, 'a"\n', call)])
    assert [whole] == form.parts(1, [AnswerPart(kind, "a", call), AnswerPart(kind, '"\n', call)])
    if kind is PartKind.CONTENT:
        assert whole == form.text(1, 'a"\n')
    [choice] = json.loads(whole.removeprefix("data: "))["choices"]
    assert choice["index"] == 1
    assert choice["finish_reason"] is None


# --- Messages of a chat that are refused, by the name of the message and the key --------------------------------------


def test_copies_of_the_values_of_a_message_are_left_out() -> None:
    """litellm sends such an object back with each message of the assistant."""
    message = {"role": "assistant", "content": "x", "reasoning_content": "r"}
    copies = {"refusal": None, "reasoning_content": "r"}
    assert read_messages([{**message, "provider_specific_fields": copies}]) == read_messages([message])
