"""Many short lines, while workers and gateways are killed all the time: each line has exactly one line of output."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.conftest import QuireProcess
from tests.faults.test_batch_faults import FAST, assert_nothing_is_left
from tests.support.faults import batches
from tests.support.faults.stack import FaultStack

# Seconds between two kills.
KILL_EVERY_S = 2.0


@pytest.mark.parametrize(
    "count",
    [
        pytest.param(6000, marks=[pytest.mark.faults, pytest.mark.timeout(600)]),
        pytest.param(100_000, marks=[pytest.mark.soak, pytest.mark.timeout(7200)]),
    ],
)
def test_each_line_has_one_line_of_output(stack: FaultStack, tmp_path: Path, count: int) -> None:
    files = ("--files-dir", str(tmp_path / "files"), "--max-batch-lines", str(count))
    gateways: dict[str, tuple[QuireProcess, str]] = {name: stack.gateway(*files) for name in ("x", "y")}
    workers = {name: stack.worker(name, *FAST, TEST_STEP_S="0.001") for name in ("a", "b")}
    lines = [batches.line(number, max_tokens=3, prompt=f"w{number % 90}", temperature=0) for number in range(count)]
    url = gateways["x"][1]
    # Lines with the same prompt have the same answer.
    expected = batches.answers(url, batches.ended(url, batches.create(url, lines[:90])))
    draw, kills, began = random.Random(count), 0, time.monotonic()
    batch_id = batches.create(url, lines)
    while True:
        url = next(address for process, address in gateways.values() if process.process.poll() is None)
        batch = batches.show(url, batch_id)
        if batch.status not in ("validating", "in_progress"):
            break
        name = draw.choice(("a", "b", "x", "y"))
        if name in workers:
            os.kill(workers[name].pid, signal.SIGKILL)
            workers[name] = stack.worker(name, *FAST, TEST_STEP_S="0.001", ready=False)
        else:
            os.kill(gateways[name][0].pid, signal.SIGKILL)
            gateways[name] = stack.gateway(*files)
        kills += 1
        time.sleep(KILL_EVERY_S)
    seconds = time.monotonic() - began
    print(f"{count} lines in {seconds:.0f} s, with {kills} kills")
    assert batch.status == "completed"
    assert (batch.request_counts.completed, batch.request_counts.failed) == (count, 0)
    found = batches.answers(url, batch)
    assert len(found) == count
    wrong = [number for number in range(count) if found[f"line-{number}"] != expected[f"line-{number % 90}"]]
    assert wrong == []
    assert kills > 2
    assert_nothing_is_left(stack)
    stack.man(workers, *FAST)
    stack.assert_invariants()
    totals = stack.totals()
    assert totals["accepted"] == count + 90
