"""The operations in plain torch: the definition of what is right, on any device and in any floating type.

Clarity comes first; `paged_attention` walks the sequences one by one. Sums are taken in float32, or in float64 for
float64 tensors, which makes this an oracle for the others. Results are not row-invariant: torch chooses its algorithms
by shape.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels import checks
from quire.kernels.cuda import accumulate_in_float32, pinned_bytes
from quire.kernels.layers import Caches, Stack, run
from quire.kernels.ops import AllReduceGroup, DecoderLayer


@dataclass
class ReferenceLinear:
    weight: Tensor  # [N, K]
    bias: Tensor | None

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (self.bias.nbytes if self.bias is not None else 0)


class ReferenceOps:
    name = "reference"
    row_invariant = False

    def __init__(self, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32) -> None:
        self.device = torch.device(device)
        if self.device.type == "cuda":
            accumulate_in_float32()
        self.dtype = self.kv_dtype = dtype
        self.sum_dtype = torch.float64 if dtype == torch.float64 else torch.float32

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> ReferenceLinear:
        checks.linear_weights(weight, bias, self.dtype)
        return ReferenceLinear(weight, bias)

    def pack_gate_up(self, weight: Tensor, bias: Tensor | None = None) -> ReferenceLinear:
        checks.linear_weights(weight, bias, self.dtype, halves=True)
        return ReferenceLinear(weight, bias)

    def linear(self, x: Tensor, packed: ReferenceLinear, out: Tensor | None = None) -> Tensor:
        checks.rows(x, packed.in_features, self.dtype)
        return _into(out, F.linear(x, packed.weight, packed.bias))

    def linear_silu_mul(self, x: Tensor, packed: ReferenceLinear, out: Tensor | None = None) -> Tensor:
        checks.rows(x, packed.in_features, self.dtype)
        gate, up = F.linear(x, packed.weight, packed.bias).chunk(2, dim=-1)
        return _into(out, F.silu(gate) * up)

    def linear_logits(self, x: Tensor, packed: ReferenceLinear, out: Tensor | None = None) -> Tensor:
        checks.rows(x, packed.in_features, self.dtype)
        wide = x.to(self.sum_dtype)
        # In pieces: a wide copy of the whole head would double the largest weight of a small model.
        pieces = [F.linear(wide, rows.to(self.sum_dtype)) for rows in packed.weight.split(8192)]
        logits = torch.cat(pieces, dim=-1)
        return _into(out, (logits if packed.bias is None else logits + packed.bias).float())

    def embed(self, token_ids: Tensor, table: Tensor) -> Tensor:
        checks.token_ids(token_ids, table, self.dtype)
        return F.embedding(token_ids, table)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        checks.norm(x, weight, self.dtype)
        return self._normalise(x, weight, eps)

    def _normalise(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(self.sum_dtype)
        return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        checks.same_rows(x, residual, self.dtype)
        residual += x
        return self.rms_norm(residual, weight, eps)

    def rope_and_cache(
        self,
        qkv: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        slot_mapping: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        num_heads: int,
        num_kv_heads: int,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 1e-6,
    ) -> Tensor:
        _, _, block_size, d = checks.caches(k_cache, v_cache, num_kv_heads, self.dtype)
        checks.rope(qkv, positions, cos_sin, slot_mapping, num_heads, num_kv_heads, d, q_norm, k_norm, self.dtype)
        q, k, v = qkv.view(len(qkv), -1, d).split([num_heads, num_kv_heads, num_kv_heads], dim=1)
        q = q if q_norm is None else self._normalise(q, q_norm, eps)
        k = k if k_norm is None else self._normalise(k, k_norm, eps)
        cos, sin = cos_sin[positions.long()].to(self.sum_dtype)[:, None].chunk(2, dim=-1)  # [T, 1, D/2] each
        keep = slot_mapping >= 0
        block, offset = slot_mapping[keep].long() // block_size, slot_mapping[keep].long() % block_size
        k_cache[block, :, offset] = _rotate(k, cos, sin)[keep]
        v_cache[block, :, offset] = v[keep]
        return _rotate(q, cos, sin)

    def plan_attention(self, block_tables: Tensor, seq_lens: Tensor, query_start_loc: Tensor) -> None:
        return None

    def paged_attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
        query_start_loc: Tensor,
        scale: float,
        sliding_window: int = 0,
        out: Tensor | None = None,
        plan: object = None,
    ) -> Tensor:
        _, kv_heads, block_size, d = checks.caches(k_cache, v_cache, None, self.dtype)
        checks.attention(q, kv_heads, d, block_tables, seq_lens, query_start_loc, scale, sliding_window, self.dtype)
        out = torch.empty_like(q) if out is None else out.view_as(q)
        starts = query_start_loc.tolist()
        for s, length in enumerate(seq_lens.tolist()):
            queries = q[starts[s] : starts[s + 1]].to(self.sum_dtype)
            first = length - len(queries)
            if first < 0 or (length + block_size - 1) // block_size > block_tables.shape[1]:
                raise IndexError(f"sequence {s}: {len(queries)} queries in a context of {length} do not fit its table")
            if len(queries) == 0:
                continue
            lowest_block = max(0, first - sliding_window + 1) // block_size if sliding_window else 0
            blocks = block_tables[s, lowest_block : (length + block_size - 1) // block_size].long()
            lowest = lowest_block * block_size
            k, v = (
                cache[blocks].transpose(0, 1).reshape(kv_heads, -1, d)[:, : length - lowest].to(self.sum_dtype)
                for cache in (k_cache, v_cache)
            )
            position = torch.arange(first, length, device=q.device)[:, None]
            key = torch.arange(lowest, length, device=q.device)
            seen = key <= position
            if sliding_window:
                seen &= key > position - sliding_window
            grouped = queries.view(len(queries), kv_heads, -1, d)  # [queries, H_kv, G, D]
            scores = torch.einsum("qhgd,hkd->hgqk", grouped, k) * scale
            weights = scores.masked_fill(~seen, float("-inf")).softmax(dim=-1)
            # Keys that no query of the tile sees may be unwritten memory: zero times NaN must not count.
            v = v.masked_fill(~seen.any(dim=0)[:, None], 0)
            mixed = torch.einsum("hgqk,hkd->qhgd", weights, v)
            out[starts[s] : starts[s + 1]] = mixed.reshape(len(queries), -1, d).to(out.dtype)
        return out.view(len(q), -1)

    def stack_layers(
        self,
        layers: Sequence[DecoderLayer],
        final_norm: Tensor,
        kv_cache: Sequence[tuple[Tensor, Tensor]],
        cos_sin: Tensor,
        num_heads: int,
        num_kv_heads: int,
        eps: float,
        scale: float,
        ranks: AllReduceGroup | None = None,
    ) -> Stack:
        stack = Stack(layers, final_norm, kv_cache, cos_sin, num_heads, num_kv_heads, eps, scale, ranks)
        stack.check(self.dtype)
        return stack

    def decoder_layers(
        self,
        residual: Tensor,
        stack: Stack,
        positions: Tensor,
        slot_mapping: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
        query_start_loc: Tensor,
        rows: Tensor,
    ) -> Tensor:
        step = positions, slot_mapping, block_tables, seq_lens, query_start_loc, rows
        return run(self, residual, stack, *step)

    def alloc_kv_cache(
        self, num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor]:
        checks.cache_shape(block_size, head_dim, dtype, self.dtype)
        shape = (num_blocks, num_kv_heads, block_size, head_dim)
        k, v = (torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in range(2))
        return k, v

    def plain_kv_cache(self, k_cache: Tensor, v_cache: Tensor) -> tuple[Tensor, Tensor]:
        return k_cache.clone(), v_cache.clone()

    def stack_caches(self, kv_cache: Sequence[tuple[Tensor, Tensor]]) -> Caches:
        caches = Caches(kv_cache)
        caches.check_caches(None, self.dtype)
        return caches

    def copy_blocks(self, stack: Caches | Stack, src: Tensor, dst: Tensor) -> None:
        checks.block_copies(src, dst, stack.num_blocks)
        for pair in stack.kv_cache:
            for cache in pair:
                cache[dst] = cache[src]

    def alloc_host_blocks(self, stack: Caches | Stack, num_blocks: int) -> Tensor:
        shape = (num_blocks, *stack.block_shape)
        if self.device.type != "cuda":
            return torch.empty(shape, dtype=self.dtype)
        return pinned_bytes(math.prod(shape) * self.dtype.itemsize).view(self.dtype).view(shape)

    def swap_out(self, stack: Caches | Stack, host: Tensor, src: Tensor, dst: Tensor) -> None:
        checks.host_blocks(host, stack.block_shape, self.dtype)
        checks.block_moves(src, dst, stack.num_blocks, len(host))
        for layer, pair in enumerate(stack.kv_cache):
            for which, cache in enumerate(pair):
                host[dst, layer, which] = cache[src].to(host.device)

    def swap_in(self, stack: Caches | Stack, host: Tensor, src: Tensor, dst: Tensor) -> None:
        checks.host_blocks(host, stack.block_shape, self.dtype)
        checks.block_moves(src, dst, len(host), stack.num_blocks)
        for layer, pair in enumerate(stack.kv_cache):
            for which, cache in enumerate(pair):
                cache[dst] = host[src, layer, which].to(cache.device)

    def argmax(self, logits: Tensor) -> Tensor:
        checks.logits(logits)
        return _nan_is_lowest(logits).argmax(dim=-1).int()

    def sample(
        self, logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor
    ) -> Tensor:
        checks.sampling(logits, temperature, top_k, top_p, min_p, uniform)
        logits = _nan_is_lowest(logits)
        largest = logits.max(dim=-1, keepdim=True).values
        shifted = torch.where(logits == largest, 0.0, (logits - largest) / temperature[:, None])
        p = torch.where(largest == float("-inf"), 0.0, shifted.exp()).double()

        ordered = logits.sort(dim=-1, descending=True).values
        vocabulary = logits.shape[1]
        k = torch.where((top_k > 0) & (top_k < vocabulary), top_k, vocabulary).long()
        p = p.masked_fill(logits < ordered.gather(1, k[:, None] - 1), 0)

        ordered = p.sort(dim=-1, descending=True).values
        mass = ordered.cumsum(dim=-1)
        # The crossing id is the first whose cumulative mass reaches the target.
        crossing = (mass < top_p[:, None].double() * mass[:, -1:]).sum(dim=-1, keepdim=True).clamp_max(vocabulary - 1)
        lowest = torch.where(top_p[:, None] < 1, ordered.gather(1, crossing), 0.0)
        lowest = torch.maximum(lowest, min_p[:, None].double().clamp(max=1))
        p = p.masked_fill(p < lowest, 0)

        mass = p.cumsum(dim=-1)
        drawn = (mass <= uniform[:, None] * mass[:, -1:]).sum(dim=-1)
        last = vocabulary - 1 - (p > 0).int().flip(-1).argmax(dim=-1)  # for uniform * total that rounds up to the total
        return torch.where(mass[:, -1] > 0, torch.minimum(drawn, last), 0).int()

    def penalise(
        self,
        logits: Tensor,
        starts: Tensor,
        ids: Tensor,
        counts: Tensor,
        repetition: Tensor,
        presence: Tensor,
        frequency: Tensor,
    ) -> None:
        penalise(logits, starts, ids, counts, repetition, presence, frequency)

    def top_logprobs(self, logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
        checks.top_logprobs(logits, count)
        ids = _nan_is_lowest(logits).sort(dim=-1, descending=True, stable=True).indices[:, :count]
        return _log_softmax(logits).gather(1, ids), ids.int()

    def logprobs_of(self, logits: Tensor, ids: Tensor) -> Tensor:
        checks.logprobs_of(logits, ids)
        vocabulary = logits.shape[1]
        if (bad := ((ids < 0) | (ids >= vocabulary)).nonzero()).numel():
            raise IndexError(checks.no_such_id(int(bad[0]), ids, vocabulary))
        return _log_softmax(logits).gather(1, ids[:, None].long())[:, 0]


def _into(out: Tensor | None, value: Tensor) -> Tensor:
    return value if out is None else out.copy_(value)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


def _nan_is_lowest(logits: Tensor) -> Tensor:
    return logits.masked_fill(logits.isnan(), float("-inf"))


def _log_softmax(logits: Tensor) -> Tensor:
    logits = _nan_is_lowest(logits)
    largest = logits.max(dim=-1, keepdim=True).values
    is_largest = logits == largest
    shifted = torch.where(is_largest, 0.0, logits.double() - largest)  # infinity minus itself would be NaN
    # Without the largest, which is 1: where it has nearly all of the mass, the rest would be lost in the sum.
    rest = shifted.exp().masked_fill(is_largest, 0).sum(dim=-1, keepdim=True)
    log_sum = torch.log1p(rest + (is_largest.sum(dim=-1, keepdim=True) - 1))
    return torch.where(logits == float("-inf"), logits, shifted - log_sum).float()


def penalise(
    logits: Tensor,
    starts: Tensor,
    ids: Tensor,
    counts: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> None:
    """`Ops.penalise` in plain torch, on any device."""
    checks.logits(logits)
    rows = torch.arange(len(logits), device=logits.device).repeat_interleave(starts.diff())
    at = rows * logits.shape[1] + ids
    flat = logits.view(-1)
    values, factor = flat[at], repetition[rows]
    values = torch.where(values > 0, values / factor, values * factor)
    generated = presence[rows] + frequency[rows] * counts
    flat[at] = values - torch.where(counts > 0, generated, 0.0)
