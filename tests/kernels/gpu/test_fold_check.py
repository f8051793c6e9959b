"""The pattern of `fold` alone computes attention without a mask."""

import os
import re
import subprocess
import sys

import pytest
import torch

from quire.ops.paths import PROJECT_ROOT as ROOT
from tests.support.kernels.implementations import TRITON_DTYPES, make_triton_ops
from tests.support.kernels.oracle import assert_close, slack


@pytest.mark.parametrize("d", [64, 80])
@pytest.mark.parametrize("dtype", TRITON_DTYPES, ids=str)
def test_it_is_attention_to_all_keys(monkeypatch, dtype, d):
    make_triton_ops(dtype, monkeypatch)  # for the interpreter
    from quire.kernels.gpu.fold_check import attend_whole_tiles
    from quire.kernels.gpu.tile_sizes import prefill_tiles

    tiles = prefill_tiles(d, 1, dtype)
    q, k, v = (torch.randn(n, d).to(dtype) for n in (tiles.rows, 3 * tiles.keys, 3 * tiles.keys))
    exact = (q.double() @ k.double().T * d**-0.5).softmax(dim=-1) @ v.double()
    assert_close(attend_whole_tiles(q, k, v, tiles, d**-0.5), exact, slack(dtype, 2000))


COMPILE = """
import torch, triton
from tests.support.kernels.compile_for_cuda import Target

triton.runtime.driver.set_active(Target(90))
from quire.kernels.gpu.fold_check import fold_kernel
from quire.kernels.gpu.tile_sizes import prefill_tiles

x, tiles = torch.zeros(1024, dtype=torch.bfloat16), prefill_tiles(128, 4, torch.bfloat16)
sizes = dict(D=128, PADDED_D=128, ROWS=tiles.rows, KEYS=tiles.keys, PRECISION="tf32")
options = dict(num_warps=tiles.warps, num_stages=tiles.stages, grid=(1,))
print(fold_kernel.warmup(x, x, x, x, 640, 0.1, **sizes, **options).asm["ptx"])
"""


@pytest.mark.slow
def test_on_hopper_its_second_product_has_the_left_matrix_in_registers():
    """Otherwise the self-test would not cover what old assemblers compile wrongly."""
    pytest.importorskip("triton")
    environ = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], cwd=ROOT, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    # The accumulators come first, then the left matrix: registers in braces, or a descriptor of shared memory.
    products = re.findall(r"wgmma\.mma_async\S+\s*\{[^}]*\},\s*(\{|%)", done.stdout)
    assert set(products) == {"{", "%"}
