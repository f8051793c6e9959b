"""Replays of logged requests, and forks of running and ended ones, with real processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from redis import Redis

from quire.shared.protocol.keys import LaneKeys
from quire.shared.protocol.messages import StepItem, decode_items
from tests.conftest import QuireProcess, children_of, clean_environ
from tests.support.checkpoints import make_checkpoint
from tests.test_adapter_calls import call

pytestmark = pytest.mark.slow

KEYS = LaneKeys("tiny")
MESSAGES = [{"role": "user", "content": "Tell me about the thing in the inn."}]
DRAWN: dict[str, Any] = {"temperature": 0.8, "seed": 7, "ignore_eos": True, "max_tokens": 60}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """A running `quire serve` of a tiny model in float32."""
    model = make_checkpoint(tmp_path_factory.mktemp("models") / "tiny", "llama", max_position_embeddings=4096)
    state = tmp_path_factory.mktemp("state")
    arguments = ("serve", str(model), "--port", "0", "--state-dir", str(state), "--dtype", "float32")
    process = QuireProcess(arguments, clean_environ(), None)
    try:
        url = process.wait_ready()
        with Redis(unix_socket_path=str(state / "redis" / "redis.sock")) as redis:
            yield SimpleNamespace(url=url, model=model, state=state, redis=redis, pid=process.pid)
        assert process.stop() == 0
    finally:
        process.close()


def chat(stack: SimpleNamespace, **params: Any) -> dict[str, Any]:
    status, answer = call(
        f"{stack.url}/v1/chat/completions", "POST", **{"model": "tiny", "messages": MESSAGES} | params
    )
    assert status == 200, answer
    found: dict[str, Any] = answer
    return found


def replay(stack: SimpleNamespace, request_id: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "quire", "replay", request_id, "--state-dir", str(stack.state)]
    command += ["--model", str(stack.model), "--dtype", "float32", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=clean_environ(), timeout=100, check=False)


def logged(stack: SimpleNamespace, request_id: str) -> list[tuple[bytes, StepItem]]:
    entries = stack.redis.xrange(KEYS.output(request_id))
    return [(entry, item) for entry, fields in entries for item in decode_items(fields[b"item"])]


def keys_of(stack: SimpleNamespace, request_id: str) -> tuple[Any, Any]:
    return stack.redis.hgetall(KEYS.request(request_id)), stack.redis.xrange(KEYS.output(request_id))


def test_an_ended_request_is_replayed_exactly_and_nothing_in_redis_changes(stack: SimpleNamespace) -> None:
    answer = chat(stack, **DRAWN, n=2, frequency_penalty=0.3, logprobs=True)
    request_id = answer["id"].removeprefix("chatcmpl-")
    before = keys_of(stack, request_id)
    found = replay(stack, answer["id"], "--json")
    assert found.returncode == 0, found.stderr
    result = json.loads(found.stdout)
    assert (result["exact"], result["state"]) == (True, "done")
    assert [(one["equal"], one["tokens"], one["logprob_error"]) for one in result["choices"]] == [(60, 60, 0.0)] * 2
    assert result["weights"]["here"] == result["weights"]["logged"] != ""
    assert keys_of(stack, request_id) == before


def test_a_token_that_was_changed_in_the_log_is_named(stack: SimpleNamespace) -> None:
    answer = chat(stack, **DRAWN)
    request_id = answer["id"].removeprefix("chatcmpl-")
    entries = logged(stack, request_id)
    stack.redis.delete(KEYS.output(request_id))
    for entry, item in entries:
        if item.start <= 20 < item.end:
            [delta] = item.deltas
            tokens = list(delta.token_ids)
            tokens[20 - item.start] += 1
            item = item._replace(deltas=(delta._replace(token_ids=tuple(tokens)),))
        stack.redis.xadd(KEYS.output(request_id), {"item": item.encode()}, entry)
    found = replay(stack, request_id)
    assert found.returncode == 1, found.stderr
    assert re.search(
        r"the first that differs is token 20: logged \d+ \(log-probability -\d+\.\d+\), chosen \d+ \(-", found.stdout
    )


@pytest.mark.parametrize("why", ["best_of or beam search", "its prompt is not kept"])
def test_what_cannot_be_replayed_says_why(stack: SimpleNamespace, why: str) -> None:
    request_id = chat(stack, max_tokens=4, best_of=2 if "best_of" in why else 1)["id"].removeprefix("chatcmpl-")
    if "prompt" in why:
        stack.redis.hdel(KEYS.request(request_id), "body")
    found = replay(stack, request_id)
    assert (found.returncode, found.stdout) == (2, "")
    assert why in found.stderr


def test_an_unknown_request_and_other_weights_cannot_be_replayed(stack: SimpleNamespace, tmp_path: Path) -> None:
    found = replay(stack, "0" * 32)
    assert (found.returncode, "no request" in found.stderr) == (2, True)
    other = make_checkpoint(tmp_path / "other", "qwen2", max_position_embeddings=4096)
    found = replay(stack, chat(stack, **DRAWN)["id"], "--model", str(other), "--served-model-name", "tiny")
    assert (found.returncode, "digest" in found.stderr) == (2, True), found.stderr


def fork(stack: SimpleNamespace, public_id: str, **params: Any) -> tuple[int, Any]:
    return call(f"{stack.url}/v1/chat/completions/{public_id}/fork", "POST", **params)


def tokens_of(stack: SimpleNamespace, public_id: str, choice: int = 0) -> list[int]:
    items = [item for _, item in logged(stack, public_id.removeprefix("chatcmpl-"))]
    deltas = [delta for item in items for delta in item.deltas if delta.choice == choice]
    return [token for delta in deltas for token in delta.token_ids]


@pytest.mark.parametrize("at", [0, 1, 25, 59])
@pytest.mark.parametrize("params", [{}, {"frequency_penalty": 0.5, "min_tokens": 40, "ignore_eos": False}])
def test_a_fork_that_changes_nothing_gives_the_rest_of_the_answer(
    stack: SimpleNamespace, params: dict[str, Any], at: int
) -> None:
    first = chat(stack, **DRAWN | params)
    tokens = tokens_of(stack, first["id"])
    at = min(at, len(tokens) - 1)
    status, second = fork(stack, first["id"], at=at, return_token_ids=True)
    assert status == 200, second
    assert second["choices"][0]["token_ids"] == tokens[at:]
    assert first["choices"][0]["message"]["content"].endswith(second["choices"][0]["message"]["content"])
    assert second["usage"]["prompt_tokens"] == first["usage"]["prompt_tokens"] + at
    assert second["usage"]["completion_tokens"] == len(tokens) - at
    assert second["id"] != first["id"]
    # The blocks of an ended answer are found like those of any prompt.
    assert (
        second["usage"]["prompt_tokens_details"]["cached_tokens"] >= (second["usage"]["prompt_tokens"] - 1) // 16 * 16
    )
    assert replay(stack, second["id"]).returncode == 0


def test_a_running_call_is_forked_at_an_event_and_runs_on(stack: SimpleNamespace) -> None:
    body = {"model": "tiny", "messages": MESSAGES, "stream": True} | DRAWN | {"max_tokens": 3000}
    request = urllib.request.Request(
        f"{stack.url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "Accept": "text/event-stream"},
    )
    with urllib.request.urlopen(request, timeout=60) as stream:
        place = public_id = ""
        for line in map(bytes.decode, stream):
            place = line[4:].strip() if line.startswith("id: ") else place
            if line.startswith("data: "):
                public_id = json.loads(line[6:])["id"]
            if place and "." not in place and int(place) >= 400:
                break
        status, second = fork(stack, public_id, at=place, max_tokens=30, return_token_ids=True)
        assert status == 200, second
        # The blocks of the running answer were found, all that are full.
        details = second["usage"]["prompt_tokens_details"]
        assert details["cached_tokens"] >= (second["usage"]["prompt_tokens"] - 1) // 16 * 16
        status, other = fork(stack, public_id, at=int(place), max_tokens=30, seed=8, continuation=" And then")
        assert status == 200, other
        assert other["usage"]["prompt_tokens"] > second["usage"]["prompt_tokens"]
        rest = [line for line in map(bytes.decode, stream) if line.startswith("data: ")]
    assert rest[-1] == "data: [DONE]\n"
    tokens = tokens_of(stack, public_id)
    assert len(tokens) == 3000
    at = int(place)
    assert second["choices"][0]["token_ids"] == tokens[at : at + 30]
    assert other["choices"][0]["message"]["content"] != second["choices"][0]["message"]["content"]


def test_a_fork_streams_has_choices_and_can_be_forked_itself(stack: SimpleNamespace) -> None:
    first = chat(stack, **DRAWN, n=2)
    status, second = fork(stack, first["id"], at=20, choice=1, n=2, temperature=0, max_tokens=20, return_token_ids=True)
    assert status == 200, second
    status, unchanged = fork(stack, first["id"], at=20, choice=1, return_token_ids=True)
    assert unchanged["choices"][0]["token_ids"] == tokens_of(stack, first["id"], choice=1)[20:]
    greedy, same = (choice["token_ids"] for choice in second["choices"])
    assert greedy == same
    status, third = fork(stack, second["id"], at=10, return_token_ids=True)
    assert status == 200, third
    assert third["choices"][0]["token_ids"] == greedy[10:]
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0) as client:
        stream = client.post(
            f"/chat/completions/{first['id']}/fork",
            body={"at": 20, "stream": True, "stream_options": {"include_usage": True}},
            cast_to=openai.types.chat.ChatCompletionChunk,
            stream=True,
            stream_cls=openai.Stream[openai.types.chat.ChatCompletionChunk],
        )
        chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert first["choices"][0]["message"]["content"].endswith(text)
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 40


def test_a_fork_of_a_fork_follows_the_same_grammar_and_penalties(stack: SimpleNamespace) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "minLength": 40}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    params = {name: value for name, value in DRAWN.items() if name != "ignore_eos"}
    first = chat(stack, **params, response_format=form, frequency_penalty=0.8)
    tokens = tokens_of(stack, first["id"])
    assert len(tokens) > 30
    second = fork(stack, first["id"], at=8)[1]
    status, third = fork(stack, second["id"], at=6, return_token_ids=True)
    assert status == 200, third
    assert third["choices"][0]["token_ids"] == tokens[14:]


def test_what_cannot_be_forked_names_the_field(stack: SimpleNamespace) -> None:
    first = chat(stack, **DRAWN)
    for params, field in (
        ({"at": 61}, "at"),
        ({"at": "70.1"}, "at"),
        ({"at": -1}, "at"),
        ({"choice": 1}, "choice"),
        ({"at": 60}, "max_tokens"),
        ({"at": 10, "max_tokens": 5000}, "at"),
        ({"at": 10, "messages": MESSAGES}, "messages"),
        ({"at": 10, "temperature": 3}, "temperature"),
    ):
        status, answer = fork(stack, first["id"], **params)
        assert (status, answer["error"]["param"]) == (400, field), answer
    assert fork(stack, "chatcmpl-" + "0" * 32, at=1)[0] == 404
    assert fork(stack, first["id"].replace("chatcmpl-", "cmpl-"), at=1)[0] == 404


def test_an_answer_is_forked_after_its_worker_was_killed(stack: SimpleNamespace) -> None:
    first = chat(stack, **DRAWN, repetition_penalty=1.2)
    [worker] = [pid for pid, command in children_of(stack.pid).items() if "worker" in command]
    os.kill(worker, signal.SIGKILL)
    status, second = fork(stack, first["id"], at=30, return_token_ids=True)
    assert status == 200, second
    assert second["choices"][0]["token_ids"] == tokens_of(stack, first["id"])[30:]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_a_stored_response_is_forked(stack: SimpleNamespace) -> None:
    body = {
        "model": "tiny",
        "input": "Tell me about the thing.",
        "temperature": 0.8,
        "seed": 7,
        "max_output_tokens": 50,
    }
    status, first = call(f"{stack.url}/v1/responses", "POST", **body)
    assert status == 200, first
    path = f"{stack.url}/v1/responses/{first['id']}/fork"
    status, second = call(path, "POST", at=20)
    assert status == 200, second
    whole, rest = (response["output"][0]["content"][0]["text"] for response in (first, second))
    assert rest
    assert whole.endswith(rest)
    assert (second["previous_response_id"], second["store"], second["temperature"]) == (first["id"], False, 0.8)
    assert second["usage"]["input_tokens"] == first["usage"]["input_tokens"] + 20
    # By its id and a place, it is the same.
    status, by_id = call(f"{stack.url}/v1/responses", "POST", previous_response_id=first["id"], at=20, store=False)
    assert (status, by_id["output"][0]["content"]) == (200, second["output"][0]["content"])
    status, other = call(path, "POST", at=20, temperature=0, max_output_tokens=5, metadata={"a": "b"})
    assert (other["temperature"], other["max_output_tokens"], other["metadata"]) == (0, 5, {"a": "b"})
    status, refused = call(path, "POST", at=50)
    assert (status, refused["error"]["param"]) == (400, "max_output_tokens")
    # A response that is not stored has no forks, and no fork is stored.
    status, unstored = call(f"{stack.url}/v1/responses", "POST", **body, store=False)
    for response in (unstored, second):
        assert call(path.replace(first["id"], response["id"]), "POST", at=1)[0] == 404
    assert call(path.replace(first["id"], "resp_" + "0" * 32), "POST", at=1)[0] == 404


def test_an_answer_that_has_not_ended_is_replayed_and_forked(stack: SimpleNamespace) -> None:
    body = {"model": "tiny", "messages": MESSAGES, "stream": True, "background": True} | DRAWN | {"max_tokens": 4000}
    request = urllib.request.Request(
        f"{stack.url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as stream:
        lines = map(bytes.decode, stream)
        first = next(json.loads(line[6:]) for line in lines if line.startswith("data: "))
        # An event may have several tokens.
        assert next(line for line in lines if line.startswith("id: ") and float(line[4:]) >= 100)
        status, parked = call(f"{stack.url}/v1/chat/completions/{first['id']}/park", "POST")
    assert (status, parked["parked"]) == (200, True)
    tokens = tokens_of(stack, first["id"])
    result = replay(stack, first["id"], "--json")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert (found["exact"], found["state"]) == (True, "parked")
    assert found["choices"][0]["equal"] == len(tokens) < 4000
    status, second = fork(stack, first["id"], max_tokens=8, return_token_ids=True)
    assert status == 200, second
    call(f"{stack.url}/v1/chat/completions/{first['id']}/unpark", "POST")
    deadline = time.monotonic() + 30
    while len(more := tokens_of(stack, first["id"])) < len(tokens) + 8:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert second["choices"][0]["token_ids"] == more[len(tokens) : len(tokens) + 8]
    assert call(f"{stack.url}/v1/chat/completions/{first['id']}/cancel", "POST")[0] == 200
