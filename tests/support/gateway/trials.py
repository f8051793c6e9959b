"""Trials of grammars without the start of an interpreter: a server that has the modules forks a process for each trial.

As the command in `quire.gateway.model.grammar_check` does, the process runs `grammar_trial.main` under its limits.
"""

from __future__ import annotations

import io
import os
import select
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from quire.gateway.model import grammar_check
from quire.shared.text import grammar_trial
from quire.shared.text.grammar import GrammarVocabulary
from quire.shared.text.grammar_trial import order

LENGTH = struct.Struct("!q")


class Trials:
    """Replaces `grammar_check.try_out`. One trial runs at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._start()

    def try_out(self, grammar: str, vocabulary: GrammarVocabulary) -> str:
        with self._lock:
            ordered, ends = order(grammar, vocabulary), self._server
            assert ends.stdin is not None
            assert ends.stdout is not None
            ends.stdin.write(LENGTH.pack(len(ordered)) + ordered)
            ends.stdin.flush()
            if not select.select([ends.stdout], [], [], grammar_check.TIMEOUT_S)[0]:
                self.close()
                self._start()
                raise subprocess.TimeoutExpired("a trial", grammar_check.TIMEOUT_S)
            (length,) = LENGTH.unpack(ends.stdout.read(LENGTH.size))
            return grammar_check.TOO_LARGE if length < 0 else ends.stdout.read(length).decode()

    def _start(self) -> None:
        command = [sys.executable, "-m", "tests.support.gateway.trials"]
        self._server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def close(self) -> None:
        self._server.kill()
        self._server.communicate()


@contextmanager
def forked_trials() -> Iterator[None]:
    trials = Trials()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grammar_check, "try_out", trials.try_out)
        yield
    trials.close()


def serve() -> None:
    """Answer orders until standard input ends: each with a length and the fault, or with -1 if the trial was ended."""
    while head := sys.stdin.buffer.read(LENGTH.size):
        ordered = sys.stdin.buffer.read(*LENGTH.unpack(head))
        reads, writes = os.pipe()
        if not (pid := os.fork()):
            sys.stdin = io.TextIOWrapper(io.BytesIO(ordered))
            sys.stdout = open(writes, "w")  # noqa: SIM115
            grammar_trial.main()
            sys.stdout.flush()
            os._exit(0)
        os.close(writes)
        with open(reads, "rb") as found:
            fault = found.read()
        status = os.waitpid(pid, 0)[1]
        sys.stdout.buffer.write(LENGTH.pack(-1) if status else LENGTH.pack(len(fault)) + fault)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    serve()
