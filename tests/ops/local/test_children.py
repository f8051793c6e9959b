"""The children of `quire serve`: the phases of their start, and the waits between restarts."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from quire.ops.local.children import FIRST_BACKOFF_S, LAST_BACKOFF_S, Child, ServiceProgram, StartPhase, start_phases


def test_what_a_child_says_of_its_start_is_read_as_it_comes(tmp_path: Path) -> None:
    program = (
        "import os, sys; pipe = int(os.environ['_QUIRE_PROGRESS_FD'])\n"
        "for line in sys.stdin: os.write(pipe, eval(line))\n"
    )
    words = tmp_path / "words"
    os.mkfifo(words)
    command = ["/bin/sh", "-c", f'exec "$@" < {words}', "-", sys.executable, "-uc", program]
    service = ServiceProgram("worker-1", command, dict(os.environ), tmp_path / "logs" / "worker-1.log")
    (tmp_path / "logs").mkdir()
    process = service.start()
    try:
        with words.open("w", buffering=1) as say:

            def after(said: bytes, expected: str) -> None:
                say.write(f"{said!r}\n")
                deadline = time.monotonic() + 20
                while str(service.phase()) != expected and time.monotonic() < deadline:
                    time.sleep(0.01)
                assert str(service.phase()) == expected

            assert str(service.phase()) == "starting Python"
            after(b"importing torch\n", "importing torch")
            after(b"loading weights\nloading weights\t4", "loading weights")  # the last line is not whole yet
            after(b"2\n", "loading weights 42 %")
            after(b"x" * 60_000 + b"\nloading weights\t43\n", "loading weights 43 %")
        assert process.wait(20) == 0
        assert str(service.phase()) == "loading weights 43 %"
    finally:
        process.kill()
        process.wait()


def test_workers_in_the_same_phase_share_a_place() -> None:
    def shown(*phases: tuple[str, str]) -> tuple[str, str]:
        return start_phases([Saying(f"worker-{number + 1}", StartPhase(*phase)) for number, phase in enumerate(phases)])

    assert shown(("loading weights", "42")) == ("worker-1: loading weights 42 %", "worker-1: loading weights")
    assert shown(("loading weights", "42"), ("loading weights", "7"), ("warming up", "")) == (
        "2 workers: loading weights 7 %, worker-3: warming up",
        "2 workers: loading weights, worker-3: warming up",
    )
    assert shown(("ready", ""), ("warming up", ""))[0] == "worker-2: warming up"
    assert shown(("ready", ""))[0] == "gateway: starting"


class Saying(ServiceProgram):
    """A worker that says one thing."""

    def __init__(self, name: str, phase: StartPhase) -> None:
        self.name = name
        self._phase = phase

    def phase(self) -> StartPhase:
        return self._phase


def test_restarts_wait_twice_as_long_each_time_until_one_lasts() -> None:
    now = 0.0
    child = Child(Nothing(), clock=lambda: now)
    waits = []
    for _ in range(8):
        child.start()
        waits.append(child.schedule_restart())
    assert waits[:4] == [FIRST_BACKOFF_S, 1.0, 2.0, 4.0]
    assert waits[-1] == LAST_BACKOFF_S
    assert not child.is_due()
    now += LAST_BACKOFF_S
    assert child.is_due()
    child.start()
    now += 61
    assert child.schedule_restart() == FIRST_BACKOFF_S


class Nothing:
    """A program that is never really started."""

    name = "nothing"
    log_path = Path(os.devnull)

    def start(self):  # type: ignore[no-untyped-def]
        return None

    def reason(self) -> str:
        return ""
