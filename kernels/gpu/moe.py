"""Mixtures of experts: the choice of experts, and grouped products over the weights of all experts that have rows.

Rows are sorted by expert on the device. The host does not know how many rows an expert has, so a grid has a program for
the largest number of tiles that any division of the rows can need, and each program finds its expert by the numbers of
rows. Programs without a tile return at once. A captured step thus adapts to the choices of each replay.

Each output is the sum over the input features in one order. Tiles of all sizes but the smallest use the same
instructions for it, and the batch-invariant mode does without the smallest.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.grouped_matmul import load_group
from quire.kernels.gpu.linear import TritonLinear
from quire.kernels.gpu.tile_sizes import MatmulTiles, dot_precision, grouped_tiles, power_of_2, tiles_of_codes
from quire.kernels.grouped_weight import BITS, GroupedWeight, packed_words
from quire.kernels.moe import CLAMPED, CLAMPED_ALPHA, CLAMPED_LIMIT, GELU, ExpertWeights, Routing
from quire.kernels.weights import LinearWeight

BLOCK = 1024  # columns of one program that adds up outputs
PLAIN = ""  # the kind of weights that are no codes


@dataclass(frozen=True, eq=False)
class ExpertMatrix:
    """The weights [N, K] of one linear layer of all experts."""

    weight: Tensor  # [E, N, K]; codes: [E, N, groups, 1 + bits] int32, of `packed_words`
    bias: Tensor | None  # [E, N]
    in_features: int
    kind: str = PLAIN  # of a `GroupedWeight`

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


@dataclass(frozen=True, eq=False)
class TritonMoE:
    """A router and the weights of all experts."""

    routing: Routing
    router: TritonLinear
    gate_up: ExpertMatrix  # [2I, hidden]
    down: ExpertMatrix  # [hidden, I]
    scales: Tensor | None = None  # [E] float32, of `Ops.pack_moe`

    @property
    def hidden(self) -> int:
        return self.gate_up.in_features

    @property
    def inner(self) -> int:
        return self.down.in_features

    @property
    def kind(self) -> str:
        """The kind of the codes of gates and ups; PLAIN for other weights."""
        return self.gate_up.kind

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (self.router, self.gate_up, self.down))


class ExpertStack:
    """The weights of one linear layer, of as many experts as were added."""

    def __init__(self, num_experts: int, dtype: torch.dtype, device: torch.device) -> None:
        """dtype: of activations, and of codes that must be expanded."""
        self._num_experts, self._dtype, self._device = num_experts, dtype, device
        self._kind, self._in_features = PLAIN, 0
        self._weight: Tensor | None = None
        self._bias: Tensor | None = None

    def add(self, number: int, weight: LinearWeight, bias: Tensor | None) -> None:
        """Copy the weights of an expert. Raises ValueError for biases of some experts only, and other kinds of codes.

        Codes in an order of their own are expanded: each expert would need its rows in another order.
        """
        kind = weight.kind if isinstance(weight, GroupedWeight) and weight.order is None else PLAIN
        if isinstance(weight, GroupedWeight):
            values = weight.dequantized(self._dtype) if kind == PLAIN else packed_words(weight)
        else:
            assert isinstance(weight, Tensor)
            values = weight
        if self._weight is None:
            self._kind, self._in_features = kind, weight.shape[1]
            shape = (self._num_experts, *values.shape)
            self._weight = torch.empty(shape, dtype=values.dtype, device=self._device)
            self._bias = None if bias is None else bias.new_empty((self._num_experts, *bias.shape))
        if (self._bias is None) is not (bias is None):
            raise ValueError(f"expert {number} has other biases than expert 0")
        if kind != self._kind:
            raise ValueError(f"expert {number} has weights of the kind {kind!r}, and expert 0 of {self._kind!r}")
        self._weight[number] = values
        if self._bias is not None and bias is not None:
            self._bias[number] = bias

    def matrix(self) -> ExpertMatrix:
        assert self._weight is not None
        return ExpertMatrix(self._weight, self._bias, self._in_features, self._kind)


def pack_moe(
    routing: Routing,
    router: TritonLinear,
    experts: Iterable[ExpertWeights],
    dtype: torch.dtype,
    device: torch.device,
    scales: Tensor | None = None,
) -> TritonMoE:
    """Copy the weights of experts into one tensor for each of their layers, one expert after the other.

    dtype: of activations. scales: of `Ops.pack_moe`.
    """
    gate_up, down = (ExpertStack(routing.num_experts, dtype, device) for _ in range(2))
    for number, expert in enumerate(experts):
        gate_up.add(number, expert.gate_up, expert.gate_up_bias)
        down.add(number, expert.down, expert.down_bias)
    return TritonMoE(routing, router, gate_up.matrix(), down.matrix(), scales)


@triton.jit
def route_kernel(
    logits, ids, weights, E: tl.constexpr, PADDED: tl.constexpr, TOP_K: tl.constexpr, NORMALISED: tl.constexpr
):
    """logits [T, E] -> ids [T, TOP_K] int32, the largest logit first, and weights [T, TOP_K] float32. grid (T,)."""
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, PADDED)
    lowest = float("-inf")
    left = tl.load(logits + row * E + expert, mask=expert < E, other=lowest).to(tl.float32)
    left = tl.where(left == left, left, lowest)
    largest = tl.max(left, axis=0)
    total = tl.sum(tl.exp(left - largest), axis=0)
    if NORMALISED:
        total = 0.0
        rest = left
        free = expert < E
        for _ in tl.static_range(TOP_K):
            best = tl.argmax(tl.where(free, tl.maximum(rest, -3.0e38), lowest), axis=0)
            total += tl.exp(tl.sum(tl.where(expert == best, rest, 0.0), axis=0) - largest)
            free = free & (expert != best)
    free = expert < E
    for choice in tl.static_range(TOP_K):
        # A logit of minus infinity is larger than an expert that is taken.
        best = tl.argmax(tl.where(free, tl.maximum(left, -3.0e38), lowest), axis=0)
        logit = tl.sum(tl.where(expert == best, left, 0.0), axis=0)
        tl.store(ids + row * TOP_K + choice, best)
        tl.store(weights + row * TOP_K + choice, tl.exp(logit - largest) / total)
        free = free & (expert != best)


@triton.jit(do_not_specialize=["column_tiles"])
def grouped_kernel(
    x, weight, bias, order, starts, out, column_tiles,
    E: tl.constexpr, EXPERTS: tl.constexpr, N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr,
    GATHER: tl.constexpr, GATED: tl.constexpr, CLAMP: tl.constexpr, GELU_TANH: tl.constexpr, BIAS: tl.constexpr,
    KIND: tl.constexpr, BITS: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute products of sorted rows with the weights of their experts.

    order [P] int64: the pair (token * TOP_K + choice) of each sorted row. starts [E + 1] int64: the first sorted row of
    each expert. GATHER: x [T, K] has the rows of tokens, and out [P, N] is in sorted order; otherwise x [P, K] is in
    sorted order, and out [P, N] in the order of pairs. GATED: weight [E, 2N, K], and out is the activation of both
    products; otherwise weight [E, N, K]. bias [E, 2N] or [E, N]. EXPERTS: E, rounded up to a power of 2. KIND: of codes
    in groups of DEPTH input features, with weight [E, 2N or N, groups, 1 + BITS] int32; empty: weights are no codes.
    grid (largest number of row tiles * column_tiles,).
    """
    tile = (tl.program_id(0) // column_tiles).to(tl.int64)
    column = (tl.program_id(0) % column_tiles) * COLUMNS + tl.arange(0, COLUMNS)
    expert = tl.arange(0, EXPERTS)
    exists = expert < E
    first_row = tl.load(starts + expert, mask=exists, other=0)
    counts = tl.load(starts + 1 + expert, mask=exists, other=0) - first_row
    tiles = (counts + ROWS - 1) // ROWS
    ends = tl.cumsum(tiles, axis=0)
    if tile >= tl.sum(tiles, axis=0):
        return
    own = tl.sum((ends <= tile).to(tl.int32), axis=0)
    is_own = expert == own
    before = tl.sum(tl.where(is_own, ends - tiles, 0), axis=0)
    begin = tl.sum(tl.where(is_own, first_row, 0), axis=0)
    count = tl.sum(tl.where(is_own, counts, 0), axis=0)
    in_tile = (tile - before) * ROWS + tl.arange(0, ROWS)
    inside = in_tile < count
    sorted_row = begin + in_tile
    pair = tl.load(order + sorted_row, mask=inside, other=0)
    source = pair // TOP_K if GATHER else sorted_row
    depth = tl.arange(0, DEPTH)
    x_at = x + source[:, None] * K + depth[None, :]
    wide: tl.constexpr = 2 * N if GATED else N
    rows, columns = inside[:, None], (column < N)[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    up = tl.zeros([ROWS, COLUMNS], tl.float32)
    act = out.dtype.element_ty
    if KIND == "":
        w_at = weight + own.to(tl.int64) * wide * K + column.to(tl.int64)[None, :] * K + depth[:, None]
        for start in tl.range(0, K, DEPTH):
            deep = start + depth < K
            a = tl.load(x_at + start, mask=rows & deep[None, :], other=0.0)
            b = tl.load(w_at + start, mask=columns & deep[:, None], other=0.0)
            total = tl.dot(a, b, total, input_precision=PRECISION)
            if GATED:
                c = tl.load(w_at + N * K + start, mask=columns & deep[:, None], other=0.0)
                up = tl.dot(a, c, up, input_precision=PRECISION)
    else:
        per_word: tl.constexpr = 32 // BITS
        row_words: tl.constexpr = (K + DEPTH - 1) // DEPTH * (1 + BITS)  # of one output feature
        header_at = weight + (own.to(tl.int64) * wide + column) * row_words
        word_at = header_at[None, :] + 1 + (depth // per_word)[:, None]
        shift = (depth % per_word * BITS)[:, None]
        for group in tl.range(0, (K + DEPTH - 1) // DEPTH):
            deep = group * DEPTH + depth < K
            a = tl.load(x_at + group * DEPTH, mask=rows & deep[None, :], other=0.0)
            at = group * (1 + BITS)
            b = load_group(header_at + at, word_at + at, shift, column < N, act, KIND, BITS)
            total = tl.dot(a, b, total, input_precision=PRECISION)
            if GATED:
                at += N * row_words
                c = load_group(header_at + at, word_at + at, shift, column < N, act, KIND, BITS)
                up = tl.dot(a, c, up, input_precision=PRECISION)
    if BIAS:
        own_bias = bias + own.to(tl.int64) * wide + column
        total += tl.load(own_bias, mask=column < N, other=0.0).to(tl.float32)[None, :]
        if GATED:
            up += tl.load(own_bias + N, mask=column < N, other=0.0).to(tl.float32)[None, :]
    if GATED:
        gate, up = total.to(act).to(tl.float32), up.to(act).to(tl.float32)
        if CLAMP:
            gate = tl.minimum(gate, LIMIT)
            up = tl.minimum(tl.maximum(up, 0.0 - LIMIT), LIMIT)
            total = (up + 1.0) * (gate / (1.0 + tl.exp(-(gate * ALPHA))))
        else:
            inside_exp = gate
            if GELU_TANH:  # as in rows.py
                inside_exp = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
            total = (gate / (1.0 + tl.exp(-inside_exp))).to(act).to(tl.float32) * up
    to = sorted_row if GATHER else pair
    tl.store(out + to[:, None] * N + column[None, :], total.to(act), mask=rows & columns)


@triton.jit
def combine_kernel(outputs, weights, out, WIDTH: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """out [T, WIDTH] = the sum of outputs [T, TOP_K, WIDTH] times weights [T, TOP_K]. grid (T, cdiv(WIDTH, BLOCK))."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    total = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(TOP_K):
        pair = row * TOP_K + choice
        value = tl.load(outputs + pair * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
        total += value * tl.load(weights + pair)
    tl.store(out + row * WIDTH + column, total.to(out.dtype.element_ty), mask=inside)


def route(logits: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """Return what `quire.kernels.moe.route` defines: experts [T, k] int32, and weights [T, k] float32."""
    tokens, experts = logits.shape
    ids = torch.empty((tokens, routing.top_k), dtype=torch.int32, device=logits.device)
    weights = torch.empty((tokens, routing.top_k), dtype=torch.float32, device=logits.device)
    route_kernel[(tokens,)](
        logits, ids, weights,
        E=experts, PADDED=power_of_2(experts), TOP_K=routing.top_k, NORMALISED=routing.normalised, num_warps=1,
    )  # fmt: skip
    return ids, weights


def compute(x: Tensor, packed: TritonMoE, logits: Tensor, out: Tensor, invariant: bool = False) -> Tensor:
    """Fill and return out [T, hidden], which may be x. x [T, hidden]; logits [T, E]: of the router.

    invariant: the bits of a row do not depend on the others.
    """
    routing, tokens = packed.routing, len(x)
    if tokens == 0:
        return out
    ids, weights = route(logits, routing)
    if packed.scales is not None:
        weights *= packed.scales[ids]
    experts, order = ids.flatten().sort(stable=True)
    starts = torch.searchsorted(experts, torch.arange(routing.num_experts + 1, dtype=torch.int32, device=x.device))
    inner = x.new_empty((len(order), packed.inner))
    outputs = x.new_empty((len(order), packed.hidden))
    tiles = grouped_tiles(len(order), routing.num_experts, x.dtype, invariant)
    _grouped(x, packed.gate_up, order, starts, inner, routing, tiles, first=True)
    _grouped(inner, packed.down, order, starts, outputs, routing, tiles, first=False)
    grid = tokens, triton.cdiv(packed.hidden, BLOCK)
    combine_kernel[grid](outputs, weights, out, WIDTH=packed.hidden, TOP_K=routing.top_k, BLOCK=BLOCK)
    return out


def _grouped(
    x: Tensor,
    matrix: ExpertMatrix,
    order: Tensor,
    starts: Tensor,
    out: Tensor,
    routing: Routing,
    tiles: MatmulTiles,
    first: bool,
) -> None:
    rows, n = out.shape
    if matrix.kind != PLAIN:
        tiles = tiles_of_codes(tiles)
    # Each expert with rows adds at most one tile that is not full.
    row_tiles = min(rows, rows // tiles.rows + routing.num_experts)
    column_tiles = triton.cdiv(n, tiles.columns)
    grouped_kernel[(row_tiles * column_tiles,)](
        x, matrix.weight, x if matrix.bias is None else matrix.bias, order, starts, out, column_tiles,
        E=routing.num_experts, EXPERTS=power_of_2(routing.num_experts), N=n, K=matrix.in_features, TOP_K=routing.top_k,
        GATHER=first, GATED=first, CLAMP=routing.activation == CLAMPED, GELU_TANH=routing.activation == GELU,
        BIAS=matrix.bias is not None, KIND=matrix.kind, BITS=BITS.get(matrix.kind, 0),
        ALPHA=CLAMPED_ALPHA, LIMIT=CLAMPED_LIMIT,
        ROWS=tiles.rows, COLUMNS=tiles.columns, DEPTH=tiles.depth, PRECISION=dot_precision(x.dtype),
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
