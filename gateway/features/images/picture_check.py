"""Checks that files have a picture, in a few processes, each of which checks many files."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from quire.gateway.features.images.picture_messages import ANSWER, HEAD, TRIAL_CPU_S
from quire.shared.images.picture_error import PictureError

# Longest wait for a process. The limit of processor time ends most checks earlier; this limit ends the check on a
# machine that is too busy to run it.
TIMEOUT_S = 60.0
# Files after which a process is replaced, so that a leak in a decoder does not grow.
MAX_SERVED = 200
# The kernel closes the socket of a process some moments before its exit status can be read.
_EXIT_S = 5.0
_SLICE = 1024 * 1024


class CheckLost(Exception):
    """A check without a result, through no fault of its file: the process was killed, or got no time."""


class PictureChecks:
    """At most `processes` checks at a time; others wait. Each process is started when it is needed first."""

    def __init__(self, processes: int, max_bytes: int, max_pixels: int) -> None:
        self._limits = (str(max_bytes), str(max_pixels))
        self._threads = ThreadPoolExecutor(processes, thread_name_prefix="image")
        self._idle: list[_Process] = []
        self._all: set[_Process] = set()

    def close(self) -> None:
        """End the processes. Checks that run end with an error."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in list(self._all):
            process.end()

    async def check(self, given: str | bytes, start: int = 0, *, is_small: bool = False) -> tuple[bytes, int, int]:
        """Return the file of an image, and the width and height of its picture.

        given: the file; or a text whose base64 in ASCII begins at `start`. is_small: a picture that is larger than
        SMALL_SIDE is scaled down, and becomes a PNG file. Raises PictureError, CheckLost.
        """
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._check, given, start, is_small)

    def _check(self, given: str | bytes, start: int, is_small: bool) -> tuple[bytes, int, int]:
        process = self._idle.pop() if self._idle else _Process(self._limits)
        self._all.add(process)
        try:
            width, height, found = process.ask(given, start, is_small)
        except (OSError, EOFError) as error:
            self._all.discard(process)
            raise _fault(process.end(0 if isinstance(error, TimeoutError) else _EXIT_S)) from error
        if process.served < MAX_SERVED:
            self._idle.append(process)
        else:
            self._all.discard(process)
            process.end()
        if not width:
            raise PictureError(found.decode())
        return found, width, height


def _fault(status: int) -> PictureError | CheckLost:
    """Return the error of a check whose process ended with this exit status."""
    if status in (-signal.SIGKILL, -signal.SIGTERM):
        return CheckLost()
    if status == -signal.SIGXCPU:
        return PictureError(f"decoding it takes more than {TRIAL_CPU_S} s")
    return PictureError("decoding it takes too much memory, or makes the decoder fail")


class _Process:
    """A process that runs `picture_trial`. One thread at a time may ask it."""

    def __init__(self, limits: tuple[str, str]) -> None:
        self.served = 0
        self._socket, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-m", "quire.gateway.features.images.picture_trial", *limits]
        with theirs:
            # In a session of its own, because Ctrl-C at the terminal is for the gateway. The process ends at the end of
            # its input.
            end = theirs.fileno()
            self._process = subprocess.Popen(
                command, stdin=end, stdout=end, stderr=subprocess.DEVNULL, start_new_session=True
            )

    def ask(self, given: str | bytes, start: int, is_small: bool) -> tuple[int, int, bytes]:
        """Return an answer: width, height, and the file; or 0, 0 and the reason. Raises OSError, EOFError."""
        self.served += 1
        self._socket.settimeout(TIMEOUT_S)
        self._socket.sendall(HEAD.pack(isinstance(given, str), is_small, len(given) - start))
        # In slices: a copy of all would be as large as the file.
        for index in range(start, len(given), _SLICE):
            piece = given[index : index + _SLICE]
            self._socket.sendall(piece.encode("ascii") if isinstance(piece, str) else piece)
        width, height, length = ANSWER.unpack(self._receive(ANSWER.size))
        return width, height, self._receive(length)

    def _receive(self, length: int) -> bytes:
        data = bytearray(length)
        rest = memoryview(data)
        while rest:
            received = self._socket.recv_into(rest)
            if not received:
                raise EOFError
            rest = rest[received:]
        return bytes(data)

    def end(self, grace_s: float = 0.0) -> int:
        """End the process, after `grace_s` if it does not end itself, and return its exit status."""
        self._socket.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(grace_s)
        self._process.kill()
        return self._process.wait()
