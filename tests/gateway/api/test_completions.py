"""Completions, and the labels of calls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from quire.gateway.api.call import Call
from quire.gateway.api.headers import NO_EFFECT_HEADER
from quire.gateway.api.labels import USER_HASH_DIGITS, user_hash
from quire.gateway.api.parameters import CHAT, read
from quire.gateway.errors.api_errors import InvalidRequest
from quire.gateway.stream.call_metadata import CallMetadata
from quire.shared.protocol.messages import Delta, GenerationRequest, Outcome
from tests.gateway.conftest import Start
from tests.support.gateway.fake_worker import Steps, emit
from tests.support.gateway.running import CHAT as CHATS
from tests.support.gateway.running import (
    COMPLETIONS,
    MODEL,
    RunningGateway,
    chat_body,
    check,
    texts,
    tokens,
    write_model,
)
from tests.support.tokenizers import byte_fallback, byte_level

# --- Completions over HTTP: forms of prompts, answers and events ------------------------------------------------------


async def echo(request: GenerationRequest) -> Steps:
    """Answers each prompt with itself."""
    for index, token in enumerate(request.prompt):
        last = index + 1 == len(request.prompt)
        yield (Delta(0, (token,), "stop" if last else None),), Outcome("stop") if last else None


def usage(prompt: int, completion: int) -> dict[str, object]:
    counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    return counts | {"prompt_tokens_details": {"cached_tokens": 0}}


async def test_every_form_of_prompt_is_answered_in_order(gateway: RunningGateway) -> None:
    for prompt, expected in [
        ("one 😀", ["one 😀"]),
        (["one", "two"], ["one", "two"]),
        (tokens("one"), ["one"]),
        ([tokens("one"), tokens("two 😀")], ["one", "two 😀"]),
        (["one", tokens("two")], ["one", "two"]),
        (["same", "same"], ["same", "same"]),
    ]:
        async with gateway.worker(echo):
            whole = (await gateway.complete(prompt=prompt)).json
            events = await gateway.events("/v1/completions", {"model": MODEL, "prompt": prompt, "stream": True})
        assert [choice["text"] for choice in whole["choices"]] == expected
        assert [choice["index"] for choice in whole["choices"]] == list(range(len(expected)))
        assert ["".join(texts(events, index)) for index in range(len(expected))] == expected
        count = sum(len(tokens(text)) for text in expected)
        assert whole["usage"] == usage(count, count)
        assert events[-1].id.tokens == count


async def test_choices_of_several_prompts_are_numbered_through(gateway: RunningGateway) -> None:
    async def script(request: GenerationRequest) -> Steps:
        prompt = tuple(request.prompt)
        a, b = byte_level().token_to_id("A"), byte_level().token_to_id("B")
        yield (Delta(1, (*prompt, b), "stop"), Delta(0, (*prompt, a), "length")), Outcome("length")

    async with gateway.worker(script):
        whole = (await gateway.complete(prompt=["x", "y"], n=2)).json
    assert [choice["text"] for choice in whole["choices"]] == ["xA", "xB", "yA", "yB"]
    assert [choice["finish_reason"] for choice in whole["choices"]] == ["length", "stop"] * 2


async def test_sixteen_tokens_are_generated_unless_asked_otherwise(gateway: RunningGateway) -> None:
    async with gateway.worker(emit(tokens("abc"))) as worker:
        for asked in ({}, {"max_tokens": 3}, {"prompt": [5] * 505}):
            await gateway.complete(**asked)
    assert [request.sampling.max_tokens for request in worker.claimed] == [16, 3, 7]


async def test_when_one_prompt_fails_the_others_are_cancelled(gateway: RunningGateway) -> None:
    async def script(request: GenerationRequest) -> Steps:
        if tuple(request.prompt) == tuple(tokens("bad")):
            yield (), Outcome("error", "broken")
        while True:
            yield (Delta(0, (65,)),), None

    async with gateway.worker(script) as worker:
        reply = await gateway.complete(prompt=["good", "bad"])
        assert reply.status == 500
        assert reply.error["message"] == "broken"
        assert await worker.cancelled.get() == reply.headers["x-request-id"]


async def test_a_tokenizer_that_adds_a_beginning_of_sequence_does_so_for_plain_prompts_only(
    start_gateway: Start, tmp_path: Path
) -> None:
    folder = write_model(tmp_path / "bos")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save(str(folder / "tokenizer.json"))
    gateway = await start_gateway(model=str(folder))
    async with gateway.worker(emit(tokens("a"))) as worker:
        assert (await gateway.complete(model="bos", prompt="x")).status == 200
        assert (await gateway.chat(model="bos")).status == 200
    plain, chat = (list(request.prompt) for request in worker.claimed)
    assert plain == [1, *tokens("x")]
    assert chat[0] == byte_level().token_to_id("<|im_start|>")


async def test_a_completion_goes_on_in_a_text_and_a_message_is_one(start_gateway: Start, tmp_path: Path) -> None:
    # SentencePiece: a word brings the space in front of it along, and the first one of a text loses it.
    model = write_model(tmp_path / MODEL, byte_fallback())
    gateway = await start_gateway(model=str(model))
    words = byte_fallback().encode("the way", add_special_tokens=False).ids
    async with gateway.worker(emit(words)):
        completion = (await gateway.complete()).json
        message = (await gateway.chat()).json
        streamed = await gateway.events("/v1/completions", {"model": MODEL, "prompt": "on", "stream": True})
        chunks = await gateway.events(
            "/v1/chat/completions", {"model": MODEL, "messages": [{"role": "user", "content": "on"}], "stream": True}
        )
        stopped = (await gateway.complete(stop=" the")).json
    assert completion["choices"][0]["text"] == "".join(texts(streamed)) == " the way"
    assert message["choices"][0]["message"]["content"] == "".join(texts(chunks)) == "the way"
    assert stopped["choices"][0]["text"] == ""


PROMPTS: dict[str, tuple[Any, str, str]] = {
    "empty": ("", "prompt", "empty"),
    "empty array": ([], "prompt", "empty"),
    "an empty one among others": (["x", ""], "prompt[1]", "empty"),
    "an empty array among others": ([[1], []], "prompt[1]", "empty"),
    "a number": (5, "prompt", "must be"),
    "an object": ({}, "prompt", "must be"),
    "a float among ids": ([1, 2.5], "prompt[1]", "token id"),
    "true among ids": ([1, True], "prompt[1]", "token id"),
    "a negative id": ([1, -1], "prompt[1]", "token id"),
    "an id over the vocabulary": ([1, 500], "prompt[1]", "0 to 451"),
    "a huge id": ([[2**70]], "prompt[0][0]", "token id"),
    "nested too far": ([[[1]]], "prompt[0][0]", "token id"),
    "text among ids": ([1, "x"], "prompt[1]", "token id"),
    "too many": (["x"] * 9, "prompt", "at most 8"),
    "longer than the context": ([1] * 512, "prompt", "maximum context length is 512 tokens"),
    "much longer than the context": ("x" * 20_000, "prompt", "maximum context length is 512 tokens"),
}


async def test_prompts_that_are_none(server: RunningGateway) -> None:
    for prompt, param, says in PROMPTS.values():
        await check(server, COMPLETIONS, {"model": MODEL, "prompt": prompt}, 400, param, says)


# --- Labels of a call: users are hashed, metadata and tier come back, and a header names parameters without -----------


METADATA = {"team": "a", "run": "4 ⅞"}
PATHS = {CHATS: chat_body(), COMPLETIONS: {"model": MODEL, "prompt": "Hello"}}
NO_EFFECT = NO_EFFECT_HEADER.lower()


def labels(**given: Any) -> Any:
    return Call.of(read(chat_body(**given), CHAT), {})


@pytest.mark.parametrize(
    ("tier", "priority", "expected"),
    [
        ("auto", None, ("standard", "default")),
        ("auto", "batch", ("batch", "flex")),
        ("default", None, ("standard", "default")),
        ("flex", None, ("batch", "flex")),
        ("flex", "batch", ("batch", "flex")),
        ("priority", None, ("interactive", "priority")),
        (None, "interactive", ("interactive", "")),
        (None, None, ("standard", "")),
    ],
)
def test_a_tier_is_a_class(tier: str | None, priority: str | None, expected: tuple[str, str]) -> None:
    found = labels(service_tier=tier, priority=priority)
    assert (found.priority, found.about.service_tier) == expected


@pytest.mark.parametrize(("tier", "priority"), [("default", "batch"), ("flex", "standard"), ("priority", "standard")])
def test_a_tier_against_the_priority_is_refused(tier: str, priority: str) -> None:
    with pytest.raises(InvalidRequest, match="give one of them") as caught:
        labels(service_tier=tier, priority=priority)
    assert caught.value.param == "service_tier"


def test_the_newer_name_of_the_user_has_precedence() -> None:
    assert labels(user="a").user == "a"
    assert labels(user="a", safety_identifier="b").user == labels(safety_identifier="b").user == "b"
    assert labels(user="", safety_identifier=None).user == ""


def test_a_user_is_hashed_with_the_key() -> None:
    found = user_hash("someone@example.org", b"key")
    assert len(found) == USER_HASH_DIGITS
    assert found == user_hash("someone@example.org", b"key")
    assert len({found, user_hash("someone@example.org", b"other"), user_hash("someone", b"key")}) == 3
    assert user_hash("", b"key") == ""


def test_only_values_that_ask_for_something_are_without_effect() -> None:
    assert labels(store=False, prompt_cache_key="k", prediction=None).no_effect == ()
    assert labels(store=True, prompt_cache_retention="24h").no_effect == (
        "store",
        "prompt_cache_retention",
    )


async def test_a_value_of_metadata_is_a_short_string(server: RunningGateway) -> None:
    for value in [5, None, "x" * 513, {}]:
        await check(server, CHATS, chat_body(metadata={"run": value}), 400, "metadata.run", "a string")


async def test_what_has_no_effect_is_named_in_a_header(gateway: RunningGateway) -> None:
    for path in PATHS:
        async with gateway.worker(emit(tokens("a"), "stop")):
            quiet = await gateway.post(path, {**PATHS[path], "store": False})
            assert NO_EFFECT not in quiet.headers
            reply = await gateway.post(path, {**PATHS[path], "store": True, "prompt_cache_options": {"a": 1}})
            assert (reply.status, reply.headers[NO_EFFECT]) == (200, "store, prompt_cache_options")
            async with gateway.stream(path, {**PATHS[path], "stream": True, "store": True}) as stream:
                assert stream.response.headers[NO_EFFECT] == "store"
                await stream.rest()


@pytest.mark.parametrize("path", PATHS)
async def test_labels_are_the_same_in_the_answer_in_a_stream_and_at_another_gateway(
    gateway: RunningGateway, start_gateway: Start, path: str
) -> None:
    body = {**PATHS[path], "metadata": METADATA, "service_tier": "flex", "prompt_cache_key": "k"}
    async with gateway.worker(emit(tokens("ab"), "stop")) as worker:
        whole = (await gateway.post(path, body)).json
        assert (whole["metadata"], whole["service_tier"]) == (METADATA, "flex")
        events = await gateway.events(path, {**body, "stream": True, "background": True})
        chunks = [event.data for event in events if event.data != "[DONE]"]
        assert {chunk["service_tier"] for chunk in chunks} == {"flex"}
        assert [chunk.get("metadata") for chunk in chunks] == [
            METADATA if chunk["choices"][0]["finish_reason"] else None for chunk in chunks
        ]
        other = await start_gateway()
        async with other.stream(f"{path}/{chunks[0]['id']}/stream") as resumed:
            assert await resumed.rest() == events
    assert worker is not None
    plain = chunks[0]["id"].split("-")[1]
    stored = await gateway.gateway.broker.client.hmget(gateway.gateway.broker.keys.request(plain), "metadata", "class")
    assert CallMetadata.decode(stored[0]).prompt_cache_key == "k"
    assert stored[1] == b"batch"


async def test_an_answer_without_labels_has_none(gateway: RunningGateway) -> None:
    async with gateway.worker(emit(tokens("a"), "stop")):
        reply = await gateway.chat(metadata={}, user="someone")
    assert not {"metadata", "service_tier"} & reply.json.keys()


async def test_the_log_has_the_hash_of_the_user_and_never_the_user(
    start_gateway: Start, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    gateway = await start_gateway(user_hash_key="the key")
    async with gateway.worker(emit(tokens("a"), "stop")):
        await gateway.chat(user="someone@example.org")
    [record] = [one for one in caplog.records if one.name == "gateway.access" and "chat" in one.getMessage()]
    expected = user_hash("someone@example.org", b"the key")
    assert record.__dict__["user_hash"] == expected
    assert f" user={expected}" in record.getMessage()
    assert "someone@example.org" not in caplog.text
    keys = [key async for key in gateway.gateway.broker.client.scan_iter()]
    for key in keys:
        if await gateway.gateway.broker.client.type(key) == b"hash":
            stored = await gateway.gateway.broker.client.hgetall(key)
            assert "someone@example.org" not in json.dumps([str(value) for value in stored.values()])
