"""The operations of kernels/ops.py in plain torch: the definition of correct results, on any device.

The code prefers clarity to speed: `paged_attention` computes one sequence at a time. Sums are taken in float32, or in
float64 for float64 tensors, against which tests compare other implementations. Results are not row-invariant, because
torch chooses algorithms by shape.
"""

import math
from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels import checks, kv_values
from quire.kernels.gpu.cuda import accumulate_in_float32, pinned_bytes
from quire.kernels.grouped_weight import KINDS
from quire.kernels.interrupt import Interrupt
from quire.kernels.k_quant_weight import K_QUANTS
from quire.kernels.layers import run_layers
from quire.kernels.lora import AdaptedRows, AdapterBatch, LoraLayer, NormsOfLayer, TorchAdapter, pack_adapter
from quire.kernels.moe import ExpertWeights, PackedMoE, Routing, check_experts, check_scales, route
from quire.kernels.nvfp4_weight import NVFP4
from quire.kernels.ops import AddedRows, AllReduceGroup, CacheStack, DecoderLayer, LayerStack, PackedLinear
from quire.kernels.quantization import QuantizedLinear, QuantizedWeight, quantized_linear
from quire.kernels.reference_linear import ReferenceLinear, ReferenceMoE, ReferencePacked, reference_moe
from quire.kernels.stack import Caches, Stack
from quire.kernels.weights import CodedWeight, LinearWeight, WeightRows, whole


