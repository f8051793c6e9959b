"""The pattern of `online_softmax.fold` alone, for the self-test: a product whose left matrix has just been computed.

On Hopper this matrix stays in registers. Assemblers (ptxas) before 13.3 may generate wrong code for it, so that some
rows of prefill are wrong, depending on the shape.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.online_softmax import LOG2_E, cap_scales, fold
from quire.kernels.gpu.tile_sizes import AttentionTiles, dot_precision, power_of_2


@triton.jit(do_not_specialize=["length"])
def fold_kernel(
    q, k, v, out, length, scale,
    D: tl.constexpr, PADDED_D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """q, out [ROWS, D]; k, v [length, D], with a length that is a multiple of KEYS. grid (1,)."""
    row, d, lane = tl.arange(0, ROWS), tl.arange(0, PADDED_D), tl.arange(0, KEYS)
    mine = (row >= 0)[:, None] & (d < D)[None, :]
    queries = tl.load(q + row[:, None] * D + d[None, :], mask=mine, other=0.0)
    most = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, PADDED_D], tl.float32)
    for start in tl.range(0, length, KEYS):
        token = start + lane
        keys = tl.load(k + token[None, :] * D + d[:, None], mask=(d < D)[:, None], other=0.0)
        values = tl.load(v + token[:, None] * D + d[None, :], mask=(d < D)[None, :], other=0.0)
        most, total, mixed = fold(queries, keys, values, mine, most, total, mixed, scale, 0.0, False, False, PRECISION)
    tl.store(out + row[:, None] * D + d[None, :], (mixed / total[:, None]).to(out.dtype.element_ty), mask=mine)


def attend_whole_tiles(q: Tensor, k: Tensor, v: Tensor, tiles: AttentionTiles, scale: float) -> Tensor:
    """Return the attention of q [tiles.rows, D] to all of k and v [length, D], without a mask.

    The length is a multiple of tiles.keys. scale: of the scores, in base e.
    """
    rows, d = q.shape
    assert rows == tiles.rows
    assert len(k) % tiles.keys == 0
    out = torch.empty_like(q)
    base_2, _ = cap_scales(scale * LOG2_E, 0.0)
    fold_kernel[(1,)](
        q, k, v, out, len(k), base_2,
        D=d, PADDED_D=power_of_2(d), ROWS=rows, KEYS=tiles.keys, PRECISION=dot_precision(q.dtype),
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return out
