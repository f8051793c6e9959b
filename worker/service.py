"""The worker as one asyncio service around what computes: consumer, committer, heartbeat and admin server."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from redis.exceptions import RedisError

from quire.shared.protocol.broker import Broker, ComputedTokens, QueueReader, StepCommit, new_id
from quire.shared.protocol.keys import BEAT_S
from quire.shared.protocol.messages import WorkerCard
from quire.shared.protocol.states import ParkReply
from quire.shared.redis.check import check_redis
from quire.shared.redis.clients import blocking_client, command_client
from quire.shared.redis.lane_client import LaneClient
from quire.shared.telemetry.internal_server import InternalServer
from quire.shared.telemetry.loop_lag import LoopLag
from quire.worker.progress import progress
from quire.worker.queue.committer import Committer
from quire.worker.queue.consumer import Consumer, LoadedAdapters
from quire.worker.queue.executor import Emit, Executor
from quire.worker.queue.leases import NameTaken, home, is_gone, take_name
from quire.worker.queue.metrics import QueueMetrics
from quire.worker.queue.orphans import Orphans
from quire.worker.queue.watchdog import Watchdog

if TYPE_CHECKING:
    from quire.shared.telemetry.spans import Tracer

log = logging.getLogger(__name__)


# Time that tasks get to end after a failure.
END_TIMEOUT_S = 3.0


class EngineDied(RuntimeError):
    """The engine's thread has failed. The process must end too; other workers continue its requests."""


@dataclass(frozen=True, slots=True)
class LeaseTimes:
    """The settings of the same names, in seconds."""

    lease_s: float = 3.0
    beat_s: float = BEAT_S
    watchdog_s: float = 0.0
    orphan_s: float = 30.0


class WorkerRuntime(Protocol):
    """What computes the answers of a worker: an engine (`EngineRuntime`), or servers of other engines.

    The service calls `executor` first, then `adapters`, each once.
    """

    def executor(self, emit: Emit, ended: Callable[[], None]) -> Executor:
        """Make the executor. It calls `ended` when it ends, `emit` as `Executor` says."""
        ...

    def adapters(self, broker: Broker, poll_s: float) -> LoadedAdapters | None:
        """Make the loader of LoRA adapters; None if none are served."""
        ...

    def admin_server(self, listener: socket.socket, queue: QueueMetrics, model: str) -> InternalServer: ...

    def tasks(self, broker: Broker, worker_id: str, ended: asyncio.Event) -> Mapping[str, Coroutine[Any, Any, object]]:
        """Return what else runs until `ended` is set, by name."""
        ...

    def card(self, worker_id: str, incarnation: str, model: str) -> WorkerCard: ...

    def close(self) -> None:
        """Free what outlives the service. Called last."""
        ...


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """The parts of a running worker.

    died: set when the engine's thread has ended. internal: the admin server; None without a port for it.
    tasks: by name.
    """

    commands: LaneClient
    blocking: LaneClient
    broker: Broker
    committer: Committer
    consumer: Consumer
    reader: QueueReader
    engine: Executor
    died: asyncio.Event
    adapters: LoadedAdapters | None
    watch: Watchdog
    lag: LoopLag
    internal: InternalServer | None
    tasks: dict[str, asyncio.Task[object]] = field(default_factory=dict)


