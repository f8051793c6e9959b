"""The benchmark of sampling runs on a small vocabulary and reports every case."""

import pytest
import torch

from quire import kernels
from quire.ops.benchmarks.kernels import sampling


def test_every_case_is_reported(capsys):
    try:
        kernels.CpuOps(torch.float32)
    except kernels.KernelsUnavailable as missing:
        pytest.skip(str(missing))
    assert sampling.main(["--vocabulary", "500", "--rows", "2", "--rounds", "1"]) == 0
    printed = capsys.readouterr().out
    for name in ("read", "argmax", "top 20 logprobs", *sampling.PARAMETERS):
        assert name in printed
