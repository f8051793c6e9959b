"""The `openai` SDK on `/v1/files` and `/v1/batches` of the demo model, with the storage that `quire serve` sets up."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types import Batch

CHAT = "/v1/chat/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Tell me a story about a fox."}], "max_tokens": 20},
    "/v1/completions": {"prompt": "Once upon a time", "max_tokens": 20},
    "/v1/responses": {"input": "Tell me a story about a fox.", "max_output_tokens": 20},
    "/v1/embeddings": {"input": ["A fox.", "A boat."], "dimensions": 8},
}


@pytest.fixture
def client(demo_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{demo_url}/v1", api_key="none", max_retries=0) as client:
        yield client


def run(client: openai.OpenAI, lines: list[dict[str, Any]], endpoint: Any) -> Batch:
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    file = client.files.create(file=("calls.jsonl", content), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window="24h", metadata={"job": "test"}
    )
    deadline = time.monotonic() + 60
    while batch.status in ("validating", "in_progress", "finalizing", "cancelling"):
        assert time.monotonic() < deadline, batch
        time.sleep(0.05)
        batch = client.batches.retrieve(batch.id)
    return batch


@pytest.mark.parametrize("endpoint", BODIES)
def test_a_batch_of_each_endpoint(client: openai.OpenAI, endpoint: str) -> None:
    sampling = {} if endpoint == "/v1/embeddings" else {"temperature": 0}
    body = {"model": "demo", **sampling, **BODIES[endpoint]}
    lines = [{"custom_id": str(n), "method": "POST", "url": endpoint, "body": body} for n in range(5)]
    batch = run(client, lines, endpoint)
    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert (batch.request_counts.total, batch.request_counts.completed) == (5, 5)
    assert batch.metadata == {"job": "test"}
    assert batch.output_file_id is not None
    found = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    assert [one["custom_id"] for one in found] == list("01234")
    # The calls are equal, and so are the answers, but for ids.
    bodies = [one["response"]["body"] for one in found]
    assert len({json.dumps(body.get("choices") or body.get("data"), sort_keys=True) for body in bodies}) == 1
    assert batch.id in [one.id for one in client.batches.list(limit=10)]


def test_a_wrong_line_is_reported_before_anything_runs(client: openai.OpenAI) -> None:
    line = {"custom_id": "a", "method": "POST", "url": CHAT, "body": {"model": "demo", "messages": []}}
    batch = run(client, [line], CHAT)
    assert batch.status == "failed"
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert (batch.errors.data[0].line, batch.errors.data[0].param) == (1, "body.messages")


def test_cancel(client: openai.OpenAI) -> None:
    body = {"model": "demo", **BODIES[CHAT], "max_tokens": 200, "ignore_eos": True}
    lines = [{"custom_id": str(n), "method": "POST", "url": CHAT, "body": body} for n in range(300)]
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    file = client.files.create(file=("calls.jsonl", content), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    while client.batches.retrieve(batch.id).status == "validating":
        time.sleep(0.05)
    assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    while (batch := client.batches.retrieve(batch.id)).status == "cancelling":
        time.sleep(0.05)
    assert batch.status == "cancelled"
    assert batch.error_file_id is not None
    errors = [json.loads(line) for line in client.files.content(batch.error_file_id).text.splitlines()]
    assert {one["error"]["code"] for one in errors} == {"batch_cancelled"}
    assert batch.request_counts is not None
    assert batch.request_counts.completed + len(errors) == 300
