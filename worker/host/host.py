"""The model host: registers the models of a folder, watches their queues, and starts and stops their workers.

The host has no state that must survive: requests and their tokens are in Redis, the models in the folder. If the host
is killed, its workers end with it, and the next host finds in the queues which models are asked for.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field

from aiohttp import web
from redis.exceptions import RedisError

from quire.shared.process.backoff import Backoff
from quire.shared.process.errors import StartError
from quire.shared.protocol.broker.hosts import Demand, DemandReader, HostRegistry
from quire.shared.protocol.broker.models import ModelRegistry
from quire.shared.protocol.keys import BEAT_S, HOST_TTL_S, REGISTER_S, REGISTRY_LANE
from quire.shared.protocol.messages.host_card import MAX_REASON, HostCard, HostedModel, HostState
from quire.shared.protocol.messages.manifest import ModelManifest
from quire.shared.protocol.registered_files import manifest_of, read_files
from quire.shared.redis.clients import command_client
from quire.shared.redis.lane_client import LaneClient
from quire.shared.redis.url import parse_redis_url
from quire.shared.telemetry.internal_server import InternalServer, json_response
from quire.shared.telemetry.prometheus import CONTENT_TYPE_LATEST
from quire.worker.host.folder import FolderEntry, scan
from quire.worker.host.metrics import HostMetrics
from quire.worker.host.plan import LoadPlan, ModelDemand, Phase, make_plan
from quire.worker.host.settings import check_host_settings, room_of, too_large, worker_environ
from quire.worker.host.worker_process import WorkerProcess
from quire.worker.progress import progress
from quire.worker.queue.leases import home, is_gone
from quire.worker.settings import WorkerSettings

log = logging.getLogger(__name__)

# Time between two looks at the queues and the workers, and between two looks at the folder.
LOOK_S = 0.1
SCAN_S = 1.0
# Time after which a model that cannot be loaded is tried again, and the longest after repeated faults.
FIRST_RETRY_S, LAST_RETRY_S = 10.0, 600.0
# Time until a worker that died without a report is started again, and the longest after repeated deaths.
FIRST_RESTART_S, LAST_RESTART_S = 0.2, 10.0
# Deaths in a row while a model is loaded after which the model counts as the cause.
MAX_DEATHS = 5
# Time that workers get to stop after their --drain-s, before they are killed.
STOP_GRACE_S = 5.0
# Time that a removed model gets for its open requests before its worker is told to stop.
FAREWELL_S = 30.0


@dataclass(slots=True)
class FolderModel:
    """A model of the folder, and its worker if it has one. Times are seconds of the event loop's clock.

    reason: why it cannot be loaded, until `retry_at`. kill_at: end of the patience with a worker that stops.
    removed_at: time since which the folder does not have it.
    """

    entry: FolderEntry
    demand: ModelDemand
    manifest: ModelManifest | None = None
    process: WorkerProcess | None = None
    reason: str = ""
    retry_at: float = 0.0
    started_at: float = 0.0
    kill_at: float = 0.0
    removed_at: float | None = None
    used_ms: int = 0
    deaths: int = 0
    faults: Backoff = field(default_factory=lambda: Backoff(FIRST_RETRY_S, LAST_RETRY_S))
    restarts: Backoff = field(default_factory=lambda: Backoff(FIRST_RESTART_S, LAST_RESTART_S))

    def is_over(self, now: float) -> bool:
        """Return whether the folder does not have the model any more, and its requests have had their time."""
        return self.removed_at is not None and (self.demand.is_idle or now - self.removed_at >= FAREWELL_S)

    def state(self, now: float) -> HostState:
        """Return what gateways are told."""
        if self.demand.phase is Phase.READY:
            return HostState.LOADED
        if self.demand.phase is Phase.LOADING:
            return HostState.LOADING
        return HostState.FAILED if self.reason and now < self.retry_at else HostState.NOT_LOADED


class ModelHost:
    """One host over one folder and one Redis. `listener` is a bound socket for the metrics, or None."""

    def __init__(self, settings: WorkerSettings, listener: socket.socket | None = None) -> None:
        """Raise StartError for settings that do not fit a host."""
        self._folder = check_host_settings(settings)
        self._settings = settings
        self._room = room_of(settings)
        self._id = settings.name
        self._listener = listener
        self._is_cluster = parse_redis_url(settings.redis_url).kind == "cluster"
        self._models: dict[str, FolderModel] = {}
        # Entries of the folder, those that cannot be served included.
        self._entries: dict[str, FolderEntry] = {}
        # The fault that was logged last of each model that is not served.
        self._logged: dict[str, str] = {}
        # Models whose lease this host has taken, to load them or to make room for them.
        self._claimed: set[str] = set()
        self._readers: dict[str, DemandReader] = {}
        self._clients: list[LaneClient] = []
        self._now_ms = 0
        self._redis_answers = True
        self._stop = asyncio.Event()
        self.metrics = HostMetrics()

    def stop(self) -> None:
        """Ask `run` to stop the workers and to end."""
        self._stop.set()

    async def run(self) -> None:
        """Serve until `stop`, SIGTERM or SIGINT. Raise StartError if another live host has the name."""
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self.stop)
        client = self._client(REGISTRY_LANE)
        self._hosts, self._registry = HostRegistry(client), ModelRegistry(client)
        internal = None
        tasks: list[asyncio.Task[None]] = []
        try:
            await self._check_name()
            await self._scan()
            if self._listener is not None:
                handlers = {"/metrics": self._show_metrics, "/health": self._show_health}
                internal = InternalServer(self._listener, handlers)
                await internal.start()
                log.info("for operators: %s%s", internal.url, internal.paths)
            await self._beat()
            progress.ready()
            log.info("ready: host %s serves the models of %s: %s", self._id, self._folder, ", ".join(self._models))
            tasks = [asyncio.create_task(self._look_forever()), asyncio.create_task(self._register_forever())]
            stopped = asyncio.create_task(self._stop.wait())
            await asyncio.wait([*tasks, stopped], return_when=asyncio.FIRST_COMPLETED)
            stopped.cancel()
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            self._stop.set()
            await asyncio.to_thread(self._end_workers)
            await asyncio.gather(*tasks, return_exceptions=True)
            with suppress(RedisError, OSError):
                await self._hosts.retire(self._id)
            if internal is not None:
                await internal.close()
            for opened in self._clients:
                await opened.aclose()

    def _client(self, lane: str) -> LaneClient:
        client = command_client(self._settings.redis_url, lane, connections=2)
        self._clients.append(client)
        return client

    async def _check_name(self) -> None:
        """Raise StartError if a live host has this one's name."""
        until = asyncio.get_running_loop().time() + HOST_TTL_S + 1
        while (card := await self._hosts.card(self._id)) is not None and not is_gone(card.home):
            if asyncio.get_running_loop().time() > until:
                raise StartError(
                    f"the worker id {self._id!r} is in use by another worker with --models-dir; give each its own "
                    "--worker-id (QUIRE_WORKER_ID)"
                )
            await asyncio.sleep(BEAT_S / 4)

    # --- the folder ---------------------------------------------------------------------------------------------------

    async def _scan(self) -> None:
        """Register new and changed models, and forget those that the folder no longer has."""
        try:
            entries = await asyncio.to_thread(scan, self._folder, self._entries)
        except OSError as error:
            log.warning("--models-dir %s cannot be read: %s", self._folder, error)
            return
        old, self._entries = self._entries, entries
        self._logged = {name: fault for name, fault in self._logged.items() if name in entries}
        for name, entry in entries.items():
            if old.get(name) is not entry:
                await self._take_up(entry)
        for name, model in self._models.items():
            if name not in entries and model.removed_at is None:
                model.removed_at = asyncio.get_running_loop().time()
                log.info("model %s is no longer in %s", name, self._folder)
                await self._forget(model)

    async def _take_up(self, entry: FolderEntry) -> None:
        """Register a model that is new, or whose files have changed."""
        manifest, fault = None, entry.fault
        if not fault:
            try:
                manifest = await self._register(entry, replaces=True)
            except StartError as error:
                fault = self._without_folder(str(error))
        if manifest is None:
            # A model that is being copied changes from scan to scan.
            if self._logged.get(entry.name) != fault:
                log.error("model %s is not served: %s", entry.name, fault)
            self._logged[entry.name] = fault
            if (known := self._models.get(entry.name)) is not None and known.removed_at is None:
                known.removed_at = asyncio.get_running_loop().time()
                await self._forget(known)
            return
        self._logged.pop(entry.name, None)
        known = self._models.get(entry.name)
        if known is None:
            known = self._models[entry.name] = FolderModel(entry, ModelDemand(entry.name, 0))
        if known.demand.phase in (Phase.LOADING, Phase.READY):
            log.info("the files of %s have changed", entry.name)
            self._unload(known, "changed")
        known.entry, known.manifest, known.removed_at = entry, manifest, None
        known.demand.size = entry.size
        known.reason, known.retry_at, known.deaths = "", 0.0, 0
        known.faults.reset()
        if reason := too_large(entry, self._settings, self._room):
            known.reason, known.retry_at = reason, float("inf")
            log.error("model %s cannot be loaded: %s", entry.name, reason)

    async def _register(self, entry: FolderEntry, *, replaces: bool) -> ModelManifest:
        """Register a model with its files, of which none stays in memory. Raise StartError for files that are wrong."""
        files = await asyncio.to_thread(read_files, entry.place)
        manifest = manifest_of(entry.name, (), files)
        try:
            await self._registry.register(manifest, files, replaces=replaces)
        except (RedisError, OSError) as error:
            log.debug("model %s cannot be registered now: %s", entry.name, error)
        return manifest

    async def _register_forever(self) -> None:
        while not await self._stops_within(REGISTER_S):
            for model in list(self._models.values()):
                if model.manifest is None or model.removed_at is not None:
                    continue
                try:
                    await self._registry.register(model.manifest, {}, replaces=False)
                except KeyError:  # Redis has lost files
                    with suppress(StartError):
                        await self._register(model.entry, replaces=False)
                except (RedisError, OSError) as error:
                    log.debug("the registrations cannot be renewed now: %s", error)
                    break

    async def _forget(self, model: FolderModel) -> None:
        if model.manifest is not None:
            with suppress(RedisError, OSError):  # it expires
                await self._registry.forget(model.manifest)

    def _without_folder(self, text: str) -> str:
        """Return an error for clients: they need not know where the folder is."""
        return text.replace(f"{self._folder}{os.sep}", "").replace(f"{self._folder.resolve()}{os.sep}", "")

    # --- the look at queues and workers -------------------------------------------------------------------------------

    async def _look_forever(self) -> None:
        loop = asyncio.get_running_loop()
        scanned_at = beat_at = loop.time()
        while not await self._stops_within(LOOK_S):
            now = loop.time()
            changed = self._look_at_workers(now)
            try:
                if now - scanned_at >= SCAN_S:
                    scanned_at = now
                    await self._scan()
                await self._look_at_queues()
                await self._carry_out(make_plan([model.demand for model in self._present], self._room, loop.time()))
                if changed or now - beat_at >= BEAT_S:
                    beat_at = now
                    await self._beat()
                self._redis_answers = True
            except (RedisError, OSError) as error:
                if self._redis_answers:
                    log.warning("Redis does not answer: %s", error)
                self._redis_answers = False

    async def _stops_within(self, seconds: float) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stop.wait()
        return self._stop.is_set()

    @property
    def _present(self) -> list[FolderModel]:
        """The models that may be loaded, and those whose workers still run."""
        return [model for model in self._models.values() if model.removed_at is None or model.process is not None]

    async def _look_at_queues(self) -> None:
        """Note which models have open requests, and which of them wait for a worker."""
        demands = await self._read_demands()
        unserved = [name for name, demand in demands.items() if demand.open and not demand.others]
        claims = dict(zip(unserved, await self._hosts.claims(unserved), strict=True))
        now = asyncio.get_running_loop().time()
        for name, demand in demands.items():
            model = self._models[name]
            model.demand.is_idle = not demand.open
            if demand.open:
                model.demand.used_at, model.used_ms = now, self._now_ms
            can_load = model.demand.phase is Phase.NONE and model.removed_at is None and now >= model.retry_at
            if can_load and name in claims and claims[name] in ("", self._id):
                model.demand.wanted_since = model.demand.wanted_since or now
            else:
                model.demand.wanted_since = None

    async def _read_demands(self) -> dict[str, Demand]:
        names = [model.entry.name for model in self._present]
        if not names:
            return {}
        if not self._is_cluster:
            return await self._reader(REGISTRY_LANE).read(names)
        found = await asyncio.gather(*(self._reader(name).read([name]) for name in names))
        return {name: demand for lane in found for name, demand in lane.items()}

    def _reader(self, lane: str) -> DemandReader:
        if lane not in self._readers:
            client = self._hosts.client if lane == REGISTRY_LANE else self._client(lane)
            self._readers[lane] = DemandReader(client, self._id)
        return self._readers[lane]

    async def _carry_out(self, plan: LoadPlan) -> None:
        for name in plan.load:
            if await self._claim(name):
                self._load(self._models[name])
        for eviction in plan.evict:
            if not eviction.successor or await self._claim(eviction.successor):
                for_whom = f", for {eviction.successor}" if eviction.successor else ""
                log.info("unloading %s (%s%s)", eviction.name, eviction.why, for_whom)
                self._unload(self._models[eviction.name], eviction.why)

    async def _claim(self, name: str) -> bool:
        """Take the lease on a load. Without it another host loads the model."""
        if await self._hosts.take_load(name, self._id):
            self._claimed.add(name)
            return True
        return False

    async def _beat(self) -> None:
        now = asyncio.get_running_loop().time()
        models = [
            HostedModel(name, model.state(now), model.reason[:MAX_REASON] * (now < model.retry_at), model.used_ms)
            for name, model in self._models.items()
            if model.removed_at is None
        ]
        self._now_ms = await self._hosts.beat(self._id, HostCard(home(), tuple(models)))
        for name in list(self._claimed):
            model = self._models.get(name)
            if model is not None and (model.demand.phase is Phase.LOADING or model.demand.wanted_since is not None):
                await self._hosts.take_load(name, self._id)
            elif model is not None and model.demand.phase is Phase.READY:
                self._claimed.discard(name)  # the lease ends once the worker has sent its first heartbeats
            else:
                self._claimed.discard(name)
                await self._hosts.end_load(name, self._id)

    # --- workers ------------------------------------------------------------------------------------------------------

    def _load(self, model: FolderModel) -> None:
        now = asyncio.get_running_loop().time()
        name = model.entry.name
        log.info("loading %s", name)
        try:
            model.process = WorkerProcess(worker_environ(self._settings, model.entry, os.environ))
        except OSError as error:
            self._note_death(model, f"no process can be started: {error}", now)
            return
        model.demand.phase, model.demand.wanted_since, model.started_at = Phase.LOADING, None, now

    def _unload(self, model: FolderModel, why: str) -> None:
        assert model.process is not None
        self.metrics.evictions[why] += 1
        model.process.stop()
        model.demand.phase = Phase.STOPPING
        model.kill_at = asyncio.get_running_loop().time() + self._settings.drain_s + STOP_GRACE_S

    def _look_at_workers(self, now: float) -> bool:
        """Note which workers have become ready or have ended. Return whether a model has changed its state."""
        before = {name: model.state(now) for name, model in self._models.items()}
        for name, model in list(self._models.items()):
            if model.process is None:
                if model.removed_at is not None:
                    del self._models[name]
                continue
            runs = model.process.look()
            if not runs:
                self._end(model, now)
            elif model.demand.phase is Phase.LOADING and model.process.is_ready:
                model.demand.phase, model.demand.ready_at, model.demand.used_at = Phase.READY, now, now
                model.deaths, model.reason = 0, ""
                model.faults.reset()
                self.metrics.loads[name] += 1
                self.metrics.load_s.observe(now - model.started_at)
                log.info("loaded %s after %.1f s", name, now - model.started_at)
            elif model.demand.phase is Phase.STOPPING and now >= model.kill_at:
                log.warning("the worker of %s did not stop in time, and is killed", name)
                model.process.kill()
            elif model.demand.phase is not Phase.STOPPING and model.is_over(now):
                self._unload(model, "removed")
        return before != {name: model.state(now) for name, model in self._models.items()}

    def _end(self, model: FolderModel, now: float) -> None:
        """Note the end of a model's worker."""
        process, phase = model.process, model.demand.phase
        assert process is not None
        process.close()
        model.process, model.demand.phase = None, Phase.NONE
        if phase is Phase.STOPPING:
            log.info("unloaded %s", model.entry.name)
        elif phase is Phase.LOADING and process.fault:
            self._fail(model, self._without_folder(process.fault), now)
        else:
            if phase is Phase.READY and now - model.demand.ready_at > LAST_RESTART_S:
                model.restarts.reset()
            self._note_death(model, process.how_it_ended(), now, is_loading=phase is Phase.LOADING)

    def _note_death(self, model: FolderModel, how: str, now: float, *, is_loading: bool = True) -> None:
        """Restart a worker that died soon; after several deaths while it loaded, the model counts as the cause."""
        log.warning("the worker of %s ended: %s", model.entry.name, how)
        model.deaths += is_loading
        if model.deaths >= MAX_DEATHS:
            deaths, model.deaths = model.deaths, 0
            self._fail(model, f"its worker has ended {deaths} times while it loaded the model, at last by {how}", now)
        else:
            model.retry_at = now + model.restarts.next()

    def _fail(self, model: FolderModel, reason: str, now: float) -> None:
        wait_s = model.faults.next()
        model.reason, model.retry_at = reason, now + wait_s
        self.metrics.failures[model.entry.name] += 1
        log.error("model %s cannot be loaded, tried again after %g s: %s", model.entry.name, wait_s, reason)

    def _end_workers(self) -> None:
        """Stop all workers, and kill those that do not stop in time."""
        processes = [model.process for model in self._models.values() if model.process is not None]
        for process in processes:
            process.stop()
        until = time.monotonic() + self._settings.drain_s + STOP_GRACE_S - 1
        for process in processes:
            if not process.wait(max(0.0, until - time.monotonic())):
                process.kill()
                process.wait(STOP_GRACE_S)
            process.close()

    # --- operators ----------------------------------------------------------------------------------------------------

    @property
    def _states(self) -> Counter[str]:
        now = asyncio.get_running_loop().time()
        states = Counter({str(state): 0 for state in HostState})
        states.update(str(model.state(now)) for model in self._models.values() if model.removed_at is None)
        states["refused"] = len(self._entries) - sum(name in self._models for name in self._entries)
        return states

    async def _show_metrics(self, request: web.Request) -> web.StreamResponse:
        """GET /metrics"""
        return web.Response(body=self.metrics.render(self._states), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _show_health(self, request: web.Request) -> web.StreamResponse:
        """GET /health"""
        status = 200 if self._redis_answers else 503
        return json_response(status, {"status": "ok" if status == 200 else "unavailable", "models": self._states})
