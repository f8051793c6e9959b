"""The operations of kernels/ops.py in C++ for x86-64 with AVX2 or AVX-512. All operations are row-invariant.

The sources in this folder hold the arithmetic and its reasons: gemm.h, rows.h, attention.h, sampling.h, logprobs.h.
This module checks the arguments and passes their addresses. A cache block keeps keys and values in the order that the
dot-product instructions read (rows.h); `plain_kv_cache` returns them in plain order.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.kernels import checks
from quire.kernels.checks import address
from quire.kernels.cpu import library
from quire.kernels.cpu.levels import best_level
from quire.kernels.cpu.memory import Arena
from quire.kernels.cpu.ranks import CpuRanks
from quire.kernels.cpu.stack import CpuCaches, CpuStack
from quire.kernels.layers import run_layers
from quire.kernels.ops import AllReduceGroup, CacheStack, DecoderLayer, LayerStack, PackedLinear
from quire.kernels.reference import penalise
from quire.kernels.stack import Caches, Stack

_PANEL = 32  # columns, `kPanel` in gemm.h
_ACT, _FLOAT, _SILU_MUL = 0, 1, 2  # `Output` in gemm.h


class CpuLinear:
    """Weights in panels of 32 columns (16 gates and 16 ups for `pack_gate_up`); the bias likewise, in float32."""

    __slots__ = (
        "bias",
        "bias_address",
        "dtype",
        "gate_up",
        "in_features",
        "nbytes",
        "out_features",
        "weight",
        "weight_address",
    )

    def __init__(self, weight: Tensor, bias: Tensor | None, gate_up: bool, arena: Arena) -> None:
        n, k = weight.shape
        self.in_features, self.out_features = k, n
        self.dtype, self.gate_up = weight.dtype, gate_up
        width, columns = (_PANEL // 2, n // 2) if gate_up else (_PANEL, n)
        panels = -(-columns // width)
        words = -(-k * weight.element_size() // 4)
        self.weight = arena.take(panels * words * _PANEL * 4)
        self.weight_address = self.weight.data_ptr()
        library.load().common.pack(weight.data_ptr(), n, k, weight.element_size(), gate_up, self.weight_address)
        self.bias = None if bias is None else _panels(bias.float(), width, gate_up)
        self.bias_address = None if self.bias is None else self.bias.data_ptr()
        self.nbytes = self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


def _panels(bias: Tensor, width: int, gate_up: bool) -> Tensor:
    parts = bias.view(2 if gate_up else 1, -1)
    padded = torch.nn.functional.pad(parts, (0, -parts.shape[1] % width))
    return padded.view(len(parts), -1, width).transpose(0, 1).flatten().contiguous()


class CpuOps:
    """The C++ kernels at the best instruction-set level of this processor.

    dtype: of weights and activations, bfloat16 or float32.
    Raises KernelsUnavailable if the library cannot be built or the processor runs no level for the dtype.
    """

    name = "cpu"
    row_invariant = True
    device = torch.device("cpu")

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        self.dtype = self.kv_dtype = dtype
        self.level = best_level(dtype)
        self._values_per_word = 4 // dtype.itemsize
        self._arena = Arena()
        self._common, self._functions = library.load().common, self.level.functions

    # Linear layers

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> CpuLinear:
        return self._pack(weight, bias, gate_up=False)

    def pack_gate_up(self, weight: Tensor, bias: Tensor | None = None) -> CpuLinear:
        return self._pack(weight, bias, gate_up=True)

    def _pack(self, weight: Tensor, bias: Tensor | None, gate_up: bool) -> CpuLinear:
        checks.linear_weights(weight, bias, self.dtype, halves=gate_up)
        address(weight)
        return CpuLinear(weight, bias, gate_up, self._arena)

    def linear(self, x: Tensor, packed: PackedLinear, out: Tensor | None = None) -> Tensor:
        return self._matmul(x, packed, out, packed.out_features, _ACT, self.dtype)

    def linear_silu_mul(self, x: Tensor, packed: PackedLinear, out: Tensor | None = None) -> Tensor:
        return self._matmul(x, packed, out, packed.out_features // 2, _SILU_MUL, self.dtype)

    def linear_logits(self, x: Tensor, packed: PackedLinear, out: Tensor | None = None) -> Tensor:
        return self._matmul(x, packed, out, packed.out_features, _FLOAT, torch.float32)

    def _matmul(
        self, x: Tensor, packed: PackedLinear, out: Tensor | None, width: int, output: int, dtype: torch.dtype
    ) -> Tensor:
        checks.rows(x, packed.in_features, self.dtype)
        if (
            not isinstance(packed, CpuLinear)
            or packed.gate_up != (output == _SILU_MUL)
            or packed.dtype is not self.dtype
        ):
            raise ValueError(
                "weights of pack_gate_up are for linear_silu_mul alone, and for the dtype they were packed in"
            )
        rows = x.shape[0]
        out = self._out(out, (rows, width), dtype)
        weight, bias = packed.weight_address, packed.bias_address
        self._functions.linear(address(x), rows, packed.in_features, weight, bias, width, address(out), output)
        return out

    def _out(self, out: Tensor | None, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """Return the checked `out`, or a new tensor."""
        if out is None:
            return torch.empty(shape, dtype=dtype)
        checks.tensor("out", out, dtype, shape)
        return out

    # Rows

    def embed(self, token_ids: Tensor, table: Tensor) -> Tensor:
        checks.token_ids(token_ids, table, self.dtype)
        vocabulary, width = table.shape
        out = torch.empty((token_ids.shape[0], width), dtype=self.dtype)
        wide, count = token_ids.dtype is torch.int64, token_ids.shape[0]
        bad = self._functions.embed(address(token_ids), wide, count, address(table), vocabulary, width, out.data_ptr())
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
    ) -> Tensor:
        blocks, _, block_size, d = checks.caches(k_cache, v_cache, num_kv_heads, self.dtype)
        checks.rope(qkv, positions, cos_sin, slot_mapping, num_heads, num_kv_heads, d, q_norm, k_norm, self.dtype)
        q = torch.empty((qkv.shape[0], num_heads, d), dtype=self.dtype)
        bad = self._functions.rope_and_cache(
            address(qkv), address(positions), address(cos_sin), address(slot_mapping), address(k_cache),
            address(v_cache), q.data_ptr(), address(q_norm), address(k_norm), qkv.shape[0], cos_sin.shape[0],
            blocks, block_size, num_heads, num_kv_heads, d, eps, slot_mapping.dtype is torch.int64,
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
    ) -> Tensor:
        blocks, kv_heads, block_size, d = checks.caches(k_cache, v_cache, None, self.dtype)
        checks.attention(q, kv_heads, d, block_tables, seq_lens, query_start_loc, scale, sliding_window, self.dtype)
        tokens, heads, _ = q.shape
        out = self._out(out, (tokens, heads * d), self.dtype)
        bad = self._functions.paged_attention(
            address(q), address(k_cache), address(v_cache), address(block_tables), address(seq_lens),
            address(query_start_loc), address(out), block_tables.shape[1], seq_lens.shape[0], tokens, blocks, heads,
            kv_heads, d, block_size, sliding_window, scale,
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
    ) -> CpuStack:
        stack = Stack(kv_cache, layers, final_norm, cos_sin, num_heads, num_kv_heads, eps, scale, ranks)
        return CpuStack(stack, self.dtype)

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
    ) -> Tensor:
        assert isinstance(stack, CpuStack)
        if not isinstance(stack.stack.ranks, CpuRanks | None):  # the library cannot call another all-reduce
            return run_layers(
                self, residual, stack.stack, positions, slot_mapping, block_tables, seq_lens, query_start_loc, rows
            )
        return stack.run(
            self._functions, residual, positions, slot_mapping, block_tables, seq_lens, query_start_loc, rows
        )

    # The cache

    def alloc_kv_cache(
        self, num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int
    ) -> tuple[Tensor, Tensor]:
        checks.cache_shape(block_size, head_dim)
        shape = (num_blocks, num_kv_heads, block_size, head_dim)
        size = num_blocks * num_kv_heads * block_size * head_dim * self.dtype.itemsize
        k, v = (self._arena.take(size, apart=True).view(self.dtype).view(shape) for _ in range(2))
        return k, v

    def plain_kv_cache(self, k_cache: Tensor, v_cache: Tensor) -> tuple[Tensor, Tensor]:
        blocks, heads, block_size, d = checks.caches(k_cache, v_cache, None, self.dtype)
        word, group = self._values_per_word, min(16, block_size)
        k = k_cache.view(blocks, heads, block_size // group, d // word, group, word).transpose(3, 4)
        v = v_cache.view(blocks, heads, block_size // word, d, word).transpose(3, 4)
        return k.reshape(k_cache.shape), v.reshape(v_cache.shape)

    def stack_caches(self, kv_cache: Sequence[tuple[Tensor, Tensor]]) -> CpuCaches:
        return CpuCaches(Caches(kv_cache), self.dtype)

    def copy_blocks(self, stack: CacheStack, src: Tensor, dst: Tensor) -> None:
        assert isinstance(stack, CpuCaches)
        checks.block_copies(src, dst, stack.num_blocks)
        caches, count = stack.caches, len(stack.caches)
        self._common.copy_blocks(caches, count, stack.block_bytes, address(src), address(dst), len(src))

    def alloc_host_blocks(self, stack: CacheStack, num_blocks: int) -> Tensor:
        assert isinstance(stack, CpuCaches)
        size = num_blocks * len(stack.caches) * stack.block_bytes
        return self._arena.take(size).view(self.dtype).view(num_blocks, *stack.block_shape)

    def swap_out(self, stack: CacheStack, host: Tensor, src: Tensor, dst: Tensor) -> None:
        assert isinstance(stack, CpuCaches)
        checks.host_blocks(host, stack.block_shape, self.dtype)
        checks.block_moves(src, dst, stack.num_blocks, len(host))
        caches, count, size = stack.caches, len(stack.caches), stack.block_bytes
        self._common.swap_out(caches, count, size, address(src), address(dst), len(src), address(host))

    def swap_in(self, stack: CacheStack, host: Tensor, src: Tensor, dst: Tensor) -> None:
        assert isinstance(stack, CpuCaches)
        checks.host_blocks(host, stack.block_shape, self.dtype)
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
