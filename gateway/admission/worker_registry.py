"""The live workers of the lane, looked up once per second, and the renewal of the gateway's own lease."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from redis.exceptions import RedisError

from quire.gateway.admission.service_rate import ServiceRate
from quire.gateway.model.served_model import ServedModel
from quire.gateway.stream.buffer import StreamStats
from quire.shared.broker import Broker
from quire.shared.keys import BEAT_S, GATEWAY_TTL_S
from quire.shared.messages import MAX_CHOICES, MAX_PROMPT_TOKENS, WorkerCard
from quire.shared.redis.cancellation import check_cancelled

log = logging.getLogger("gateway")

FIRST_WORKER_S = 0.05


class WorkerRegistry:
    """The live workers of the lane, and the limits that follow from them. Without a worker the last limits stay."""

    def __init__(
        self, broker: Broker, gateway_id: str, model: ServedModel, max_model_len: int, stats: StreamStats
    ) -> None:
        self._broker = broker
        self._stats = stats
        self._noted_repairs = 0
        self._gateway_id = gateway_id
        own = [limit for limit in (max_model_len, model.max_model_len) if limit]
        self._own_limit = min(own, default=MAX_PROMPT_TOKENS)
        self._task: asyncio.Task[None] | None = None
        self._leased_at = float("-inf")
        self.workers: tuple[WorkerCard, ...] = ()
        self.rate = ServiceRate()
        self.redis_answers = False
        self.max_model_len = self._own_limit
        self.max_num_seqs = MAX_CHOICES
        self.vocab_size = model.vocab_size
        self._own_vocab_size = model.vocab_size

    async def start(self) -> None:
        await self.refresh()
        self._task = asyncio.create_task(self._refresh_forever())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _refresh_forever(self) -> None:
        while True:
            # Until the first worker is there, look more often: a start waits for it.
            await asyncio.sleep(BEAT_S if self.workers else FIRST_WORKER_S)
            await self.refresh()
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
            with contextlib.suppress(ValueError):  # a counter that is not a number
                self.rate.sample(now, await self._broker.read_totals())
        except (RedisError, OSError) as error:
            if self.redis_answers:
                log.warning("Redis does not answer: %s", error)
            self.redis_answers, self.workers = False, ()
            self._leased_at = float("-inf")  # the lease may expire meanwhile
            return
        if not self.redis_answers:
            log.info("Redis answers")
        if len(workers) != len(self.workers) or not self.redis_answers:
            log.info("live workers: %d", len(workers))
        self.redis_answers, self.workers = True, workers
        if workers:
            self.max_model_len = min(self._own_limit, *(card.max_model_len for card in workers))
            self.max_num_seqs = min(card.max_num_seqs for card in workers)
            self.vocab_size = min(self._own_vocab_size, *(card.vocab_size for card in workers))
