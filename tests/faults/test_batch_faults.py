"""Workers and gateways are killed in the middle of a batch: its output is that of a run without faults."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from quire.shared.protocol.keys import BatchKeys
from tests.support.faults import batches
from tests.support.faults.stack import KEYS, FaultStack

FAST = ("--lease-s", "1", "--beat-s", "0.25")
LINES = [batches.line(number, max_tokens=20 + number % 5 * 20) for number in range(300)]


def assert_nothing_is_left(stack: FaultStack) -> None:
    """Check that Redis has no requests, and no windows."""
    keys = BatchKeys()
    stack.wait(lambda: not list(stack.redis.scan_iter(KEYS.prefix + "req:*")))
    assert not list(stack.redis.scan_iter(KEYS.prefix + "out:*"))
    for pattern in (keys.windows("*"), keys.leases("*"), keys.open("*"), keys.active):
        assert not list(stack.redis.scan_iter(pattern.replace("{", r"\{"))), pattern


def progress(stack: FaultStack) -> int:
    """Return the number of requests of the lane that have ended."""
    totals = stack.totals()
    return sum(totals.values()) - totals.get("accepted", 0)


def kill(process: object) -> None:
    os.kill(process.pid, signal.SIGKILL)  # type: ignore[attr-defined]


@pytest.mark.faults
@pytest.mark.promise
def test_a_batch_survives_the_death_of_any_process(stack: FaultStack, tmp_path: Path) -> None:
    files = ("--files-dir", str(tmp_path / "files"))
    first, url = stack.gateway(*files)
    _, other = stack.gateway(*files)
    workers = {name: stack.worker(name, *FAST, "--max-num-seqs", "32") for name in ("a", "b")}
    # 1) Without faults.
    expected = batches.answers(url, batches.ended(url, batches.create(url, LINES)))
    assert len(expected) == len(LINES)
    # 2) Each process is killed in the middle: a worker, the gateway that runs the window, and the other worker.
    done = progress(stack)
    batch_id = batches.create(url, LINES)
    stack.wait(lambda: progress(stack) > done + 20)
    kill(workers["a"])
    stack.wait(lambda: progress(stack) > done + 60)
    kill(first)
    workers["a"] = stack.worker("a", *FAST, "--max-num-seqs", "32")
    stack.wait(lambda: progress(stack) > done + 110, 40)
    kill(workers["b"])
    batch = batches.ended(other, batch_id)
    assert batch.status == "completed"
    assert (batch.request_counts.completed, batch.request_counts.failed) == (len(LINES), 0)
    assert batches.answers(other, batch) == expected
    # Each line was accepted once, although two gateways have submitted it.
    assert stack.totals()["accepted"] == 2 * len(LINES)
    assert_nothing_is_left(stack)
    stack.assert_invariants()


@pytest.mark.faults
def test_a_batch_goes_on_after_all_processes_were_killed(stack: FaultStack, tmp_path: Path) -> None:
    """Redis alone remains. Its append-only file has what was accepted."""
    files = ("--files-dir", str(tmp_path / "files"))
    gateway, url = stack.gateway(*files)
    worker = stack.worker("a", *FAST)
    lines = LINES[:100]
    expected = batches.answers(url, batches.ended(url, batches.create(url, lines)))
    done = progress(stack)
    batch_id = batches.create(url, lines)
    stack.wait(lambda: progress(stack) > done + 20)
    kill(gateway)
    kill(worker)
    _, url = stack.gateway(*files)
    stack.worker("a", *FAST)
    batch = batches.ended(url, batch_id)
    assert batches.answers(url, batch) == expected
    assert stack.totals()["accepted"] == 2 * len(lines)
    assert_nothing_is_left(stack)
    stack.assert_invariants()


@pytest.mark.faults
def test_a_cancelled_batch_stops_within_two_steps(stack: FaultStack, tmp_path: Path) -> None:
    _, url = stack.gateway("--files-dir", str(tmp_path / "files"))
    stack.worker("a", "--max-num-seqs", "16", TEST_STEP_S="0.05")
    batch_id = batches.create(url, [batches.line(number, max_tokens=1500) for number in range(60)])

    def emitted() -> dict[bytes, int]:
        return {
            key: int(stack.redis.hget(key, "emitted") or 0)
            for key in stack.redis.scan_iter(KEYS.prefix + "req:*")
            if stack.redis.hget(key, "state") == b"running"
        }

    stack.wait(lambda: len(emitted()) == 16 and min(emitted().values()) > 3)
    before = time.monotonic()
    cancelled = batches.cancel(url, batch_id)
    assert cancelled.status == "cancelling"
    took_s = time.monotonic() - before
    reached = emitted()
    # Two steps later, all rows are free.
    stack.wait(lambda: not emitted(), timeout_s=0.05 * 2 + 0.2)
    batch = batches.ended(url, batch_id)
    assert batch.status == "cancelled"
    assert took_s < 2
    errors = batches.read(url, batch.error_file_id)
    assert [one["custom_id"] for one in errors] == [f"line-{number}" for number in range(60)]
    assert {one["error"]["code"] for one in errors} == {"batch_cancelled"}
    assert len(reached) <= 16
    assert_nothing_is_left(stack)
    stack.assert_invariants()
