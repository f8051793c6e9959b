"""Checks that answers can follow a JSON schema: each new schema is tried in a process of its own.

A few characters can ask for hours, gigabytes or an endless stack (`shared/text/json_schema_trial.py`). In a process of
its own such a schema ends only that process.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

from quire.shared.text.json_schema import ANY_OBJECT, SchemaError

# Number of schemas whose results are kept.
KEPT = 256
# Longest time of a trial. The limit of processor time ends most trials earlier; this limit ends the trial on a machine
# that is too busy to run it.
TIMEOUT_S = 30.0
TOO_LARGE = "it is too large, or takes too long"


class Schemas:
    """Tries schemas in at most `threads` processes at a time, and keeps the results."""

    def __init__(self, threads: int) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="schema")
        self._known: OrderedDict[str, str] = OrderedDict([(ANY_OBJECT, "")])

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def check(self, schema: str) -> None:
        """Raises SchemaError for a schema that answers cannot follow."""
        if schema not in self._known:
            try:
                wrong = await asyncio.get_running_loop().run_in_executor(self._threads, try_out, schema)
            except subprocess.TimeoutExpired as error:  # the machine is busy; the schema may be tried again
                raise SchemaError(TOO_LARGE) from error
            self._known[schema] = wrong
            if len(self._known) > KEPT:
                self._known.popitem(last=False)
        self._known.move_to_end(schema)
        if wrong := self._known[schema]:
            raise SchemaError(wrong)


def try_out(schema: str) -> str:
    """Return the fault of a schema; empty if it has none. Raises TimeoutExpired."""
    command = [sys.executable, "-P", "-m", "quire.shared.text.json_schema_trial"]
    trial = subprocess.run(
        command, input=schema.encode(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=TIMEOUT_S
    )
    return TOO_LARGE if trial.returncode else trial.stdout.decode()
