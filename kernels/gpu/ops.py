"""The operations in Triton for CUDA devices (see kernels/ops.py for the contract).

Here arguments are checked by what the host knows: dtypes, shapes, layouts. Ids, slots, positions and lengths lie on the
device, and to look at them would stop it: `check_ids` does, and raises as the contract says. Without it a bad slot is
not written, a bad token id gives NaN, and block tables and lengths must be right.

Everything is done in the order of the current stream, without waiting for it, and may be captured in a graph, except
moves of blocks, whose ids come from the host. Sizes of grids and of temporary memory follow from shapes, never from
values on the device, so a captured step adapts to the lengths of each replay; `check_ids` must be off. A step may be
filled up to the shape of a graph with sequences of no tokens, and with tokens behind the last sequence whose slot is
-1: they write nothing that another row reads, and their own rows of results may hold anything. A kernel is
compiled at its first launch with a dtype, alignment or constant that is new, so each must have run once before it is
captured.
"""

import math
from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from quire.kernels import checks
from quire.kernels.cuda import accumulate_in_float32, pinned_bytes
from quire.kernels.gpu import bounds, layers, limits, logprobs, penalties
from quire.kernels.gpu.attention import AttentionPlan, Device
from quire.kernels.gpu.linear import TritonLinear, multiply, multiply_to_float
from quire.kernels.gpu.logits import argmax_kernel
from quire.kernels.gpu.rope import rope_and_cache_kernel
from quire.kernels.gpu.rows import embed_kernel, rms_norm_kernel, silu_mul_kernel
from quire.kernels.gpu.sampling import sample_kernel
from quire.kernels.gpu.tiles import ROOMY_BYTES, power_of_2
from quire.kernels.layers import Caches, Stack
from quire.kernels.ops import AllReduceGroup, DecoderLayer


