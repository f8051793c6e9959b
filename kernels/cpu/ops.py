"""The operations of kernels/ops.py in C++ for x86-64 with AVX2 or AVX-512. All operations are row-invariant.

The sources in this folder hold the arithmetic and its reasons: gemm.h, rows.h, kv_cache.h, attention.h, sampling.h,
logprobs.h. This module checks the arguments and passes their addresses. A cache block keeps keys and values in the
order that the dot-product instructions read (kv_cache.h); `plain_kv_cache` returns them in plain order.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from quire.kernels import checks
from quire.kernels.checks import address
from quire.kernels.cpu import library
from quire.kernels.cpu.levels import best_level
from quire.kernels.cpu.linear import FLOAT_FORMATS, GATES, CpuLinear, Format
from quire.kernels.cpu.lora import CpuAdapter, CpuAdapters
from quire.kernels.cpu.memory import Arena
from quire.kernels.cpu.moe import CpuMoE
from quire.kernels.cpu.ranks import CpuRanks
from quire.kernels.cpu.stack import CpuCaches, CpuStack
from quire.kernels.grouped_weight import KINDS
from quire.kernels.interrupt import Interrupt
from quire.kernels.k_quant_weight import K_QUANTS
from quire.kernels.layers import run_layers
from quire.kernels.lora import AdapterBatch, LoraLayer, NormsOfLayer
from quire.kernels.moe import GELU, SILU, ExpertWeights, PackedMoE, Routing, check_experts, check_scales
from quire.kernels.nvfp4_weight import NVFP4
from quire.kernels.ops import AddedRows, AllReduceGroup, CacheStack, DecoderLayer, LayerStack, PackedLinear
from quire.kernels.reference import penalise
from quire.kernels.stack import Caches, Stack
from quire.kernels.weights import LinearWeight, WeightRows

_ACT, _FLOAT = 0, 1  # `Output` in gemm.h
_SILU_MUL, _GELU_MUL = GATES[SILU], GATES[GELU]
_KV_ACT = 0  # a cache of the type of the activations: `KvType` in kv_cache.h, as these
_KV_TYPES = {torch.bfloat16: 1, torch.int8: 2, torch.float8_e4m3fn: 3}


class CpuOps:
    """The C++ kernels at the best instruction-set level of this processor.

    dtype: of activations, bfloat16 or float32. Weights of float32 activations may be bfloat16, float16 or quantised.
    kv_dtype: of the cache, `dtype` if None; bfloat16, int8 and float8_e4m3fn take less memory.
    Raises KernelsUnavailable if the library cannot be built or the processor runs no level for the dtype, and TypeError
    for another kv_dtype.
    """

    name = "cpu"
    row_invariant = True
    device = torch.device("cpu")

    def __init__(self, dtype: torch.dtype = torch.bfloat16, kv_dtype: torch.dtype | None = None) -> None:
        self.dtype, self.kv_dtype = dtype, kv_dtype or dtype
        self.level = best_level(dtype)
        self.weight_dtypes: tuple[torch.dtype, ...] = tuple(FLOAT_FORMATS) if dtype is torch.float32 else (dtype,)
        self.quantized_bits: tuple[int, ...] = (8, 4) if dtype is torch.float32 else ()
        self.code_kinds = (*KINDS, *K_QUANTS, NVFP4)
        if self.kv_dtype not in (dtype, *_KV_TYPES):
            kept = ", ".join(map(str, (dtype, *_KV_TYPES)))
            raise TypeError(f"the cache is asked for as {kv_dtype}: the C++ kernels keep it as {kept}")
        self.kv_type = _KV_ACT if self.kv_dtype is dtype else _KV_TYPES[self.kv_dtype]
        self._arena = Arena()
        self._common, self._functions = library.load().common, self.level.functions

    # Linear layers

    def pack_linear(self, weight: LinearWeight | WeightRows, bias: Tensor | None = None) -> CpuLinear:
        return self._pack(weight, bias, gate_up=False)

    def pack_gate_up(self, weight: LinearWeight | WeightRows, bias: Tensor | None = None) -> CpuLinear:
        return self._pack(weight, bias, gate_up=True)

    def _pack(self, weight: LinearWeight | WeightRows, bias: Tensor | None, gate_up: bool) -> CpuLinear:
        def check(rows: LinearWeight) -> None:
            checks.linear_weights(rows, self.weight_dtypes, self.quantized_bits, self.code_kinds, halves=gate_up)

        checks.linear_bias(bias, self.weight_dtypes, weight.shape)
        return CpuLinear(weight, bias, gate_up, self.dtype, self._arena, check)

    def pack_moe(
        self, routing: Routing, router: PackedLinear, experts: Iterable[ExpertWeights], scales: Tensor | None = None
    ) -> CpuMoE:
        checks.router(router, routing)
        check_scales(scales, routing)
        assert isinstance(router, CpuLinear)
        packed = (
            (self.pack_gate_up(expert.gate_up, expert.gate_up_bias), self.pack_linear(expert.down, expert.down_bias))
            for expert in check_experts(routing, router.in_features, experts)
        )
        return CpuMoE(routing, router, packed, scales)

    def moe(
        self, x: Tensor, packed: PackedMoE, out: Tensor | None = None, router_input: Tensor | None = None
    ) -> Tensor:
        assert isinstance(packed, CpuMoE)
        checks.rows(x, packed.hidden, self.dtype)
        router_input = x if router_input is None else router_input
        checks.same_rows(x, router_input, self.dtype)
        out = self._out(out, (x.shape[0], packed.hidden), self.dtype)
        self._functions.moe(address(router_input), address(x), x.shape[0], packed.hidden, packed.address, address(out))
        return out

    def pack_adapter(self, layers: Sequence[LoraLayer], inner: int, norms: Sequence[NormsOfLayer] = ()) -> CpuAdapter:
        return CpuAdapter(layers, inner, norms)

    def adapt_embeddings(self, embeddings: Tensor, token_ids: Tensor, adapters: AdapterBatch) -> None:
        checks.rows(embeddings, embeddings.shape[1], self.dtype)
        ids, step = token_ids.long().contiguous(), CpuAdapters(adapters, of_ends=True)
        self._functions.adapt_embeddings(step.address, address(ids), address(embeddings), embeddings.shape[1])

    def adapt_logits(self, logits: Tensor, hidden: Tensor, adapters: AdapterBatch) -> None:
        checks.logits(logits)
        checks.rows(hidden, hidden.shape[1], self.dtype)
        step = CpuAdapters(replace(adapters, wanted=adapters.wanted[: len(hidden)]), of_ends=True)
        self._functions.adapt_logits(step.address, address(hidden), hidden.shape[1], address(logits), logits.shape[1])

    def linear(self, x: Tensor, packed: PackedLinear, out: Tensor | None = None) -> Tensor:
        return self._matmul(x, packed, out, packed.out_features, _ACT, self.dtype)

    def linear_silu_mul(self, x: Tensor, packed: PackedLinear, out: Tensor | None = None) -> Tensor:
        return self._matmul(x, packed, out, packed.out_features // 2, _SILU_MUL, self.dtype)

    def linear_gelu_mul(self, x: Tensor, packed: PackedLinear, out: Tensor | None = None) -> Tensor:
        return self._matmul(x, packed, out, packed.out_features // 2, _GELU_MUL, self.dtype)

    def linear_logits(self, x: Tensor, packed: PackedLinear, out: Tensor | None = None) -> Tensor:
        return self._matmul(x, packed, out, packed.out_features, _FLOAT, torch.float32)

    def _matmul(
        self, x: Tensor, packed: PackedLinear, out: Tensor | None, width: int, output: int, dtype: torch.dtype
    ) -> Tensor:
        checks.rows(x, packed.in_features, self.dtype)
        if (
            not isinstance(packed, CpuLinear)
            or packed.gate_up != (output >= _SILU_MUL)
            or packed.dtype is not self.dtype
        ):
            raise ValueError(
                "weights of pack_gate_up are for linear_silu_mul and linear_gelu_mul alone, and all weights for the "
                "dtype they were packed in"
            )
        rows = x.shape[0]
        out = self._out(out, (rows, width), dtype)
        self._functions.linear(address(x), rows, packed.in_features, packed.address, width, address(out), output)
        return out

    def _out(self, out: Tensor | None, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """Return the checked `out`, or a new tensor."""
        if out is None:
            return torch.empty(shape, dtype=dtype)
        checks.tensor("out", out, dtype, shape)
        return out

    # Rows

    def embed(self, token_ids: Tensor, table: Tensor) -> Tensor:
        checks.token_ids(token_ids, table, self.weight_dtypes)
        vocabulary, width = table.shape
        table_format = Format.WORDS if table.dtype is self.dtype else FLOAT_FORMATS[table.dtype]
        out = torch.empty((token_ids.shape[0], width), dtype=self.dtype)
        wide, count = token_ids.dtype is torch.int64, token_ids.shape[0]
        bad = self._functions.embed(
            address(token_ids), wide, count, address(table), table_format, vocabulary, width, out.data_ptr()
        )
        if bad:
            raise IndexError(f"token_ids[{bad - 1}] is {int(token_ids[bad - 1])}, outside 0..{vocabulary - 1}")
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._norm(x, None, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        checks.same_rows(x, residual, self.dtype)
        return self._norm(x, residual, weight, eps)

    def _norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        checks.norm(x, weight, self.dtype)
        out, width = torch.empty_like(x), x.shape[-1]
        rows = x.numel() // width
        self._functions.rms_norm(address(x), address(residual), address(weight), eps, rows, width, out.data_ptr())
        return out

    # Attention

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
        blocks, _, block_size, d = checks.caches(k_cache, v_cache, num_kv_heads or None, self.kv_dtype)
        norms = q_norm, k_norm, v_norm
        checks.rope(qkv, positions, cos_sin, slot_mapping, num_heads, num_kv_heads, d, norms, self.dtype)
        q = torch.empty((qkv.shape[0], num_heads, d), dtype=self.dtype)
        bad = self._functions.rope_and_cache(
            address(qkv), address(positions), address(cos_sin), address(slot_mapping), address(k_cache),
            address(v_cache), q.data_ptr(), address(q_norm), address(k_norm), address(v_norm), qkv.shape[0],
            cos_sin.shape[0], blocks, block_size, num_heads, num_kv_heads, d, eps, slot_mapping.dtype is torch.int64,
            self.kv_type,
        )  # fmt: skip
        if bad:
            raise IndexError(
                checks.no_such_slot(bad - 1, positions, cos_sin.shape[0], slot_mapping, blocks * block_size)
            )
        return q

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
        blocks, kv_heads, block_size, d = checks.caches(k_cache, v_cache, None, self.kv_dtype)
        tables = block_tables, seq_lens, query_start_loc
        checks.attention(q, kv_heads, d, *tables, scale, sliding_window, self.dtype, sinks, softcap, key_ends)
        tokens, heads, _ = q.shape
        out = self._out(out, (tokens, heads * d), self.dtype)
        bad = self._functions.paged_attention(
            address(q), address(k_cache), address(v_cache), address(block_tables), address(seq_lens),
            address(query_start_loc), address(out), block_tables.shape[1], seq_lens.shape[0], tokens, blocks, heads,
            kv_heads, d, block_size, sliding_window, scale, self.kv_type, address(sinks), softcap,
            address(key_ends),
        )  # fmt: skip
        if bad:
            raise IndexError(checks.no_such_blocks(bad - 1, blocks))
        return out

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
    ) -> CpuStack:
        stack = Stack(kv_cache, layers, final_norm, cos_sin, num_heads, num_kv_heads, eps, scale, ranks, softcap)
        return CpuStack(stack, self.dtype, self.kv_dtype, self.kv_type)

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
        assert isinstance(stack, CpuStack)
        step = positions, slot_mapping, block_tables, seq_lens, query_start_loc, rows
        # The library can neither call another all-reduce nor add to the outputs of layers.
        if added is not None or not isinstance(stack.stack.ranks, CpuRanks | None):
            return run_layers(self, residual, stack.stack, *step, adapters, interrupt, layer_inputs, added, key_ends)
        return stack.run(self._functions, residual, *step, adapters, interrupt, layer_inputs, key_ends)

    # The cache

    def alloc_kv_cache(
        self, num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int
    ) -> tuple[Tensor, Tensor]:
        checks.cache_shape(block_size, head_dim)
        shape = (num_blocks, num_kv_heads, block_size, checks.cache_width(head_dim, self.kv_dtype))
        size = math.prod(shape) * self.kv_dtype.itemsize
        k, v = (self._arena.take(size, apart=True).view(self.kv_dtype).view(shape) for _ in range(2))
        return k, v

    def plain_kv_cache(self, k_cache: Tensor, v_cache: Tensor) -> tuple[Tensor, Tensor]:
        blocks, heads, block_size, d = checks.caches(k_cache, v_cache, None, self.kv_dtype)
        unit, group = 1 if self.kv_dtype is torch.float32 else 2, min(16, block_size)
        groups, width = (blocks, heads, block_size // group), k_cache.shape[3]
        integer = {1: torch.int8, 2: torch.int16, 4: torch.int32}[self.kv_dtype.itemsize]  # torch cannot join fp8
        k, v = (cache.view(integer).view(*groups, group * width) for cache in (k_cache, v_cache))
        k_values = k[..., : group * d].reshape(*groups, d // unit, group, unit).transpose(3, 4)
        v_values = v[..., : group * d].reshape(*groups, group // unit, d, unit).transpose(4, 5)
        k, v = (
            torch.cat(
                [values.reshape(*groups, group, d), stored[..., group * d :].reshape(*groups, group, width - d)], dim=-1
            ).view(self.kv_dtype)
            for values, stored in ((k_values, k), (v_values, v))
        )
        return k.view(k_cache.shape), v.view(v_cache.shape)

    def stack_caches(self, kv_cache: Sequence[tuple[Tensor, Tensor]]) -> CpuCaches:
        return CpuCaches(Caches(kv_cache), self.kv_dtype)

    def copy_blocks(self, stack: CacheStack, src: Tensor, dst: Tensor) -> None:
        assert isinstance(stack, CpuCaches)
        checks.block_copies(src, dst, stack.num_blocks)
        caches, count = stack.caches, len(stack.caches)
        self._common.copy_blocks(caches, count, stack.block_bytes, address(src), address(dst), len(src))

    def alloc_host_blocks(self, stack: CacheStack, num_blocks: int) -> Tensor:
        assert isinstance(stack, CpuCaches)
        size = num_blocks * len(stack.caches) * stack.block_bytes
        return self._arena.take(size).view(self.kv_dtype).view(num_blocks, *stack.block_shape)

    def swap_out(self, stack: CacheStack, host: Tensor, src: Tensor, dst: Tensor) -> None:
        assert isinstance(stack, CpuCaches)
        checks.host_blocks(host, stack.block_shape, self.kv_dtype)
        checks.block_moves(src, dst, stack.num_blocks, len(host))
        caches, count, size = stack.caches, len(stack.caches), stack.block_bytes
        self._common.swap_out(caches, count, size, address(src), address(dst), len(src), address(host))

    def swap_in(self, stack: CacheStack, host: Tensor, src: Tensor, dst: Tensor) -> None:
        assert isinstance(stack, CpuCaches)
        checks.host_blocks(host, stack.block_shape, self.kv_dtype)
        checks.block_moves(src, dst, len(host), stack.num_blocks)
        caches, count, size = stack.caches, len(stack.caches), stack.block_bytes
        self._common.swap_in(caches, count, size, address(src), address(dst), len(src), address(host))

    # Logits

    def argmax(self, logits: Tensor) -> Tensor:
        checks.logits(logits)
        rows, vocabulary = logits.shape
        out = torch.empty(rows, dtype=torch.int32)
        self._functions.argmax(address(logits), rows, vocabulary, out.data_ptr())
        return out

    def sample(
        self, logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor
    ) -> Tensor:
        checks.sampling(logits, temperature, top_k, top_p, min_p, uniform)
        rows, vocabulary = logits.shape
        out = torch.empty(rows, dtype=torch.int32)
        self._functions.sample(
            address(logits), rows, vocabulary, address(temperature), address(top_k), address(top_p), address(min_p),
            address(uniform), out.data_ptr(),
        )  # fmt: skip
        return out

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
        rows, vocabulary = logits.shape
        values, ids = torch.empty((rows, count)), torch.empty((rows, count), dtype=torch.int32)
        self._functions.top_logprobs(address(logits), rows, vocabulary, count, values.data_ptr(), ids.data_ptr())
        return values, ids

    def logprobs_of(self, logits: Tensor, ids: Tensor) -> Tensor:
        checks.logprobs_of(logits, ids)
        rows, vocabulary = logits.shape
        out, wide = torch.empty(rows), ids.long()
        if bad := self._functions.logprobs_of(address(logits), rows, vocabulary, address(wide), out.data_ptr()):
            raise IndexError(checks.no_such_id(bad - 1, ids, vocabulary))
        return out
