"""Linear layers whose weights are codes of 4 or 8 bits with a scale per group: the expansion is part of the product.

The definition is `GroupedWeight.dequantized` in the dtype of activations, and a product with it. Each element is the
sum over K in one order, a group at a time.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.tile_sizes import MIN_ROWS, dot_precision
from quire.kernels.grouped_weight import BITS, FP8, GROUP, MXFP4, UINT4, UINT8, GroupedWeight, packed_words

KINDS = (UINT4, MXFP4, FP8, UINT8)  # that `expand_codes` has
ROWS, COLUMNS = 64, 64  # of a tile of many rows


@dataclass(frozen=True, eq=False)
class TritonGroupedLinear:
    """The weights of one linear layer. gate_up: I rows of the gate, then I rows of the up projection."""

    words: Tensor  # [N, groups, 1 + bits] int32, of `packed_words`
    bias: Tensor | None
    kind: str
    in_features: int
    dtype: torch.dtype  # of activations
    gate_up: bool = False
    order: Tensor | None = None  # of a `GroupedWeight`

    @property
    def out_features(self) -> int:
        return self.words.shape[0]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (self.words, self.bias, self.order) if part is not None)


def pack_grouped(
    weight: GroupedWeight, bias: Tensor | None, gate_up: bool, dtype: torch.dtype, device: torch.device
) -> TritonGroupedLinear:
    """Copy weights to the device. dtype: of activations."""
    words = packed_words(weight).to(device)
    order = None if weight.order is None else weight.order.to(device)
    return TritonGroupedLinear(words, bias, weight.kind, weight.shape[1], dtype, gate_up, order)


@triton.jit
def expand_codes(code, scale, zero, KIND: tl.constexpr):
    """Return the weights of codes in float32. KIND: of a `GroupedWeight`."""
    if KIND == "uint4" or KIND == "uint8":
        value = code.to(tl.float32) - zero
    elif KIND == "mxfp4":
        magnitude = (code & 7).to(tl.float32)
        large = tl.where(magnitude < 6, magnitude - 2.0, magnitude * 2.0 - 8.0)
        value = tl.where(magnitude < 4, magnitude * 0.5, large)
        value = tl.where((code & 8) != 0, 0.0 - value, value)
    else:
        small = (code & 7).to(tl.float32) * 0.001953125  # 2^-9, where the exponent is zero
        large = (((code & 127) << 20) + (120 << 23)).to(tl.float32, bitcast=True)
        value = tl.where((code & 120) == 0, small, large)
        value = tl.where((code & 128) != 0, 0.0 - value, value)
    return value * scale


@triton.jit
def load_group(header_at, word_at, shift, columns, dtype, KIND: tl.constexpr, BITS: tl.constexpr):
    """Load a group of weights as [GROUP, COLUMNS] of dtype.

    header_at [COLUMNS], word_at [GROUP, COLUMNS]: addresses of the words of `packed_words`. shift [GROUP, 1]: of a code
    in its word. columns [COLUMNS]: those that exist.
    """
    header = tl.load(header_at, mask=columns, other=0)
    raw = tl.load(word_at, mask=columns[None, :], other=0)
    if KIND == "uint4" or KIND == "uint8":
        zero = (header & 255).to(tl.float32)[None, :]
        header = header & -256
    else:
        zero = 0.0
    scale = header.to(tl.float32, bitcast=True)[None, :]
    return expand_codes((raw >> shift) & ((1 << BITS) - 1), scale, zero, KIND).to(dtype)


@triton.jit(do_not_specialize=["tokens"])
def grouped_matmul_kernel(
    x, words, bias, out, tokens, N, K, GROUPS,
    KIND: tl.constexpr, BITS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr,
    BIAS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """x [tokens, K], words [N, GROUPS, 1 + BITS], bias [N] -> out [tokens, N].

    grid (cdiv(tokens, ROWS) * cdiv(N, COLUMNS),). Successive programs share a tile of weights. Offsets are int64.
    """
    row_tiles = tl.cdiv(tokens, ROWS)
    row = (tl.program_id(0) % row_tiles) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(0) // row_tiles) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, GROUP)
    per_word: tl.constexpr = 32 // BITS
    rows, columns = (row < tokens)[:, None], column < N
    x_at = x + row.to(tl.int64)[:, None] * K + depth[None, :]
    header_at = words + column.to(tl.int64) * GROUPS * (1 + BITS)
    word_at = header_at[None, :] + 1 + (depth // per_word)[:, None]
    shift = (depth % per_word * BITS)[:, None]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for group in tl.range(0, GROUPS):
        at = group * (1 + BITS)
        b = load_group(header_at + at, word_at + at, shift, columns, x.dtype.element_ty, KIND, BITS)
        a = tl.load(x_at + group * GROUP, mask=rows & (group * GROUP + depth < K)[None, :], other=0.0)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    if BIAS:
        total += tl.load(bias + column, mask=columns, other=0.0).to(tl.float32)[None, :]
    at = out + row.to(tl.int64)[:, None] * N + column[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=rows & columns[None, :])


def grouped_matmul(
    x: Tensor, packed: TritonGroupedLinear, out: Tensor | None, out_dtype: torch.dtype, invariant: bool = False
) -> Tensor:
    """Return x [T, K] times the weights, plus the bias, as [T, N] of out_dtype; sums are in float32.

    invariant: the bits of a row do not depend on the number of rows, so that all tiles use the same instructions.
    """
    tokens, n = len(x), packed.out_features
    if out is None:
        out = torch.empty((tokens, n), dtype=out_dtype, device=x.device)
    if tokens == 0:
        return out
    if packed.order is not None:
        x = x.index_select(1, packed.order)
    rows = MIN_ROWS if tokens <= MIN_ROWS and not invariant else ROWS
    grouped_matmul_kernel[(triton.cdiv(tokens, rows) * triton.cdiv(n, COLUMNS),)](
        x, packed.words, x if packed.bias is None else packed.bias, out, tokens, n, packed.in_features,
        packed.words.shape[1], KIND=packed.kind, BITS=BITS[packed.kind], ROWS=rows, COLUMNS=COLUMNS,
        GROUP=GROUP, BIAS=packed.bias is not None, PRECISION=dot_precision(x.dtype), num_warps=4, num_stages=4,
    )  # fmt: skip
    return out
