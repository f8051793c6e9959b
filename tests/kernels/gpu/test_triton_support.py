"""Errors of Triton become one line with kernel, cause and remedy; a Triton that compiles wrongly is reported.

The errors are Triton's own: tests.support.kernels.triton_failures compiles kernels for a GPU that need not be there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from quire import kernels
from quire.kernels.gpu.triton_support import use_installed_assembler
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


def installed_ptxas(folder: Path, version: str) -> Path:
    """Make the package nvidia-cuda-nvcc in a folder, and return its ptxas."""
    program = folder / "nvidia" / "cu13" / "bin" / "ptxas"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {version}, V{version}.37'\n")
    program.chmod(0o755)
    metadata = folder / f"nvidia_cuda_nvcc-{version}.37.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: nvidia-cuda-nvcc\nVersion: {version}.37\n")
    files = (f"nvidia/cu13/bin/{name}" for name in ("nvcc", "ptxas.profile", "ptxas"))
    (metadata / "RECORD").write_text("".join(f"{name},,\n" for name in files))
    return program


@pytest.mark.parametrize(
    ("version", "cuda", "is_used"),
    [("13.3", "13.0", True), ("13.5", "14.1", True), ("13.2", "13.0", False), ("13.5", "12.9", False)],
)
def test_triton_runs_the_ptxas_of_an_installed_package(
    version: str, cuda: str, is_used: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    program = installed_ptxas(tmp_path, version)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("TRITON_PTXAS_PATH", "")  # so that the variable is restored
    assert use_installed_assembler(cuda) == (program if is_used else None)
    assert os.environ["TRITON_PTXAS_PATH"] == (str(program) if is_used else "")
    if is_used:
        assert kernels.outdated_assembler((9, 0)) is None


def test_a_ptxas_that_the_user_names_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed_ptxas(tmp_path, "13.5")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("TRITON_PTXAS_PATH", "/another/ptxas")
    assert use_installed_assembler("13.0") is None
    assert os.environ["TRITON_PTXAS_PATH"] == "/another/ptxas"


@pytest.mark.parametrize("cuda", [None, "13.0"])
def test_without_the_package_triton_keeps_its_own_ptxas(cuda: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)
    monkeypatch.setattr("importlib.metadata.distribution", Mock(side_effect=PackageNotFoundError))
    assert use_installed_assembler(cuda) is None
    assert "TRITON_PTXAS_PATH" not in os.environ


def test_a_package_without_the_program_is_no_assembler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed_ptxas(tmp_path, "13.5").unlink()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)
    assert use_installed_assembler("13.0") is None
