"""Embeddings, scores and rankings."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import struct
from array import array
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from quire.gateway.api.embeddings import EMBEDDINGS, EmbeddingFormat
from quire.gateway.errors.api_errors import GenerationFailed
from quire.shared.protocol.messages import Delta, GenerationRequest, Outcome
from tests.gateway.conftest import Start
from tests.support.gateway.fake_worker import Steps, emit
from tests.support.gateway.running import (
    CONTEXT,
    MODEL,
    Reply,
    RunningGateway,
    chat_body,
    texts,
    tokens,
    until,
    write_model,
)

# --- The parameters of embedding calls are honoured or refused by name, and embeddings are written exactly ------------


HIDDEN = 8
Steps_of_embeddings = AsyncIterator[tuple[tuple[Delta, ...], Outcome | None]]


def vector(request: GenerationRequest) -> list[float]:
    """Return an embedding of a prompt: different for each prompt and pooling, exact in float32."""
    first = 2 if request.pooling == "mean" else 1
    return [float(first), float(len(request.prompt)), float(sum(request.prompt) % 1000), *range(3, HIDDEN)]


async def embedder(request: GenerationRequest) -> Steps_of_embeddings:
    assert request.pooling in ("last", "mean")
    yield (), Outcome("stop", embedding=struct.pack(f"<{HIDDEN}f", *vector(request)))


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_model(tmp_path_factory.mktemp("models") / "test-model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": HIDDEN}))
    return folder


async def embed(gateway: RunningGateway, **parameters: Any) -> Reply:
    return await gateway.post("/v1/embeddings", {"model": MODEL, "input": "Hello", **parameters})


async def prompts(gateway: RunningGateway, **parameters: Any) -> list[list[int]]:
    """Return the prompts of a call in the order of its inputs, as the worker got them."""
    async with gateway.worker(embedder) as worker:
        reply = await embed(gateway, **parameters)
        assert reply.status == 200, reply.json
        by_id = {request.id: list(request.prompt) for request in worker.claimed}
        found = [by_id[key] for key in sorted(by_id, key=lambda key: int(key.partition("-")[2] or 0))]
        count = sum(map(len, found))
        assert reply.json["usage"] == {"prompt_tokens": count, "total_tokens": count}
        return found


def unit(values: list[float]) -> list[float]:
    length = math.hypot(*values)
    return [struct.unpack("<f", struct.pack("<f", value / length))[0] for value in values]


async def test_the_answer_is_openais_with_an_id(gateway: RunningGateway) -> None:
    async with gateway.worker(embedder) as worker:
        reply = await embed(gateway, input=["one", "three"])
    answer = reply.json
    by_prompt = {request.prompt: vector(request) for request in worker.claimed}
    expected = [by_prompt[tuple(tokens(text))] for text in ("one", "three")]
    assert answer["data"] == [
        {"object": "embedding", "index": index, "embedding": unit(values)} for index, values in enumerate(expected)
    ]
    assert (answer["object"], answer["model"]) == ("list", MODEL)
    assert answer["id"] == f"embd-{reply.headers['x-request-id']}"
    assert {request.pooling for request in worker.claimed} == {"last"}
    # The gateway adds the prompts' tokens to the load of the queue, and no answer.
    assert [request.cost for request in worker.claimed] == [len(request.prompt) for request in worker.claimed]


async def test_the_openai_sdk_gets_the_same_numbers_in_both_formats(gateway: RunningGateway) -> None:
    async with gateway.worker(embedder), gateway.openai() as client:
        by_default = await client.embeddings.create(model=MODEL, input=["one", "two two"])
        as_floats = await client.embeddings.create(model=MODEL, input=["one", "two two"], encoding_format="float")
        as_text = await client.embeddings.create(model=MODEL, input=["one", "two two"], encoding_format="base64")
        shorter = await client.embeddings.create(
            model=MODEL, input="one", dimensions=3, extra_body={"pooling": "mean", "normalize": False}
        )
    assert [one.embedding for one in by_default.data] == [one.embedding for one in as_floats.data]
    data = [base64.b64decode(one.embedding) for one in as_text.data]  # type: ignore[arg-type]
    assert [list(array("f", one)) for one in data] == [one.embedding for one in as_floats.data]
    assert [len(one.embedding) for one in as_floats.data] == [HIDDEN, HIDDEN]
    assert as_floats.usage.prompt_tokens == len(tokens("one")) + len(tokens("two two"))
    assert shorter.data[0].embedding == [2.0, float(len(tokens("one"))), float(sum(tokens("one")) % 1000)]


async def test_inputs_have_four_forms(gateway: RunningGateway) -> None:
    assert await prompts(gateway, input="one") == [tokens("one")]
    assert await prompts(gateway, input=["one", "two"]) == [tokens("one"), tokens("two")]
    assert await prompts(gateway, input=[5, 6, 7]) == [[5, 6, 7]]
    assert await prompts(gateway, input=[[5], "one", [6, 7]]) == [[5], tokens("one"), [6, 7]]


async def test_long_inputs_are_shortened_only_if_the_call_asks_for_it(gateway: RunningGateway) -> None:
    long = [index % 200 + 5 for index in range(CONTEXT + 3)]
    assert await prompts(gateway, input=long[:CONTEXT]) == [long[:CONTEXT]]
    assert await prompts(gateway, input=long, truncate_prompt_tokens=4) == [long[-4:]]
    assert await prompts(gateway, input=[long, [5]], truncate_prompt_tokens=-1) == [long[-CONTEXT:], [5]]
    text = "word " * 20 * CONTEXT
    assert await prompts(gateway, input=text, truncate_prompt_tokens=7) == [tokens(text)[-7:]]
    for parameters, param in (({"input": long}, "input"), ({"input": ["a", text]}, "input[1]")):
        reply = await embed(gateway, **parameters)
        assert (reply.status, reply.error["param"], reply.error["code"]) == (400, param, "context_length_exceeded")


async def test_special_tokens_may_be_left_out(start_gateway: Start, tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    from tests.support.tokenizers import byte_level

    tokenizer = Tokenizer.from_str(byte_level().to_str())  # a copy: other tests share the original
    tokenizer.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    gateway = await start_gateway(model=str(write_model(tmp_path / MODEL, tokenizer)))
    assert await prompts(gateway, input="one") == [[1, *tokens("one"), 2]]
    assert await prompts(gateway, input=["one"], add_special_tokens=False) == [tokens("one")]
    assert await prompts(gateway, input=[5, 6]) == [[5, 6]]


async def test_wrong_parameters_are_refused_by_name(gateway: RunningGateway) -> None:
    for parameters, param, code in [
        ({"input": None}, "input", "missing_required_parameter"),
        ({"input": ""}, "input", "empty_prompt"),
        ({"input": []}, "input", "empty_prompt"),
        ({"input": ["a", ""]}, "input[1]", "empty_prompt"),
        ({"input": ["a", []]}, "input[1]", "empty_prompt"),
        ({"input": 5}, "input", "invalid_value"),
        ({"input": ["a", 5]}, "input[1]", "invalid_value"),
        ({"input": [5, "a"]}, "input[1]", "invalid_value"),
        ({"input": [5, 10**9]}, "input[1]", "invalid_value"),
        ({"input": [[5, -1]]}, "input[0][1]", "invalid_value"),
        ({"input": [[5, True]]}, "input[0][1]", "invalid_value"),
        ({"input": {"text": "a"}}, "input", "invalid_value"),
        ({"model": "other"}, "model", "model_not_found"),
        ({"dimensions": HIDDEN + 1}, "dimensions", "invalid_value"),
        ({"truncate_prompt_tokens": CONTEXT + 1}, "truncate_prompt_tokens", "invalid_value"),
        ({"stream": True}, "stream", "unknown_parameter"),
        ({"tools": []}, "tools", "unknown_parameter"),
        ({"temperature": 1}, "temperature", "unknown_parameter"),
        ({"messages": []}, "messages", "unknown_parameter"),
    ]:
        reply = await embed(gateway, **parameters)
        assert reply.status == (404 if code == "model_not_found" else 400)
        assert (reply.error["param"], reply.error["code"]) == (param, code)
        assert param.partition("[")[0] in reply.error["message"] or code == "model_not_found"
        assert await gateway.accepted() == 0


async def test_null_is_the_same_as_absent(gateway: RunningGateway) -> None:
    nulls: dict[str, Any] = {name: None for name, one in EMBEDDINGS.items() if not one.required}
    assert await prompts(gateway, **nulls) == [tokens("Hello")]


async def test_the_number_of_inputs_is_limited_by_a_setting(start_gateway: Start) -> None:
    gateway = await start_gateway(max_embedding_inputs=3)
    assert len(await prompts(gateway, input=["a"] * 3)) == 3
    reply = await embed(gateway, input=["a"] * 4)
    assert (reply.status, reply.error["param"]) == (400, "input")
    assert "at most 3" in reply.error["message"]


async def test_the_salt_and_the_default_pooling_reach_the_worker(start_gateway: Start, tmp_path: Path) -> None:
    async def start(mode: str) -> RunningGateway:
        folder = write_model(tmp_path / mode / MODEL)
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": mode}))
        return await start_gateway(model=str(folder))

    gateway = await start("mean")
    async with gateway.worker(embedder) as worker:
        assert (await embed(gateway, cache_salt="mine")).status == 200
        assert (await embed(gateway, pooling="last")).status == 200
    assert [(one.pooling, one.cache_salt) for one in worker.claimed] == [("mean", "mine"), ("last", "")]
    reply = await embed(await start("cls"))
    assert (reply.status, reply.error["param"]) == (400, "pooling")


async def test_dimensions_are_checked_against_the_worker_if_the_configuration_does_not_tell_them(
    start_gateway: Start, tmp_path: Path
) -> None:
    gateway = await start_gateway(model=str(write_model(tmp_path / MODEL)))
    async with gateway.worker(embedder):
        assert len((await embed(gateway, dimensions=HIDDEN)).json["data"][0]["embedding"]) == HIDDEN
        reply = await embed(gateway, dimensions=HIDDEN + 1)
    assert (reply.status, reply.error["param"]) == (400, "dimensions")


# --- the numbers ------------------------------------------------------------------------------------------------------


def finish(values: list[float], dimensions: int | None = None, normalize: bool = True) -> list[float]:
    data = struct.pack(f"<{len(values)}f", *values)
    return list(EmbeddingFormat("float", dimensions, normalize).finish(data))


def test_embeddings_have_the_length_1() -> None:
    assert finish([3.0, 4.0]) == [struct.unpack("<f", struct.pack("<f", one))[0] for one in (0.6, 0.8)]
    assert finish([3.0, 4.0, 5.0], dimensions=2) == finish([3.0, 4.0])
    assert finish([3.0, 4.0], normalize=False) == [3.0, 4.0]
    assert finish([0.0, 0.0]) == [0.0, 0.0]
    tiny = finish([3e-38, 4e-38])
    assert tiny == pytest.approx([0.6, 0.8])


@pytest.mark.parametrize("wrong", [math.inf, -math.inf, math.nan])
def test_embeddings_that_are_not_finite_are_an_error(wrong: float) -> None:
    for normalize in (True, False):
        with pytest.raises(GenerationFailed):
            finish([1.0, wrong], normalize=normalize)


# --- best_of and beam search: the request to the worker, and the answer with the choices that the worker ranked -------


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


async def test_ranked_choices_have_text_reason_and_score_in_their_order(gateway: RunningGateway) -> None:
    for path in PATHS:
        for asked in [{"best_of": 4}, {"use_beam_search": True}]:
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
            assert reply.json["usage"]["completion_tokens"] == len(tokens("the best 😀")) + 1 + len(
                tokens("the second")
            )


async def test_the_choices_of_each_prompt_have_their_own_scores(gateway: RunningGateway) -> None:
    async with gateway.worker(ranked):
        whole = (await gateway.complete(prompt=["x", "y"], n=3, best_of=4)).json
    assert [choice["index"] for choice in whole["choices"]] == list(range(6))
    assert [choice["score"] for choice in whole["choices"]] == [-0.5, -1.5, -2.5] * 2


async def test_choices_that_were_not_ranked_have_no_score(gateway: RunningGateway) -> None:
    for path in PATHS:
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


async def test_as_many_as_n_can_be_streamed(gateway: RunningGateway) -> None:
    for path in PATHS:
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


async def test_the_worker_gets_what_was_asked_for(gateway: RunningGateway) -> None:
    for path in PATHS:
        for asked, expected in ASKED.values():
            async with gateway.worker(emit(tokens("ab"))) as worker:
                assert (await gateway.post(path, body(path, **asked))).status == 200
            [request] = worker.claimed
            assert {name: getattr(request.sampling, name) for name in expected} == expected


async def test_the_salt_goes_to_the_worker_as_it_is(gateway: RunningGateway) -> None:
    for path in PATHS:
        salt = "ä" * 256
        async with gateway.worker(emit(tokens("ab"))) as worker:
            assert (await gateway.post(path, body(path, cache_salt=salt))).status == 200
            assert (await gateway.post(path, body(path))).status == 200
        assert [request.cache_salt for request in worker.claimed] == [salt, ""]


async def test_the_bound_on_tokens_counts_every_sequence_that_runs(gateway: RunningGateway) -> None:
    async def queued() -> bool:
        return await gateway.gateway.broker.queued() == (1, 10 + 4 * 100)

    waiting = asyncio.create_task(gateway.complete(prompt=[65] * 10, max_tokens=100, best_of=4))
    await until(queued)
    async with gateway.worker(ranked):
        assert (await waiting).status == 200
