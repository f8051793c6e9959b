"""Prefix affinity at a gateway: the prefixes of a call, and the time for which a request is left to a worker.

Redis chooses the worker when the request is submitted (`_affinity.lua`). docs/prefix-affinity.md describes the feature.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Protocol

from prometheus_client.metrics_core import Metric
from redis.exceptions import RedisError

from quire.gateway.features.affinity.beginnings import hashed
from quire.shared.process.tasks import end_tasks
from quire.shared.protocol.broker import Admission, Broker
from quire.shared.protocol.broker.affinity import AffinityVerbs
from quire.shared.protocol.messages import GenerationRequest, WorkerCard
from quire.shared.redis.cancellation import check_cancelled
from quire.shared.telemetry.prometheus import counter

log = logging.getLogger("gateway")

# Shorter prompts are computed in less time than it takes to choose a worker.
MIN_PROMPT_TOKENS = 64
# Tokens that stand for a prompt without messages.
FIRST_TOKENS = 64


class LiveWorkers(Protocol):
    """The workers that are alive (`WorkerRegistry`)."""

    workers: tuple[WorkerCard, ...]


class AffinityMeter:
    """What a process has counted, over all models."""

    def __init__(self) -> None:
        self.left = 0
        self.withdrawn = 0

    def families(self) -> Iterator[Metric]:
        """Yield the metrics."""
        yield counter("quire_prefix_left", "Requests left to the worker that held a prefix of the prompt", self.left)
        yield counter(
            "quire_prefix_withdrawn",
            "Requests left to a worker that had not taken them after --prefix-affinity-ms: any worker takes them then",
            self.withdrawn,
        )


class Affinity:
    """Prefix affinity for one model. Between `start` and `close` it withdraws requests from workers in time."""

    def __init__(self, broker: Broker, live: LiveWorkers, left_ms: int, meter: AffinityMeter) -> None:
        """left_ms: for which a request is left to a worker; 0 for never."""
        self._withdraw = AffinityVerbs(broker.client, broker.keys.lane).withdraw
        self._live = live
        self._left_ms = left_ms
        self._meter = meter
        # Requests that were left to workers, each with the time on the loop's clock at which that ends.
        self._left: deque[tuple[float, str]] = deque()
        self._has_left = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._left_ms:
            self._task = asyncio.create_task(self._withdraw_forever())

    async def close(self) -> None:
        await end_tasks(self._task)

    def placed(
        self, name: str, beginnings: tuple[bytes, ...], requests: Sequence[GenerationRequest], terms: Admission
    ) -> Admission:
        """Return the terms of a call with the prefixes of its prompt, if there are workers to choose from.

        name: of the conversation; empty without one. beginnings: of its messages, see `beginnings_of`.
        """
        if not self._left_ms or len(requests) != 1 or len(self._live.workers) < 2:
            return terms
        prefixes = prefixes_of(name, beginnings, requests[0])
        return terms._replace(prefixes=prefixes, origin=requests[0].forked_from, left_ms=self._left_ms)

    def note(self, request_id: str, is_left: bool) -> None:
        """Withdraw a request later on if it was just left to a worker."""
        if not is_left:
            return
        self._meter.left += 1
        self._left.append((asyncio.get_running_loop().time() + self._left_ms / 1000, request_id))
        self._has_left.set()

    async def _withdraw_forever(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._has_left.wait()
            await asyncio.sleep(self._left[0][0] - loop.time())
            due = []
            while self._left and self._left[0][0] <= loop.time():
                due.append(self._left.popleft()[1])
            if not self._left:
                self._has_left.clear()
            try:
                if due:
                    self._meter.withdrawn += await self._withdraw(due)
            except (RedisError, OSError) as error:  # others take these requests when the lease of their worker ends
                log.warning("%d requests cannot be withdrawn from their workers: %s", len(due), error)
            check_cancelled()


def prefixes_of(name: str, beginnings: tuple[bytes, ...], request: GenerationRequest) -> tuple[bytes, ...]:
    """Return hashes of the beginnings of a prompt, the most specific first; none for a prompt that is not worth it.

    The name of a conversation comes before its first messages. Only calls that share cached blocks have equal hashes.
    """
    prompt = request.prompt
    if len(prompt) < MIN_PROMPT_TOKENS or request.pooling or request.sampling.prompt_logprobs >= 0:
        return ()
    scope = (request.cache_scope, request.cache_salt, request.adapter_digest)
    first, *instructions = beginnings or (array("I", prompt[:FIRST_TOKENS]).tobytes(),)
    named = [("name", name, first), ("name", name)] if name else [("first", first)]
    return tuple(hashed(*scope, *parts) for parts in (*named, *(("instructions", text) for text in instructions)))
