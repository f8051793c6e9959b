"""Trials of grammars and models without the start of an interpreter: a server forks a process for each trial.

The process runs the same `main` under the same limits as the commands of
`quire.gateway.features.grammars.grammar_check` and `quire.gateway.model.model_trial`.
"""

from __future__ import annotations

import io
import json
import os
import select
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from quire.gateway.features.grammars import grammar_check
from quire.gateway.features.several_models import registered_model
from quire.gateway.model import model_trial
from quire.shared.text import grammar_trial
from quire.shared.text.grammar import GrammarVocabulary

MAINS = {"grammar": grammar_trial.main, "model": model_trial.main}
# The exit status, and the length of the output that follows.
HEAD = struct.Struct("!iq")


class Trials:
    """Replaces the functions `try_out`. One trial runs at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._start()

    def grammar(self, grammar: str, vocabulary: GrammarVocabulary, output: Sequence[int | str] = ()) -> str:
        order = grammar_trial.order(grammar, vocabulary, output).decode()
        failed, said = self._run(["grammar", "", order], grammar_check.TIMEOUT_S)
        return grammar_check.TOO_LARGE if failed else said

    def model(self, folder: Path) -> str:
        failed, said = self._run(["model", str(folder), ""], model_trial.TIMEOUT_S)
        return "fails in the tokenizer" if failed else said

    def _run(self, order: list[str], timeout_s: float) -> tuple[int, str]:
        with self._lock:
            ends = self._server
            assert ends.stdin is not None
            assert ends.stdout is not None
            ends.stdin.write(json.dumps(order).encode() + b"\n")
            ends.stdin.flush()
            if not select.select([ends.stdout], [], [], timeout_s)[0]:
                self.close()
                self._start()
                raise subprocess.TimeoutExpired(order[0], timeout_s)
            status, length = HEAD.unpack(ends.stdout.read(HEAD.size))
            return status, ends.stdout.read(length).decode()

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
        patch.setattr(grammar_check, "try_out", trials.grammar)
        patch.setattr(registered_model, "try_out", trials.model)
        yield
    trials.close()


def serve() -> None:
    """Run trials until standard input ends. A line is a trial: its kind, its argument and its standard input."""
    for line in sys.stdin.buffer:
        kind, argument, given = json.loads(line)
        reads, writes = os.pipe()
        if not (pid := os.fork()):
            sys.argv[1:] = [argument]
            sys.stdin = io.TextIOWrapper(io.BytesIO(given.encode()))
            sys.stdout = open(writes, "w")  # noqa: SIM115
            try:
                MAINS[kind]()
                sys.stdout.flush()
            except BaseException:
                os._exit(1)
            os._exit(0)
        os.close(writes)
        with open(reads, "rb") as found:
            said = found.read()
        status = os.waitpid(pid, 0)[1]
        sys.stdout.buffer.write(HEAD.pack(status, len(said)) + said)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    serve()
