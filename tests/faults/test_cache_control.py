"""`cache_control` with the `anthropic` SDK at the real stack: pins, their bounds, and the usage."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import anthropic
import pytest
from anthropic.types import Message

from quire.ops.local.ports import free_port
from tests.support.faults.calls import FAST, make_keys
from tests.support.faults.stack import FaultStack, Stream

pytestmark = pytest.mark.slow

BLOCK = 8
# A prompt of these tests takes about 30 blocks. Half of the blocks may be pinned, and half of these by a key.
CACHE = ("--block-size", str(BLOCK), "--num-blocks", "160", "--max-model-len", "640", "--max-num-seqs", "2")
SHARES = ("--cache-pin-share", "0.5", "--cache-pin-key-share", "0.5")
KEY_BLOCKS = 40


def words(first: int, count: int) -> str:
    return " ".join(f"w{index}" for index in range(first, first + count))


def block(text: str, ttl: str = "5m") -> dict[str, Any]:
    return {"type": "text", "text": text, "cache_control": {"type": "ephemeral", "ttl": ttl}}


def counts(message: Message) -> tuple[int, int, int]:
    """Return the tokens that were read from the cache, pinned, and neither."""
    usage = message.usage
    return usage.cache_read_input_tokens or 0, usage.cache_creation_input_tokens or 0, usage.input_tokens


class Caller:
    """Calls of one API key."""

    def __init__(self, url: str, secret: str = "none") -> None:
        self.url, self.headers = url, {"Authorization": f"Bearer {secret}"}
        self._client = anthropic.Anthropic(base_url=url, api_key=secret, max_retries=0, timeout=60)

    def ask(self, *system: dict[str, Any], said: str = "w1 w2") -> Message:
        with self._client.messages.stream(
            model="tiny",
            max_tokens=2,
            system=list(system),  # type: ignore[arg-type]
            messages=[{"role": "user", "content": said}],
            extra_body={"seed": 1},
        ) as stream:
            return stream.get_final_message()

    def usage(self) -> dict[str, Any]:
        request = urllib.request.Request(f"{self.url}/v1/usage", headers=self.headers)
        [row] = json.load(urllib.request.urlopen(request, timeout=10))["data"]
        return dict(row)


class Worker:
    """A worker, with its metrics."""

    def __init__(self, stack: FaultStack, name: str, *flags: str, **environ: str) -> None:
        self.port = free_port()
        flags = (*CACHE, *SHARES, *FAST, "--internal-port", str(self.port), *flags)
        self.process = stack.worker(name, *flags, **environ)

    def count(self, name: str) -> int:
        lines = urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=10).read().decode().splitlines()
        return sum(int(float(line.split()[-1])) for line in lines if line.startswith(name))

    @property
    def hits(self) -> int:
        return self.count("quire_prefix_cache_hit_tokens_total")

    @property
    def pinned(self) -> int:
        return self.count("quire_cache_pin_blocks")

    def pinned_blocks(self) -> int:
        report = json.load(urllib.request.urlopen(f"http://127.0.0.1:{self.port}/debug/blocks", timeout=10))
        return sum(entry["pinned_by_calls"] for entry in report["blocks"])


@pytest.fixture
def keys(stack: FaultStack) -> list[str]:
    return [secret for _, secret in make_keys(stack.redis_server.url, "acme/web", "zoo/web")]


def test_the_first_call_creates_and_the_second_reads(stack: FaultStack, keys: list[str]) -> None:
    worker = Worker(stack, "a")
    caller, system = Caller(stack.gateway()[1], keys[0]), (block(words(0, 50), "1h"), block(words(50, 10)))
    first = counts(caller.ask(*system))
    read, created, _ = first
    assert read == worker.hits == 0
    assert created == worker.pinned * BLOCK == worker.pinned_blocks() * BLOCK > 100
    second = counts(caller.ask(*system, said="w3 w4"))
    # The prefix cache also has the next blocks, without a pin.
    assert second == (worker.hits, 0, sum(first) - worker.hits)
    assert created <= worker.hits < created + 2 * BLOCK
    # A longer prefix creates what it adds.
    third = counts(caller.ask(*system, block(words(70, 10))))
    assert third[0] == worker.hits - second[0] >= created
    assert third[1] == worker.pinned * BLOCK - created > 0
    usage = caller.usage()
    assert usage["cache_creation_tokens"] == created + third[1]
    assert usage["prompt_tokens"] == sum(first) + sum(second) + sum(third)


def test_other_tenants_evict_no_pinned_block_and_no_key_pins_more_than_its_part(
    stack: FaultStack, keys: list[str]
) -> None:
    worker = Worker(stack, "a")
    _, url = stack.gateway()
    ours, others, system = Caller(url, keys[0]), Caller(url, keys[1]), block(words(0, 50))
    plain = {"type": "text", "text": words(200, 50)}  # without a pin
    _, created, _ = counts(ours.ask(system))
    ours.ask(plain)
    # The other key fills the cache several times, with and without pins of its own.
    for index in range(12):
        marked = block(words(300 + 50 * index, 50))
        others.ask(marked if index % 2 else {"type": "text", "text": marked["text"]})
        assert worker.pinned <= created // BLOCK + KEY_BLOCKS
    assert worker.count("quire_prefix_cache_evictions_total") > 160
    assert worker.count('quire_cache_pins_total{event="dropped"}') > 0
    assert worker.count("quire_preemptions_total") == 0
    read, again, _ = counts(ours.ask(system))
    assert (read // BLOCK, again) == (created // BLOCK, 0)
    assert counts(ours.ask(plain))[0] < BLOCK * 4
    # A prefix that is longer than the part of a key is pinned from its beginning.
    read, created, rest = counts(others.ask(block(words(100, 80))))
    assert read + created == KEY_BLOCKS * BLOCK
    assert rest > BLOCK
    # The last used prefix of the other key is there, and an earlier one is not.
    assert counts(others.ask(block(words(100, 80))))[0] >= read + created
    assert counts(others.ask(block(words(350, 50))))[0] < BLOCK * 4


def test_a_killed_worker_loses_its_pins_and_changes_nothing_that_a_client_was_told(
    stack: FaultStack, keys: list[str]
) -> None:
    first = Worker(stack, "a")
    caller = Caller(stack.gateway()[1], keys[0])
    call: dict[str, Any] = {
        "model": "tiny",
        "max_tokens": 60,
        "system": [block(words(0, 50), "1h")],
        "messages": [{"role": "user", "content": "w1"}],
        "temperature": 0,
    }

    def start(**more: Any) -> Stream:
        return Stream(caller.url, call | more, caller.headers, "/v1/messages")

    undisturbed = start().wait_end().answer
    told = undisturbed["usage"]
    created = told["cache_creation_input_tokens"]
    assert told["cache_creation"] == {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": created}
    assert created > 100
    # Another salt, so that the prompt is computed again.
    stream = start(stream=True, cache_salt="other")
    stack.wait(lambda: sum("text_delta" in event.data for event in stream.events) > 5)
    first.process.kill()
    second = Worker(stack, "b")
    events = stream.wait_end().parsed
    said = "".join(event["delta"].get("text", "") for event in events if event["type"] == "content_block_delta")
    assert said == undisturbed["content"][0]["text"]
    [end] = [event["usage"] for event in events if event["type"] == "message_delta"]
    assert end == {name: told[name] for name in end}
    assert events[0]["message"]["usage"] == told | {"output_tokens": 0}
    assert caller.usage()["cache_creation_tokens"] == 2 * created
    # The second worker computed the prompt, and pinned it. The first call left nothing there.
    assert second.pinned * BLOCK == created
    again, lost = start(cache_salt="other").wait_end().answer, start().wait_end().answer
    assert again["usage"]["cache_read_input_tokens"] >= created
    assert (lost["usage"]["cache_read_input_tokens"], lost["usage"]["cache_creation_input_tokens"]) == (0, created)
    assert again["content"] == lost["content"] == undisturbed["content"]
