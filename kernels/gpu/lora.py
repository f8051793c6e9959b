"""Low-rank adapters of many requests in one batch: two grouped products for each linear layer (`quire.kernels.lora`).

Rows are sorted by adapter on the host, and cut into tiles of one adapter. The first kernel computes x A^T for the tiles
of all adapters, and the second one adds the products with B to the outputs. The factors of an adapter are found through
a table of addresses on the device, so that a step uploads the tiles alone.

The input features are divided among SPLITS programs, whose sums are added in one order. A tile has always ROWS rows, so
the bits of a row do not depend on the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.tile_sizes import MIN_ROWS, dot_precision, power_of_2
from quire.kernels.lora import (
    ENDS,
    LINEARS,
    LoraLayer,
    LoraPart,
    NormsOfLayer,
    PackedAdapter,
    TorchAdapter,
    pack_adapter,
)

ROWS, COLUMNS, DEPTH = MIN_ROWS, 64, 64
SPLITS = 4
MAX_RANKS = 32  # ranks of a tile
PARTS = 3  # of a linear layer: queries, keys and values
# Of a part in the table: addresses of A and B, rank, width, offset, the bits of the scale, and the address of the
# gains or 0.
FIELDS = 7
# The places of linear layers in an entry of the table, and those of ENDS in the first one.
PLACES = {name: at for names in (LINEARS, ENDS) for at, name in enumerate(names)}


@dataclass(frozen=True, slots=True, eq=False)
class TritonAdapter(TorchAdapter):
    """An adapter on a device.

    table: int64 [1 + layers, LINEARS, PARTS, FIELDS] there, with ENDS as the first entry; a part without columns is
    zeros. rank, widths: the largest of all parts, and of the parts of each of PLACES.
    """

    table: Tensor
    dtype: torch.dtype
    rank: int
    widths: dict[str, int]


def pack_triton_adapter(
    layers: Sequence[LoraLayer], device: torch.device, norms: Sequence[NormsOfLayer] = ()
) -> TritonAdapter:
    """Copy an adapter to a device. Factors of several types become float32."""
    packed = pack_adapter(layers, device, norms)
    parts = [part for layer in packed.layers for of_layer in layer.values() for part in of_layer]
    dtypes = {part.a.dtype for part in parts} | {part.b.dtype for part in parts}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    if dtypes:
        packed = pack_adapter(
            [{name: [_wide(part) for part in of] for name, of in at.items()} for at in layers], device, norms
        )
    table = np.zeros((1 + len(packed.layers), len(LINEARS), PARTS, FIELDS), dtype=np.int64)
    widths = dict.fromkeys(PLACES, 0)
    for number, of_layer in enumerate(packed.layers):
        for name, of_linear in of_layer.items():
            places = table[0 if name in ENDS else 1 + number][PLACES[name]]
            for entry, part in zip(places, of_linear, strict=False):
                scale = np.array([part.scale], dtype=np.float32).view(np.int32)[0]
                gains = 0 if part.gains is None else part.gains.data_ptr()
                entry[:] = part.a.data_ptr(), part.b.data_ptr(), len(part.a), len(part.b), part.offset, scale, gains
                widths[name] = max(widths[name], len(part.b))
    rank = max((len(part.a) for part in parts), default=0)
    on_device = torch.from_numpy(table).to(device)
    return TritonAdapter(packed.layers, packed.norms, on_device, dtype, rank, widths)


def _wide(part: LoraPart) -> LoraPart:
    return replace(part, a=part.a.float(), b=part.b.float())


@triton.jit
def load_part(tables, adapter, entry, NARROW: tl.constexpr, FIELDS: tl.constexpr):
    """Return A, B, rank, width, offset and scale of a part. NARROW: A and B are bfloat16; otherwise float32."""
    at = tl.load(tables + adapter).to(tl.pointer_type(tl.int64)) + entry * FIELDS
    if NARROW:
        a = tl.load(at).to(tl.pointer_type(tl.bfloat16))
        b = tl.load(at + 1).to(tl.pointer_type(tl.bfloat16))
    else:
        a = tl.load(at).to(tl.pointer_type(tl.float32))
        b = tl.load(at + 1).to(tl.pointer_type(tl.float32))
    a, b = tl.multiple_of(a, 16), tl.multiple_of(b, 16)  # torch allocates at multiples of 64 bytes at least
    scale = tl.load(at + 5).to(tl.int32).to(tl.float32, bitcast=True)
    return a, b, tl.load(at + 2), tl.load(at + 3), tl.load(at + 4), scale


@triton.jit(do_not_specialize=["first_entry", "pairs"])
def shrink_kernel(
    x, tables, tiles, rows, reduced, first_entry, pairs, K,
    NARROW: tl.constexpr, PARTS: tl.constexpr, FIELDS: tl.constexpr, SPLITS: tl.constexpr,
    ROWS: tl.constexpr, RANKS: tl.constexpr, CHUNKS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """reduced [SPLITS, pairs, PARTS, CHUNKS * RANKS] float32 = scale * x A^T, for a part of the K input features each.

    x [T, K]. tables [E] int64: addresses of tables of adapters. tiles [n, 3] int64: the adapter of a tile, its first
    entry in `rows`, and the number of its rows. rows [pairs] int64: rows of x, sorted by adapter. first_entry: of the
    linear layer in a table. grid (n, PARTS * CHUNKS, SPLITS).
    """
    tile, split = tl.program_id(0), tl.program_id(2)
    part, chunk = tl.program_id(1) // CHUNKS, tl.program_id(1) % CHUNKS
    adapter, first, count = tl.load(tiles + tile * 3), tl.load(tiles + tile * 3 + 1), tl.load(tiles + tile * 3 + 2)
    a, _, rank, _, _, scale = load_part(tables, adapter, first_entry + part, NARROW, FIELDS)
    at, ranks = tl.arange(0, ROWS), chunk * RANKS + tl.arange(0, RANKS)
    if chunk * RANKS >= rank:
        return
    inside, exists = (at < count)[:, None], (ranks < rank)[None, :]
    row = tl.load(rows + first + at, mask=at < count, other=0)
    depth = tl.arange(0, DEPTH)
    x_at, a_at = x + row[:, None] * K + depth[None, :], a + ranks.to(tl.int64)[None, :] * K + depth[:, None]
    total = tl.zeros([ROWS, RANKS], tl.float32)
    is_alike: tl.constexpr = x.dtype.element_ty == a.dtype.element_ty
    for start in tl.range(split * DEPTH, K, SPLITS * DEPTH):
        deep = start + depth < K
        given = tl.load(x_at + start, mask=inside & deep[None, :], other=0.0)
        factor = tl.load(a_at + start, mask=exists & deep[:, None], other=0.0)
        if not is_alike:
            given, factor = given.to(tl.float32), factor.to(tl.float32)
        total = tl.dot(given, factor, total, input_precision=PRECISION)
    to = ((split.to(tl.int64) * pairs + first + at) * PARTS + part) * (CHUNKS * RANKS)
    tl.store(reduced + to[:, None] + ranks[None, :], total * scale, mask=inside)


@triton.jit(do_not_specialize=["first_entry", "pairs"])
def expand_kernel(
    reduced, tables, tiles, rows, y, first_entry, pairs, N,
    NARROW: tl.constexpr, PARTS: tl.constexpr, FIELDS: tl.constexpr, SPLITS: tl.constexpr,
    ROWS: tl.constexpr, RANKS: tl.constexpr, CHUNKS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add to the columns of a part in y [T, N] the sum over the splits of `reduced`, times B^T, and apply the gains.

    All is rounded once. Other arguments as of `shrink_kernel`. grid (n, PARTS, columns of the widest part / COLUMNS).
    """
    tile, part = tl.program_id(0), tl.program_id(1)
    adapter, first, count = tl.load(tiles + tile * 3), tl.load(tiles + tile * 3 + 1), tl.load(tiles + tile * 3 + 2)
    _, b, rank, width, offset, _ = load_part(tables, adapter, first_entry + part, NARROW, FIELDS)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    if tl.program_id(2) * COLUMNS >= width:
        return
    at = tl.arange(0, ROWS)
    inside, exists = (at < count)[:, None], (column < width)[None, :]
    row = tl.load(rows + first + at, mask=at < count, other=0)
    gains_at = tl.load(
        tl.load(tables + adapter).to(tl.pointer_type(tl.int64)) + (first_entry + part) * FIELDS + 6
    ).to(tl.pointer_type(tl.float32))  # fmt: skip
    has_gains = gains_at.to(tl.int64) != 0
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for chunk in tl.range(0, CHUNKS):
        ranks = chunk * RANKS + tl.arange(0, RANKS)
        real = ranks < rank
        given = tl.zeros([ROWS, RANKS], tl.float32)
        for split in tl.static_range(SPLITS):
            of = ((split * pairs + first + at).to(tl.int64) * PARTS + part) * (CHUNKS * RANKS)
            given += tl.load(reduced + of[:, None] + ranks[None, :], mask=inside & real[None, :], other=0.0)
        factor = tl.load(
            b + column.to(tl.int64)[None, :] * rank + ranks[:, None], mask=exists & real[:, None], other=0.0
        )
        total = tl.dot(given, factor.to(tl.float32), total, input_precision=PRECISION)
    to = y + row[:, None] * N + offset + column[None, :]
    values = tl.load(to, mask=inside & exists, other=0.0).to(tl.float32) + total
    if has_gains:
        gain = tl.load(gains_at + column, mask=column < width, other=1.0)
        shift = tl.load(gains_at + width + column, mask=column < width, other=0.0)
        values = values * gain[None, :] + shift[None, :]
    tl.store(to, values.to(y.dtype.element_ty), mask=inside & exists)


