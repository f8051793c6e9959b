"""Ctrl-C ends the process at once or raises KeyboardInterrupt. A process that ignores Ctrl-C keeps ignoring it."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

import pytest

from quire.shared.interrupts import EXIT_CODE, end_at_ctrl_c, end_now, raise_at_ctrl_c


@pytest.mark.parametrize(("call", "code"), [("", EXIT_CODE), ("interrupts.raise_at_ctrl_c(); ", 5)])
def test_the_process_ends_at_once_unless_it_asks_for_the_exception(call: str, code: int) -> None:
    program = (
        "import os, signal, sys; from quire.shared import interrupts; interrupts.end_at_ctrl_c()\n"
        f"try: {call}os.kill(os.getpid(), signal.SIGINT)\n"
        "except KeyboardInterrupt: sys.exit(5)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (code, "")


def test_a_handler_of_someone_else_stays() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        end_at_ctrl_c()
        raise_at_ctrl_c()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_change_nothing() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        thread = threading.Thread(target=end_at_ctrl_c)
        thread.start()
        thread.join()
        assert signal.getsignal(signal.SIGINT) is not end_now
    finally:
        signal.signal(signal.SIGINT, before)
