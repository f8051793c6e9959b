"""best_of and beam search: the request to the worker, and the answer with the choices that the worker ranked."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from quire.shared.messages import Delta, GenerationRequest, Outcome
from tests.support.gateway.fake_worker import Steps, emit
from tests.support.gateway.running import MODEL, RunningGateway, chat_body, texts, tokens, until

PATHS = ["/v1/chat/completions", "/v1/completions"]
EOS = 2


def body(path: str, **parameters: Any) -> dict[str, Any]:
    return chat_body(**parameters) if "chat" in path else {"model": MODEL, "prompt": "Hello", **parameters}


def text_of(choice: dict[str, Any]) -> str:
    text: str = choice["message"]["content"] if "message" in choice else choice["text"]
    return text


async def ranked(request: GenerationRequest) -> Steps:
    """Emit all tokens in one step, as the engine does for ranked choices."""
    assert not request.sampling.is_streamed
    texts_ = ["the best 😀", "the second", "the third"][: request.sampling.n]
    deltas = tuple(
        Delta(index, (*tokens(text), *([] if index else [EOS])), "length" if index else "stop", None, -0.5 - index)
        for index, text in enumerate(texts_)
    )
    yield deltas, Outcome("length" if len(deltas) > 1 else "stop")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("asked", [{"best_of": 4}, {"use_beam_search": True}], ids=["best_of", "beams"])
async def test_ranked_choices_have_text_reason_and_score_in_their_order(
    gateway: RunningGateway, path: str, asked: dict[str, Any]
) -> None:
    async with gateway.worker(ranked):
        reply = await gateway.post(path, body(path, n=2, **asked))
    assert reply.status == 200
    choices = reply.json["choices"]
    assert [text_of(choice) for choice in choices] == ["the best 😀", "the second"]
    assert [(choice["index"], choice["finish_reason"], choice["score"]) for choice in choices] == [
        (0, "stop", -0.5),
        (1, "length", -1.5),
    ]
    # The usage counts the tokens of the returned choices only, with the end-of-sequence token.
    assert reply.json["usage"]["completion_tokens"] == len(tokens("the best 😀")) + 1 + len(tokens("the second"))


async def test_the_choices_of_each_prompt_have_their_own_scores(gateway: RunningGateway) -> None:
    async with gateway.worker(ranked):
        whole = (await gateway.complete(prompt=["x", "y"], n=3, best_of=4)).json
    assert [choice["index"] for choice in whole["choices"]] == list(range(6))
    assert [choice["score"] for choice in whole["choices"]] == [-0.5, -1.5, -2.5] * 2


@pytest.mark.parametrize("path", PATHS)
async def test_choices_that_were_not_ranked_have_no_score(gateway: RunningGateway, path: str) -> None:
    async with gateway.worker(emit(tokens("ab"))):
        for asked in ({}, {"n": 2}, {"n": 2, "best_of": 2}):
            choices = (await gateway.post(path, body(path, **asked))).json["choices"]
            assert len(choices) == asked.get("n", 1)
            assert all("score" not in choice for choice in choices)


async def test_a_stop_string_ends_a_choice_that_comes_in_one_piece(gateway: RunningGateway) -> None:
    async def script(request: GenerationRequest) -> Steps:
        yield (Delta(0, tuple(tokens("before END")), "stop", "END", -0.1),), Outcome("stop")

    async with gateway.worker(script):
        [choice] = (await gateway.complete(best_of=2, stop="END")).json["choices"]
    end = {"finish_reason": "stop", "stop_reason": "END", "score": -0.1}
    assert choice == {"index": 0, "text": "before ", "logprobs": None, **end}


async def test_a_ranked_request_that_fails_says_why(gateway: RunningGateway) -> None:
    async def script(request: GenerationRequest) -> Steps:
        yield (), Outcome("error", "no block is left")

    async with gateway.worker(script):
        reply = await gateway.chat(best_of=2)
    assert (reply.status, reply.error["message"]) == (500, "no block is left")


@pytest.mark.parametrize("path", PATHS)
async def test_as_many_as_n_can_be_streamed(gateway: RunningGateway, path: str) -> None:
    async with gateway.worker(emit(tokens("ab"))):
        events = await gateway.events(path, body(path, n=2, best_of=2, stream=True))
    assert [texts(events, 0), texts(events, 1)] == [["a", "b"]] * 2
    assert all("score" not in choice for event in events[:-1] for choice in event.data["choices"])


ASKED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nothing": ({}, {"n": 1, "best_of": 0, "beam_width": 0, "temperature": 1.0}),
    "null": ({"best_of": None, "use_beam_search": None, "beam_width": None}, {"best_of": 0, "beam_width": 0}),
    "no beams": ({"use_beam_search": False, "temperature": 0.5}, {"beam_width": 0, "temperature": 0.5}),
    "best of": ({"n": 2, "best_of": 5}, {"n": 2, "best_of": 5, "temperature": 1.0}),
    "best of equals": ({"best_of": 3, "temperature": 0}, {"best_of": 3, "temperature": 0.0}),
    "beams": (
        {"use_beam_search": True},
        {"n": 1, "beam_width": 4, "temperature": 0.0, "length_penalty": 1.0, "early_stopping": "false"},
    ),
    "as many beams as choices": ({"use_beam_search": True, "n": 6}, {"n": 6, "beam_width": 6}),
    "everything about beams": (
        {
            "use_beam_search": True,
            "n": 2,
            "beam_width": 3,
            "length_penalty": -0.5,
            "early_stopping": "never",
            "temperature": 0,
            "top_p": 1,
            "top_k": -1,
            "min_p": 0,
            "stop": [],
            "seed": 5,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.25,
            "repetition_penalty": 1.5,
            "min_tokens": 1,
            "ignore_eos": True,
        },
        {
            "n": 2,
            "beam_width": 3,
            "best_of": 0,
            "length_penalty": -0.5,
            "early_stopping": "never",
            "temperature": 0.0,
            "seed": 5,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.25,
            "repetition_penalty": 1.5,
            "min_tokens": 1,
            "ignore_eos": True,
        },
    ),
    "stopping early": ({"use_beam_search": True, "early_stopping": True}, {"early_stopping": "true"}),
    "not stopping early": ({"use_beam_search": True, "early_stopping": False}, {"early_stopping": "false"}),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("asked", "expected"), ASKED.values(), ids=ASKED)
async def test_the_worker_gets_what_was_asked_for(
    gateway: RunningGateway, path: str, asked: dict[str, Any], expected: dict[str, Any]
) -> None:
    async with gateway.worker(emit(tokens("ab"))) as worker:
        assert (await gateway.post(path, body(path, **asked))).status == 200
    [request] = worker.claimed
    assert {name: getattr(request.sampling, name) for name in expected} == expected


@pytest.mark.parametrize("path", PATHS)
async def test_the_salt_goes_to_the_worker_as_it_is(gateway: RunningGateway, path: str) -> None:
    salt = "ä" * 256
    async with gateway.worker(emit(tokens("ab"))) as worker:
        assert (await gateway.post(path, body(path, cache_salt=salt))).status == 200
        assert (await gateway.post(path, body(path))).status == 200
    assert [request.cache_salt for request in worker.claimed] == [salt, ""]


async def test_the_sdk_knows_best_of(gateway: RunningGateway) -> None:
    async with gateway.worker(ranked), gateway.openai() as client:
        answer = await client.completions.create(model=MODEL, prompt="x", best_of=3)
    assert answer.choices[0].text == "the best 😀"
    assert answer.choices[0].model_extra == {"stop_reason": None, "score": -0.5}


async def test_the_bound_on_tokens_counts_every_sequence_that_runs(gateway: RunningGateway) -> None:
    async def queued() -> bool:
        return await gateway.gateway.broker.queued() == (1, 10 + 4 * 100)

    waiting = asyncio.create_task(gateway.complete(prompt=[65] * 10, max_tokens=100, best_of=4))
    await until(queued)
    async with gateway.worker(ranked):
        assert (await waiting).status == 200
