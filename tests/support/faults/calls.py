"""The requests that fault tests send, and their answers without faults."""

from __future__ import annotations

import urllib.error
import urllib.request

from tests.faults.test_worker_faults import FAST, REQUESTS, assert_same, body, longest_pause, owner, start_streams
from tests.support.faults.stack import KEYS, FaultStack, Stream, said

__all__ = [
    "FAST",
    "REQUESTS",
    "assert_same",
    "body",
    "is_ready",
    "longest_pause",
    "owned",
    "owner",
    "start_streams",
    "undisturbed",
]


def undisturbed(url: str) -> dict[str, list[str]]:
    """Return the choices of all requests in a run without faults."""
    calls = {name: Stream(url, body(name)) for name in REQUESTS}
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
