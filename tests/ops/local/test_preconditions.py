"""The checks before `quire serve` starts: its state folder and its port must be free."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from quire.ops.local.preconditions import EMBEDDED, check_port, find_redis, lock_state_dir, read_holder
from quire.shared.command_line import CommandError


def test_a_state_folder_has_one_holder_which_the_error_names(tmp_path: Path) -> None:
    state = tmp_path / "new" / "state"
    lock = lock_state_dir(state)
    lock.write(f"{os.getpid()} http://127.0.0.1:81 redis://r")
    try:
        with pytest.raises(CommandError, match=rf"pid {os.getpid()}, http://127.0.0.1:81\) uses .*--state-dir"):
            lock_state_dir(state)
        assert find_redis(state) == "redis://r"
    finally:
        lock.close()


def test_the_redis_is_unknown_if_no_process_holds_the_folder(tmp_path: Path) -> None:
    assert find_redis(tmp_path) is None
    (tmp_path / "lock").write_text(f"{2**22 + 1} http://127.0.0.1:81 {EMBEDDED}")
    assert find_redis(tmp_path) is None


def test_a_holder_may_have_written_only_a_part() -> None:
    assert read_holder("") == ("", "", "")
    assert read_holder("7 http://x") == ("7", "http://x", "")


def test_a_port_that_is_free_is_returned_and_a_taken_one_is_refused() -> None:
    free = check_port("127.0.0.1", 0)
    assert check_port("127.0.0.1", free) == free
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(CommandError, match=rf"^port {port} on 127.0.0.1: .*; pass --port \d+, or --port 0"):
            check_port("127.0.0.1", port)