class ReferenceOps:
    """The operations in plain torch.

    dtype: of weights and activations, any floating type; quantised weights need float32. kv_dtype: of the cache, a
    floating type or int8; `dtype` if None.
    """

    name = "reference"
    row_invariant = False

    def __init__(
        self,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.device = torch.device(device)
        if self.device.type == "cuda":
            accumulate_in_float32()
        self.dtype, self.kv_dtype = dtype, kv_dtype or dtype
        self.sum_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self.weight_dtypes: tuple[torch.dtype, ...] = (dtype,)
        self.quantized_bits: tuple[int, ...] = (8, 4) if dtype == torch.float32 else ()
        self.code_kinds = (*KINDS, *K_QUANTS, NVFP4)

    def pack_linear(self, weight: LinearWeight | WeightRows, bias: Tensor | None = None) -> ReferencePacked:
        return self._pack(weight, bias, halves=False)

    def pack_gate_up(self, weight: LinearWeight | WeightRows, bias: Tensor | None = None) -> ReferencePacked:
        return self._pack(weight, bias, halves=True)

    def _pack(self, weight: LinearWeight | WeightRows, bias: Tensor | None, halves: bool) -> ReferencePacked:
        weight = whole(weight)
        checks.linear_weights(weight, self.weight_dtypes, self.quantized_bits, self.code_kinds, halves)
        checks.linear_bias(bias, self.weight_dtypes, weight.shape)
        if isinstance(weight, QuantizedWeight):
            return QuantizedLinear(weight, bias)
        if isinstance(weight, CodedWeight):
            return ReferenceLinear(weight.dequantized(self.dtype), bias)
        return ReferenceLinear(weight, bias)

    def _product(self, x: Tensor, packed: PackedLinear) -> Tensor:
        checks.rows(x, packed.in_features, self.dtype)
        if isinstance(packed, QuantizedLinear):
            return quantized_linear(x, packed.weight, packed.bias)
        assert isinstance(packed, ReferenceLinear)
        return F.linear(x, packed.weight, packed.bias)

    def pack_moe(
        self, routing: Routing, router: PackedLinear, experts: Iterable[ExpertWeights], scales: Tensor | None = None
    ) -> ReferenceMoE:
        checks.router(router, routing)
        check_scales(scales, routing)
        packed = [
            (self._pack(expert.gate_up, expert.gate_up_bias, True), self._pack(expert.down, expert.down_bias, False))
            for expert in check_experts(routing, router.in_features, experts)
        ]
        return ReferenceMoE(routing, router, packed, scales)

    def moe(
        self, x: Tensor, packed: PackedMoE, out: Tensor | None = None, router_input: Tensor | None = None
    ) -> Tensor:
        assert isinstance(packed, ReferenceMoE)
        router_input = x if router_input is None else router_input
        checks.same_rows(x, router_input, self.dtype)
        logits = self._product(router_input, packed.router)
        ids, weights = route(logits, packed.routing, packed.scales)
        return _into(out, reference_moe(x, ids, weights, packed, self._product))

    def pack_adapter(self, layers: Sequence[LoraLayer], inner: int, norms: Sequence[NormsOfLayer] = ()) -> TorchAdapter:
        return pack_adapter(layers, self.device, norms)

    def adapt_embeddings(self, embeddings: Tensor, token_ids: Tensor, adapters: AdapterBatch) -> None:
        AdaptedRows(adapters.adapters, adapters.tokens, self.device).embed(token_ids, embeddings)

    def adapt_logits(self, logits: Tensor, hidden: Tensor, adapters: AdapterBatch) -> None:
        AdaptedRows(adapters.adapters, adapters.wanted[: len(hidden)], self.device).head(hidden, logits)

    def linear(self, x: Tensor, packed: PackedLinear, out: Tensor | None = None) -> Tensor:
        return _into(out, self._product(x, packed))

    def linear_silu_mul(self, x: Tensor, packed: PackedLinear, out: Tensor | None = None) -> Tensor:
        gate, up = self._product(x, packed).chunk(2, dim=-1)
        return _into(out, F.silu(gate) * up)

    def linear_gelu_mul(self, x: Tensor, packed: PackedLinear, out: Tensor | None = None) -> Tensor:
        gate, up = self._product(x, packed).chunk(2, dim=-1)
        return _into(out, F.gelu(gate, approximate="tanh") * up)

    def linear_logits(self, x: Tensor, packed: PackedLinear, out: Tensor | None = None) -> Tensor:
        if isinstance(packed, QuantizedLinear):
            return _into(out, self._product(x, packed))
        assert isinstance(packed, ReferenceLinear)
        checks.rows(x, packed.in_features, self.dtype)
        wide = x.to(self.sum_dtype)
        # In pieces: a float32 copy of the whole head would double the memory of the largest weight of a small model.
        pieces = [F.linear(wide, rows.to(self.sum_dtype)) for rows in torch.split(packed.weight, 8192)]
        logits = torch.cat(pieces, dim=-1)
        return _into(out, (logits if packed.bias is None else logits + packed.bias).float())

    def embed(self, token_ids: Tensor, table: Tensor) -> Tensor:
        checks.token_ids(token_ids, table, self.weight_dtypes)
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
        v_norm: Tensor | None = None,
    ) -> Tensor:
        _, _, block_size, d = checks.caches(k_cache, v_cache, num_kv_heads or None, self.kv_dtype)
        norms = q_norm, k_norm, v_norm
        checks.rope(qkv, positions, cos_sin, slot_mapping, num_heads, num_kv_heads, d, norms, self.dtype)
        heads = [num_heads, num_kv_heads, num_kv_heads]
        q, k, v = torch.split(qkv.view(len(qkv), -1, d), heads, dim=1)
        q = q if q_norm is None else self._normalise(q, q_norm, eps)
        k = k if k_norm is None else self._normalise(k, k_norm, eps)
        v = v if v_norm is None else self._normalise(v, v_norm, eps)
        cos, sin = cos_sin[positions.long()].to(self.sum_dtype)[:, None].chunk(2, dim=-1)  # [T, 1, D/2] each
        if num_kv_heads == 0:
            return _rotate(q, cos, sin)
        keep = slot_mapping >= 0
        block, offset = slot_mapping[keep].long() // block_size, slot_mapping[keep].long() % block_size
        for cache, rows in ((k_cache, _rotate(k, cos, sin)), (v_cache, v)):
            indexable(cache)[block, :, offset] = indexable(kv_values.encode(rows[keep], self.kv_dtype))
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
        sinks: Tensor | None = None,
        softcap: float = 0.0,
        key_ends: Tensor | None = None,
    ) -> Tensor:
        _, kv_heads, block_size, d = checks.caches(k_cache, v_cache, None, self.kv_dtype)
        tables = block_tables, seq_lens, query_start_loc
        checks.attention(q, kv_heads, d, *tables, scale, sliding_window, self.dtype, sinks, softcap, key_ends)
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
                kv_values.decode(indexable(cache)[blocks].view(self.kv_dtype), self.sum_dtype)
                .transpose(0, 1)
                .reshape(kv_heads, -1, d)[:, : length - lowest]
                for cache in (k_cache, v_cache)
            )
            position = torch.arange(first, length, device=q.device)[:, None]
            key = torch.arange(lowest, length, device=q.device)
            seen = key <= position if key_ends is None else key < key_ends[starts[s] : starts[s + 1], None]
            if sliding_window:
                seen &= key > position - sliding_window
            grouped = queries.view(len(queries), kv_heads, -1, d)  # [queries, H_kv, G, D]
            scores = torch.einsum("qhgd,hkd->hgqk", grouped, k) * scale
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            scores = scores.masked_fill(~seen, float("-inf"))
            if sinks is not None:
                logits = sinks.to(scores.dtype).view(kv_heads, -1, 1, 1).expand(*scores.shape[:3], 1)
                scores = torch.cat([scores, logits], dim=-1)
            weights = scores.softmax(dim=-1)[..., : len(key)]
            # A key that no query sees may be unwritten memory, and its weight of zero times NaN would be NaN.
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
        softcap: float = 0.0,
    ) -> Stack:
        stack = Stack(kv_cache, layers, final_norm, cos_sin, num_heads, num_kv_heads, eps, scale, ranks, softcap)
        stack.check(self.dtype, self.kv_dtype)
        return stack

    def decoder_layers(
        self,
        residual: Tensor,
        stack: LayerStack,
        positions: Tensor,
        slot_mapping: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
        query_start_loc: Tensor,
        rows: Tensor,
        adapters: AdapterBatch | None = None,
        interrupt: Interrupt | None = None,
        layer_inputs: Tensor | None = None,
        added: AddedRows | None = None,
        key_ends: Tensor | None = None,
    ) -> Tensor:
        assert isinstance(stack, Stack)
        step = positions, slot_mapping, block_tables, seq_lens, query_start_loc, rows
        return run_layers(self, residual, stack, *step, adapters, interrupt, layer_inputs, added, key_ends)

    def alloc_kv_cache(
        self, num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int
    ) -> tuple[Tensor, Tensor]:
        checks.cache_shape(block_size, head_dim)
        shape = (num_blocks, num_kv_heads, block_size, checks.cache_width(head_dim, self.kv_dtype))
        k, v = (torch.zeros(shape, dtype=self.kv_dtype, device=self.device) for _ in range(2))
        return k, v

    def plain_kv_cache(self, k_cache: Tensor, v_cache: Tensor) -> tuple[Tensor, Tensor]:
        return k_cache.clone(), v_cache.clone()

    def stack_caches(self, kv_cache: Sequence[tuple[Tensor, Tensor]]) -> Caches:
        caches = Caches(kv_cache)
        caches.check_caches(None, self.kv_dtype)
        return caches

    def copy_blocks(self, stack: CacheStack, src: Tensor, dst: Tensor) -> None:
        assert isinstance(stack, Caches)
        checks.block_copies(src, dst, stack.num_blocks)
        for cache in map(indexable, stack.tensors):
            cache[dst] = cache[src]

    def alloc_host_blocks(self, stack: CacheStack, num_blocks: int) -> Tensor:
        assert isinstance(stack, Caches)
        shape = (num_blocks, *stack.block_shape)
        if self.device.type != "cuda":
            return torch.empty(shape, dtype=self.kv_dtype)
        return pinned_bytes(math.prod(shape) * self.kv_dtype.itemsize).view(self.kv_dtype).view(shape)

    def swap_out(self, stack: CacheStack, host: Tensor, src: Tensor, dst: Tensor) -> None:
        assert isinstance(stack, Caches)
        checks.host_blocks(host, stack.block_shape, self.kv_dtype)
        checks.block_moves(src, dst, stack.num_blocks, len(host))
        for blocks, cache in zip(indexable(host).flatten(1, 2).unbind(1), map(indexable, stack.tensors), strict=True):
            blocks[dst] = cache[src].to(host.device)

    def swap_in(self, stack: CacheStack, host: Tensor, src: Tensor, dst: Tensor) -> None:
        assert isinstance(stack, Caches)
        checks.host_blocks(host, stack.block_shape, self.kv_dtype)
        checks.block_moves(src, dst, len(host), stack.num_blocks)
        for blocks, cache in zip(indexable(host).flatten(1, 2).unbind(1), map(indexable, stack.tensors), strict=True):
            cache[dst] = blocks[src].to(cache.device)

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
        last = vocabulary - 1 - (p > 0).int().flip(-1).argmax(dim=-1)  # if uniform * total rounds up to the total
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


def indexable(cache: Tensor) -> Tensor:
    """Return a view of 8-bit values as integers: torch does not index 8-bit floats on every device."""
    return cache.view(torch.int8) if cache.dtype.itemsize == 1 else cache


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
    # The largest terms are 1 and are added by log1p: if one has nearly all of the mass, the sum would lose the rest.
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
    """Do in plain torch what `Ops.penalise` does, on any device."""
    checks.logits(logits)
    # With the size of its result, repeat_interleave does not wait for a device.
    rows = torch.arange(len(logits), device=logits.device).repeat_interleave(starts.diff(), output_size=len(ids))
    at = rows * logits.shape[1] + ids
    flat = logits.view(-1)
    values, factor = flat[at], repetition[rows]
    values = torch.where(values > 0, values / factor, values * factor)
    generated = presence[rows] + frequency[rows] * counts
    flat[at] = values - torch.where(counts > 0, generated, 0.0)
