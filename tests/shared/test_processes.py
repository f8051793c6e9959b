from __future__ import annotations

import os
import signal
import sys
import tempfile

import pytest

from quire.shared.processes import dying_with_parent, spawn


def test_a_child_has_its_environment_its_output_and_the_files_to_keep() -> None:
    reading, writing = os.pipe()
    program = f"import os; print(os.environ['WORD'], flush=True); os.write({writing}, b'kept')"
    with tempfile.TemporaryFile() as output:
        child = spawn([sys.executable, "-c", program], environ={"WORD": "hello"}, output=output, keep=[writing])
        os.close(writing)
        assert child.wait(30) == 0
        assert os.read(reading, 10) == b"kept"
        os.close(reading)
        output.seek(0)
        assert output.read() == b"hello\n"


def test_a_child_has_a_session_of_its_own() -> None:
    program = "import os; raise SystemExit(0 if os.getsid(0) == os.getpid() else 1)"
    assert spawn([sys.executable, "-c", program], environ={}, output=None).wait(30) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's death")
def test_a_command_names_this_process_and_the_signal() -> None:
    *_, program, number, parent, name = dying_with_parent(["/bin/true"], signal.SIGTERM)
    assert program.endswith("die_with_parent.py")
    assert (int(number), int(parent), name) == (signal.SIGTERM, os.getpid(), "/bin/true")
