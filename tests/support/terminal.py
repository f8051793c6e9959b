"""A program in a real terminal: a pty with a size, whose output a test waits for, and to which it types."""

from __future__ import annotations

import fcntl
import os
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from tests.conftest import clean_environ

TIMEOUT_S = 60.0


class Terminal:
    """A running program. said: all that it has written so far."""

    def __init__(self, command: Sequence[str], columns: int, rows: int, environ: dict[str, str]) -> None:
        self._ours, its_own = os.openpty()
        fcntl.ioctl(its_own, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        variables = {name: text for name, text in clean_environ(**environ).items() if name not in ("COLUMNS", "LINES")}
        self.said = ""
        self.process = subprocess.Popen(
            command,
            stdin=its_own,
            stdout=its_own,
            stderr=its_own,
            env={**variables, "TERM": "xterm-256color"},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(its_own)

    def type(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def wait_for(self, pattern: str) -> str:
        """Wait until the program writes something that matches, and forget it and all before. Return the match."""
        deadline = time.monotonic() + TIMEOUT_S
        while (match := re.search(pattern, self.said)) is None:
            assert time.monotonic() < deadline, f"no {pattern!r} in {self.said[-3000:]!r}"
            assert self._read(), f"it ended without {pattern!r}: {self.said[-3000:]!r}"
        self.said = self.said[match.end() :]
        return match[0]

    def wait(self) -> int:
        """Wait for the end of the program, and return its exit code."""
        while self._read():
            pass
        return self.process.wait(TIMEOUT_S)

    def is_as_before(self) -> bool:
        """Return whether the terminal shows what is typed, and waits for whole lines."""
        return bool(
            termios.tcgetattr(self._ours)[3] & termios.ECHO and termios.tcgetattr(self._ours)[3] & termios.ICANON
        )

    def hang_up(self) -> None:
        """Close the terminal, as its window does."""
        os.close(self._ours)
        self._ours = -1

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        if self._ours >= 0:
            self.hang_up()

    def _read(self) -> bool:
        """Read what the program has written. Return False at its end."""
        if not select.select([self._ours], [], [], TIMEOUT_S)[0]:
            return False
        with suppress(OSError):  # the program has ended
            if data := os.read(self._ours, 65536):
                self.said += data.decode(errors="replace")
                return True
        return False


@contextmanager
def terminal(command: Sequence[str], columns: int = 120, rows: int = 30, **environ: str) -> Iterator[Terminal]:
    """Run a program in a terminal, and kill it at the end of the block."""
    running = Terminal(command, columns, rows, environ)
    try:
        yield running
    finally:
        running.close()
