"""A gateway process, and each model that it serves: the parts, and how they are wired."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from aiohttp import web
from prometheus_client.metrics_core import Metric

from quire.gateway.admission.retry import AccountRetry, RetryPolicy
from quire.gateway.admission.submission import Submission
from quire.gateway.admission.worker_registry import WorkerRegistry
from quire.gateway.api.body_budget import BodyBudget, hold_more
from quire.gateway.api.caller import caller_of
from quire.gateway.api.memory import MemoryReturn
from quire.gateway.api.request_limits import RequestLimits
from quire.gateway.features.affinity.service import Affinity, AffinityMeter
from quire.gateway.features.deadlines.estimates import Deadlines
from quire.gateway.features.images.images import Images, ImageSender
from quire.gateway.features.keys.service import Keys
from quire.gateway.features.parking.service import Parking
from quire.gateway.model.renderer import Renderer
from quire.gateway.model.served_model import ServedModel
from quire.gateway.settings import GatewaySettings
from quire.gateway.stream.buffer import OutputBuffer
from quire.gateway.stream.router import FrameRouter
from quire.gateway.stream.subscription import Subscription
from quire.gateway.telemetry.request_meter import RequestMeters
from quire.shared.protocol.broker import Admission, Broker, QueueBounds, new_id
from quire.shared.protocol.messages.host_card import HostedModel
from quire.shared.redis.clients import command_client, pubsub_client
from quire.shared.telemetry.loop_lag import LoopLag

if TYPE_CHECKING:
    from quire.shared.telemetry.spans import Tracer

# Seconds that a gateway waits at its end for Redis to accept cancellations.
CANCEL_TIMEOUT_S = 3.0

# Waits until there is memory for bytes of a call, named by a text for errors.
Hold = Callable[[int, str], Awaitable[None]]

# The name under which lines of batches count in the budget of bodies.
_LINES = "lines of batches"


class LineMemory:
    """Counts the images of a line of a batch. The lines of all batches have one share, as those of one caller."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._held = 0

    async def hold(self, size: int, where: str) -> None:
        """Count further bytes, once there is room for them, or fewer if the number is negative."""
        if size > 0:
            await self._budget.take(_LINES, size, None)
        elif size:
            self._budget.give_back(_LINES, -size)
        self._held += size

    def release(self) -> None:
        """Count the line no more: it is submitted, or was not."""
        if self._held:
            held, self._held = self._held, 0
            self._budget.give_back(_LINES, held)


