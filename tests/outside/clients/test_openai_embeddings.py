"""The `openai` SDK on `/v1/embeddings` of the demo model: texts and token ids, both encodings, shorter vectors."""

from __future__ import annotations

import json
import math
import urllib.request
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.outside.clients.results import assert_same_vectors

TEXTS = ["A fox.", "A boat on the sea.", "A fox. A boat on the sea."]


@pytest.fixture
def client(demo_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{demo_url}/v1", api_key="none", max_retries=0) as client:
        yield client


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


def test_one_text_and_several(client: openai.OpenAI) -> None:
    together = embed(client)
    assert_same_vectors([embed(client, text)[0] for text in TEXTS], together)


def test_both_encodings(client: openai.OpenAI) -> None:
    """The SDK asks for base64 by itself, and decodes it."""
    assert_same_vectors(embed(client), embed(client, encoding_format="float"))


def test_token_ids_are_as_good_as_their_text(client: openai.OpenAI, demo_url: str) -> None:
    ids = [token_ids(demo_url, text) for text in TEXTS]
    assert_same_vectors(embed(client, ids), embed(client))
    assert_same_vectors(embed(client, ids[0]), embed(client, TEXTS[0]))


def test_shorter_vectors(client: openai.OpenAI) -> None:
    long = embed(client)
    short = embed(client, dimensions=64)
    cut = [vector[:64] for vector in long]
    assert_same_vectors(short, [[number / math.hypot(*vector) for number in vector] for vector in cut])


def test_a_token_id_of_another_model_is_named(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="999999") as caught:
        embed(client, [[1, 999_999]])
    assert caught.value.param == "input[0][1]"


async def test_the_asynchronous_client(demo_url: str, client: openai.OpenAI) -> None:
    async with openai.AsyncOpenAI(base_url=f"{demo_url}/v1", api_key="none", max_retries=0) as other:
        answer = await other.embeddings.create(model="demo", input=TEXTS)
    assert_same_vectors([one.embedding for one in answer.data], embed(client))
