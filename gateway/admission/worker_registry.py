"""The live workers of the lane, looked up once per second, and the renewal of the gateway's own lease."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Collection, Sequence

from redis.exceptions import RedisError

from quire.gateway.admission.service_rate import ServiceRate
from quire.gateway.model.served_model import ServedModel
from quire.gateway.stream.buffer import StreamStats
from quire.gateway.stream.call_metadata import MAX_FINGERPRINT
from quire.shared.process.tasks import end_tasks
from quire.shared.process.version import installed_version
from quire.shared.protocol.broker import Announcement, Broker
from quire.shared.protocol.keys import BEAT_S, GATEWAY_TTL_S
from quire.shared.protocol.messages import MAX_CHOICES, MAX_PROMPT_TOKENS, WorkerCard
from quire.shared.protocol.messages.host_card import HostedModel, HostState
from quire.shared.redis.cancellation import check_cancelled

log = logging.getLogger("gateway")

FIRST_WORKER_S = 0.05
# Time without a worker after which a gateway looks as rarely as with one.
AWAITED_S = 300.0


class WorkerRegistry:
    """The live workers of the lane, and the limits that follow from them. Without a worker the last limits stay."""

    def __init__(
        self,
        broker: Broker,
        gateway_id: str,
        model: ServedModel,
        max_model_len: int,
        stats: StreamStats,
        give_up_queued: Callable[[float, str], None] = lambda waited_s, fault: None,
        no_worker_timeout_s: float = math.inf,
    ) -> None:
        """give_up_queued: called with `no_worker_timeout_s` and "" while no worker has been alive for that time.

        Also called with 0 and the reason while no host can load the model.
        """
        self._give_up_queued = give_up_queued
        self._no_worker_timeout_s = no_worker_timeout_s
        self._broker = broker
        self._stats = stats
        self._noted_repairs = 0
        self._gateway_id = gateway_id
        own = [limit for limit in (max_model_len, model.max_model_len) if limit]
        self._own_limit = min(own, default=MAX_PROMPT_TOKENS)
        self._task: asyncio.Task[None] | None = None
        # Time at which the last worker was gone, on the loop's clock; None with a worker, or if Redis does not answer.
        self._empty_at: float | None = None
        self._leased_at = float("-inf")
        self.workers: tuple[WorkerCard, ...] = ()
        # The model at hosts with --models-dir; None if no host has it.
        self.hosted: HostedModel | None = None
        # Digests of the adapters that calls may name, and the announcements.
        self.adapters: dict[str, str] = {}
        self.announced: dict[str, Announcement] = {}
        self.rate = ServiceRate()
        self.redis_answers = False
        self.max_model_len = self._own_limit
        self.max_num_seqs = MAX_CHOICES
        self.vocab_size = model.vocab_size
        self._own_vocab_size = model.vocab_size

    @property
    def system_fingerprint(self) -> str:
        """The version of this server, and the digest of the weights of its workers, if they have one in common."""
        digests = {card.weights_digest for card in self.workers}
        weights = f"{digest}_" if len(digests) == 1 and (digest := digests.pop()) else ""
        return f"fp_{weights}{installed_version('0')}"[:MAX_FINGERPRINT]

    @property
    def no_images(self) -> str:
        """Why images are refused; empty if they are not. Any worker may get any request, so all must compute them."""
        return next((f"{card.no_images} (worker {card.worker_id})" for card in self.workers if card.no_images), "")

    @property
    def state(self) -> HostState:
        """The state of the model: LOADED with a live worker, else that at its host."""
        if self.workers:
            return HostState.LOADED
        if self.hosted is None or self.hosted.state is HostState.LOADED:  # its worker has gone, or not yet sent a beat
            return HostState.NOT_LOADED if self.hosted is None else HostState.LOADING
        return self.hosted.state

    @property
    def empty_s(self) -> float:
        """Seconds for which no worker has been alive; 0 with a worker or a host, or if Redis does not answer."""
        return 0.0 if self._empty_at is None else asyncio.get_running_loop().time() - self._empty_at

    def holders(self, name: str) -> dict[str, str]:
        """Return the digest of an adapter at each worker that holds it, by worker id."""
        held = {card.worker_id: held_adapters(card).get(name, "") for card in self.workers}
        return {worker_id: digest for worker_id, digest in held.items() if digest}

    def held_names(self) -> set[str]:
        """Return the names of all adapters that some worker holds."""
        return {name for card in self.workers for name in held_adapters(card)}

    async def start(self) -> None:
        await self.refresh()
        self._task = asyncio.create_task(self._refresh_forever())

    async def close(self) -> None:
        await end_tasks(self._task)

    async def _refresh_forever(self) -> None:
        while True:
            # Until a worker is there, look more often: a start waits for it. Many models may be without one for long.
            is_awaited = not self.workers and self.hosted is None and self.empty_s < AWAITED_S
            await asyncio.sleep(FIRST_WORKER_S if is_awaited else BEAT_S)
            await self.refresh()
            if self.hosted is not None and self.state is HostState.FAILED:
                self._give_up_queued(0.0, self.hosted.reason)
            elif self.empty_s >= self._no_worker_timeout_s:
                self._give_up_queued(self._no_worker_timeout_s, "")
            check_cancelled()

    async def refresh(self) -> None:
        """Look once. If Redis does not answer, `redis_answers` is false afterwards."""
        now = asyncio.get_running_loop().time()
        try:
            if now - self._leased_at > GATEWAY_TTL_S / 4:
                await self._broker.refresh_gateway(self._gateway_id)
                self._leased_at = now
            if repairs := self._stats.repairs - self._noted_repairs:
                self._noted_repairs += repairs  # if Redis fails now they are lost, and not counted twice
                await self._broker.note_repairs(repairs)
            workers = tuple(await self._broker.live_workers())
            self.announced = await self._broker.announced_adapters()
            with contextlib.suppress(ValueError):  # a counter that is not a number
                self.rate.sample(now, await self._broker.read_totals())
        except (RedisError, OSError) as error:
            if self.redis_answers:
                log.warning("Redis does not answer: %s", error)
            self.redis_answers, self.workers = False, ()
            self._empty_at = None
            self._leased_at = float("-inf")  # the lease may expire meanwhile
            return
        if not self.redis_answers:
            log.info("Redis answers")
        if len(workers) != len(self.workers) or not self.redis_answers:
            log.info("live workers: %d", len(workers))
        self.redis_answers, self.workers = True, workers
        self._empty_at = None if workers or self.hosted is not None else self._empty_at or now
        if workers:
            self.adapters = usable_adapters(workers, self.announced)
            self.max_model_len = min(self._own_limit, *(card.max_model_len for card in workers))
            self.max_num_seqs = min(card.max_num_seqs for card in workers)
            self.vocab_size = min(self._own_vocab_size, *(card.vocab_size for card in workers))


def held_adapters(card: WorkerCard) -> dict[str, str]:
    """Return the digests of the adapters that a worker holds, by name."""
    return {name: digest for name, _, digest in (entry.rpartition("@") for entry in card.adapters)}


def usable_adapters(workers: Sequence[WorkerCard], announced: Collection[str]) -> dict[str, str]:
    """Return the digests of the adapters that calls may name: every worker must be able to run each request.

    All workers hold such an adapter with one digest; or some do and it is announced, so that the others load it.
    """
    held = [held_adapters(card) for card in workers]
    usable = {}
    for name in sorted(set().union(*held)):
        digests = [adapters[name] for adapters in held if name in adapters]
        if len(set(digests)) == 1 and (len(digests) == len(workers) or name in announced):
            usable[name] = digests[0]
    return usable
