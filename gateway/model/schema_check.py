"""Whether answers can follow a JSON schema: each new one is tried in a process of its own.

A few characters can ask for hours, gigabytes or a stack without end (`shared/text/json_schema.py`). There that ends one
small process; here it would be the gateway.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

from quire.shared.text import json_schema
from quire.shared.text.json_schema import ANY_OBJECT, SchemaError

# Schemas of which it is known.
KEPT = 256
# The limit of its processor time ends a trial, unless the machine is so busy that it gets none.
TIMEOUT_S = 30.0
TOO_LARGE = "it is too large, or takes too long"


class Schemas:
    """Tries schemas, so many at a time."""

    def __init__(self, threads: int) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="schema")
        self._known: OrderedDict[str, str] = OrderedDict([(ANY_OBJECT, "")])

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def check(self, schema: str) -> None:
        """Raises SchemaError for one that no answer can be made to follow."""
        if schema not in self._known:
            try:
                wrong = await asyncio.get_running_loop().run_in_executor(self._threads, try_out, schema)
            except subprocess.TimeoutExpired as error:  # of a busy machine, not of the schema: it may be tried again
                raise SchemaError(TOO_LARGE) from error
            self._known[schema] = wrong
            if len(self._known) > KEPT:
                self._known.popitem(last=False)
        self._known.move_to_end(schema)
        if wrong := self._known[schema]:
            raise SchemaError(wrong)


def try_out(schema: str) -> str:
    """What is wrong with a schema; empty: nothing. Raises TimeoutExpired."""
    # Not as a module: the process needs nothing of this project, wherever that is found.
    command = [sys.executable, "-P", json_schema.__file__]
    trial = subprocess.run(
        command, input=schema.encode(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=TIMEOUT_S
    )
    return TOO_LARGE if trial.returncode else trial.stdout.decode()