class GatewayProcess:
    """The parts of a gateway that do not depend on a model, until `close`.

    Raises StartError for a wrong price.
    """

    def __init__(self, settings: GatewaySettings, tracer: Tracer | None = None) -> None:
        # A model that is found later may take images.
        self.settings = settings = settings.with_body_bytes(takes_images=settings.discover_models)
        self.tracer = tracer
        self.id = settings.gateway_id or new_id()
        self.started = int(time.time())
        self.draining = False
        # True once the process was told to stop; it may accept calls for a while.
        self.is_leaving = False
        self.user_hash_key = settings.user_hash_key.encode() or secrets.token_bytes(32)
        self.meters = RequestMeters()
        # What features add to /metrics.
        self.affinity = AffinityMeter()
        self.metrics: list[Callable[[], Iterable[Metric]]] = [self.affinity.families]
        self.retry = AccountRetry()
        self.keys = Keys(settings, self.retry)
        self.bodies = BodyBudget(settings.max_bodies_bytes, MemoryReturn().note)
        self.images = Images(
            max_images=settings.max_images,
            max_bytes=settings.max_image_bytes,
            max_pixels=settings.max_image_pixels,
            processes=settings.image_processes,
            hosts=settings.image_hosts,
            wait_s=settings.body_timeout_s,
            # A quarter: while a call waits for memory, others can go on.
            max_call_bytes=min(settings.max_body_bytes, settings.max_bodies_bytes // 4),
        )

    def start(self) -> None:
        self.loop_lag = LoopLag()
        self.loop_lag.start()

    async def close(self) -> None:
        await self.loop_lag.close()
        await self.keys.close()
        self.images.close()


class Gateway:
    """One model at a gateway process. Between `start` and `close` it holds connections, tasks and threads.

    The queue of a model is its lane in Redis. Each model of a process has its own connections, subscription, worker
    registry and tokenizer, so that a model that fails delays no other.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        model: ServedModel,
        tracer: Tracer | None = None,
        process: GatewayProcess | None = None,
    ) -> None:
        """process: shared with the other models; by default one of this model alone."""
        self.settings = settings = settings.with_body_bytes(takes_images=model.layout is not None)
        self.process = process or GatewayProcess(settings, tracer)
        self.model = model
        self.id = self.process.id
        self.started = self.process.started
        self.user_hash_key = self.process.user_hash_key
        self.meters = self.process.meters
        self.key_limits = self.process.keys.limits_of(model.name)

    @property
    def draining(self) -> bool:
        """True while the process shuts down."""
        return self.process.draining

    @draining.setter
    def draining(self, value: bool) -> None:
        self.process.draining = value

    async def start(self, hosted: HostedModel | None = None) -> None:
        """Open connections and start tasks. hosted: the model at hosts with --models-dir."""
        settings = self.settings
        # 1) Redis: a connection for commands, and one for the subscription.
        self._commands = command_client(settings.redis_url, self.model.name)
        self._pubsub = pubsub_client(settings.redis_url, self.model.name)
        self.broker = Broker(self._commands, self.model.name)
        # 2) The way in: prompts to token ids, calls to requests in the queue.
        self.renderer = Renderer(
            self.model, settings.tokenizer_threads, not settings.control_tokens_in_messages, self.process.images
        )
        self.router = FrameRouter(self.broker, settings.keepalive_s)
        self.worker_registry = WorkerRegistry(
            self.broker,
            self.id,
            self.model,
            settings.max_model_len,
            self.router.stats,
            self.router.give_up_queued,
            settings.no_worker_timeout_s,
        )
        self.subscription = Subscription(
            self._pubsub, self.broker.keys.channel(self.id), self.router.feed, self.router.suspect_all
        )
        self.retry = RetryPolicy(self.subscription)
        bounds = QueueBounds(
            settings.max_queued_requests,
            settings.max_queued_tokens,
            settings.max_stored_bytes,
            settings.max_key_stored_bytes,
        )
        self.affinity = Affinity(self.broker, self.worker_registry, settings.prefix_affinity_ms, self.process.affinity)
        self.deadlines = Deadlines(self.worker_registry, settings.deadline_admission)
        self.submission = Submission(
            self.broker,
            Admission(gateway=self.id, bounds=bounds, deadline_ms=math.ceil(1000 * settings.default_timeout_s)),
            self.worker_registry,
            self.retry,
            self.router.has,
            self.process.keys.refusal,
        )
        self.canceller = self.submission.canceller
        self.parking = Parking(
            self.broker,
            self.retry,
            bounds,
            self.worker_registry.rate,
            settings.parking_retention_s,
            settings.max_parked_requests,
            settings.max_key_parked_requests,
            self.process.keys.refusal,
        )
        # 3) The background tasks.
        self.router.silence.start()
        self.subscription.start()
        self.parking.start()
        self.affinity.start()
        self.worker_registry.hosted = hosted
        await self.worker_registry.start()

    async def close(self) -> None:
        await self.affinity.close()
        await self.parking.close()
        await self.canceller.close(CANCEL_TIMEOUT_S)
        await self.subscription.close()
        await self.router.silence.close()
        await self.worker_registry.close()
        self.renderer.close()
        await self._pubsub.aclose()
        await self._commands.aclose()

    def renderer_for(self, request: web.Request) -> Renderer:
        """Return the renderer for the call of a request."""
        hold = partial(hold_more, request, self.settings.body_timeout_s)
        return self.renderer.of(ImageSender(caller_of(request).owner, self.worker_registry.no_images, hold))

    def renderer_of(self, owner: str, hold: Hold) -> Renderer:
        """Return the renderer for a line of a batch of an owner. hold: as of `ImageSender`."""
        return self.renderer.of(ImageSender(owner, self.worker_registry.no_images, hold, has_body=False))

    @property
    def can_answer(self) -> bool:
        """True if a worker of the model is alive, or a host loads it for the next call."""
        registry = self.worker_registry
        return bool(registry.workers) or registry.hosted is not None

    @property
    def names(self) -> list[str]:
        """The names by which calls may name this model: its own, its aliases, and those of its LoRA adapters."""
        return [self.model.name, *self.model.aliases, *self.worker_registry.adapters]

    @property
    def limits(self) -> RequestLimits:
        """The limits of a call now; they depend on the workers that are alive."""
        settings, workers = self.settings, self.worker_registry
        return RequestLimits(
            model=self.model.name,
            max_model_len=workers.max_model_len,
            max_num_seqs=workers.max_num_seqs,
            vocab_size=workers.vocab_size,
            max_n=settings.max_n,
            max_prompts=settings.max_prompts,
            max_choices=settings.max_choices,
            max_tools=settings.max_tools,
            max_schema_bytes=settings.max_schema_bytes,
            max_schema_depth=settings.max_schema_depth,
            special_tokens=self.model.special_tokens,
            sampling_defaults=self.model.sampling_defaults,
            system_fingerprint=workers.system_fingerprint,
            adapters=workers.adapters,
            aliases=self.model.aliases,
            enforces_tools=settings.enforce_tools,
            thinking_token_budget=settings.thinking_token_budget,
            repetition_detection=settings.repetition,
            is_classifier=self.model.is_classifier,
        )

    @contextmanager
    def listening(
        self, ids: Sequence[str], can_return: bool = True, owner: str | None = None
    ) -> Iterator[OutputBuffer]:
        """Buffer the output of requests for one HTTP request; then cancel those that no client listens to.

        While the gateway shuts down, requests are not cancelled if the client `can_return` to another gateway for the
        rest: if it does not, the request is an orphan, and its worker cancels it. owner: see `OutputBuffer`.
        """
        buffer = self.router.open(ids, owner)
        try:
            yield buffer
        finally:
            self.router.close(buffer)
            if not (self.draining and can_return):
                if buffer.is_responsible:
                    # Requests that have not ended by now have lost their client, or another prompt of the call failed.
                    self.canceller.cancel(buffer.unfinished)
                self.canceller.left(id_ for id_ in buffer.cursors if not self.router.has(id_))
            self.canceller.expire(buffer.to_expire)

    def redis_problems(self) -> list[str]:
        """Return why no call can be accepted or answered now; empty if Redis answers and is subscribed to."""
        return [
            *([] if self.worker_registry.redis_answers else ["Redis does not answer"]),
            *([] if self.subscription.ready.is_set() else ["not subscribed to the workers' output"]),
        ]
