"""One worker process of a host: its start, what it says while it loads, its end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping

from quire.shared.process.processes import spawn
from quire.shared.process.start_pipe import FAILED, PIPE, READY

# More than the longest line of the progress output.
MAX_OUTPUT = 8192


class WorkerProcess:
    """A worker that ends when this process does, for whatever reason (Linux). Start it on the main thread."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        """environ: the settings of the worker. Raise OSError if no process can be started."""
        self._output, writing = os.pipe()
        os.set_blocking(self._output, False)
        self._said = b""
        self.is_ready = False
        # Why the model cannot be loaded, as the worker says it; else empty.
        self.fault = ""
        try:
            self._process = spawn(
                # -P: modules in the working directory are not ours.
                [sys.executable, "-P", "-m", "quire.worker"],
                environ={**environ, PIPE: str(writing)},
                output=None,
                keep=[writing],
            )
        except BaseException:
            os.close(self._output)
            raise
        finally:
            os.close(writing)

    @property
    def pid(self) -> int:
        return self._process.pid

    def look(self) -> bool:
        """Read what the process has said. Return whether it runs."""
        has_ended = self._process.poll() is not None  # before the last read, so that no line is missed
        self._read()
        return not has_ended

    def stop(self) -> None:
        """Ask the worker to end: running requests go on for its --drain-s, then they go back to the queue."""
        self._process.terminate()

    def kill(self) -> None:
        """End the worker at once, with its own children."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def wait(self, timeout_s: float) -> bool:
        """Return whether the process has ended within a time."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def how_it_ended(self) -> str:
        """Return `killed by SIGKILL` or `exit code 1`."""
        code = self._process.returncode
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def close(self) -> None:
        """Close the pipe. Call it once the process has ended."""
        os.close(self._output)

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._output, 65536):
                self._said = (self._said + data)[-MAX_OUTPUT:]
        *lines, self._said = self._said.split(b"\n")
        for line in lines:
            text = line.decode(errors="replace")
            self.is_ready = self.is_ready or text == READY
            if text.startswith(FAILED):
                self.fault = text.removeprefix(FAILED)
