"""The build of the C++ library, and the fallback to the reference where the build fails."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from quire import kernels
from quire.kernels.cpu import build, library

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


@pytest.mark.slow
def test_the_build_prints_one_line():
    done = subprocess.run([sys.executable, "-m", "quire.kernels.cpu.build"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stdout.startswith("kernels: ")
    assert (done.stdout.count("\n"), done.stderr) == (1, "")
