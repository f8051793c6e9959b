"""`cache_control` with the `anthropic` SDK: what is pinned, for how long, for whom, and the counts of the usage."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import anthropic
import pytest
from anthropic.types import Message

from quire.ops.local.ports import free_port
from tests.support.checkpoints import make_checkpoint
from tests.support.faults.calls import FAST
from tests.support.faults.stack import FaultStack

BLOCK = 8
# A small cache: three of the prompts of these tests fill it. Half of it may be pinned, and half of that by a key.
CACHE = ("--block-size", str(BLOCK), "--num-blocks", "160", "--max-model-len", "640", "--max-num-seqs", "2")
SHARES = ("--cache-pin-share", "0.5", "--cache-pin-key-share", "0.5")
KEY_BLOCKS = 40


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("models") / "tiny", "llama", max_position_embeddings=2048)


@pytest.fixture
def stack(tmp_path: Path, model: Path) -> Iterator[FaultStack]:
    stack = FaultStack(tmp_path, model)
    try:
        yield stack
    finally:
        stack.close()


def words(first: int, count: int) -> str:
    return " ".join(f"w{index}" for index in range(first, first + count))


def block(text: str, ttl: str | None = None, **more: Any) -> dict[str, Any]:
    marker = {"type": "ephemeral"} | ({"ttl": ttl} if ttl else {})
    return {"type": "text", "text": text, "cache_control": marker, **more}


def counts(message: Message) -> tuple[int, int, int]:
    """Return the tokens that were read from the cache, pinned, and neither."""
    usage = message.usage
    return usage.cache_read_input_tokens or 0, usage.cache_creation_input_tokens or 0, usage.input_tokens


class Caller:
    """Calls of one API key."""

    def __init__(self, url: str, secret: str = "none") -> None:
        self._client = anthropic.Anthropic(base_url=url, api_key=secret, max_retries=0, timeout=60)

    def ask(self, system: Sequence[dict[str, Any]], said: Any = "w1 w2", **more: Any) -> Message:
        asked: dict[str, Any] = {
            "model": "tiny",
            "max_tokens": 2,
            "extra_body": {"seed": 1},
            "system": list(system),
            **more,
        }
        if not isinstance(said, list):
            said = [{"role": "user", "content": said}]
        with self._client.messages.stream(messages=said, **asked) as stream:
            return stream.get_final_message()


class Worker:
    """A worker, with its metrics."""

    def __init__(self, stack: FaultStack, name: str, *flags: str, **environ: str) -> None:
        self.port = free_port()
        self.process = stack.worker(name, *CACHE, *FAST, "--internal-port", str(self.port), *flags, **environ)

    def count(self, name: str) -> int:
        lines = urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=10).read().decode().splitlines()
        [line] = [line for line in lines if line.startswith(f"{name} ")]
        return int(float(line.split()[-1]))

    def hits(self) -> int:
        return self.count("quire_prefix_cache_hit_tokens_total")

    def pinned(self) -> int:
        return self.count("quire_cache_pin_blocks")


def test_the_first_call_creates_and_the_second_reads(stack: FaultStack) -> None:
    worker = Worker(stack, "a", *SHARES)
    _, url = stack.gateway()
    caller, system = Caller(url), [block(words(0, 50), "1h"), block(words(50, 10))]
    first = caller.ask(system)
    read, created, rest = counts(first)
    assert read == worker.hits() == 0
    assert created == worker.pinned() * BLOCK > 0
    assert rest < 5 * BLOCK
    second = caller.ask(system, "w3 w4")
    # The second prompt shares a block more than is pinned.
    assert counts(second) == (worker.hits(), 0, read + created + rest - worker.hits())
    assert created <= worker.hits() < created + 2 * BLOCK
