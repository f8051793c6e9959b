"""The contract of the operations that a decoder needs, which several implementations fulfil.

Notation: T tokens of this step (prefill chunks and decode rows mixed), S sequences, R rows of logits, H hidden size or
heads by context, H_kv key-value heads, D head dimension, V vocabulary. `act` is the dtype of activations and norms.
Every tensor is contiguous and on the device of the implementation.

An implementation chooses the layout of packed weights and the order inside a cache block. A block is one index of
dimension 0 of a cache, and can be copied as such. If `row_invariant` is true, the result of a row depends on that row
alone, bit for bit: not on the rest of the batch, not on threads, and not on whether its position is computed in a
prefill chunk or as a decode row.

Errors: TypeError for a wrong dtype, ValueError for a wrong shape, layout, device or parameter, IndexError for an id,
slot, position or block that is out of range.

Modules outside of kernels import the records of arguments from here, those of adapters and of experts too.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from quire.kernels.interrupt import Interrupt
from quire.kernels.lora import (
    ENDS,
    MAX_RANK,
    NO_ADAPTER,
    AdapterBatch,
    LoraLayer,
    LoraPart,
    NormsOfLayer,
    PackedAdapter,
)
from quire.kernels.moe import (
    CLAMPED,
    CLAMPED_ALPHA,
    CLAMPED_LIMIT,
    GELU,
    SILU,
    ExpertNorms,
    ExpertWeights,
    PackedMoE,
    Routing,
)
from quire.kernels.weights import LinearWeight, WeightRows

__all__ = [
    "CLAMPED", "CLAMPED_ALPHA", "CLAMPED_LIMIT", "ENDS", "GELU", "MAX_RANK", "NO_ADAPTER", "SILU", "AdapterBatch",
    "AddedRows", "AllReduceGroup", "CacheStack", "DecoderLayer", "ExpertNorms", "ExpertWeights", "KernelsUnavailable",
    "LayerStack", "LoraLayer", "LoraPart", "NormsOfLayer", "Ops", "PackedAdapter", "PackedLinear", "PackedMoE",
    "PerLayerInput", "Routing",
]  # fmt: skip


class KernelsUnavailable(RuntimeError):
    """The C++ or Triton kernels cannot be built, loaded or launched here. The message names the remedy."""


class AddedRows(NamedTuple):
    """What is added to the outputs of the first layers of a decoder. There are fewer of them than layers."""

    rows: Tensor  # int64 [N], the tokens
    values: Sequence[Tensor]  # act [N, hidden], of each of these layers


class PackedLinear(Protocol):
    """The weights of one linear layer in the layout of an implementation. The caller may drop the original."""

    @property
    def in_features(self) -> int: ...

    @property
    def out_features(self) -> int: ...

    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True, eq=False)
class PerLayerInput:
    """The end of a layer that adds an input of its own for each token (Gemma 4, per-layer embeddings).

    To the residual is added norm(projection(gelu(gate(residual)) * input)), with the input [T, P] of this layer.
    """

    gate: PackedLinear  # [hidden] -> [P]
    projection: PackedLinear  # [P] -> [hidden]
    norm: Tensor  # [hidden]

    @property
    def nbytes(self) -> int:
        return self.gate.nbytes + self.projection.nbytes + self.norm.nbytes


class DecoderLayer(Protocol):
    """The weights of one layer: attention and a gated MLP or experts, each after a norm and added to the residual.

    The numbers of kv heads and of their dimensions are those of the layer's cache.
    """

    input_norm: Tensor  # [hidden]
    qkv: PackedLinear  # with shares_kv: queries alone
    q_norm: Tensor | None  # [D]
    k_norm: Tensor | None
    v_norm: Tensor | None
    shares_kv: bool  # the layer writes no keys and values: its cache is that of an earlier layer
    sliding_window: int  # 0: none
    o: PackedLinear
    mlp_norm: Tensor  # [hidden]
    gate_up: PackedLinear | None  # of pack_gate_up; None with experts
    down: PackedLinear | None
    moe: PackedMoE | None  # the experts that take the place of gate_up and down; with expert_norms next to these
    expert_norms: ExpertNorms | None
    gate: str  # activation of gate_up: moe.SILU or moe.GELU
    post_attention_norm: Tensor | None  # [hidden], of the output of attention before it is added
    post_mlp_norm: Tensor | None
    sinks: Tensor | None  # [H] float32
    cos_sin: Tensor | None  # rotations of this layer; None: those of the stack
    per_layer_input: PerLayerInput | None
    output_scale: float  # of the residual at the end of the layer
    uses_key_ends: bool  # attention sees the keys that `key_ends` of the step says


class AllReduceGroup(Protocol):
    """The group of processes that hold a part of each layer, from the view of one process."""

    rank: int
    size: int

    def all_reduce(self, values: Tensor) -> Tensor:
        """Sum values of the same shape over all ranks, in place, and return them."""


class CacheStack(Protocol):
    """The caches of all layers, as `stack_caches` returns them. The stack keeps the caches alive."""


class LayerStack(Protocol):
    """Layers and caches, as `stack_layers` returns them. The stack keeps both alive."""


@runtime_checkable
class Ops(Protocol):
    """The operations of one implementation, for one device and one dtype of activations."""

    name: str
    dtype: torch.dtype
    weight_dtypes: tuple[torch.dtype, ...]  # of weights and biases of linear layers, and of embedding tables
    quantized_bits: tuple[int, ...]  # of quantised weights; empty: none
    code_kinds: tuple[str, ...]  # of a `CodedWeight`
    kv_dtype: torch.dtype  # of the KV cache
    device: torch.device
    row_invariant: bool

    def pack_linear(self, weight: LinearWeight | WeightRows, bias: Tensor | None = None) -> PackedLinear:
        """Pack weight [N, K] and bias [N], as torch.nn.Linear keeps them.

        They have a dtype of `weight_dtypes`, and keep it: products are those of the same weights in `act`. Quantised
        weights have as many bits as `quantized_bits` says, and their products are `quantization.quantized_linear`.
        Codes with scales have a kind of `code_kinds`; products are those of the dequantised weights, which are rounded
        to bfloat16 if that is the dtype of activations. Operations may be asked to round the activations of FP8 weights
        instead (`fp8_rows`). `WeightRows` are read while they are packed.
        """

    def pack_gate_up(self, weight: LinearWeight | WeightRows, bias: Tensor | None = None) -> PackedLinear:
        """Pack weight [2I, K] for the gated products: I rows of the gate, then I rows of the up projection."""

    def pack_moe(
        self, routing: Routing, router: PackedLinear, experts: Iterable[ExpertWeights], scales: Tensor | None = None
    ) -> PackedMoE:
        """Pack the experts of a layer for `moe`, one after the other, so that no two need be in memory before.

        router: of `pack_linear`, [hidden] -> [experts]. Weights as for `pack_linear`; those of all experts have the
        same shapes, the same dtype or bits, and all or none have biases. scales [experts] float32: the weight of a
        chosen expert is multiplied by its scale.
        """

    def pack_adapter(
        self, layers: Sequence[LoraLayer], inner: int, norms: Sequence[NormsOfLayer] = ()
    ) -> PackedAdapter:
        """Pack a low-rank adapter: its factors for each layer of the decoder, and for embedding and head as a last one.

        inner: gates of the MLP; the ups have offsets from there. norms: those that the adapter has of its own, for each
        layer and, as a last entry, the final norm.
        """

    def adapt_embeddings(self, embeddings: Tensor, token_ids: Tensor, adapters: AdapterBatch) -> None:
        """Change the embeddings [T, H] act of tokens [T] int32 or int64 in place, as `lora.AdaptedRows.embed` does."""

    def adapt_logits(self, logits: Tensor, hidden: Tensor, adapters: AdapterBatch) -> None:
        """Change the logits [R, V] float32 of `linear_logits` in place, as `lora.AdaptedRows.head` does.

        hidden [R, H] act: the input of the head, of the first R of the wanted tokens.
        """

    def linear(self, x: Tensor, packed: PackedLinear, out: Tensor | None = None) -> Tensor:
        """Return x [T, K] times the weights as [T, N] act. Sums are in float32 (float64 for float64) and rounded once.

        out: filled and returned if it is given. The bias is added before rounding.
        """

    def linear_silu_mul(self, x: Tensor, packed: PackedLinear, out: Tensor | None = None) -> Tensor:
        """Return silu(gate) * up of x [T, K] as [T, I] act, with gate, up and silu(gate) each rounded to act."""

    def linear_gelu_mul(self, x: Tensor, packed: PackedLinear, out: Tensor | None = None) -> Tensor:
        """Return gelu(gate) * up like `linear_silu_mul`, with the approximation of GELU by tanh."""

    def linear_logits(self, x: Tensor, packed: PackedLinear, out: Tensor | None = None) -> Tensor:
        """Return x [R, K] times the weights as [R, N] float32, not rounded to act in between."""

    def moe(
        self, x: Tensor, packed: PackedMoE, out: Tensor | None = None, router_input: Tensor | None = None
    ) -> Tensor:
        """Return the weighted sum of the outputs of the experts that the router chooses for each row, [T, hidden] act.

        x [T, hidden]; out: filled and returned, and may be x. router_input [T, hidden]: x if None. The router's logits
        are rounded to act, and `moe.route` chooses by them. An expert computes `moe.activate` of its gates and ups
        between two products, all rounded to act; `moe.combine` adds up in float32, in the order of the logits.
        """

    def embed(self, token_ids: Tensor, table: Tensor) -> Tensor:
        """Return the rows of table [V, H], one of `weight_dtypes`, at token_ids [T] int32 or int64, as [T, H] act."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return x [..., H] / rms(x), in float32 and rounded to act, times weight [H] (Hugging Face LlamaRMSNorm)."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add x to residual in place, rounded to act, and return `rms_norm` of the new residual."""

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
        """Rotate q and k, write k and v to the cache, and return q [T, H, D].

        qkv [T, (H + 2 H_kv) * D]; positions [T] int32; cos_sin [max_position, D] float32, the cosines of the D/2
        frequencies and then the sines (rotate-half convention); slot_mapping [T] int32 or int64, block * block_size +
        offset, or -1 for a token whose k and v are not kept. q_norm and k_norm [D]: weights of an RMSNorm over D before
        the rotation (Qwen3). v_norm [D]: of such a norm of the values (Gemma 4). The rotation is computed in float32
        and rounded once. num_kv_heads 0: qkv holds queries alone, and nothing is written.
        """

    def plan_attention(self, block_tables: Tensor, seq_lens: Tensor, query_start_loc: Tensor) -> object:
        """Return a plan for `paged_attention` that all layers of a step share. Arguments as there.

        The plan is valid until the contents of the arguments change.
        """

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
        """Return causal attention over the cache, [T, H * D].

        q [T, H, D]. block_tables [S, max_blocks] int32; entries beyond a sequence's blocks are never read. seq_lens [S]
        int32: length of the context, including the tokens of this step, whose k and v are in the cache already.
        query_start_loc [S + 1] int32. scale: of the scores. out: filled and returned if it is given. plan: of
        `plan_attention` with the same arguments.
        Query i of sequence s has position seq_lens[s] - (queries of s - i) and sees the keys at or before its position;
        with a window (0: none) only keys in (position - window, position], as in Hugging Face Mistral. Blocks whose
        keys are before every window of the call may have been freed.
        key_ends [T] int32: query t sees the keys before position key_ends[t] instead, for tokens of an image that see
        all of the image. The position is after that of the query, and at most seq_lens[s]. A window begins where it
        does without.
        softcap (0: none): a score s, scaled, becomes softcap * tanh(s / softcap) before the mask (Gemma 2). sinks [H]
        float32, finite: the logit of each head that is added to the denominator of the softmax and has no value, as if
        a key with this score and a value of zeros were visible to every query (gpt-oss).
        """

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
    ) -> LayerStack:
        """Check the layers of a decoder and their caches once, for `decoder_layers`.

        final_norm [hidden]; kv_cache: k and v of each layer, whose heads and their dimensions may differ; the cache of
        a layer with `shares_kv` is that of an earlier layer. num_kv_heads: of the first layer. cos_sin as for
        rope_and_cache; eps: of the norms; scale: of the scores; softcap: as for paged_attention. ranks: the processes
        that hold a part of each layer (tensor parallelism), if `layers` are one part: the outputs of `o`, `down` and
        the experts are summed over all of them.
        """

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
        """Compute all layers of one step, from the embeddings to the final norm, as `layers.run_layers` defines it.

        residual [T, hidden] act is overwritten. rows [R] int64: the tokens whose output is wanted. Other arguments as
        for rope_and_cache and paged_attention. adapters: of `pack_adapter`, for the tokens that use one; not with
        several ranks. layer_inputs [T, layers, P] act: for layers with `per_layer_input`. added: to the outputs of the
        first layers; on a CPU not with adapters. key_ends: as for paged_attention, for layers with `uses_key_ends`.
        Returns [R, hidden] act, the input of the head.

        interrupt: on a CPU, raises StepInterrupted before the next layer once it is requested; not with several ranks.
        A GPU ignores it, because its layers are only launched here.
        """

    def alloc_kv_cache(
        self, num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int
    ) -> tuple[Tensor, Tensor]:
        """Return zeroed k and v caches [num_blocks, H_kv, block_size, D] of kv_dtype. The order in a block is private.

        Keys and values are rounded to act first, and then to kv_dtype: to the nearest, ties to even. float8_e4m3fn
        saturates at 448. An int8 cache keeps a float32 scale for each token and kv head, the largest absolute value /
        127, and integers round(value / scale). Its last dimension is D + 4, for the bytes of the scale, and NaN is
        stored as some finite value.
        """

    def plain_kv_cache(self, k_cache: Tensor, v_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Return copies of caches, or of some of their blocks, in the order that the shape says.

        int8: each row has its D integers, and then the 4 bytes of its scale.
        """

    def stack_caches(self, kv_cache: Sequence[tuple[Tensor, Tensor]]) -> CacheStack:
        """Check the caches of all layers once: k and v of each, all of one shape."""

    def copy_blocks(self, stack: CacheStack, src: Tensor, dst: Tensor) -> None:
        """Copy block src[i] to block dst[i] in the k and v caches of every layer, for all i.

        src and dst [n] int64, in host memory for every device; n may be 0. Raises ValueError if a block occurs twice in
        dst, or in both.
        """

    def alloc_host_blocks(self, stack: CacheStack, num_blocks: int) -> Tensor:
        """Return host memory for swapped blocks, [num_blocks, layers, 2 (k, v), H_kv, block_size, D], undefined.

        The dtype, the last dimension and the order inside a block are those of the caches. For a CPU the system commits
        pages as blocks are first written. For a GPU the memory is pinned, which commits all of it.
        """

    def swap_out(self, stack: CacheStack, host: Tensor, src: Tensor, dst: Tensor) -> None:
        """Copy block src[i] of the caches to host block dst[i], for all i.

        host: of `alloc_host_blocks`. src and dst as for `copy_blocks`, but an id may occur in both, because it names
        two different blocks.
        """

    def swap_in(self, stack: CacheStack, host: Tensor, src: Tensor, dst: Tensor) -> None:
        """Copy host block src[i] to block dst[i] of the caches, for all i. Arguments as for `swap_out`."""

    def argmax(self, logits: Tensor) -> Tensor:
        """Return the id of the largest of logits [R, V] float32, as [R] int32; of equal logits the lowest id.

        NaN counts as minus infinity.
        """

    def sample(
        self, logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor
    ) -> Tensor:
        """Draw one id per row of logits [R, V] float32; returns [R] int32.

        temperature [R] float32 > 0; top_k [R] int32, 0: off; top_p [R] float32, 1: off; min_p [R] float32, 0: off;
        uniform [R] float64 in [0, 1). p = softmax(logits / temperature). The filters keep the top_k largest; of these
        the smallest set of most probable ids whose share reaches top_p; of these the ids with p >= min_p * max p. Ids
        that tie with the last kept id are kept. The draw is the first id whose cumulative kept mass, in id order,
        exceeds uniform * total. NaN counts as minus infinity, and an id with minus infinity is never drawn. A row of
        minus infinity gives 0.
        """

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
        """Change logits [R, V] float32 in place, for the tokens that each row has seen.

        ids [n] int32: the tokens of row r are at starts[r]..starts[r + 1] (starts [R + 1] int32), none twice in a row;
        counts [n] int32: how often each was generated, 0 if it is in the prompt only. repetition, presence, frequency
        [R] float32. The repetition penalty (Hugging Face: positive logits are divided, others multiplied) applies to
        all of them, the others (OpenAI) to generated ones: logit -= presence + frequency * count.
        """

    def top_logprobs(self, logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return the `count` largest log-probabilities of each row in descending order; of equals the lower id first.

        logits [R, V] float32 -> log(softmax) [R, count] float32, summed in float32 or better, and ids [R, count] int32.
        NaN counts as minus infinity. In a row of minus infinity all log-probabilities are minus infinity. Raises
        ValueError unless count is in 1..V.
        """

    def logprobs_of(self, logits: Tensor, ids: Tensor) -> Tensor:
        """Return the log-probability of one id per row, [R] float32, with the same bits as `top_logprobs`.

        logits [R, V] float32; ids [R] int32 or int64.
        """
