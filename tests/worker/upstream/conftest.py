"""An executor with upstreams, as a worker's queue uses it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from quire.shared.protocol.broker import ComputedTokens, StepCommit
from quire.shared.protocol.messages import GenerationRequest, Outcome, SamplingParams, StepItem
from quire.worker.upstream.client import UpstreamClient
from quire.worker.upstream.executor import UpstreamExecutor
from quire.worker.upstream.pool import UpstreamPool
from tests.support.upstreams import MODEL, FakeUpstream

EOS = 268


@pytest.fixture(scope="session")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(tiny_model / "tokenizer.json"))


class Caller:
    """The queue's side of an executor."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.items: dict[str, list[StepItem]] = {}
        self.attempts: dict[str, str] = {}
        self.executor: UpstreamExecutor
        self.pool: UpstreamPool
        self.has_ended = False
        self._changed = asyncio.Condition()

    def emit(self, commits: list[StepCommit], computed: list[ComputedTokens]) -> None:
        for attempt, item in commits:
            assert self.attempts.get(item.request_id, attempt) == attempt
            self.items.setdefault(item.request_id, []).append(item)

    def ended(self) -> None:
        self.has_ended = True

    def add(
        self, prompt: str | list[int], earlier: tuple[StepItem, ...] = (), request_id: str = "r1", **sampling: object
    ) -> GenerationRequest:
        """Start a request; greedy with 20 tokens unless `sampling` says otherwise."""
        ids = self.tokenizer.encode(prompt, add_special_tokens=False).ids if isinstance(prompt, str) else prompt
        params = SamplingParams(**{"max_tokens": 20, "temperature": 0.0, **sampling})  # type: ignore[arg-type]
        request = GenerationRequest(request_id, MODEL, tuple(ids), params)
        self.attempts[request_id] = f"attempt of {request_id}"
        self.executor.add(request, f"attempt of {request_id}", earlier)
        return request

    async def until(self, condition) -> None:  # type: ignore[no-untyped-def]
        async with asyncio.timeout(60):
            while not condition():  # noqa: ASYNC110 - nothing tells when it is true
                await asyncio.sleep(0.005)

    async def outcome(self, request_id: str = "r1") -> Outcome:
        """Wait for the end of a request."""
        await self.until(lambda: request_id in self.items and self.items[request_id][-1].outcome)
        outcome = self.items[request_id][-1].outcome
        assert outcome is not None
        return outcome

    def tokens(self, request_id: str = "r1", choice: int = 0) -> list[int]:
        """The tokens of a choice; the items must follow each other without a gap."""
        items = self.items[request_id]
        for before, after in pairwise(items):
            assert after.start == before.end
            assert before.outcome is None
        return [token for item in items for delta in item.deltas if delta.choice == choice for token in delta.token_ids]

    def text(self, request_id: str = "r1", choice: int = 0) -> str:
        return self.tokenizer.decode(self.tokens(request_id, choice))


@asynccontextmanager
async def executing(
    tokenizer: Tokenizer, *upstreams: FakeUpstream, key: str = "", idle_s: float = 30.0, max_num_seqs: int = 8
) -> AsyncIterator[Caller]:
    """Run an executor with these upstreams, which need not run."""
    caller = Caller(tokenizer)
    clients = [UpstreamClient(upstream.url, key, idle_s, 60.0) for upstream in upstreams]
    caller.pool = UpstreamPool(clients, tokenizer, MODEL, "")
    caller.executor = UpstreamExecutor(
        caller.pool, tokenizer, 269, frozenset({EOS}), max_num_seqs, caller.emit, caller.ended
    )
    caller.executor.start()
    try:
        yield caller
    finally:
        caller.executor.stop()
        await asyncio.to_thread(caller.executor.join, 10)
        assert caller.has_ended
        assert caller.executor.failure is None


@asynccontextmanager
async def answering(*upstreams: FakeUpstream, **options: Any) -> AsyncIterator[Caller]:
    """Run upstreams, and an executor with them."""
    async with AsyncExitStack() as servers:
        for upstream in upstreams:
            await servers.enter_async_context(upstream.running())
        async with executing(upstreams[0].tokenizer, *upstreams, **options) as caller:
            yield caller


@pytest.fixture
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask upstreams often, so that tests need not wait."""
    from quire.worker.upstream import generation, pool

    monkeypatch.setattr(pool, "WATCH_S", 0.1)
    monkeypatch.setattr(pool, "DOWN_S", (0.05, 0.1))
    monkeypatch.setattr(generation, "RETRY_S", (0.01, 0.1))
