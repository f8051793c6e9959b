"""A pytest plugin: records the lines and the Lua scripts that each test runs, and how long it takes.

QUIRE_MUTATION_RECORD names the JSON file that it writes.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from coverage import Coverage

_seconds: dict[str, float] = defaultdict(float)
_failed: set[str] = set()
_scripts: dict[str, set[str]] = defaultdict(set)
_running = ""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    global _running
    _running = item.nodeid
    coverage = Coverage.current()
    assert coverage is not None
    coverage.switch_context(item.nodeid)
    result = yield
    coverage.switch_context("")
    return result


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _seconds[report.nodeid] += report.duration
    if report.outcome != "passed":
        _failed.add(report.nodeid)


def pytest_configure() -> None:
    from quire.shared.protocol.broker import scripts

    load, call = scripts.script_source, scripts.Script.__call__
    names: dict[str, str] = {}

    def script_source(name: str) -> str:
        names[load(name)] = name
        return load(name)

    async def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        _scripts[names[self._source]].add(_running)
        return await call(self, *args, **kwargs)

    scripts.script_source = script_source
    scripts.Script.__call__ = noted  # type: ignore[method-assign]


def pytest_sessionfinish() -> None:
    record = {
        "seconds": {test: seconds for test, seconds in _seconds.items() if test not in _failed},
        "failed": sorted(_failed),
        "scripts": {name: sorted(tests) for name, tests in _scripts.items()},
    }
    Path(os.environ["QUIRE_MUTATION_RECORD"]).write_text(json.dumps(record))
