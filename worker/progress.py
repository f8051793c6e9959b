"""The progress of a worker's start: a phase such as `loading weights`, and the share of the phase that is done.

Phases are logged. Two displays also show the share:

    `quire serve`   through a pipe, at any log level: one line per change, `PHASE` or `PHASE<tab>PERCENT`
    a terminal      one line that is redrawn, and cleared for each log line; phases are not logged then
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

from quire.shared.process.start_pipe import FAILED, PIPE, READY
from quire.shared.telemetry.logs import JsonFormatter

_REDRAW_S = 0.1
LOG_S = 2.0
_CLEAR_LINE = "\r\x1b[2K"
# A longer reason could fill the pipe.
_MAX_REASON = 1000

log = logging.getLogger(__name__)


class Display(Protocol):
    """Shows phases to a person."""

    def show(self, phase: str, percent: int | None) -> None:
        """Show a phase. percent: None in a phase of unknown length."""

    def close(self) -> None: ...


class Pipe:
    """Writes to `quire serve`. If the pipe is full or closed the line is dropped, so that the start never waits."""

    def __init__(self, descriptor: int) -> None:
        """Check the descriptor. Raises OSError if it is invalid."""
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
    """One line of a terminal that is redrawn; each log record clears it, and it is drawn again below the record."""

    def __init__(self, terminal: TextIO) -> None:
        super().__init__()
        self._terminal = terminal
        self._line = ""
        self._log = list(logging.getLogger().handlers)
        for handler in self._log:
            handler.addFilter(self._clear)
        logging.getLogger().addHandler(self)  # the last handler: it redraws after all others have written

    def show(self, phase: str, percent: int | None) -> None:
        self._line = f"starting: {phase}" + ("" if percent is None else f" {percent} %")
        self._draw()

    def emit(self, record: logging.LogRecord) -> None:
        self._draw()

    def close(self) -> None:
        logging.getLogger().removeHandler(self)
        for handler in self._log:
            handler.removeFilter(self._clear)
        self._write(_CLEAR_LINE)
        super().close()

    def _clear(self, record: logging.LogRecord) -> bool:
        self._write(_CLEAR_LINE)
        return True

    def _draw(self) -> None:
        width = shutil.get_terminal_size((80, 24)).columns - 1
        self._write(_CLEAR_LINE + self._line[:width])

    def _write(self, text: str) -> None:
        self._terminal.write(text)
        self._terminal.flush()


class StartProgress:
    """The phases of one start. Without `begin`, as in tests and offline runs, they are only logged."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._display: Display | None = None
        self._phase = ""
        self._shown = 0.0

    def begin(self) -> None:
        """Choose the display. Call it in a worker's own process, once its log is set up."""
        descriptor = os.environ.pop(PIPE, "")
        handlers = logging.getLogger().handlers
        if descriptor.isdigit():
            try:
                self._display = Pipe(int(descriptor))
            except OSError as error:
                log.warning("%s=%s is not an open pipe: %s", PIPE, descriptor, error.strerror)
        elif sys.stderr.isatty() and not any(isinstance(handler.formatter, JsonFormatter) for handler in handlers):
            self._display = TerminalLine(sys.stderr)

    def phase(self, text: str) -> None:
        """Begin the phase `text`."""
        self._phase, self._shown = text, 0.0
        if not isinstance(self._display, TerminalLine):
            log.info("starting: %s", text)
        if self._display is not None:
            self._display.show(text, None)

    def share(self, done: int, total: int) -> None:
        """Report `done` of `total`, in any unit, of the present phase. Frequent calls are cheap."""
        now = self._clock()
        if self._display is not None and now - self._shown >= _REDRAW_S:
            self._shown = now
            self._display.show(self._phase, 100 * done // max(total, 1))

    def ready(self) -> None:
        """Report the last phase, and close the display."""
        if self._display is not None:
            self._display.show(READY, None)
        self.close()

    def fail(self, reason: str) -> None:
        """Report to the parent that the model cannot be loaded. The error goes to the log as ever."""
        if isinstance(self._display, Pipe):
            self._display.show(FAILED + " ".join(reason.split())[:_MAX_REASON], None)

    def close(self) -> None:
        """Close the display. Repeatable."""
        if self._display is not None:
            self._display.close()
            self._display = None


progress = StartProgress()


class BuildProgress:
    """Reports the build of kernels as a phase of the start, which begins with the first call."""

    def __init__(self) -> None:
        self._began = False

    def __call__(self, done: int, total: int) -> None:
        """Note that `done` of `total` units are compiled."""
        if not self._began:
            self._began = True
            progress.phase("building the C++ kernels, once for this machine")
        progress.share(done, total)


class LoadingLog:
    """Reports how far the loading of a checkpoint is: as progress of the start, and every two seconds in the log.

    phase: a new phase of the start, which begins with the first call. Without it the present phase continues.
    """

    def __init__(self, what: str = "loaded", phase: str = "") -> None:
        self._what = what
        self._phase = phase
        self._logged_at = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        """Note that `done` of `total` bytes are loaded."""
        if self._phase:
            progress.phase(self._phase)
            self._phase = ""
        progress.share(done, total)
        if time.monotonic() - self._logged_at >= LOG_S:
            self._logged_at = time.monotonic()
            log.info("%s %d of %d MiB (%d %%)", self._what, done >> 20, total >> 20, 100 * done // max(total, 1))
