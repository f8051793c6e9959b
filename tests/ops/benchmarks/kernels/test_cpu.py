"""The benchmark runs on a small shape and reports every operation."""

import pytest
import torch

from quire import kernels
from quire.ops.benchmarks.kernels import cpu


def test_a_small_step_is_reported(capsys):
    try:
        kernels.CpuOps(torch.float32)
    except kernels.KernelsUnavailable as missing:
        pytest.skip(str(missing))
    small = ["--hidden", "64", "--intermediate", "96", "--layers", "2", "--heads", "4", "--kv-heads", "2"]
    small += ["--head-dim", "32", "--vocabulary", "200", "--context", "40", "--repeat", "1", "--dtype", "float32"]
    assert cpu.main([*small, "--case", "decode:2", "--case", "prefill:5"]) == 0
    printed = capsys.readouterr().out
    for word in ("reference", "decode:2", "prefill:5", "attention", "gate_up", "head", "tokens/s"):
        assert word in printed
    for weights in ("float16", "int8", "int4"):
        assert cpu.main([*small, "--ops", "cpu", "--case", "decode:2", "--weights", weights]) == 0
        assert "tokens/s" in capsys.readouterr().out
