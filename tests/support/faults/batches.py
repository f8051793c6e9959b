"""Batches of the fault tests: their lines, and their ends."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import openai

from tests.support.faults.stack import MODEL

URL = "/v1/completions"
# Seconds for which a call is repeated while no gateway answers.
RETRY_S = 30.0


def line(number: int, **body: Any) -> dict[str, Any]:
    """Return a line: every third is greedy, the others draw their tokens from a seed."""
    drawn = {"temperature": 0} if number % 3 == 0 else {"temperature": 0.9, "seed": number, "top_k": 50}
    call = {"model": MODEL, "prompt": f"w10 w20 w{number % 90}", "ignore_eos": True, **drawn, **body}
    return {"custom_id": f"line-{number}", "method": "POST", "url": URL, "body": call}


def create(url: str, lines: Sequence[dict[str, Any]], key: str = "none", endpoint: str = URL) -> str:
    """Upload the lines, and create a batch of them. Returns its id."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
        content = b"".join(json.dumps(one).encode() + b"\n" for one in lines)
        file = client.files.create(file=("lines.jsonl", content), purpose="batch")
        return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h").id


def models(url: str) -> set[str]:
    """Return the models of a gateway."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        return {one.id for one in client.models.list().data}


def again(call: Callable[[], Any]) -> Any:
    """Repeat a call while the gateway or its Redis does not answer."""
    until = time.monotonic() + RETRY_S
    while True:
        try:
            return call()
        except (openai.APIConnectionError, openai.InternalServerError):
            if time.monotonic() > until:
                raise
            time.sleep(0.2)


def show(url: str, batch_id: str, key: str = "none") -> Any:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
        return again(lambda: client.batches.retrieve(batch_id))


def ended(url: str, batch_id: str, timeout_s: float = 100, key: str = "none") -> Any:
    """Return a batch once it has ended."""
    until = time.monotonic() + timeout_s
    while (batch := show(url, batch_id, key)).status in ("validating", "in_progress", "cancelling", "finalizing"):
        assert time.monotonic() < until, batch
        time.sleep(0.1)
    return batch


def read(url: str, file_id: str | None) -> list[dict[str, Any]]:
    """Return the lines of a file; none without a file."""
    if file_id is None:
        return []
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        text = again(lambda: client.files.content(file_id).text)
    return [json.loads(one) for one in text.splitlines()]


def answers(url: str, batch: Any) -> dict[str, tuple[str, Any]]:
    """Return text and usage of each line of the output file, which has each line once."""
    lines = read(url, batch.output_file_id)
    found = {}
    for one in lines:
        assert one["response"]["status_code"] == 200
        body = one["response"]["body"]
        found[one["custom_id"]] = body["choices"][0]["text"], body["usage"]["completion_tokens"]
    assert len(found) == len(lines), "a line is in the output twice"
    return found


def cancel(url: str, batch_id: str, key: str = "none") -> Any:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
        return client.batches.cancel(batch_id)
