"""The operations of kernels/ops.py in Triton for CUDA devices.

The arguments are checked as far as the host knows them: dtypes, shapes, layouts. Ids, slots, positions and lengths are
on the device, and reading them would wait for it. With `check_ids` they are read, and checked as the contract says.
Without it, a bad slot is not written, a bad token id gives NaN, and block tables and lengths must be correct.

All operations are enqueued on the current stream without waiting for it, and can be captured in a CUDA graph, except
moves of blocks, whose ids are on the host. The sizes of grids and of temporary memory follow from shapes, never from
values on the device, so a captured step adapts to the lengths of each replay. `check_ids` must be off. A step may be
padded to the shape of a graph with sequences without tokens, and with tokens after the last sequence whose slot is -1:
they write nothing that another row reads, and their own rows of results are undefined. A kernel is compiled at the
first launch with a new dtype, alignment or constant, so each kernel must have run once before it is captured.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import torch
import triton
from torch import Tensor

from quire.kernels import checks
from quire.kernels.fp8_rows import channel_scales
from quire.kernels.gpu import id_checks, linear, supported
from quire.kernels.gpu.attention import AttentionPlan, LaunchOptions
from quire.kernels.gpu.cuda import accumulate_in_float32, pinned_bytes
from quire.kernels.gpu.few_rows.layers import MOST_ROWS, run_few_rows
from quire.kernels.gpu.fp8_matmul import pack_fp8
from quire.kernels.gpu.grouped_matmul import KINDS, pack_grouped
from quire.kernels.gpu.kernel_table import ATTENTION, FEW_ROWS, GRAPH, NEEDED_BY_GRAPHS, REPLACEMENTS, KernelTable
from quire.kernels.gpu.layers import run_layers
from quire.kernels.gpu.linear import AnyTritonLinear, TritonLinear
from quire.kernels.gpu.lora import TritonAdapter, pack_triton_adapter
from quire.kernels.gpu.moe import TritonMoE, pack_moe
from quire.kernels.gpu.stack import TritonCaches, TritonStack
from quire.kernels.gpu.tile_sizes import LARGE_SHARED_BYTES
from quire.kernels.grouped_weight import GroupedWeight
from quire.kernels.interrupt import Interrupt
from quire.kernels.lora import AdapterBatch, LoraLayer, NormsOfLayer
from quire.kernels.moe import ExpertWeights, PackedMoE, Routing, check_experts, check_scales
from quire.kernels.ops import AddedRows, AllReduceGroup, CacheStack, DecoderLayer, LayerStack, PackedLinear
from quire.kernels.stack import Caches, Stack
from quire.kernels.weights import LinearWeight, WeightRows, whole


class TritonOps:
    """The Triton kernels on a CUDA device, or in Triton's interpreter (TRITON_INTERPRET=1) on the CPU.

    dtype: of weights and activations. kv_dtype: of the cache, `dtype` if None; float8_e4m3fn halves its memory.
    batch_invariant: the result of a row depends on that row alone, bit for bit, whether it is computed in a prompt or
    as a decode step. Matrix products then sum over K in one order, while cuBLAS chooses by shape, and attention splits
    keys at fixed places and sums them in one order.
    fp8_activations: round the activations of layers whose FP8 weights have a scale per output channel or tensor
    (`fp8_rows`). Not with batch_invariant. Needs compute capability 8.9.
    hopper_prefill: on compute capability 9.0, compute new prompts by `kernels/gpu/hopper_prefill.py` where it can.
    check_ids: wait for the device and check ids, slots, positions and block tables.
    """

    name = "triton"
    replaceable = tuple(REPLACEMENTS)

    def __init__(
        self,
        device: str | torch.device = "cuda",
        dtype: torch.dtype = torch.bfloat16,
        kv_dtype: torch.dtype | None = None,
        batch_invariant: bool = False,
        check_ids: bool = False,
        fp8_activations: bool = False,
        hopper_prefill: bool = False,
    ) -> None:
        if fp8_activations and batch_invariant:
            raise ValueError("FP8 products are not batch-invariant: cuBLAS chooses the order of sums by the shape")
        self.dtype, self.kv_dtype = dtype, kv_dtype or dtype
        supported.check_dtypes(dtype, self.kv_dtype)
        self.weight_dtypes: tuple[torch.dtype, ...] = (dtype,)
        self.quantized_bits: tuple[int, ...] = ()
        self.code_kinds: tuple[str, ...] = KINDS
        accumulate_in_float32()
        self.device = torch.device(device)
        if self.device.type == "cuda":
            if self.device.index is None:
                self.device = torch.device("cuda", torch.cuda.current_device())
            properties = torch.cuda.get_device_properties(self.device)
            multiprocessors = properties.multi_processor_count
            shared_bytes = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]  # torch's stub lacks it
            has_dependent_launch, is_hopper = properties.major >= 9, properties.major == 9
        elif triton.knobs.runtime.interpret:
            multiprocessors, shared_bytes, has_dependent_launch, is_hopper = 3, LARGE_SHARED_BYTES, False, False
        else:
            raise ValueError(f"device is {device}: the Triton kernels need a CUDA device (or Triton's interpreter)")
        self.launch_options = LaunchOptions(
            multiprocessors,
            batch_invariant,
            shared_bytes >= LARGE_SHARED_BYTES,
            has_dependent_launch,
            hopper_prefill and is_hopper,
        )
        self.row_invariant, self.fp8_activations = batch_invariant, fp8_activations
        self.check_ids = check_ids
        self.kernels = KernelTable()
        self.replaced: frozenset[str] = frozenset()

    # Replacements of kernels

    def replacement(self, kernel: str) -> str:
        """Return what can replace a kernel; "" if nothing can. kernel: a name of `kernel_table.REPLACEMENTS`."""
        return "" if self.row_invariant else REPLACEMENTS.get(kernel, "")

    def replace_kernel(self, kernel: str) -> None:
        """Compute without this kernel from now on. Stacks of caches that exist keep their way of moving blocks."""
        assert self.replacement(kernel), f"nothing can replace the kernel {kernel}"
        self.replaced |= {kernel}
        if kernel in ATTENTION:
            self.launch_options = replace(self.launch_options, replaced=self.launch_options.replaced | {kernel})
        elif kernel not in (GRAPH, FEW_ROWS):
            self.kernels = self.kernels.with_torch(kernel)

    @property
    def can_capture(self) -> bool:
        """True if steps can be captured in CUDA graphs."""
        return not self.replaced & NEEDED_BY_GRAPHS

    # Linear layers

    def pack_linear(self, weight: LinearWeight | WeightRows, bias: Tensor | None = None) -> AnyTritonLinear:
        return self._pack(weight, bias, gate_up=False)

    def pack_gate_up(self, weight: LinearWeight | WeightRows, bias: Tensor | None = None) -> AnyTritonLinear:
        return self._pack(weight, bias, gate_up=True)

    def _pack(self, weight: LinearWeight | WeightRows, bias: Tensor | None, gate_up: bool) -> AnyTritonLinear:
        weight = whole(weight)
        checks.linear_weights(weight, self.weight_dtypes, self.quantized_bits, self.code_kinds, halves=gate_up)
        checks.linear_bias(bias, self.weight_dtypes, weight.shape)
        if isinstance(weight, GroupedWeight):
            if self.fp8_activations and (scales := channel_scales(weight)) is not None:
                return pack_fp8(weight, scales, bias, gate_up, self.dtype, self.device)
            return pack_grouped(weight, bias, gate_up, self.dtype, self.device)
        assert isinstance(weight, Tensor)
        return TritonLinear(weight, bias, gate_up)

    def pack_moe(
        self, routing: Routing, router: PackedLinear, experts: Iterable[ExpertWeights], scales: Tensor | None = None
    ) -> TritonMoE:
        checks.router(router, routing)
        check_scales(scales, routing)
        assert isinstance(router, TritonLinear)

        def checked() -> Iterator[ExpertWeights]:
            for expert in check_experts(routing, router.in_features, experts):
                for weight, bias in ((expert.gate_up, expert.gate_up_bias), (expert.down, expert.down_bias)):
                    checks.linear_weights(weight, self.weight_dtypes, self.quantized_bits, self.code_kinds)
                    checks.linear_bias(bias, self.weight_dtypes, weight.shape)
                yield expert

        return pack_moe(routing, router, checked(), self.dtype, self.device, scales)

    def moe(
        self, x: Tensor, packed: PackedMoE, out: Tensor | None = None, router_input: Tensor | None = None
    ) -> Tensor:
        assert isinstance(packed, TritonMoE)
        checks.rows(x, packed.hidden, self.dtype)
        router_input = x if router_input is None else router_input
        checks.same_rows(x, router_input, self.dtype)
        if out is None:
            out = torch.empty_like(x)
        else:
            checks.tensor("out", out, self.dtype, tuple(x.shape))
        logits = linear.linear(router_input, packed.router, None, self.row_invariant)
        return self.kernels.moe(x, packed, logits, out, self.row_invariant)

    def pack_adapter(
        self, layers: Sequence[LoraLayer], inner: int, norms: Sequence[NormsOfLayer] = ()
    ) -> TritonAdapter:
        return pack_triton_adapter(layers, self.device, norms)

    def adapt_embeddings(self, embeddings: Tensor, token_ids: Tensor, adapters: AdapterBatch) -> None:
        self.kernels.lora(adapters.adapters, adapters.tokens, self.device).embed(token_ids, embeddings)

    def adapt_logits(self, logits: Tensor, hidden: Tensor, adapters: AdapterBatch) -> None:
        self.kernels.lora(adapters.adapters, adapters.wanted[: len(hidden)], self.device).head(hidden, logits)

    def linear(self, x: Tensor, packed: PackedLinear, out: Tensor | None = None) -> Tensor:
        weights = self._check_linear(x, packed, False, out, packed.out_features, self.dtype)
        return self._linear(x, weights, out)

    def _linear(self, x: Tensor, weights: AnyTritonLinear, out: Tensor | None) -> Tensor:
        kernels = self.kernels
        return linear.linear(x, weights, out, self.row_invariant, kernels.grouped_matmul, kernels.fp8_matmul)

    def linear_silu_mul(self, x: Tensor, packed: PackedLinear, out: Tensor | None = None) -> Tensor:
        return self._gated(x, packed, out, self.kernels.silu_mul)

    def linear_gelu_mul(self, x: Tensor, packed: PackedLinear, out: Tensor | None = None) -> Tensor:
        return self._gated(x, packed, out, self.kernels.gelu_mul)

    def _gated(
        self, x: Tensor, packed: PackedLinear, out: Tensor | None, activate: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        inner = packed.out_features // 2
        weights = self._check_linear(x, packed, True, out, inner, self.dtype)
        out = x.new_empty((len(x), inner)) if out is None else out
        return activate(self._linear(x, weights, None), out)

    def linear_logits(self, x: Tensor, packed: PackedLinear, out: Tensor | None = None) -> Tensor:
        weights = self._check_linear(x, packed, False, out, packed.out_features, torch.float32)
        products = self.kernels.grouped_matmul, self.kernels.fp8_matmul
        logits = linear.linear_float32(x, weights, self.row_invariant, *products)
        return logits if out is None else out.copy_(logits)

    def _check_linear(
        self, x: Tensor, packed: PackedLinear, gate_up: bool, out: Tensor | None, width: int, dtype: torch.dtype
    ) -> AnyTritonLinear:
        if not isinstance(packed, AnyTritonLinear) or packed.gate_up != gate_up:
            raise ValueError("weights of pack_gate_up are for the gated products, and no others are")
        checks.rows(x, packed.in_features, self.dtype)
        if out is not None:
            checks.tensor("out", out, dtype, (x.shape[0], width))
        return packed

    # Rows

    def embed(self, token_ids: Tensor, table: Tensor) -> Tensor:
        checks.token_ids(token_ids, table, self.weight_dtypes)
        if self.check_ids:
            id_checks.token_ids(token_ids, table)
        return self.kernels.embed(token_ids, table)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        checks.norm(x, weight, self.dtype)
        return self.kernels.rms_norm(x, None, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        checks.same_rows(x, residual, self.dtype)
        checks.norm(x, weight, self.dtype)
        return self.kernels.rms_norm(x, residual, weight, eps)

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
        blocks, _, block_size, d = self._check_caches(k_cache, v_cache, num_kv_heads or None)
        norms = q_norm, k_norm, v_norm
        checks.rope(qkv, positions, cos_sin, slot_mapping, num_heads, num_kv_heads, d, norms, self.dtype)
        if self.check_ids:
            id_checks.slots(positions, len(cos_sin), slot_mapping, blocks * block_size)
        return self.kernels.rope_and_cache(
            qkv, positions, cos_sin, slot_mapping, k_cache, v_cache, num_heads, num_kv_heads, q_norm, k_norm, eps,
            v_norm=v_norm,
        )  # fmt: skip

    def plan_attention(self, block_tables: Tensor, seq_lens: Tensor, query_start_loc: Tensor) -> AttentionPlan:
        checks.sequences(block_tables, seq_lens, query_start_loc)
        return AttentionPlan(self.launch_options, block_tables, seq_lens, query_start_loc)

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
        blocks, kv_heads, block_size, d = self._check_caches(k_cache, v_cache, None)
        tables = block_tables, seq_lens, query_start_loc
        checks.attention(q, kv_heads, d, *tables, scale, sliding_window, self.dtype, sinks, softcap, key_ends)
        supported.check_group(q.shape[1], kv_heads, d, self.dtype)
        if out is None:
            out = q.new_empty((len(q), q.shape[1] * d))
        else:
            checks.tensor("out", out, self.dtype, (len(q), q.shape[1] * d))
        if self.check_ids:
            id_checks.blocks(block_tables, seq_lens, query_start_loc, len(q), block_size, blocks, sliding_window)
        if plan is None:
            plan = AttentionPlan(self.launch_options, block_tables, seq_lens, query_start_loc)
        assert isinstance(plan, AttentionPlan)
        plan.attend(q, k_cache, v_cache, scale, sliding_window, out.view_as(q), None, sinks, softcap, key_ends)
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
    ) -> TritonStack:
        stack = Stack(kv_cache, layers, final_norm, cos_sin, num_heads, num_kv_heads, eps, scale, ranks, softcap)
        return TritonStack(stack, self.dtype, self.kv_dtype)

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
        assert isinstance(stack, TritonStack)
        checks.step(residual, stack.hidden, self.dtype, positions, slot_mapping, rows)
        stack.stack.check_inputs(layer_inputs, len(residual), self.dtype)
        checks.sequences(block_tables, seq_lens, query_start_loc)
        checks.key_ends(key_ends, len(residual))
        if self.check_ids:
            blocks, tokens, block_size = stack.num_blocks, len(residual), stack.block_size
            windows = {layer.sliding_window for layer in stack.stack.layers}
            window = 0 if 0 in windows else max(windows)
            id_checks.slots(positions, len(stack.stack.cos_sin), slot_mapping, blocks * block_size)
            id_checks.blocks(block_tables, seq_lens, query_start_loc, tokens, block_size, blocks, window)
            id_checks.rows(rows, tokens)
        plan = AttentionPlan(self.launch_options, block_tables, seq_lens, query_start_loc)
        if self._has_few_rows(stack, len(residual), len(rows)) and not (adapters or added or key_ends is not None):
            return run_few_rows(residual, stack.stack, positions, slot_mapping, plan, rows)
        given = adapters, layer_inputs, added, key_ends
        return run_layers(self, residual, stack.stack, positions, slot_mapping, plan, rows, *given)

    def _has_few_rows(self, stack: TritonStack, tokens: int, wanted: int) -> bool:
        """Return whether the kernels of `few_rows` compute a step. They stand for kernels that are not replaced."""
        fits = stack.fits_few_rows and 0 < tokens <= MOST_ROWS and 0 < wanted <= MOST_ROWS
        return fits and not self.row_invariant and not self.replaced - {GRAPH}

    # The cache

    def _check_caches(self, k_cache: Tensor, v_cache: Tensor, kv_heads: int | None) -> torch.Size:
        shape = checks.caches(k_cache, v_cache, kv_heads, self.kv_dtype)
        supported.check_cache_shape(shape[2], shape[3], self.dtype)
        return shape

    def alloc_kv_cache(
        self, num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int
    ) -> tuple[Tensor, Tensor]:
        checks.cache_shape(block_size, head_dim)
        supported.check_cache_shape(block_size, head_dim, self.dtype)
        shape = (num_blocks, num_kv_heads, block_size, head_dim)
        k, v = (torch.zeros(shape, dtype=self.kv_dtype, device=self.device) for _ in range(2))
        return k, v

    def plain_kv_cache(self, k_cache: Tensor, v_cache: Tensor) -> tuple[Tensor, Tensor]:
        return k_cache.clone(), v_cache.clone()

    def stack_caches(self, kv_cache: Sequence[tuple[Tensor, Tensor]]) -> TritonCaches:
        return TritonCaches(Caches(kv_cache), self.dtype, self.kv_dtype, self.kernels)

    def copy_blocks(self, stack: CacheStack, src: Tensor, dst: Tensor) -> None:
        assert isinstance(stack, TritonCaches)
        checks.block_copies(src, dst, stack.num_blocks)
        stack.mover.copy(src, dst)

    def alloc_host_blocks(self, stack: CacheStack, num_blocks: int) -> Tensor:
        assert isinstance(stack, TritonCaches)
        shape = (num_blocks, *stack.block_shape)
        if self.device.type != "cuda":
            return torch.empty(shape, dtype=self.kv_dtype, device="cpu")
        size = math.prod(shape) * self.kv_dtype.itemsize
        return pinned_bytes(size).view(self.kv_dtype).view(shape)

    def swap_out(self, stack: CacheStack, host: Tensor, src: Tensor, dst: Tensor) -> None:
        assert isinstance(stack, TritonCaches)
        self._check_swap(host, stack)
        checks.block_moves(src, dst, stack.num_blocks, len(host))
        stack.mover.swap_out(host, src, dst)

    def swap_in(self, stack: CacheStack, host: Tensor, src: Tensor, dst: Tensor) -> None:
        assert isinstance(stack, TritonCaches)
        self._check_swap(host, stack)
        checks.block_moves(src, dst, len(host), stack.num_blocks)
        stack.mover.swap_in(host, src, dst)

    def _check_swap(self, host: Tensor, stack: TritonCaches) -> None:
        checks.host_blocks(host, stack.block_shape, self.kv_dtype)
        if self.device.type == "cuda" and not host.is_pinned():
            raise ValueError("host is not pinned: it must be of alloc_host_blocks")

    # Logits

    def argmax(self, logits: Tensor) -> Tensor:
        checks.logits(logits)
        return self.kernels.argmax(logits)

    def sample(
        self, logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor
    ) -> Tensor:
        checks.sampling(logits, temperature, top_k, top_p, min_p, uniform)
        return self.kernels.sample(logits, temperature, top_k, top_p, min_p, uniform)

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
        self.kernels.penalise(logits, starts, ids, counts, repetition, presence, frequency)

    def top_logprobs(self, logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
        checks.top_logprobs(logits, count)
        ids = self.kernels.best_ids(logits, count)
        return self.kernels.logprobs_of(logits, ids), ids

    def logprobs_of(self, logits: Tensor, ids: Tensor) -> Tensor:
        checks.logprobs_of(logits, ids)
        if self.check_ids:
            id_checks.vocabulary_ids(ids, logits.shape[1])
        return self.kernels.logprobs_of(logits, ids[:, None])[:, 0]
