"""Runs batches in the background of a gateway: begins windows, renews their leases, and takes over those of others.

Any gateway runs windows of any batch whose model it serves. Redis decides who has which window; a gateway holds nothing
that another one could not find there or in the storage.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field

from redis.exceptions import RedisError

from quire.gateway.errors.api_errors import ApiError, BrokerDown
from quire.gateway.features.batches.batch import Batch, BatchStatus
from quire.gateway.features.batches.batch_meter import BatchMeter
from quire.gateway.features.batches.batch_store import LOST, VALIDATION, BatchStore, Window
from quire.gateway.features.batches.files.storage import WHOLE, Storage, StorageError
from quire.gateway.features.batches.line_endpoints import LineEndpoints
from quire.gateway.features.batches.line_run import BatchState, LineRunner
from quire.gateway.features.batches.slots import LineSlots
from quire.gateway.features.batches.validation import validate
from quire.gateway.features.batches.validation_check import check_of
from quire.gateway.features.batches.window_run import WindowRun
from quire.gateway.serving.model_directory import ModelDirectory
from quire.shared.process.backoff import Backoff
from quire.shared.protocol.keys import WINDOW_LEASE_S
from quire.shared.redis.cancellation import check_cancelled

log = logging.getLogger("gateway")

# Seconds between two looks for windows to begin, and between two renewals of the leases.
POLL_S = 1.0
RENEW_S = WINDOW_LEASE_S / 10
# Windows that a gateway has at most, and those of one owner and model: the answers of their lines wait in Redis. Half
# of the windows are kept for owners that have none.
MAX_WINDOWS = 32
MAX_OWN_WINDOWS = 8
# Inputs that a gateway validates at the same time, one of each owner.
MAX_VALIDATIONS = 16
# Seconds for which a window is kept although all its lines wait, while another batch needs its place. After a hand-back
# the batch of the window displaces no other one for as long: batches that all wait would displace each other endlessly.
IDLE_S = 2.0
PAUSE_S = (0.2, 5.0)


@dataclass(slots=True)
class OpenWindow:
    """A window, or a validation, that this gateway has begun. run: None for a validation."""

    window: Window
    state: BatchState
    task: asyncio.Task[None]
    run: WindowRun | None = None
    begun_at: float = field(default_factory=time.monotonic)

    @property
    def owner(self) -> str:
        return self.state.batch.owner

    @property
    def lane(self) -> str:
        return self.state.batch.lane


class BatchRunner:
    """The batches of a gateway process, between `start` and `close`."""

    def __init__(
        self,
        directory: ModelDirectory,
        endpoints: LineEndpoints,
        store: BatchStore,
        storage: Storage,
        meter: BatchMeter,
    ) -> None:
        self._directory = directory
        self._endpoints = endpoints
        self._settings = directory.process.settings
        self._store = store
        self._storage = storage
        self._meter = meter
        self._wake = asyncio.Event()
        # By model, so that one without a worker holds up no other.
        self._slots: dict[str, LineSlots] = {}
        # Owner and model of each batch that has not ended.
        self._places: dict[str, tuple[str, str]] = {}
        # When a window of each of these batches was handed back.
        self._handed_back: dict[str, float] = {}
        # By batch and number of the window.
        self._open: dict[tuple[str, int], OpenWindow] = {}
        # The state and the lines of each batch with an open window, which its windows share.
        self._batches: dict[str, tuple[BatchState, LineRunner]] = {}
        # The batch after which the next look begins, so that batches take turns.
        self._last = ""
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._repeat(self._look)), asyncio.create_task(self._repeat(self._renew))]

    async def close(self) -> None:
        """Stop, and hand all windows to other gateways. Lines in flight run on at the workers."""
        for task in self._tasks:
            task.cancel()
        opened = list(self._open.values())
        for open_window in opened:
            open_window.task.cancel()
        await asyncio.gather(*self._tasks, *(open_window.task for open_window in opened), return_exceptions=True)
        await asyncio.gather(
            *(self._store.release(open_window.window) for open_window in opened), return_exceptions=True
        )

    def look(self) -> None:
        """Look for windows now: a batch was added."""
        self._wake.set()

    async def cancelled(self, batch_id: str) -> None:
        """Stop the lines of a batch that run through this gateway: it was cancelled."""
        if (known := self._batches.get(batch_id)) is not None and not known[0].is_cancelled:
            known[0].is_cancelled = True
            await self._stop(batch_id)

    async def _stop(self, batch_id: str) -> None:
        """Stop the lines of a batch that has ended."""
        if (known := self._batches.get(batch_id)) is not None:
            self._slots_of(known[0].batch.lane).let_go(batch_id)
            await known[1].cancel_open()

    async def _repeat(self, work: Callable[[], Awaitable[None]]) -> None:
        is_down = False
        while True:
            try:
                await work()
                is_down = False
            except (RedisError, OSError, BrokerDown) as error:
                if not is_down:
                    log.warning("batches wait, because Redis does not answer: %s", error)
                is_down = True
                await asyncio.sleep(POLL_S)
            except Exception as error:
                log.error("batches failed unexpectedly", exc_info=error)
                await asyncio.sleep(POLL_S)
            check_cancelled()

    # --- begin windows ------------------------------------------------------------------------------------------------

    async def _look(self) -> None:
        """Begin windows while lines can be run; then wait until something has changed, for POLL_S at most."""
        self._wake.clear()
        while not self._directory.process.draining and await self._begin_one():
            pass
        lines = sum(slots.taken for slots in self._slots.values())
        self._meter.windows, self._meter.lines_in_flight = len(self._open), lines
        with suppress(TimeoutError):
            async with asyncio.timeout(POLL_S):
                await self._wake.wait()

    def _slots_of(self, lane: str) -> LineSlots:
        if lane not in self._slots:
            self._slots[lane] = LineSlots(self._settings.batch_lines_in_flight, self._wake.set)
        return self._slots[lane]

    async def _begin_one(self) -> bool:
        """Begin a window, or the validation, of the next batch that has one. Returns False if no batch has one."""
        active, now = await self._store.active(), time.monotonic()
        at = active.index(self._last) + 1 if self._last in active else 0
        self._places = {id_: self._places[id_] for id_ in active if id_ in self._places}
        self._handed_back = {id_: then for id_, then in self._handed_back.items() if now - then < IDLE_S}
        for batch_id in active[at:] + active[:at]:
            place = self._places.get(batch_id)
            if place and not self._may_validate(place[0]) and not self._may_run(*place):
                continue
            known = self._batches.get(batch_id) or await self._known(batch_id)
            if known is None:
                continue
            batch = known[0].batch
            place = self._places[batch_id] = batch.owner, batch.lane
            is_valid = batch.status != BatchStatus.VALIDATING
            if not (self._may_run(*place) if is_valid else self._may_validate(batch.owner)):
                continue
            is_full = is_valid and sum(window.run is not None for window in self._open.values()) >= MAX_WINDOWS
            replaced = self._oldest_idle() if is_full and batch_id not in self._handed_back else None
            if is_full and replaced is None:
                continue
            window = await self._store.claim(batch_id)
            if window is None:
                continue
            self._last = batch_id
            self._batches[batch_id] = known
            self._open_window(window, *known)
            if replaced is not None:
                await self._hand_back(replaced)
            return True
        return False

    def _may_validate(self, owner: str) -> bool:
        validated = [window.owner for window in self._open.values() if window.run is None]
        return owner not in validated and len(validated) < MAX_VALIDATIONS

    def _may_run(self, owner: str, lane: str) -> bool:
        """Return True if the lines of another window of this owner and model would get slots soon."""
        windows = [window for window in self._open.values() if window.run is not None]
        own = [window for window in windows if (window.owner, window.lane) == (owner, lane)]
        most = MAX_OWN_WINDOWS if len(windows) < MAX_WINDOWS // 2 else 1
        is_reading = any(window.run is not None and window.run.is_reading for window in own)
        return len(own) < most and not is_reading and self._slots_of(lane).may_begin(owner)

    def _oldest_idle(self) -> OpenWindow | None:
        """Return the oldest of the windows that may be handed back; None if there is none."""
        before = time.monotonic() - IDLE_S
        idle = [window for window in self._open.values() if window.begun_at < before and self._is_idle(window)]
        return min(idle, key=lambda window: window.begun_at, default=None)

    async def _hand_back(self, open_window: OpenWindow) -> None:
        """Stop a window, and let any gateway begin it again."""
        self._handed_back[open_window.window.batch_id] = time.monotonic()
        open_window.task.cancel()
        await asyncio.gather(open_window.task, return_exceptions=True)
        await self._store.release(open_window.window)

    def _is_idle(self, open_window: OpenWindow) -> bool:
        """Return True if the lines of a window wait for a limit, or for a worker of a model that has none."""
        gateway = self._directory.find(open_window.lane)
        can_answer = gateway is not None and gateway.can_answer
        return open_window.run is not None and (open_window.run.is_idle or not can_answer)

    async def _known(self, batch_id: str) -> tuple[BatchState, LineRunner] | None:
        """Return the state of a batch whose model this process serves; else None."""
        batch = await self._store.get(batch_id)
        if batch is None or not batch.is_open or (batch.lane and self._directory.find(batch.lane) is None):
            return None
        state = BatchState(batch, batch.status == BatchStatus.CANCELLING)
        return state, LineRunner(self._directory, self._endpoints, state)

    def _open_window(self, window: Window, state: BatchState, lines: LineRunner) -> None:
        key = window.batch_id, window.index
        state.left_s = window.left_s
        if (old := self._open.pop(key, None)) is not None:  # its lease has ended here unnoticed
            old.task.cancel()
        if window.was_begun:
            self._meter.taken_over += 1
        run: WindowRun | None = None
        if window.index == VALIDATION:
            task = asyncio.create_task(self._validate(window, state.batch))
        else:
            run = WindowRun(
                window,
                state,
                self._store,
                self._storage,
                lines,
                self._slots_of(state.batch.lane),
                self._meter,
                self._settings.max_body_bytes,
            )
            task = asyncio.create_task(run.run())
        self._open[key] = OpenWindow(window, state, task, run)
        task.add_done_callback(lambda done: self._ended(key, done))

    def _ended(self, key: tuple[str, int], task: asyncio.Task[None]) -> None:
        if (open_window := self._open.get(key)) is not None and open_window.task is task:
            del self._open[key]
        if key[1] == VALIDATION or not any(batch_id == key[0] for batch_id, _ in self._open):
            self._batches.pop(key[0], None)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("window %d of batch %s failed unexpectedly", key[1], key[0], exc_info=error)
        self._wake.set()

    async def _validate(self, window: Window, batch: Batch) -> None:
        """Validate the input of a batch, and have its windows begun."""
        settings, backoff = self._settings, Backoff(*PAUSE_S, jitter=True)
        while True:
            try:
                check = await check_of(self._directory, self._endpoints, batch)
                report = await validate(
                    self._storage.read(batch.input, WHOLE),
                    batch.endpoint,
                    check,
                    settings.max_batch_lines,
                    settings.max_body_bytes,
                )
                if report.errors:
                    await self._store.fail(window, report.errors, report.lines)
                else:
                    await self._store.begin(window, report.places, report.lines)
                return
            except ApiError as error:
                if not isinstance(error, BrokerDown):
                    await self._store.fail(
                        window, [{"code": error.code, "message": error.message, "param": error.param, "line": None}], 0
                    )
                    return
                problem: Exception = error
            except (RedisError, OSError, StorageError) as error:
                problem = error
            log.warning("the validation of batch %s waits: %s", batch.id, problem)
            await asyncio.sleep(backoff.next())

    # --- renew leases -------------------------------------------------------------------------------------------------

    async def _renew(self) -> None:
        """Renew all leases. A window that another gateway has is given up, and one of a cancelled batch is told so."""
        opened = list(self._open.items())
        replies = await asyncio.gather(
            *(self._store.renew(open_window.window, *_progress(open_window)) for _, open_window in opened),
            return_exceptions=True,
        )
        failure: BaseException | None = None
        for (key, open_window), reply in zip(opened, replies, strict=True):
            if isinstance(reply, BaseException):
                failure = reply
            elif reply[0] == LOST:
                if self._open.get(key) is open_window and not open_window.task.done():
                    open_window.task.cancel()
            else:
                open_window.state.left_s = reply[1]
                if reply[0] == BatchStatus.CANCELLING:
                    open_window.state.is_cancelled = True
                # The deadline of a line that was parked is later than the end of its batch.
                if open_window.state.has_ended:
                    await self._stop(open_window.window.batch_id)
        if failure is not None:
            raise failure
        await asyncio.sleep(RENEW_S)


def _progress(open_window: OpenWindow) -> tuple[int, int]:
    return (open_window.run.completed, open_window.run.failed) if open_window.run is not None else (0, 0)
