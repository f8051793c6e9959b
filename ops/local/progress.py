"""Progress of a command: one line that is redrawn on a terminal, plain lines on other outputs."""

from __future__ import annotations

import shutil
import time
from typing import TextIO

_FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_CLEAR_LINE = "\r\x1b[2K"
# Interval of reports on outputs that are no terminal.
_PLAIN_INTERVAL_S = 10.0


class Progress:
    """Writes to one stream. `say` prints a permanent line, `update` shows the current activity."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._moves = stream.isatty()
        self._started = time.monotonic()
        self._drawn = False
        self._phase = ""
        self._next_plain = self._started + _PLAIN_INTERVAL_S

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started

    def say(self, text: str) -> None:
        self.clear()
        self._write(text + "\n")

    def update(self, text: str, phase: str = "") -> None:
        """Show the current activity, and the time since the start.

        phase: `text` without its numbers. If the stream is no terminal, each new phase is printed once.
        """
        now = time.monotonic()
        if self._moves:
            frame = _FRAMES[int(now * 10) % len(_FRAMES)]
            width = shutil.get_terminal_size((80, 24)).columns - 1
            self._write(_CLEAR_LINE + f"{frame} {self.elapsed_s:.1f} s  {text}"[:width])
            self._drawn = True
        elif now >= self._next_plain or phase != self._phase:
            self._next_plain, self._phase = now + _PLAIN_INTERVAL_S, phase
            self._write(f"{self.elapsed_s:.1f} s  {text}\n")

    def clear(self) -> None:
        """Erase the redrawn line, before other output is written to the terminal."""
        if self._drawn:
            self._write(_CLEAR_LINE)
            self._drawn = False

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):
            pass  # the reader has gone; the command continues
