"""The choice of an implementation for a device and a dtype."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from quire import kernels

ROOT = Path(__file__).parents[2]


def test_the_reference_is_chosen_on_request():
    ops = kernels.select_ops("cpu", torch.float32, "reference")
    assert (ops.name, ops.row_invariant) == ("reference", False)


def test_both_implementations_meet_the_contract():
    assert isinstance(kernels.ReferenceOps(), kernels.Ops)
    assert isinstance(kernels.select_ops("cpu", torch.float32), kernels.Ops)


def test_an_unknown_preference_is_refused():
    with pytest.raises(ValueError, match="prefer"):
        kernels.select_ops("cpu", torch.float32, "fastest")


def test_a_type_without_kernels_falls_back(monkeypatch, caplog):
    monkeypatch.delenv("KERNELS_CPU_ISA", raising=False)
    assert kernels.select_ops("cpu", torch.float16).name == "reference"
    assert "torch.float16" in caplog.text
    with pytest.raises(kernels.KernelsUnavailable):
        kernels.select_ops("cpu", torch.float16, "cpu")


@pytest.mark.slow
def test_kernels_import_nothing_of_the_project():
    code = "import sys, quire.kernels; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "quire.kernels.reference" in done.stdout.split()
    of_others = ("quire.gateway", "quire.worker", "quire.shared", "quire.ops")
    assert not [name for name in done.stdout.split() if name.startswith(of_others)]
