"""The build of the C++ libraries, and the fallback to the reference where the build fails."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from quire import kernels
from quire.kernels.cpu import build, library
from quire.kernels.cpu.levels import LEVELS, Level

ROOT = Path(__file__).parents[3]


def test_without_compiler_and_library_plain_torch_is_used(monkeypatch, caplog, tmp_path):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("KERNELS_CPU_ISA", raising=False)
    monkeypatch.setattr(build, "_cache_dirs", lambda: [tmp_path])
    monkeypatch.setattr(library, "load", library.load.__wrapped__)  # without the cached library, as in a new process
    with caplog.at_level(logging.WARNING):
        ops = kernels.select_ops("cpu", torch.float32)
    assert ops.name == "reference"
    assert len(caplog.records) == 1
    assert "install g++" in caplog.text
    assert ops.linear(torch.ones(1, 2), ops.pack_linear(torch.ones(3, 2))).tolist() == [[2.0, 2.0, 2.0]]


def test_another_processor_uses_plain_torch(monkeypatch, caplog):
    monkeypatch.delenv("KERNELS_CPU_ISA", raising=False)
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    monkeypatch.setattr(library, "load", library.load.__wrapped__)
    assert kernels.select_ops("cpu", torch.float32).name == "reference"
    assert "x86-64" in caplog.text


def test_the_script_knows_the_same_levels_as_the_package():
    assert [level.name for level in Level] == list(build.LEVELS)
    assert [level.name for level in LEVELS[torch.bfloat16]] == list(build.BFLOAT16_LEVELS)
    assert [level.name for level in LEVELS[torch.float32]] == list(build.FLOAT32_LEVELS)


# Writes an empty file as the result, and its name to the log.
COMPILER = """#!/bin/sh
while [ "$1" != -o ]; do shift; done
: >"$2"
basename "$2" >>{log}
"""


@pytest.fixture
def sources(tmp_path):
    """A copy of build.py with sources, and what makes it call COMPILER, whose log is compiled.txt."""
    (tmp_path / "build.py").write_bytes(Path(build.__file__).read_bytes())
    for name in ("pool.cpp", *(f"level_{level}.cpp" for level in build.LEVELS)):
        (tmp_path / name).write_text("")
    compiler = tmp_path / "compiler"
    compiler.write_text(COMPILER.format(log=tmp_path / "compiled.txt"))
    compiler.chmod(0o755)
    return tmp_path


def script(sources, **options):
    command = [sys.executable, "-I", "-S", str(sources / "build.py"), "--all"]
    environ = {"PATH": os.environ["PATH"], "CXX": str(sources / "compiler")}
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True, **options)


def test_processes_that_build_at_the_same_time_compile_each_unit_once(sources):
    """The script runs without any package, as while pip still installs them."""
    running = [script(sources) for _ in range(3)]
    for process in running:
        output = process.communicate()[0]
        assert output.startswith("kernels: common, avx2, avx512, ")
        assert output.count("\n") == 1
    made = (sources / "compiled.txt").read_text().split()
    assert len(made) == len(set(made))
    objects = {name for name in made if name.endswith(".o")}
    assert objects == {
        "pool-0.o",
        *(f"level_{level}-{part}.o" for level in build.FLOAT32_LEVELS for part in range(4)),
        *(f"level_{level}-{part}.o" for level in build.BFLOAT16_LEVELS for part in range(2)),
    }
    assert {path.suffix for path in (sources / "_build").iterdir()} == {".so", ""}


def test_the_progress_of_a_build_is_reported(sources, monkeypatch):
    monkeypatch.setattr(build, "SOURCE_DIR", sources)
    monkeypatch.setenv("CXX", str(sources / "compiler"))
    reports = []
    paths = build.build([build.COMMON, "amx"], lambda done, total: reports.append((done, total)))
    assert reports == [(0, 3), (1, 3), (2, 3), (3, 3)]
    assert [path.parent for path in paths] == [sources / "_build"] * 2
    assert build.build([build.COMMON, "amx"], lambda done, total: reports.clear()) == paths
    assert len(reports) == 4, "nothing is built"