class AdapterTiles:
    """The rows of a step that use adapters with factors of one type, on the device."""

    def __init__(self, adapters: dict[int, TritonAdapter], index: np.ndarray, device: torch.device) -> None:
        """adapters: by their number in `index` int32 [T], of an `AdapterBatch`."""
        numbers = list(adapters)
        self.adapters = list(adapters.values())
        rows = np.concatenate([np.flatnonzero(index == number) for number in numbers])
        self.counts = [int((index == number).sum()) for number in numbers]
        tiles, first = [], 0
        for adapter, count in enumerate(self.counts):
            tiles += [(adapter, first + at, min(ROWS, count - at)) for at in range(0, count, ROWS)]
            first += count
        addresses = [adapter.table.data_ptr() for adapter in self.adapters]
        packed = np.concatenate([addresses, np.array(tiles, dtype=np.int64).ravel(), rows]).astype(np.int64)
        on_device = torch.from_numpy(packed).to(device, non_blocking=True)
        sizes = [len(addresses), 3 * len(tiles), len(rows)]
        self.tables, self.tiles, self.rows = torch.split(on_device, sizes)
        self.num_tiles, self.pairs = len(tiles), len(rows)
        rank = max(adapter.rank for adapter in self.adapters)
        self.ranks = min(MAX_RANKS, max(MIN_ROWS, power_of_2(rank)))
        self.chunks = triton.cdiv(rank, self.ranks)
        self.dtype = self.adapters[0].dtype

    def apply(self, layer: int, name: str, x: Tensor, y: Tensor) -> None:
        """Compute both products. layer: -1 for the head."""
        if not self._width(name):
            return
        reduced = torch.empty(self._shape, dtype=torch.float32, device=x.device)
        product = x.dtype if x.dtype == self.dtype else torch.float32
        shrink_kernel[(self.num_tiles, PARTS * self.chunks, SPLITS)](
            x, self.tables, self.tiles, self.rows, reduced, self._entry(layer, name), self.pairs, x.shape[1],
            DEPTH=DEPTH, PRECISION=dot_precision(product), **self._common,
        )  # fmt: skip
        self._expand(layer, name, reduced, y)

    def embed(self, token_ids: Tensor, y: Tensor) -> None:
        """Change embeddings: the first product is a column of A for each token."""
        if not self._width("embedding"):
            return
        reduced = torch.zeros(self._shape, dtype=torch.float32, device=y.device)
        first = 0
        for adapter, count in zip(self.adapters, self.counts, strict=True):
            for part in adapter.layers[-1].get("embedding", ()):
                ids = token_ids[self.rows[first : first + count]].long()
                reduced[0, first : first + count, 0, : len(part.a)] = part.a[:, ids].float().T * part.scale
            first += count
        self._expand(-1, "embedding", reduced, y)

    def _expand(self, layer: int, name: str, reduced: Tensor, y: Tensor) -> None:
        expand_kernel[(self.num_tiles, PARTS, triton.cdiv(self._width(name), COLUMNS))](
            reduced, self.tables, self.tiles, self.rows, y, self._entry(layer, name), self.pairs, y.shape[1],
            COLUMNS=COLUMNS, PRECISION=dot_precision(torch.float32), **self._common,
        )  # fmt: skip

    def _width(self, name: str) -> int:
        return max(adapter.widths[name] for adapter in self.adapters)

    @staticmethod
    def _entry(layer: int, name: str) -> int:
        return ((1 + layer) * len(LINEARS) + PLACES[name]) * PARTS

    @property
    def _shape(self) -> tuple[int, ...]:
        """The shape of the first products."""
        return SPLITS, self.pairs, PARTS, self.chunks * self.ranks

    @property
    def _common(self) -> dict[str, object]:
        return {
            "NARROW": self.dtype == torch.bfloat16, "PARTS": PARTS, "FIELDS": FIELDS, "SPLITS": SPLITS, "ROWS": ROWS,
            "RANKS": self.ranks, "CHUNKS": self.chunks, "num_warps": 4,
        }  # fmt: skip


