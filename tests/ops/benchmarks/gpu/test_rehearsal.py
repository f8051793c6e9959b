"""The tiny shapes of the rehearsal, and the simulated device that it gives to the processes that it starts."""

from __future__ import annotations

import os
import subprocess
import sys

from quire.ops.benchmarks.gpu import rehearsal
from quire.ops.benchmarks.kernels.gpu import CASES


def test_every_case_of_the_kernel_benchmark_is_rehearsed_with_less_work() -> None:
    small = rehearsal.kernel_cases()
    assert [case.name for case in small] == [case.name for case in CASES]
    for case, whole in zip(small, CASES, strict=True):
        assert type(case) is type(whole)
        assert case.bus == whole.bus
        assert case.work(2).bytes < whole.work(2).bytes / 1000


def test_started_processes_see_a_simulated_device() -> None:
    code = "import torch; print(torch.cuda.get_device_name(), torch.ones(2, device='cuda').sum().item())"
    before = dict(os.environ)
    with rehearsal.simulated_device_of_children():
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, cwd=rehearsal.packages.ROOT)
    assert done.stdout == "simulated CUDA device 2.0\n", done.stderr
    assert os.environ == before
