"""Checks that answers can follow a grammar: each new grammar is tried in a process of its own.

A few characters can ask for hours, gigabytes or an endless stack (`shared/text/grammar_trial.py`). In a process of its
own such a grammar ends only that process.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby

from quire.shared.text.grammar import ANY_OBJECT, GrammarVocabulary
from quire.shared.text.grammar_error import GrammarError
from quire.shared.text.grammar_trial import order

# Number of grammars whose results are kept, and the number of their characters.
KEPT = 256
KEPT_CHARACTERS = 16 * 1024 * 1024
# Longest time of a trial. The limit of processor time ends most trials earlier; this limit ends the trial on a machine
# that is too busy to run it.
TIMEOUT_S = 30.0
TOO_LARGE = "it is too large, or takes too long"


class GrammarTrials:
    """Tries grammars for one vocabulary in at most `threads` processes at a time, and keeps the results."""

    def __init__(self, vocabulary: GrammarVocabulary, threads: int) -> None:
        self._vocabulary = vocabulary
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="grammar")
        self._known: OrderedDict[str, str] = OrderedDict([(ANY_OBJECT, "")])
        self._characters = len(ANY_OBJECT)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def check(self, grammar: str) -> None:
        """Raise GrammarError for a grammar that answers cannot follow."""
        if (wrong := self._known.get(grammar)) is None:
            loop = asyncio.get_running_loop()
            try:
                wrong = await loop.run_in_executor(self._threads, try_out, grammar, self._vocabulary)
            except subprocess.TimeoutExpired as error:  # the machine is busy; the grammar may be tried again
                raise GrammarError(TOO_LARGE) from error
            self._keep(grammar, wrong)
        else:
            self._known.move_to_end(grammar)
        if wrong:
            raise GrammarError(wrong)

    async def follow(self, grammar: str, output: Sequence[int], decode: Callable[[list[int]], str]) -> None:
        """Raise GrammarError unless an answer that follows a grammar can begin with these tokens."""
        special_ids = set(self._vocabulary.special_tokens.values())
        parts: list[int | str] = []
        for is_special, run in groupby(output, special_ids.__contains__):
            tokens = list(run)
            parts += tokens if is_special else [decode(tokens)]
        loop = asyncio.get_running_loop()
        try:
            wrong = await loop.run_in_executor(self._threads, try_out, grammar, self._vocabulary, parts)
        except subprocess.TimeoutExpired as error:
            raise GrammarError(TOO_LARGE) from error
        if wrong:
            raise GrammarError(wrong)

    def _keep(self, grammar: str, wrong: str) -> None:
        if grammar not in self._known:  # another call may have tried it meanwhile
            self._characters += len(grammar)
        self._known[grammar] = wrong
        while len(self._known) > KEPT or self._characters > KEPT_CHARACTERS:
            forgotten, _ = self._known.popitem(last=False)
            self._characters -= len(forgotten)


def try_out(grammar: str, vocabulary: GrammarVocabulary, output: Sequence[int | str] = ()) -> str:
    """Return the fault of a grammar, or of an answer that begins with `output`; empty without one.

    Raises TimeoutExpired.
    """
    command = [sys.executable, "-P", "-m", "quire.shared.text.grammar_trial"]
    trial = subprocess.run(
        command,
        input=order(grammar, vocabulary, output),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        timeout=TIMEOUT_S,
        check=False,
    )
    return TOO_LARGE if trial.returncode else trial.stdout.decode()
