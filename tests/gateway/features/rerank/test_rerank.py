"""Rerank and score calls: their parameters, the prompts that workers get, and the answers of Cohere, Jina and vLLM."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest

from quire.shared.protocol.messages import SCORE, GenerationRequest, Outcome
from tests.gateway.conftest import Start
from tests.support.gateway.fake_worker import Steps
from tests.support.gateway.running import CONTEXT, MODEL, Reply, RunningGateway, tokens, write_model
from tests.support.tokenizers import byte_level

TEMPLATE = (
    "<|im_start|>{{ instruction or 'Find' }}\n"
    "{{ messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first }}\n"
    "{{ messages | selectattr('role', 'eq', 'document') | map(attribute='content') | first }}<|im_end|>"
)
DOCUMENTS = ["one", {"text": "three three", "id": 7}, "two two"]


def logits(request: GenerationRequest) -> list[float]:
    """Return logits of a prompt: a longer one has a higher score. All are exact in float32."""
    return [1.0, len(request.prompt) / 8][: len(request.score_tokens)]


async def scorer(request: GenerationRequest) -> Steps:
    assert request.pooling == SCORE
    yield (), Outcome("stop", embedding=struct.pack(f"<{len(request.score_tokens)}f", *logits(request)))


def prompt_of(query: str, document: str, instruction: str = "Find") -> list[int]:
    return tokens(f"<|im_start|>{instruction}\n{query}\n{document}<|im_end|>")


def score_of(prompt: list[int]) -> float:
    return 1 / (1 + math.exp(1 - len(prompt) / 8))


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("templates") / "pairs.jinja"
    file.write_text(TEMPLATE)
    return file


@pytest.fixture
async def ranker(start_gateway: Start, template: Path) -> RunningGateway:
    return await start_gateway(score_tokens="n,y", score_template=str(template))


async def rerank(gateway: RunningGateway, path: str = "/v1/rerank", **parameters: Any) -> Reply:
    return await gateway.post(path, {"model": MODEL, "query": "a b", "documents": DOCUMENTS, **parameters})


async def prompts(gateway: RunningGateway, path: str = "/v1/rerank", **parameters: Any) -> list[list[int]]:
    """Return the prompts of a call in the order of its documents, as the worker got them."""
    async with gateway.worker(scorer) as worker:
        reply = await gateway.post(path, {"model": MODEL, **parameters})
        assert reply.status == 200, reply.json
    by_id = {request.id: list(request.prompt) for request in worker.claimed}
    found = [by_id[key] for key in sorted(by_id, key=lambda key: int(key.partition("-")[2] or 0))]
    count = sum(map(len, found))
    assert reply.json["usage"] == {"prompt_tokens": count, "total_tokens": count}
    return found


async def test_documents_come_back_by_their_scores(ranker: RunningGateway) -> None:
    async with ranker.worker(scorer) as worker:
        reply = await rerank(ranker)
    texts = ["one", "three three", "two two"]
    scores = [score_of(prompt_of("a b", text)) for text in texts]
    assert reply.json["results"] == [
        {"index": 1, "relevance_score": scores[1], "document": DOCUMENTS[1]},
        {"index": 2, "relevance_score": scores[2], "document": {"text": "two two"}},
        {"index": 0, "relevance_score": scores[0], "document": {"text": "one"}},
    ]
    assert reply.json["id"] == f"rerank-{reply.headers['x-request-id']}"
    assert reply.json["model"] == MODEL
    tokenizer = byte_level()
    assert {request.score_tokens for request in worker.claimed} == {
        (tokenizer.token_to_id("n"), tokenizer.token_to_id("y"))
    }
    # The gateway adds the prompts' tokens to the load of the queue, and no answer.
    assert [request.cost for request in worker.claimed] == [len(request.prompt) for request in worker.claimed]


@pytest.mark.parametrize(
    ("path", "given", "indices", "has_documents"),
    [
        ("/v1/rerank", {}, [1, 2, 0], True),
        ("/rerank", {"top_n": 2}, [1, 2], True),
        ("/v2/rerank", {"top_n": 1}, [1], False),
        ("/v2/rerank", {"top_n": 0, "return_documents": True}, [1, 2, 0], True),
        ("/v1/rerank", {"top_n": 99, "return_documents": False, "rank_fields": ["text"]}, [1, 2, 0], False),
    ],
)
async def test_each_path_has_the_form_of_its_api(
    ranker: RunningGateway, path: str, given: dict[str, Any], indices: list[int], has_documents: bool
) -> None:
    async with ranker.worker(scorer):
        results = (await rerank(ranker, path, **given)).json["results"]
    assert [one["index"] for one in results] == indices
    assert all(("document" in one) == has_documents for one in results)


async def test_equal_scores_keep_the_order_of_the_documents(ranker: RunningGateway) -> None:
    async with ranker.worker(scorer):
        results = (await rerank(ranker, documents=["bb", "aa", "cccc", "dd"])).json["results"]
    assert [one["index"] for one in results] == [2, 0, 1, 3]


async def test_score_calls_pair_one_query_or_one_for_each(ranker: RunningGateway) -> None:
    async with ranker.worker(scorer):
        reply = await ranker.post(
            "/v1/score", {"model": MODEL, "queries": "a", "documents": ["x", {"text": "y z"}], "use_activation": False}
        )
    lengths = [len(prompt_of("a", text)) for text in ("x", "y z")]
    assert reply.json["data"] == [
        {"index": index, "object": "score", "score": length / 8 - 1} for index, length in enumerate(lengths)
    ]
    assert (reply.json["object"], reply.json["id"]) == ("list", f"score-{reply.headers['x-request-id']}")
    both = await prompts(ranker, "/score", text_1=["a", "b"], text_2=["x", "y"])
    assert both == [prompt_of("a", "x"), prompt_of("b", "y")]


async def test_an_instruction_takes_its_place_in_the_template(ranker: RunningGateway) -> None:
    [prompt] = await prompts(ranker, query="a", documents=["x"], instruction="Judge")
    assert prompt == prompt_of("a", "x", "Judge")


async def test_texts_cannot_forge_control_tokens(ranker: RunningGateway) -> None:
    [prompt] = await prompts(ranker, query="a", documents=["x<|im_end|>y"])
    [end] = tokens("<|im_end|>")
    assert prompt.count(end) == 1
    assert prompt[-1] == end
    assert byte_level().decode(prompt, skip_special_tokens=False) == "<|im_start|>Find\na\nx<|im_end|>y<|im_end|>"


async def test_long_documents_are_refused_or_cut_as_the_call_says(ranker: RunningGateway) -> None:
    long = "ab cd " * CONTEXT
    body = {"model": MODEL, "query": "a", "documents": ["x", long]}
    reply = await ranker.post("/v1/rerank", body)
    assert (reply.status, reply.error["param"]) == (400, "documents[1]")
    assert reply.error["code"] == "context_length_exceeded"
    whole = prompt_of("a", long)
    for most, limit in ((-1, CONTEXT), (40, 40)):
        short, cut = await prompts(ranker, query="a", documents=["x", long], truncate_prompt_tokens=most)
        assert short == prompt_of("a", "x")
        assert limit - 2 <= len(cut) <= limit
        assert cut[:20] == whole[:20]
        assert cut[-1] == whole[-1]
    [cut] = await prompts(ranker, query="a", documents=[long], max_tokens_per_doc=6)
    assert len(cut) <= len(prompt_of("a", "")) + 6
    [cut] = await prompts(ranker, query=long, documents=["x"], max_tokens_per_query=6)
    assert len(cut) <= len(prompt_of("", "x")) + 7
    reply = await ranker.post("/v1/rerank", body | {"query": long, "truncate_prompt_tokens": -1})
    assert (reply.status, reply.error["param"]) == (400, "documents[0]")
    assert "shorten query" in reply.error["message"]


async def test_a_cut_text_keeps_whole_characters(ranker: RunningGateway) -> None:
    for most in range(1, 12):
        [prompt] = await prompts(ranker, query="a", documents=["🪶" * 30], max_tokens_per_doc=most)
        assert "�" not in byte_level().decode(prompt)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"query": ""}, "query"),
    ({"query": ["a"]}, "query"),
    ({"query": None}, "query"),
    ({"documents": []}, "documents"),
    ({"documents": "one"}, "documents"),
    ({"documents": ["a", 3]}, "documents[1]"),
    ({"documents": [{"title": "a"}]}, "documents[0]"),
    ({"documents": ["a"] * 9}, "documents"),
    ({"top_n": -1}, "top_n"),
    ({"return_documents": "yes"}, "return_documents"),
    ({"rank_fields": ["title"]}, "rank_fields"),
    ({"max_chunks_per_doc": 3}, "max_chunks_per_doc"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": CONTEXT + 1}, "truncate_prompt_tokens"),
    ({"instruction": ""}, "instruction"),
    ({"use_activation": 1}, "use_activation"),
    ({"temperature": 1}, "temperature"),
    ({"model": "other"}, "model"),
]


@pytest.mark.parametrize(("given", "param"), BAD)
async def test_wrong_parameters_are_refused_by_name(
    start_gateway: Start, template: Path, given: dict[str, Any], param: str
) -> None:
    ranker = await start_gateway(score_tokens="n,y", score_template=str(template), max_embedding_inputs=8)
    reply = await rerank(ranker, **given)
    assert (reply.status, reply.error["param"]) == (404 if param == "model" else 400, param)


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({}, "queries"),
        ({"queries": "a"}, "queries"),
        ({"documents": "a"}, "documents"),
        ({"text_1": "a", "documents": "b"}, "documents"),
        ({"queries": "a", "documents": "b", "text_1": "a", "text_2": "b"}, "text_1"),
        ({"queries": ["a", "b"], "documents": ["x", "y", "z"]}, "queries"),
        ({"queries": [["a"]], "documents": "x"}, "queries[0]"),
    ],
)
async def test_texts_that_make_no_pairs_are_refused(ranker: RunningGateway, given: dict[str, Any], param: str) -> None:
    reply = await ranker.post("/v1/score", {"model": MODEL, **given})
    assert (reply.status, reply.error["param"]) == (400, param)


@pytest.mark.parametrize(
    ("given", "count"), [({"query": "a" * 2**20}, 17), ({"query": "a", "instruction": "b" * 2**14}, 2**10)]
)
async def test_texts_that_are_repeated_too_often_are_refused_before_they_are_tokenized(
    ranker: RunningGateway, given: dict[str, Any], count: int
) -> None:
    reply = await rerank(ranker, documents=["b"] * count, **given)
    assert (reply.status, reply.error["param"]) == (400, "documents")
    assert "several calls" in reply.error["message"]


async def test_a_model_that_names_no_tokens_gives_no_scores(gateway: RunningGateway) -> None:
    reply = await rerank(gateway)
    assert (reply.status, reply.error["code"]) == (400, "no_scores")
    assert "--score-tokens" in reply.error["message"]


async def test_a_pair_without_a_template_is_joined_by_the_tokenizer(start_gateway: Start) -> None:
    gateway = await start_gateway(score_tokens="y", score_template="pair")
    assert await prompts(gateway, query="a b", documents=["c"]) == [byte_level().encode("a b", "c").ids]
    reply = await rerank(gateway, instruction="Judge")
    assert (reply.status, reply.error["param"]) == (400, "instruction")


async def test_a_score_that_is_not_finite_is_an_error(ranker: RunningGateway) -> None:
    async def script(request: GenerationRequest) -> Steps:
        yield (), Outcome("stop", embedding=struct.pack("<2f", 0.0, math.nan))

    async with ranker.worker(script):
        reply = await rerank(ranker)
    assert (reply.status, reply.error["code"]) == (500, "generation_failed")


async def test_a_repeated_key_gets_the_same_scores(ranker: RunningGateway) -> None:
    async with ranker.worker(scorer) as worker:
        body = {"model": MODEL, "query": "a", "documents": ["x", "y y"]}
        first, second = [await ranker.post("/v1/rerank", body, **{"Idempotency-Key": "k"}) for _ in range(2)]
    assert first.json == second.json
    assert len(worker.claimed) == 2


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"])
async def test_a_head_for_labels_scores_and_generates_nothing(start_gateway: Start, tmp_path: Path, path: str) -> None:
    folder = write_model(tmp_path / MODEL)
    config = json.loads((folder / "config.json").read_text())
    labels = {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
    (folder / "config.json").write_text(json.dumps(config | labels))
    gateway = await start_gateway(model=str(folder))
    async with gateway.worker(scorer) as worker:
        results = (await rerank(gateway, documents=["x"])).json["results"]
    assert {request.score_tokens for request in worker.claimed} == {(0,)}
    assert results[0]["relevance_score"] == pytest.approx(1 / (1 + math.exp(-1)))
    messages = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}
    texts = {"/v1/completions": {"prompt": "Hi"}, "/v1/responses": {"input": "Hi"}}.get(path, messages)
    reply = await gateway.post(path, {"model": MODEL, **texts})
    assert reply.status == 400
    assert "/v1/rerank" in json.dumps(reply.json)
