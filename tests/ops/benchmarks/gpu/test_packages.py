"""The packages that a bare machine lacks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from quire.ops.benchmarks.gpu import packages


def test_what_was_unpacked_beside_the_project_is_not_missing(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(packages, "EXTRA", tmp_path)
    assert not packages.is_here("nowhere")
    (tmp_path / "nowhere").mkdir()
    assert packages.is_here("nowhere")
    # The command in the hint must be one that knows them all.
    pinned = (packages.ROOT / "constraints.txt").read_text().replace("-", "_")
    assert all(f"\n{name}==" in pinned for name in packages.of_stack())


def test_the_engine_needs_none_of_the_packages_that_a_bare_machine_lacks() -> None:
    """Only the stack does, and it is left out there."""
    lacking = ("hiredis", "redis", "llguidance", "aiohttp", "uvloop")
    block = f"import sys; sys.modules.update(dict.fromkeys({lacking!r}))"
    benchmarks = ("gpu.engine", "gpu.hugging_face", "gpu.invariance", "paper.workloads")
    needed = ", ".join(f"quire.ops.benchmarks.{name}" for name in benchmarks)
    needed += ", tests.gpu.test_engine_parity, tests.gpu.on_ranks, quire.worker.ranks.follower"
    needed += ", quire.worker.models.choice"
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"{block}; import {needed}",
        ],
        cwd=packages.ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
