"""The requests that fault tests send, and their answers without faults."""

from __future__ import annotations

import asyncio
import urllib.error
import urllib.request
from typing import Any
from uuid import uuid4

from quire.shared.accounts.limits import AccountLimits
from quire.shared.accounts.store import AccountStore
from quire.shared.protocol.keys import ACCOUNTS_TAG
from quire.shared.redis.clients import command_client
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
    """Return a worker that owns some of the running requests, once a request runs."""
    running: list[str] = []

    def some_run() -> bool:
        owners = [stack.redis.hmget(key, "owner", "state") for key in stack.redis.scan_iter(KEYS.prefix + "req:*")]
        running[:] = [name.decode() for name, state in owners if name is not None and state == b"running"]
        return bool(running)

    stack.wait(some_run)
    return workers[max(workers, key=running.count)]


def assert_same(streams: dict[str, Stream], expected: dict[str, list[str]]) -> None:
    for name, stream in streams.items():
        stream.wait_end()
        assert stream.is_complete, stream.error
        assert [said(stream.choices(index)) for index in range(len(expected[name]))] == expected[name]


def longest_pause(streams: dict[str, Stream]) -> float:
    return max(stream.longest_pause_s for stream in streams.values())


# --- keys -------------------------------------------------------------------------------------------------------------
# API keys of the fault tests.


def make_keys(url: str, *tenants: str, life_s: int = 0, **limits: int) -> list[tuple[str, str]]:
    """Make an API key with these limits for each tenant, an organisation and a project with a slash between them.

    life_s: seconds of Redis' clock after which the keys expire; 0 for never. Returns id and secret of each.
    """

    async def make() -> list[tuple[str, str]]:
        client = command_client(url, ACCOUNTS_TAG, connections=1)
        try:
            store = AccountStore(client, "test")
            expires = int(await store.now()) + life_s if life_s else 0
            asked = AccountLimits.of(limits)
            made = [await store.create(*one.split("/"), uuid4().hex, asked, expires) for one in tenants]
            return [(account.id, secret) for account, secret in made]
        finally:
            await client.aclose()

    return asyncio.run(make())


def make_key(url: str, project: str = "web", life_s: int = 86_400, **limits: int) -> str:
    """Make an API key of a project. Returns its secret."""
    [(_, secret)] = make_keys(url, f"acme/{project}", life_s=life_s, **limits)
    return secret


def bearers(keys: list[tuple[str, str]]) -> list[dict[str, str]]:
    """Return the headers of calls with these keys."""
    return [{"Authorization": f"Bearer {secret}"} for _, secret in keys]