class TritonOps:
    """kv_dtype: float8_e4m3fn halves the cache; k_scale and v_scale are what its values are multiplied with.

    batch_invariant: the result of a row depends on that row alone, bit for bit, whether it is computed in a prompt or
    as a decode step. Products then add up K in one order instead of cuBLAS' choice by shape, and attention splits keys
    at fixed places and adds them up in one order.
    """

    name = "triton"

    def __init__(
        self,
        device: str | torch.device = "cuda",
        dtype: torch.dtype = torch.bfloat16,
        kv_dtype: torch.dtype | None = None,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        batch_invariant: bool = False,
        check_ids: bool = False,
    ) -> None:
        self.dtype, self.kv_dtype = dtype, kv_dtype or dtype
        limits.check_dtypes(dtype, self.kv_dtype)
        accumulate_in_float32()
        self.device = torch.device(device)
        if self.device.type == "cuda":
            if self.device.index is None:
                self.device = torch.device("cuda", torch.cuda.current_device())
            found = torch.cuda.get_device_properties(self.device)
            multiprocessors, shared_bytes = found.multi_processor_count, found.shared_memory_per_block_optin
        elif triton.knobs.runtime.interpret:
            multiprocessors, shared_bytes = 3, ROOMY_BYTES
        else:
            raise ValueError(f"device is {device}: the Triton kernels need a CUDA device (or Triton's interpreter)")
        scales = (k_scale, v_scale) if self.kv_dtype == limits.FP8 else (1.0, 1.0)
        self._launch = Device(multiprocessors, batch_invariant, *scales, shared_bytes >= ROOMY_BYTES)
        self.row_invariant = batch_invariant
        self.check_ids = check_ids

    # Linear layers

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> TritonLinear:
        checks.linear_weights(weight, bias, self.dtype)
        return TritonLinear(weight, bias)

    def pack_gate_up(self, weight: Tensor, bias: Tensor | None = None) -> TritonLinear:
        checks.linear_weights(weight, bias, self.dtype, halves=True)
        return TritonLinear(weight, bias, gate_up=True)

    def linear(self, x: Tensor, packed: TritonLinear, out: Tensor | None = None) -> Tensor:
        self._check_linear(x, packed, False, out, packed.out_features, self.dtype)
        return multiply(x, packed, out, self.row_invariant)

    def linear_silu_mul(self, x: Tensor, packed: TritonLinear, out: Tensor | None = None) -> Tensor:
        inner = packed.out_features // 2
        self._check_linear(x, packed, True, out, inner, self.dtype)
        out = x.new_empty((len(x), inner)) if out is None else out
        return self.silu_mul(multiply(x, packed, None, self.row_invariant), out)

    def silu_mul(self, gate_up: Tensor, out: Tensor) -> Tensor:
        """gate_up [T, 2I] -> out [T, I]: the second half of `linear_silu_mul`."""
        rows, inner = out.shape
        if rows:
            silu_mul_kernel[(rows, triton.cdiv(inner, 1024))](gate_up, out, inner, BLOCK=1024)
        return out

    def linear_logits(self, x: Tensor, packed: TritonLinear, out: Tensor | None = None) -> Tensor:
        self._check_linear(x, packed, False, out, packed.out_features, torch.float32)
        logits = multiply_to_float(x, packed, self.row_invariant)
        return logits if out is None else out.copy_(logits)

    def _check_linear(
        self, x: Tensor, packed: TritonLinear, gate_up: bool, out: Tensor | None, width: int, dtype: torch.dtype
    ) -> None:
        if packed.gate_up != gate_up:
            raise ValueError("weights of pack_gate_up are for linear_silu_mul, and no others are")
        checks.rows(x, packed.in_features, self.dtype)
        if out is not None:
            checks.tensor("out", out, dtype, (x.shape[0], width))

    # Rows

    def embed(self, token_ids: Tensor, table: Tensor) -> Tensor:
        checks.token_ids(token_ids, table, self.dtype)
        if self.check_ids:
            bounds.token_ids(token_ids, table)
        vocabulary, width = table.shape
        out = table.new_empty((len(token_ids), width))
        if len(token_ids):
            grid = len(token_ids), triton.cdiv(width, 1024)
            embed_kernel[grid](token_ids, table, out, vocabulary, WIDTH=width, BLOCK=1024)
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        checks.norm(x, weight, self.dtype)
        return self._norm(x, x, weight, eps, False)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        checks.same_rows(x, residual, self.dtype)
        checks.norm(x, weight, self.dtype)
        return self._norm(x, residual, weight, eps, True)

    def _norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, add: bool) -> Tensor:
        out, width = torch.empty_like(x), x.shape[-1]
        if x.numel():
            padded = power_of_2(width)
            # In place: were there more threads than values, several would read one, and one of them perhaps the sum.
            warps = max(1, min(4, padded // 32)) if padded <= 2048 else 8 if padded <= 8192 else 16
            grid = (x.numel() // width,)
            rms_norm_kernel[grid](x, residual, weight, out, eps, WIDTH=width, PADDED=padded, ADD=add, num_warps=warps)
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
    ) -> Tensor:
        blocks, _, block_size, d = self._check_caches(k_cache, v_cache, num_kv_heads)
        checks.rope(qkv, positions, cos_sin, slot_mapping, num_heads, num_kv_heads, d, q_norm, k_norm, self.dtype)
        if self.check_ids:
            bounds.slots(positions, len(cos_sin), slot_mapping, blocks * block_size)
        where = positions, cos_sin, slot_mapping, k_cache, v_cache
        return self.rope_and_cache_kernel(qkv, *where, num_heads, num_kv_heads, q_norm, k_norm, eps)

    def rope_and_cache_kernel(
        self,
        qkv: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        slot_mapping: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        num_heads: int,
        num_kv_heads: int,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        keep_k: bool = False,
    ) -> Tensor:
        """`rope_and_cache` without its checks; with keep_k the rotated k takes the place of k in qkv."""
        tokens = len(qkv)
        blocks, _, block_size, d = k_cache.shape
        q = qkv.new_empty((tokens, num_heads, d))
        if tokens == 0:
            return q
        block_heads = min(8, power_of_2(num_heads + 2 * num_kv_heads))
        rope_and_cache_kernel[(tokens, triton.cdiv(num_heads + 2 * num_kv_heads, block_heads))](
            qkv,
            positions,
            cos_sin,
            slot_mapping,
            k_cache,
            v_cache,
            q,
            qkv if q_norm is None else q_norm,
            qkv if k_norm is None else k_norm,
            eps,
            self._launch.k_scale,
            self._launch.v_scale,
            len(cos_sin),
            blocks * block_size,
            HEADS=num_heads,
            KV_HEADS=num_kv_heads,
            D=d,
            HALF=power_of_2(d // 2),
            BLOCK_SIZE=block_size,
            BLOCK_HEADS=block_heads,
            Q_NORM=q_norm is not None,
            K_NORM=k_norm is not None,
            KEEP_K=keep_k,
            FP8=self.kv_dtype == limits.FP8,
            num_warps=2,
        )
        return q

    def plan_attention(self, block_tables: Tensor, seq_lens: Tensor, query_start_loc: Tensor) -> AttentionPlan:
        checks.sequences(block_tables, seq_lens, query_start_loc)
        return AttentionPlan(self._launch, block_tables, seq_lens, query_start_loc)

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
        plan: AttentionPlan | None = None,
    ) -> Tensor:
        blocks, kv_heads, block_size, d = self._check_caches(k_cache, v_cache, None)
        checks.attention(q, kv_heads, d, block_tables, seq_lens, query_start_loc, scale, sliding_window, self.dtype)
        limits.check_group(q.shape[1], kv_heads, d, self.dtype)
        if out is None:
            out = q.new_empty((len(q), q.shape[1] * d))
        else:
            checks.tensor("out", out, self.dtype, (len(q), q.shape[1] * d))
        tables = block_tables, seq_lens, query_start_loc
        if self.check_ids:
            bounds.blocks(*tables, len(q), block_size, blocks, sliding_window)
        step = AttentionPlan(self._launch, *tables) if plan is None else plan
        step.attend(q, k_cache, v_cache, scale, sliding_window, out.view_as(q))
        return out

    def stack_layers(
        self,
        layers_: Sequence[DecoderLayer],
        final_norm: Tensor,
        kv_cache: Sequence[tuple[Tensor, Tensor]],
        cos_sin: Tensor,
        num_heads: int,
        num_kv_heads: int,
        eps: float,
        scale: float,
        ranks: AllReduceGroup | None = None,
    ) -> layers.TritonStack:
        stack = Stack(layers_, final_norm, kv_cache, cos_sin, num_heads, num_kv_heads, eps, scale, ranks)
        return layers.TritonStack(stack, self.dtype, self.kv_dtype)

    def decoder_layers(
        self,
        residual: Tensor,
        stack: layers.TritonStack,
        positions: Tensor,
        slot_mapping: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
        query_start_loc: Tensor,
        rows: Tensor,
    ) -> Tensor:
        layers.check_step(stack, self.dtype, residual, positions, slot_mapping, rows)
        checks.sequences(block_tables, seq_lens, query_start_loc)
        tables = block_tables, seq_lens, query_start_loc
        if self.check_ids:
            blocks, _, block_size, _ = stack.stack.kv_cache[0][0].shape
            bounds.slots(positions, len(stack.stack.cos_sin), slot_mapping, blocks * block_size)
            windows = {layer.sliding_window for layer in stack.stack.layers}
            bounds.blocks(*tables, len(residual), block_size, blocks, 0 if 0 in windows else max(windows))
            bounds.rows(rows, len(residual))
        return layers.run(self, residual, stack, positions, slot_mapping, AttentionPlan(self._launch, *tables), rows)

    # The cache

    def _check_caches(self, k_cache: Tensor, v_cache: Tensor, kv_heads: int | None) -> torch.Size:
        shape = checks.caches(k_cache, v_cache, kv_heads, self.kv_dtype)
        limits.check_cache_shape(shape[2], shape[3])
        return shape

    def alloc_kv_cache(
        self, num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor]:
        checks.cache_shape(block_size, head_dim, dtype, self.kv_dtype)
        limits.check_cache_shape(block_size, head_dim)
        shape = (num_blocks, num_kv_heads, block_size, head_dim)
        k, v = (torch.zeros(shape, dtype=self.kv_dtype, device=self.device) for _ in range(2))
        return k, v

    def plain_kv_cache(self, k_cache: Tensor, v_cache: Tensor) -> tuple[Tensor, Tensor]:
        return k_cache.clone(), v_cache.clone()

    def stack_caches(self, kv_cache: Sequence[tuple[Tensor, Tensor]]) -> layers.TritonCaches:
        return layers.TritonCaches(Caches(kv_cache), self.kv_dtype)

    def copy_blocks(self, stack: layers.TritonCaches, src: Tensor, dst: Tensor) -> None:
        checks.block_copies(src, dst, stack.num_blocks)
        stack.blocks.copy(src, dst)

    def alloc_host_blocks(self, stack: layers.TritonCaches, num_blocks: int) -> Tensor:
        shape = (num_blocks, *stack.block_shape)
        if self.device.type != "cuda":
            return torch.empty(shape, dtype=self.kv_dtype, device="cpu")
        size = math.prod(shape) * self.kv_dtype.itemsize
        return pinned_bytes(size).view(self.kv_dtype).view(shape)

    def swap_out(self, stack: layers.TritonCaches, host: Tensor, src: Tensor, dst: Tensor) -> None:
        self._check_swap(host, stack)
        checks.block_moves(src, dst, stack.num_blocks, len(host))
        stack.blocks.swap_out(host, src, dst)

    def swap_in(self, stack: layers.TritonCaches, host: Tensor, src: Tensor, dst: Tensor) -> None:
        self._check_swap(host, stack)
        checks.block_moves(src, dst, len(host), stack.num_blocks)
        stack.blocks.swap_in(host, src, dst)

    def _check_swap(self, host: Tensor, stack: layers.TritonCaches) -> None:
        checks.host_blocks(host, stack.block_shape, self.kv_dtype)
        if self.device.type == "cuda" and not host.is_pinned():
            raise ValueError("host is not pinned: it must be of alloc_host_blocks")

    # Logits

    def argmax(self, logits: Tensor) -> Tensor:
        checks.logits(logits)
        out = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
        if len(logits):
            argmax_kernel[(len(logits),)](logits, out, logits.shape[1], BLOCK=4096, num_warps=8)
        return out

    def sample(
        self, logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor
    ) -> Tensor:
        checks.sampling(logits, temperature, top_k, top_p, min_p, uniform)
        out = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
        if len(logits):
            row = logits, temperature, top_k, top_p, min_p, uniform
            sample_kernel[(len(logits),)](*row, out, logits.shape[1], BLOCK=4096, num_warps=16)
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
        checks.logits(logits)
        penalties.penalise(logits, starts, ids, counts, repetition, presence, frequency)

    def top_logprobs(self, logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
        checks.top_logprobs(logits, count)
        ids = logprobs.best_ids(logits, count)
        return logprobs.logprobs_of(logits, ids), ids

    def logprobs_of(self, logits: Tensor, ids: Tensor) -> Tensor:
        checks.logprobs_of(logits, ids)
        if self.check_ids:
            bounds.vocabulary_ids(ids, logits.shape[1])
        return logprobs.logprobs_of(logits, ids[:, None])[:, 0]
