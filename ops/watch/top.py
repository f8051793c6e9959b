"""`quire top`: queues, workers and the slowest answers in the terminal, with keys to act on them."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import termios
import tty
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import TYPE_CHECKING

from redis.exceptions import RedisError

from quire.ops.terminal import has_styles
from quire.ops.watch.commands import TopSettings
from quire.ops.watch.observer import Look, Observer, RequestRow, WorkerRow
from quire.ops.watch.redis_reads import brokers, place_of, run_on
from quire.ops.watch.trace import read_life, shown
from quire.ops.watch.words import duration
from quire.shared.config.command_line import CommandError
from quire.shared.process.version import install_command
from quire.shared.protocol.states import CancelReply, ParkReply
from quire.worker.queue.leases import pid_here

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

# Models on the screen at most; TopSettings names the number.
MAX_LANES = 8
# What a terminal sends for a key: an arrow, or a character.
_KEY = re.compile(rb"\x1b\[[A-D]|.", re.DOTALL)
_INSPECT = (b"i", b"\r", b"\n")
_UP, _DOWN = (b"\x1b[A", b"k"), (b"\x1b[B", b"j")
HELP = "Tab, arrows: select   i: inspect   c: cancel   p: park   d: drain worker   q: leave"
NO_LANE = "no worker has registered a model in the last hour; start one, or name the model with --served-model-name"


def top(settings: TopSettings, environ: Mapping[str, str]) -> int:
    """Show the lanes until `q`, or print one look as JSON. Raise CommandError."""
    place = place_of(settings, environ)
    if not settings.json:
        _check_terminal()

    async def run() -> int:
        async with brokers(place.url, settings.served_model_name, MAX_LANES) as lanes:
            observer = Observer(lanes)
            if settings.json:
                await observer.look()
                await asyncio.sleep(settings.interval_s)
                print(json.dumps(asdict(await observer.look()), indent=1))
            elif not lanes:
                raise CommandError(NO_LANE)
            else:
                await observer.look()
                await Screen(observer, settings.interval_s).run()
            return 0

    return run_on(place, run)


def _check_terminal() -> None:
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise CommandError("`quire top` needs a terminal; --json prints one look")
    try:
        import rich  # noqa: F401
    except ImportError as error:
        remedy = f"{install_command('top')} installs it; --json works without"
        raise CommandError(f"`quire top` needs the package rich: {remedy}") from error


@contextmanager
def _keys(loop: asyncio.AbstractEventLoop, heard: Callable[[bytes], None]) -> Iterator[None]:
    """Call `heard` with each key, without waiting for Enter, and restore the terminal at the end."""
    stdin = sys.stdin.fileno()
    before = termios.tcgetattr(stdin)
    tty.setcbreak(stdin)

    def read() -> None:
        data = b""
        with suppress(OSError):  # the terminal has gone, as at its end
            data = os.read(stdin, 256)
        for key in _KEY.findall(data) or [b"q"]:
            heard(key)

    loop.add_reader(stdin, read)
    try:
        yield
    finally:
        loop.remove_reader(stdin)
        termios.tcsetattr(stdin, termios.TCSADRAIN, before)


class Screen:
    """The screen: what is selected, and what a key does."""

    def __init__(self, observer: Observer, interval_s: float) -> None:
        self._observer = observer
        self._interval_s = interval_s
        self._look = Look()
        self._heard: asyncio.Queue[bytes] = asyncio.Queue()
        self._is_on_workers = False
        self._selected = {False: "", True: ""}
        self._note = ""
        self._detail: list[str] = []
        # What `y` does, after a question.
        self._asked: Callable[[], Awaitable[str]] | None = None

    async def run(self) -> None:
        """Show, and obey keys, until `q`."""
        from rich.console import Console
        from rich.live import Live

        console, loop = Console(no_color=not has_styles(sys.stdout)), asyncio.get_running_loop()
        with (
            Live(console=console, screen=True, auto_refresh=False) as live,
            _keys(loop, self._heard.put_nowait),
        ):
            due = loop.time()
            while True:
                if loop.time() >= due:
                    due = loop.time() + self._interval_s
                    await self._renew()
                live.update(self._render(console.height), refresh=True)
                try:
                    async with asyncio.timeout(max(0.0, due - loop.time())):
                        key = await self._heard.get()
                except TimeoutError:
                    continue
                if key in (b"q", b"Q") and self._asked is None:
                    return
                await self._obey(key)

    async def _renew(self) -> None:
        try:
            self._look = await self._observer.look()
            if row := self._detail and self._request():
                self._detail = await self._life(row)
        except (RedisError, OSError) as error:
            self._note = f"Redis does not answer: {error}"

    # --- keys ---------------------------------------------------------------------------------------------------------

    async def _obey(self, key: bytes) -> None:
        asked, self._asked, self._note = self._asked, None, ""
        try:
            if asked is not None:
                self._note = await asked() if key in (b"y", b"Y") else "nothing was done"
            elif key == b"\t":
                self._is_on_workers = not self._is_on_workers
            elif key in (*_UP, *_DOWN):
                self._move(-1 if key in _UP else 1)
            elif key == b"\x1b" or (self._detail and key in _INSPECT):
                self._detail = []
            elif key == b"d":
                self._ask_to_drain()
            elif key in (*_INSPECT, b"c", b"p"):
                await self._act(key)
        except (RedisError, OSError) as error:
            self._note = f"nothing is known about it: {error}"

    async def _act(self, key: bytes) -> None:
        row = self._request()
        if row is None:
            self._note = "select a request first, with the arrows"
        elif key == b"c":
            self._note, self._asked = f"cancel {row.id}? y/n", lambda: self._cancel(row)
        elif key == b"p":
            self._note, self._asked = f"park {row.id}? y/n", lambda: self._park(row)
        else:
            self._detail = await self._life(row)

    async def _cancel(self, row: RequestRow) -> str:
        reply = await self._observer.brokers[row.model].cancel(row.id)
        done = {CancelReply.CANCELLED: "cancelled", CancelReply.FLAGGED: "cancelled; its worker ends it now"}
        return f"{row.id}: {done.get(reply, 'it had ended')}"

    async def _park(self, row: RequestRow) -> str:
        if await self._observer.brokers[row.model].park(row.id) is ParkReply.PARKED:
            return f"parked; `quire parking unpark --id {row.id}` continues it"
        return f"{row.id}: it had ended"

    async def _life(self, row: RequestRow) -> list[str]:
        life = await read_life(self._observer.brokers[row.model], row.id)
        return shown(life) if life else ["it has ended, and Redis has forgotten it"]

    def _ask_to_drain(self) -> None:
        row = self._request()
        wanted = self._selected[True] if self._is_on_workers else row.worker if row else ""
        worker = next((worker for worker in self._look.workers if worker.id == wanted), None)
        if worker is None:
            self._note = "select a worker first: Tab, and the arrows"
            return
        pid = pid_here(worker.home)
        if pid is None:
            host = worker.home.partition("/")[0] or "another machine"
            self._note = f"{worker.id} runs on {host}: send its process SIGTERM there"
            return
        what = "its requests end or go to others; `quire serve` starts it again"
        self._note, self._asked = f"drain {worker.id} (process {pid})? {what}. y/n", lambda: _drain(worker)

    # --- selection ----------------------------------------------------------------------------------------------------

    def _rows(self) -> list[str]:
        return [row.id for row in (self._look.workers if self._is_on_workers else self._look.requests)]

    def _move(self, by: int) -> None:
        rows, selected = self._rows(), self._selected[self._is_on_workers]
        at = rows.index(selected) + by if selected in rows else 0
        self._selected[self._is_on_workers] = rows[max(0, min(at, len(rows) - 1))] if rows else ""

    def _request(self) -> RequestRow | None:
        return next((row for row in self._look.requests if row.id == self._selected[False]), None)

    # --- drawing ------------------------------------------------------------------------------------------------------

    def _render(self, height: int) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        look = self._look
        total = sum(lane.rate for lane in look.lanes)
        head = f"{sum(lane.running for lane in look.lanes)} requests run, {total:.1f} tokens/s"
        parts: list[RenderableType] = [Text(head, style="bold", no_wrap=True), self._lanes(), self._workers()]
        room = height - len(look.lanes) - min(len(look.workers), height // 3) - 6
        if self._detail:
            parts += [Text.from_ansi("\n".join(self._detail[: max(1, room)]))]
        else:
            parts += [self._requests(max(1, room))]
        note = Text(self._note or HELP, style="bold" if self._note else "dim", no_wrap=True, overflow="ellipsis")
        return Group(*parts, note)

    def _lanes(self) -> Table:
        table = _table(
            "MODEL", "WAIT", "OLDEST", "RUN", "PARKED", "DEAD", "REQ/S", "TOKENS/S", "ENDED WITHOUT AN ANSWER"
        )
        for lane in self._look.lanes:
            failed = {**lane.failed, "recoveries": lane.recoveries.get("migrations", 0)}
            waiting = sum(lane.waiting.values())
            _add(
                table,
                lane.model,
                str(waiting),
                duration(lane.oldest_s) if waiting else "-",
                str(lane.running),
                str(lane.parked),
                str(lane.dead),
                f"{lane.accepted_per_s:.1f}",
                f"{lane.rate:.1f}",
                " ".join(f"{name} {count}" for name, count in failed.items() if count) or "-",
            )
        return table

    def _workers(self) -> Table:
        table = _table("WORKER", "MODEL", "RUN", "ROWS", "WAIT", "CACHE", "TOKENS/S", "HEARTBEAT")
        for row in self._look.workers:
            style = "reverse" if self._is_on_workers and row.id == self._selected[True] else ""
            beat = f"{duration(row.silent_s)} ago"
            numbers = (
                str(row.running),
                str(row.rows),
                str(row.waiting),
                f"{100 * row.blocks:.0f} %",
                f"{row.rate:.1f}",
            )
            _add(table, row.id, row.model, *numbers, beat, style=style)
        return table

    def _requests(self, room: int) -> Table:
        table = _table("REQUEST", "MODEL", "CLASS", "STATE", "WORKER", "AGE", "FIRST", "TOKENS", "TOKENS/S")
        rows, selected = self._look.requests, self._selected[False]
        at = next((index for index, row in enumerate(rows) if row.id == selected), 0)
        for row in rows[max(0, at - room + 1) :][:room]:
            first = duration(row.first_s) if row.first_s is not None else "-"
            style = "reverse" if not self._is_on_workers and row.id == selected else ""
            texts = (row.id, row.model, row.priority_class, row.state, row.worker or "-", duration(row.age_s), first)
            _add(table, *texts, str(row.tokens), f"{row.rate:.1f}", style=style)
        return table


async def _drain(worker: WorkerRow) -> str:
    pid = pid_here(worker.home)  # again: it may have ended since the question, and its pid may be of another process
    if pid is None:
        return f"{worker.id} had ended"
    os.kill(pid, signal.SIGTERM)
    return f"{worker.id} drains"


def _table(*heads: str) -> Table:
    from rich.table import Table

    table = Table(box=None, header_style="dim", pad_edge=False)
    for head in heads:
        table.add_column(head, no_wrap=True, overflow="ellipsis")
    return table


def _add(table: Table, *cells: str, style: str = "") -> None:
    """Add a row. rich takes brackets in a str, such as those of a model's name, for markup; a Text has none."""
    from rich.text import Text

    table.add_row(*map(Text, cells), style=style)
