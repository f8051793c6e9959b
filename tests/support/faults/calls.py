"""The requests that fault tests send, and their answers without faults."""

from __future__ import annotations

import urllib.error
import urllib.request
from typing import Any

from tests.conftest import QuireProcess
from tests.support.faults.stack import KEYS, FaultStack, Stream, said

# One greedy request; one sampled with penalties, log-probabilities and n=2; one with a stop string of several tokens.
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "max_tokens": 150},
    "drawn": {
        "temperature": 1,
        "seed": 7,
        "n": 2,
        "logprobs": 3,
        "presence_penalty": 0.6,
        "repetition_penalty": 1.1,
        "max_tokens": 120,
    },
    "top": {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "seed": 11, "max_tokens": 150, "min_tokens": 20},
}
FAST = ("--lease-s", "1", "--beat-s", "0.25")


def body(name: str) -> dict[str, Any]:
    return {"model": "tiny", "prompt": f"w10 w20 w30 {name}", "ignore_eos": True, **REQUESTS[name]}


def undisturbed(url: str, *names: str) -> dict[str, list[str]]:
    """Return the choices of these requests, or of all, in a run without faults."""
    calls = {name: Stream(url, body(name)) for name in names or REQUESTS}
    for call in calls.values():
        assert call.wait_end().status == 200, call.text_body
    return {name: [said([choice]) for choice in call.answer["choices"]] for name, call in calls.items()}


def is_ready(url: str) -> bool:
    """Return whether the gateway accepts requests.

    After a fault, streams may end by reading the output log before the gateway is subscribed again. Until then it
    answers new requests with a 503.
    """
    try:
        with urllib.request.urlopen(f"{url}/readyz", timeout=60):
            return True
    except urllib.error.HTTPError as error:
        error.close()
        return False


def owned(stack: FaultStack, name: str) -> list[bytes]:
    """Return the keys of the requests that a worker owns according to Redis."""
    keys = list(stack.redis.scan_iter(KEYS.prefix + "req:*"))
    return [key for key in keys if stack.redis.hmget(key, "owner", "state") == [name.encode(), b"running"]]


def start_streams(url: str) -> dict[str, Stream]:
    """Start all requests; wait until each is in the middle of its answer."""
    streams = {name: Stream(url, body(name) | {"stream": True}) for name in REQUESTS}
    for stream in streams.values():
        stream.wait_events(10)
    return streams


def owner(stack: FaultStack, workers: dict[str, QuireProcess]) -> QuireProcess:
    """Return a worker that owns some of the running requests."""
    owners = [stack.redis.hget(key, "owner") for key in stack.redis.scan_iter(KEYS.prefix + "req:*")]
    running = [name.decode() for name in owners if name is not None]
    assert running, "nothing runs"
    return workers[max(workers, key=running.count)]


def assert_same(streams: dict[str, Stream], expected: dict[str, list[str]]) -> None:
    for name, stream in streams.items():
        stream.wait_end()
        assert stream.is_complete, stream.error
        assert [said(stream.choices(index)) for index in range(len(expected[name]))] == expected[name]


def longest_pause(streams: dict[str, Stream]) -> float:
    return max(stream.longest_pause_s for stream in streams.values())
