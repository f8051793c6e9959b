"""The choice of an instruction-set level."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from quire import kernels
from quire.kernels.cpu.levels import Level

ROOT = Path(__file__).parents[3]


def test_the_level_can_be_lowered(monkeypatch, caplog):
    monkeypatch.setenv("KERNELS_CPU_ISA", "none")
    with caplog.at_level(logging.WARNING):
        assert kernels.select_ops("cpu", torch.float32).name == "reference"
    assert "KERNELS_CPU_ISA" in caplog.text
    monkeypatch.setenv("KERNELS_CPU_ISA", "avx1024")
    with pytest.raises(ValueError, match="avx2, avx512, avx512vnni, avx512bf16, amxint8, amx or none"):
        kernels.select_ops("cpu", torch.float32)


# Answers EPERM to arch_prctl, as a container's filter may, and asks for the level then.
REFUSED = """
import ctypes, struct
step = struct.Struct("=HBBI")
load, equal, give, allow, refuse, arch_prctl = 0x20, 0x15, 0x06, 0x7FFF0000, 0x00050001, 158
steps = step.pack(load, 0, 0, 0), step.pack(equal, 0, 1, arch_prctl), step.pack(give, 0, 0, refuse)
code = ctypes.create_string_buffer(b"".join([*steps, step.pack(give, 0, 0, allow)]))
program = ctypes.create_string_buffer(struct.pack("=HxxxxxxQ", 4, ctypes.addressof(code)))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, program) == 0, ctypes.get_errno()
import torch
from quire import kernels
ops = kernels.CpuOps(torch.bfloat16)
print(ops.level.name, ops.linear(torch.ones(1, 2).bfloat16(), ops.pack_linear(torch.ones(1, 2).bfloat16())).item())
"""


def test_tiles_that_the_system_does_not_give_are_not_used():
    try:
        if kernels.CpuOps(torch.bfloat16).level is not Level.amx:
            pytest.skip("this processor has no amx")
    except kernels.KernelsUnavailable as missing:
        pytest.skip(str(missing))
    done = subprocess.run([sys.executable, "-c", REFUSED], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "avx512bf16 2.0\n"), done.stderr