class WorkerService:
    """One runtime that serves one lane of one Redis. `listener` is a bound socket for the admin server, or None."""

    def __init__(
        self,
        runtime: WorkerRuntime,
        *,
        model_name: str,
        worker_id: str,
        redis_url: str,
        listener: socket.socket | None = None,
        leases: LeaseTimes = LeaseTimes(),
        tracer: Tracer | None = None,
        register: Callable[[asyncio.Event], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        """register: keeps the model registered, for gateways without its folder, until the event is set.

        None registers nothing.
        """
        self._register = register
        self._leases = leases
        self._tracer = tracer
        self._model_name = model_name
        self._worker_id = worker_id
        self._redis_url = redis_url
        self._listener = listener
        self._runtime = runtime
        self._incarnation = new_id()
        self._home = home()
        self._stop = asyncio.Event()
        self._ended = asyncio.Event()

    def stop(self) -> None:
        """Ask `run` to end: it stops reading, gives running requests a grace period and returns the rest."""
        self._stop.set()

    async def run(self, drain_s: float, park_s: int = 0) -> None:
        """Serve until `stop`, SIGTERM or SIGINT.

        drain_s: time that running requests get to end. park_s: seconds for which the remaining ones are parked; 0 hands
        them back to the queue.
        Raises BrokerUnavailable without a Redis at the start, NameTaken if another live worker has this one's name.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self.stop)
        await check_redis(self._redis_url, self._model_name)
        parts = await self._assemble()
        parts.engine.start()
        parts.watch.start()
        if parts.adapters is not None:
            await parts.adapters.refresh()  # a new worker claims requests only with all adapters
        self._start_tasks(parts)
        try:
            await self._serve_until_stopped(parts)
            await self._stop_in_order(parts, drain_s, park_s)
        except (RedisError, OSError) as error:
            log.error("Redis failed while the worker was stopping: %s", error)
        finally:
            await self._close(parts)

    async def _assemble(self) -> WorkerParts:
        """Take the worker's name in Redis, and make the parts. None of them runs yet. Raises NameTaken."""
        url, lane = self._redis_url, self._model_name
        commands, blocking = command_client(url, lane, connections=4), blocking_client(url, lane)
        broker = Broker(commands, lane)
        try:
            await take_name(broker, self._worker_id, self._incarnation, self._leases.beat_s)
        except BaseException:
            await commands.aclose()
            await blocking.aclose()
            raise
        loop, died = asyncio.get_running_loop(), asyncio.Event()
        committer = Committer(broker, self._worker_id, on_lost=lambda: consumer.reread_pending())

        # `emit` and `ended` may run on the thread of an engine, and do nothing once the event loop is closed.
        def emit(commits: list[StepCommit], computed: list[ComputedTokens]) -> None:
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(committer.put, commits, computed)

        def ended() -> None:
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(died.set)

        engine = self._runtime.executor(emit, ended)
        reader = QueueReader(blocking, lane, self._worker_id)
        adapters = self._runtime.adapters(broker, self._leases.beat_s)
        consumer = Consumer(
            broker, reader, committer, engine, self._incarnation, self._leases.lease_s, self._tracer, adapters
        )
        watch, lag, internal = Watchdog(engine, self._leases.watchdog_s), LoopLag(), None
        if self._listener is not None:
            metrics = QueueMetrics(broker, consumer.claims, committer, lag)
            internal = self._runtime.admin_server(self._listener, metrics, lane)
        return WorkerParts(
            commands, blocking, broker, committer, consumer, reader, engine, died, adapters, watch, lag, internal
        )

    def _start_tasks(self, parts: WorkerParts) -> None:
        broker, committer = parts.broker, parts.committer
        runs: dict[str, Coroutine[Any, Any, object]] = {
            "consumer": parts.consumer.run(),
            "reclaim": parts.consumer.run_reclaim(),
            "committer": committer.run(parts.engine),
            "heartbeat": self._heartbeat(parts),
            "orphans": Orphans(broker, committer, self._leases.orphan_s).run(self._ended),
            **self._runtime.tasks(broker, self._worker_id, self._ended),
        }
        if self._register is not None:
            runs["registrar"] = self._register(self._ended)
        for name, run in runs.items():
            parts.tasks[name] = asyncio.create_task(run, name=name)

    async def _serve_until_stopped(self, parts: WorkerParts) -> None:
        """Serve until `stop` is called.

        Raises EngineDied, or the error of a task that has failed: the worker fails with it, and the supervisor starts a
        new process.
        """
        if parts.internal:
            parts.lag.start()
            await parts.internal.start()
            log.info("for operators: %s%s", parts.internal.url, parts.internal.paths)
        progress.ready()
        log.info("ready: worker %s serves %s", self._worker_id, self._model_name)
        stopped = asyncio.create_task(self._stop.wait(), name="stop")
        dead = asyncio.create_task(parts.died.wait(), name="engine")
        try:
            await asyncio.wait([*parts.tasks.values(), stopped, dead], return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
            dead.cancel()
        for task in parts.tasks.values():
            if task.done():
                task.result()
        if (failure := parts.engine.failure) is not None:
            raise EngineDied(f"the engine's thread failed: {failure!r}") from failure

    async def _stop_in_order(self, parts: WorkerParts, drain_s: float, park_s: int) -> None:
        """Stop the parts, and park or return requests that have not ended. Raises the error of a failed task."""
        broker, committer, consumer, engine = parts.broker, parts.committer, parts.consumer, parts.engine
        log.info("stopping: %d running requests get up to %.1f s", committer.num_running, drain_s)
        # 1) Claim no more requests. Requests that were about to be claimed are running or isolated afterwards.
        consumer.stop()
        await parts.reader.unblock(parts.commands)
        await asyncio.gather(parts.tasks["consumer"], parts.tasks["reclaim"])
        await self._return_to_queue(broker, committer, consumer.waiting_isolated)
        # 2) Give running requests time to end.
        await self._drain(committer, drain_s)
        # 3) Stop the engine, and commit its last results.
        engine.stop()
        await asyncio.to_thread(engine.join)
        await asyncio.sleep(0)  # let the callbacks run that the last step passed to call_soon_threadsafe
        committer.stop()
        await parts.tasks["committer"]
        # 4) Park or return the remaining requests, and end the other tasks.
        if park_s:
            await self._park(broker, committer, park_s)
        await self._return_to_queue(broker, committer, committer.attempts)
        self._ended.set()
        await asyncio.wait(parts.tasks.values())
        for task in parts.tasks.values():
            task.result()

    async def _close(self, parts: WorkerParts) -> None:
        """End what still runs, also after a failure, and close all connections."""
        parts.engine.stop()
        parts.watch.stop()
        self._ended.set()
        parts.consumer.stop()
        for task in parts.tasks.values():
            task.cancel()
        await asyncio.wait(parts.tasks.values(), timeout=END_TIMEOUT_S)
        await asyncio.to_thread(parts.engine.join, END_TIMEOUT_S)
        await parts.lag.close()
        with suppress(RedisError, OSError):  # without this the worker's card expires
            await parts.broker.retire(self._worker_id, self._incarnation)
        if parts.internal:
            await parts.internal.close()
        await parts.commands.aclose()
        await parts.blocking.aclose()

    async def _return_to_queue(self, broker: Broker, committer: Committer, attempts: list[tuple[str, str]]) -> None:
        if attempts:
            released = await broker.release(attempts)
            committer.released(attempts)
            log.info("%d requests are returned to the queue; other workers continue them", released)

    async def _park(self, broker: Broker, committer: Committer, park_s: int) -> None:
        """Park the running requests. A request that cannot be parked stays."""
        parked = []
        for request_id, token in committer.attempts:
            if await broker.park(request_id, retention_s=park_s, attempt=token) is ParkReply.PARKED:
                parked.append((request_id, token))
        committer.released(parked)
        log.info("%d requests are parked for %d s at most", len(parked), park_s)

    async def _drain(self, committer: Committer, drain_s: float) -> None:
        try:
            async with asyncio.timeout(drain_s):
                await committer.all_ended()
        except TimeoutError:
            log.info("%d requests are still running after %.1f s", committer.num_running, drain_s)

    async def _heartbeat(self, parts: WorkerParts) -> None:
        """Send heartbeats and renew leases, but only while the engine ticks: a worker that hangs loses its requests.

        Ends by a flag, because redis-py can swallow a cancellation that arrives during a command. Raises NameTaken if
        another worker, which may be alive, has taken the name of this worker.
        """
        broker, engine, committer = parts.broker, parts.engine, parts.committer
        seen = -1
        while not self._ended.is_set():
            if engine.ticks != seen:
                seen = engine.ticks
                try:
                    if stranded := engine.stranded:
                        await self._return_to_queue(broker, committer, stranded)
                        for attempt in stranded:
                            engine.drop(*attempt)
                    lost = await broker.renew(self._worker_id, committer.attempts)
                    committer.counts.leases_lost += len(lost)
                    committer.lose(lost, engine)
                    card = self._runtime.card(self._worker_id, self._incarnation, self._model_name)
                    card = replace(card, pace=committer.errors.corrected(card.pace))
                    beats = await broker.beat(card, engine.status.slowest_step_s, self._home, self._leases.beat_s)
                    if not beats and (holder := await broker.holder(self._worker_id)):
                        if not is_gone(holder.home):
                            raise NameTaken(self._worker_id, holder)
                        # Redis was restored from an older state, with the dead worker that had the name before.
                        await broker.enlist(
                            self._worker_id, self._incarnation, self._home, self._leases.beat_s, holder.incarnation
                        )
                except (RedisError, OSError) as error:
                    log.warning("heartbeat failed: %s", error)
                    parts.consumer.postpone_reclaim()
            else:
                log.warning("no heartbeat: the engine has made no progress for %.3g s", self._leases.beat_s)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._leases.beat_s):
                    await self._ended.wait()
