"""Errors of Triton become one line with kernel, cause and remedy; a Triton that compiles wrongly is reported.

The errors are Triton's own: tests.support.kernels.triton_failures compiles kernels for a GPU that need not be there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from quire import kernels
from quire.kernels.gpu.triton_support import OLDEST
from tests.support.kernels.implementations import HAS_TRITON

ROOT = Path(__file__).parents[3]

needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize(
    ("case", "kind", "kernel", "cause", "remedy"),
    [
        ("static_assert", "CompileTimeAssertionFailure", "wrong_kernel", "BLOCK is 7", "report this line"),
        ("called", "CompilationError", "calling_kernel", "CompileTimeAssertionFailure: BLOCK is 7", "report this"),
        ("ptxas", "PTXASError", "right_kernel", "ptxas fatal", "TRITON_PTXAS_PATH"),
        ("shared", "OutOfResources", "right_kernel", "Required: 4096, Hardware limit: 1000", "16-bit --dtype"),
        ("libcuda", "AssertionError", "right_kernel", "libcuda.so cannot found", "TRITON_LIBCUDA_PATH"),
    ],
)
def test_what_triton_raises_is_one_line(case: str, kind: str, kernel: str, cause: str, remedy: str) -> None:
    environ = {name: text for name, text in os.environ.items() if not name.startswith(("TRITON_", "PTXAS_"))}
    command = [sys.executable, "-m", "tests.support.kernels.triton_failures", case]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["raised"] == kind
    assert said["line"].startswith(f"the Triton kernel {kernel} cannot run here (")
    assert cause in said["line"]
    assert remedy in said["line"]
    assert "\n" not in said["line"]


def test_errors_of_others_are_not_explained() -> None:
    def asserts() -> None:
        raise AssertionError("a fault of ours")

    for error_type in (ValueError, RuntimeError, AssertionError):
        assert kernels.triton_failure(error_type("no")) is None
    with pytest.raises(AssertionError) as caught:
        asserts()
    assert kernels.triton_failure(caught.value) is None


@pytest.mark.parametrize(
    ("version", "is_old"),
    [
        ("2.3.1", True),
        ("3.6.0", True),
        ("3.7.0", True),
        ("3.7.0+git1b2c3d4", True),
        ("3.7", True),
        ("3.7.1", False),
        ("3.7.1+rocm", False),
        ("3.10.0", False),
        ("4.0", False),
    ],
)
def test_a_triton_that_compiles_attention_wrongly_is_named(
    version: str, is_old: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__=version))
    fault = kernels.outdated_triton()
    assert (fault is not None) == is_old
    if fault:
        assert fault.startswith(f"triton {version} ")
        assert fault.endswith("pip install triton==3.7.1")


def test_a_missing_triton_is_not_an_old_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    assert kernels.outdated_triton() is None


def test_the_oldest_version_is_the_one_that_tests_install() -> None:
    assert f'"triton=={OLDEST}; ' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize(
    ("version", "is_old"), [("12.8", True), ("13.0", True), ("13.2", True), ("13.3", False), ("14.0", False)]
)
def test_an_assembler_that_compiles_attention_for_hopper_wrongly_is_named(
    version: str, is_old: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton asks the file of TRITON_PTXAS_PATH for its version."""
    pytest.importorskip("triton")
    program = tmp_path / "ptxas"
    program.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {version}, V{version}.93'\n")
    program.chmod(0o755)
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(program))
    fault = kernels.outdated_assembler((9, 0))
    assert (fault is not None) == is_old
    if fault:
        assert fault.startswith(f"ptxas {version} ({program}) ")
        assert "TRITON_PTXAS_PATH" in fault
    for other in ((8, 0), (8, 9), (10, 0), (12, 0)):
        assert kernels.outdated_assembler(other) is None


def test_the_assembler_of_triton_itself_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)
    if fault := kernels.outdated_assembler((9, 0)):
        assert "triton/backends/nvidia/bin/ptxas" in fault


def test_without_triton_no_assembler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    assert kernels.outdated_assembler((9, 0)) is None
