"""What a worker does while it starts: a phase such as `loading weights`, and the share of it that is done.

Phases are lines of the log. Two readers get more, the share as it grows:

    `quire serve`   through a pipe, whatever the log's level: one line per change, `PHASE` or `PHASE<tab>PERCENT`
    a terminal      as one line that is redrawn and makes way for the log; phases are not logged then
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol, TextIO

from quire.shared.telemetry.logs import JsonFormatter

# The variable that holds the descriptor of the pipe's writing end.
PIPE = "_QUIRE_PROGRESS_FD"
# The last phase. The worker takes requests.
READY = "ready"

_REDRAW_S = 0.1
_CLEAR_LINE = "\r\x1b[2K"

log = logging.getLogger(__name__)


class Reader(Protocol):
    """Shows phases to a person. `percent` is None where a phase has no known length."""

    def show(self, phase: str, percent: int | None) -> None: ...

    def close(self) -> None: ...


class Pipe:
    """Writes to `quire serve`. A line that finds the pipe full or closed is dropped: the start does not wait for it."""

    def __init__(self, descriptor: int) -> None:
        """Raises OSError for a descriptor that is none."""
        os.set_blocking(descriptor, False)
        os.set_inheritable(descriptor, False)
        self._descriptor = descriptor

    def show(self, phase: str, percent: int | None) -> None:
        line = phase if percent is None else f"{phase}\t{percent}"
        with suppress(OSError):
            os.write(self._descriptor, f"{line}\n".encode())

    def close(self) -> None:
        os.close(self._descriptor)


class TerminalLine(logging.Handler):
    """One line of a terminal, which is redrawn. It makes way for each log record, and comes back below it."""

    def __init__(self, terminal: TextIO) -> None:
        super().__init__()
        self._terminal = terminal
        self._line = ""
        self._log = list(logging.getLogger().handlers)
        for handler in self._log:
            handler.addFilter(self._make_way)
        logging.getLogger().addHandler(self)  # the last one: it has each record when the others have written it

    def show(self, phase: str, percent: int | None) -> None:
        self._line = f"starting: {phase}" + ("" if percent is None else f" {percent} %")
        self._draw()

    def emit(self, record: logging.LogRecord) -> None:
        self._draw()

    def close(self) -> None:
        logging.getLogger().removeHandler(self)
        for handler in self._log:
            handler.removeFilter(self._make_way)
        self._write(_CLEAR_LINE)
        super().close()

    def _make_way(self, record: logging.LogRecord) -> bool:
        self._write(_CLEAR_LINE)
        return True

    def _draw(self) -> None:
        width = shutil.get_terminal_size((80, 24)).columns - 1
        self._write(_CLEAR_LINE + self._line[:width])

    def _write(self, text: str) -> None:
        self._terminal.write(text)
        self._terminal.flush()


class StartProgress:
    """The phases of one start. Without `begin`, as in tests and offline runs, they are lines of the log only."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._reader: Reader | None = None
        self._phase = ""
        self._shown = 0.0

    def begin(self) -> None:
        """Find out who reads. Call it in a worker's own process, once its log is set up."""
        descriptor = os.environ.pop(PIPE, "")
        handlers = logging.getLogger().handlers
        if descriptor.isdigit():
            try:
                self._reader = Pipe(int(descriptor))
            except OSError as error:
                log.warning("%s=%s is no open pipe: %s", PIPE, descriptor, error.strerror)
        elif sys.stderr.isatty() and not any(isinstance(handler.formatter, JsonFormatter) for handler in handlers):
            self._reader = TerminalLine(sys.stderr)

    def phase(self, text: str) -> None:
        """The worker begins with `text`."""
        self._phase, self._shown = text, 0.0
        if not isinstance(self._reader, TerminalLine):
            log.info("starting: %s", text)
        if self._reader is not None:
            self._reader.show(text, None)

    def share(self, done: int, total: int) -> None:
        """`done` of `total`, in any unit, of the present phase is done. It may be called often."""
        now = self._clock()
        if self._reader is not None and now - self._shown >= _REDRAW_S:
            self._shown = now
            self._reader.show(self._phase, 100 * done // max(total, 1))

    def ready(self) -> None:
        """The start is over: the worker takes requests."""
        if self._reader is not None:
            self._reader.show(READY, None)
        self.close()

    def close(self) -> None:
        """No more is shown. Repeatable."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None


progress = StartProgress()
