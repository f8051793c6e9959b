"""The answer of a line is the answer over HTTP."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.gateway.api.batch_parameters import BATCH_ENDPOINTS
from quire.gateway.batches.line_endpoints import line_endpoint
from quire.gateway.errors.api_errors import ApiError
from quire.shared.messages import GenerationRequest, Outcome
from tests.gateway.batches.test_batch_service import VECTOR
from tests.gateway.conftest import Start
from tests.support.gateway.batch_calls import BatchClient, jsonl
from tests.support.gateway.fake_worker import Steps, emit
from tests.support.gateway.running import MODEL, RunningGateway, tokens

CALLS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "n": 2, "metadata": {"a": "b"}}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "stop": ["l"], "user": "u"}),
    ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 7}),
    ("/v1/responses", {"input": "Hi", "instructions": "Be short.", "store": False}),
    ("/v1/embeddings", {"input": ["a", "b"], "dimensions": 1}),
    ("/v1/embeddings", {"input": "a", "encoding_format": "base64"}),
]
# Fields that differ between two calls; the fingerprint has the weights once the gateway knows of the worker.
OWN = ("id", "created", "created_at", "completed_at", "system_fingerprint")


@pytest.fixture
async def gateway(start_gateway: Start, tmp_path: Path) -> RunningGateway:
    return await start_gateway(files_dir=str(tmp_path / "files"))


def without_own(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_own(one) for key, one in value.items() if key not in OWN}
    return [without_own(one) for one in value] if isinstance(value, list) else value


async def script(request: GenerationRequest) -> Steps:
    if request.pooling:
        yield (), Outcome("stop", embedding=VECTOR)
        return
    async for step in emit([*tokens("Hello"), 2], "stop")(request):
        yield step


@pytest.mark.parametrize(("path", "body"), CALLS, ids=range(len(CALLS)))
async def test_the_answer_is_that_over_http(gateway: RunningGateway, path: str, body: dict[str, Any]) -> None:
    client, call = BatchClient(gateway), {"model": MODEL, **body}
    line = {"custom_id": "x", "method": "POST", "url": path, "body": call}
    async with gateway.worker(script):
        expected = await client.json("POST", path, json=call)
        batch = await client.ended((await client.create(jsonl([line]), path))["id"])
    ((found,), errors) = await client.outputs(batch)
    assert errors == []
    assert without_own(found["response"]["body"]) == without_own(expected)


@pytest.mark.parametrize("path", BATCH_ENDPOINTS)
async def test_parameters_are_checked_without_a_worker(gateway: RunningGateway, path: str) -> None:
    endpoint = line_endpoint(path, gateway.gateway, "")
    good = next(body for url, body in CALLS if url == path)
    endpoint.check({"model": MODEL, **good})
    with pytest.raises(ApiError) as caught:
        endpoint.check({"model": MODEL, **good, "no_such_parameter": 1})
    assert caught.value.param == "no_such_parameter"
    assert json.dumps(good)


def test_other_paths_are_no_endpoints() -> None:
    with pytest.raises(ValueError, match="/v1/messages"):
        line_endpoint("/v1/messages", None, "")  # type: ignore[arg-type]
