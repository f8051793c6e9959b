"""Completions over HTTP: forms of prompts, answers and events."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from quire.shared.messages import Delta, GenerationRequest, Outcome
from tests.gateway.conftest import Start
from tests.support.gateway.fake_worker import Steps, emit
from tests.support.gateway.refusals import COMPLETIONS, check
from tests.support.gateway.running import MODEL, RunningGateway, texts, tokens, write_model
from tests.support.tokenizers import byte_fallback, byte_level


async def echo(request: GenerationRequest) -> Steps:
    """Answers each prompt with itself."""
    for index, token in enumerate(request.prompt):
        last = index + 1 == len(request.prompt)
        yield (Delta(0, (token,), "stop" if last else None),), Outcome("stop") if last else None


def usage(prompt: int, completion: int) -> dict[str, object]:
    counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    return counts | {"prompt_tokens_details": {"cached_tokens": 0}}


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("one 😀", ["one 😀"]),
        (["one", "two"], ["one", "two"]),
        (tokens("one"), ["one"]),
        ([tokens("one"), tokens("two 😀")], ["one", "two 😀"]),
        (["one", tokens("two")], ["one", "two"]),
        (["same", "same"], ["same", "same"]),
    ],
    ids=["text", "texts", "ids", "lists of ids", "mixed", "equal"],
)
async def test_every_form_of_prompt_is_answered_in_order(
    gateway: RunningGateway, prompt: object, expected: list[str]
) -> None:
    async with gateway.worker(echo):
        whole = (await gateway.complete(prompt=prompt)).json
        events = await gateway.events("/v1/completions", {"model": MODEL, "prompt": prompt, "stream": True})
    assert [choice["text"] for choice in whole["choices"]] == expected
    assert [choice["index"] for choice in whole["choices"]] == list(range(len(expected)))
    assert ["".join(texts(events, index)) for index in range(len(expected))] == expected
    count = sum(len(tokens(text)) for text in expected)
    assert whole["usage"] == usage(count, count)
    assert events[-1].id.tokens == count


async def test_the_form_of_answers_and_events(gateway: RunningGateway) -> None:
    async with gateway.worker(emit(tokens("ab"), "stop")):
        whole = (await gateway.complete()).json
        body = {"model": MODEL, "prompt": "x", "stream": True, "stream_options": {"include_usage": True}}
        events = await gateway.events("/v1/completions", body)
    assert whole == {
        "id": whole["id"],
        "object": "text_completion",
        "created": whole["created"],
        "model": MODEL,
        "system_fingerprint": whole["system_fingerprint"],
        "choices": [{"index": 0, "text": "ab", "logprobs": None, "finish_reason": "stop", "stop_reason": None}],
        "usage": usage(len(tokens("Hello")), 2),
    }
    assert whole["id"].startswith("cmpl-")
    common = {"id": events[0].data["id"], "object": "text_completion", "created": events[0].data["created"]}
    common |= {"model": MODEL, "system_fingerprint": whole["system_fingerprint"]}

    def choice(text: str, reason: str | None) -> list[dict[str, object]]:
        end = {"stop_reason": None} if reason else {}
        return [{"index": 0, "text": text, "logprobs": None, "finish_reason": reason, **end}]

    assert [event.data for event in events] == [
        {**common, "choices": choice("a", None), "usage": None},
        {**common, "choices": choice("b", None), "usage": None},
        {**common, "choices": choice("", "stop"), "usage": None},
        {**common, "choices": [], "usage": usage(1, 2)},
        "[DONE]",
    ]


async def test_the_sdk_streams_a_completion(gateway: RunningGateway) -> None:
    async with gateway.worker(echo), gateway.openai() as client:
        stream = await client.completions.create(model=MODEL, prompt=["one", "two"], stream=True)
        found = ["", ""]
        async for chunk in stream:
            found[chunk.choices[0].index] += chunk.choices[0].text
    assert found == ["one", "two"]


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


async def test_each_prompt_of_a_call_is_a_request_of_its_own(gateway: RunningGateway) -> None:
    async with gateway.worker(echo) as worker:
        reply = await gateway.complete(prompt=["one", "two"], seed=5)
    request_id = reply.headers["x-request-id"]
    assert sorted(request.id for request in worker.claimed) == [request_id, f"{request_id}-1"]
    assert {request.sampling.seed for request in worker.claimed} == {5}


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


@pytest.mark.parametrize(("prompt", "param", "says"), PROMPTS.values(), ids=PROMPTS)
async def test_prompts_that_are_none(server: RunningGateway, prompt: Any, param: str, says: str) -> None:
    await check(server, COMPLETIONS, {"model": MODEL, "prompt": prompt}, 400, param, says)