class TritonAdaptedRows:
    """`quire.kernels.lora.AdaptedRows`, with grouped products of all adapters."""

    def __init__(self, adapters: Sequence[PackedAdapter], index: np.ndarray, device: torch.device) -> None:
        """index int32 [T]: of `AdapterBatch`."""
        by_type: dict[torch.dtype, dict[int, TritonAdapter]] = {}
        for number, adapter in enumerate(adapters):
            assert isinstance(adapter, TritonAdapter)
            if adapter.rank and (index == number).any():
                by_type.setdefault(adapter.dtype, {})[number] = adapter
        self._groups = [AdapterTiles(group, index, device) for group in by_type.values()]

    def apply(self, layer: int, name: str, x: Tensor, y: Tensor) -> None:
        """Change the rows of y [T, N] by what their adapters make of the rows of x [T, K]. Both are contiguous."""
        for group in self._groups:
            group.apply(layer, name, x, y)

    def embed(self, token_ids: Tensor, y: Tensor) -> None:
        """Change the embeddings y [T, H] of tokens [T]."""
        for group in self._groups:
            group.embed(token_ids, y)

    def head(self, x: Tensor, y: Tensor) -> None:
        """Change logits y float32 [R, V] of the rows of x [R, H]."""
        self.apply(-1, "head", x, y)
