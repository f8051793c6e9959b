"""Server processes, with the time and memory of their descendants."""

from __future__ import annotations

import os
import select
import sys
import time
from pathlib import Path

import pytest

from quire.ops.benchmarks.peers.processes import ServerProcess, answers, descendants
from quire.ops.local.ports import free_port
from quire.shared.command_line import CommandError

# A server whose child uses memory and processor time.
SERVER = """
import subprocess, sys
from http.server import HTTPServer, SimpleHTTPRequestHandler
child = subprocess.Popen([sys.executable, "-c", "memory = b'x' * (64 << 20)\\nwhile True: pass"])
HTTPServer(("127.0.0.1", int(sys.argv[1])), SimpleHTTPRequestHandler).serve_forever()
"""


def is_alive(pid: int) -> bool:
    """Return False within ten seconds for a killed process, even if its parent has not waited for it yet."""
    try:
        process_fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        return not select.select([process_fd], [], [], 10)[0]
    finally:
        os.close(process_fd)


def test_time_and_memory_count_with_descendants_and_all_end(tmp_path: Path) -> None:
    port = free_port()
    server = ServerProcess("s", [sys.executable, "-c", SERVER, str(port)], os.environ, tmp_path / "log")
    try:
        server.wait_ready(f"http://127.0.0.1:{port}/")
        assert server.ready_s > 0
        deadline = time.monotonic() + 30
        while (server.cpu_s() < 0.5 or server.memory_mib() < 64) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert server.cpu_s() >= 0.5
        assert server.memory_mib() >= 64
        below = descendants(server.pid)
        assert len(below) == 1
    finally:
        server.stop()
    assert not answers(f"http://127.0.0.1:{port}/")
    assert not any(is_alive(pid) for pid in below)


def test_a_program_that_does_not_exist_is_one_line(tmp_path: Path) -> None:
    # The wrapper that ends the child with its parent starts; the program itself does not.
    with pytest.raises(CommandError, match="s ended before it was ready: "):
        ServerProcess("s", ["/none"], os.environ, tmp_path / "log").wait_ready("http://127.0.0.1:1/")
