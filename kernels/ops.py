"""The operations that a decoder needs, as one interface with several implementations.

Notation: T tokens of this step (prefill chunks and decode rows mixed), S sequences, R rows of logits, H hidden size or
heads by context, H_kv key-value heads, D head dimension, V vocabulary. `act` is the type of weights and activations.
Every tensor is contiguous and on the device of the implementation.

An implementation may keep packed weights and the inside of a cache block as it likes. What is fixed: a block of a cache
is one index of dimension 0 and can be copied as such. Where `row_invariant` is true, the result for a row depends on
that row alone, bit for bit: not on the batch around it, not on threads, not on whether its position was computed in a
prefill chunk or as a decode row.

Errors: TypeError for a wrong dtype, ValueError for a wrong shape, layout, device or parameter, IndexError for an id,
slot, position or block that lies outside its table.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor


class PackedLinear(Protocol):
    """The weights of one linear layer in an implementation's own layout. The original may be dropped."""

    in_features: int
    out_features: int
    nbytes: int


class DecoderLayer(Protocol):
    """The weights of one layer: attention, then a gated MLP, each behind a norm and added to the residual stream."""

    input_norm: Tensor  # [hidden]
    qkv: PackedLinear
    q_norm: Tensor | None  # [D]
    k_norm: Tensor | None
    sliding_window: int  # 0: none
    o: PackedLinear
    mlp_norm: Tensor  # [hidden]
    gate_up: PackedLinear  # of pack_gate_up
    down: PackedLinear


class AllReduceGroup(Protocol):
    """Several processes that compute together, as one of them sees it."""

    rank: int
    size: int

    def all_reduce(self, values: Tensor) -> Tensor:
        """The sum over all ranks, in place; each has values of the same shape."""


class CacheStack(Protocol):
    """What `stack_caches` made of the caches of all layers; holds them."""


class LayerStack(CacheStack, Protocol):
    """What `stack_layers` made of layers and caches; holds both, and does for a CacheStack."""


@runtime_checkable
class Ops(Protocol):
    name: str
    dtype: torch.dtype
    kv_dtype: torch.dtype  # of the KV cache
    device: torch.device
    row_invariant: bool

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
        """weight [N, K] act and bias [N], as torch.nn.Linear keeps them."""

    def pack_gate_up(self, weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
        """weight [2I, K]: I rows of the gate, then I rows of the up projection. For `linear_silu_mul` only."""

    def linear(self, x: Tensor, packed: PackedLinear, out: Tensor | None = None) -> Tensor:
        """x [T, K] -> [T, N] act. Accumulates in float32 (float64 for float64), adds the bias, rounds once."""

    def linear_silu_mul(self, x: Tensor, packed: PackedLinear, out: Tensor | None = None) -> Tensor:
        """x [T, K] -> silu(gate) * up [T, I] act, with gate, up and silu(gate) each rounded to act."""

    def linear_logits(self, x: Tensor, packed: PackedLinear, out: Tensor | None = None) -> Tensor:
        """x [R, K] -> [R, N] float32, not rounded to act in between."""

    def embed(self, token_ids: Tensor, table: Tensor) -> Tensor:
        """token_ids [T] int32 or int64, table [V, H] -> [T, H]."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [..., H], weight [H]. In float32, rounded to act, then times the weight (Hugging Face LlamaRMSNorm)."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """residual += x in place, rounded to act; returns `rms_norm` of the new residual."""

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
        """Rotates q and k, and writes k and v into the cache. Returns q [T, H, D].

        qkv [T, (H + 2 H_kv) * D]; positions [T] int32; cos_sin [max_position, D] float32, the cosines of the D/2
        frequencies and then the sines (rotate-half convention); slot_mapping [T] int32 or int64, block * block_size +
        offset, -1 for a token whose k and v are not kept. q_norm and k_norm [D]: RMSNorm over D before the rotation
        (Qwen3). The rotation is computed in float32 and rounded once.
        """

    def plan_attention(self, block_tables: Tensor, seq_lens: Tensor, query_start_loc: Tensor) -> object:
        """What the attention of all layers of a step has in common, for `paged_attention`. Arguments as there; it is
        right as long as they are what they were."""

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
        """Causal attention over the cache; returns [T, H * D]. plan: of `plan_attention`, from the same arguments.

        q [T, H, D]; block_tables [S, max_blocks] int32, entries beyond a sequence's blocks are never read; seq_lens [S]
        int32, the context with this step's tokens, whose k and v are in the cache already; query_start_loc [S + 1]
        int32. Query i of sequence s has position seq_lens[s] - (queries of s - i) and sees the keys at or before it;
        with a window (0: none) only those in (position - window, position], as in Hugging Face Mistral. Blocks that lie
        wholly before every window of the call may have been freed.
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
    ) -> LayerStack:
        """Checks the layers of a decoder and their caches once, for `decoder_layers`. cos_sin as for rope_and_cache.

        ranks: the processes that have a part of each layer (tensor parallelism), where these are one part: products of
        `o` and `down` are added up over all of them.
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
    ) -> Tensor:
        """All layers of one step, from the embeddings to the final norm: `layers.run` says which operations.

        residual [T, hidden] act is overwritten; rows [R] int64 are the tokens whose output is wanted; the others are as
        for rope_and_cache and paged_attention. Returns [R, hidden], what the head multiplies.
        """

    def alloc_kv_cache(
        self, num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor]:
        """Zeroed k and v caches of shape [num_blocks, H_kv, block_size, D]; the order inside a block is private."""

    def plain_kv_cache(self, k_cache: Tensor, v_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Copies of caches (or of some of their blocks) with the order that the shape says."""

    def stack_caches(self, kv_cache: Sequence[tuple[Tensor, Tensor]]) -> CacheStack:
        """Checks the caches of all layers once, k and v of each. All have one shape."""

    def copy_blocks(self, stack: CacheStack, src: Tensor, dst: Tensor) -> None:
        """Block dst[i] becomes a copy of block src[i] in the k and v caches of every layer, for all i at once.

        src and dst [n] int64, in host memory for every device; n may be 0. ValueError if a block occurs twice in dst,
        or in both.
        """

    def alloc_host_blocks(self, stack: CacheStack, num_blocks: int) -> Tensor:
        """Host memory for swapped blocks: act [num_blocks, layers, 2 (k, v), H_kv, block_size, D], contents undefined.

        For a CPU it is committed page by page as blocks are first written; for a GPU it is pinned, and so committed as
        a whole. Inside a block the order is that of the caches.
        """

    def swap_out(self, stack: CacheStack, host: Tensor, src: Tensor, dst: Tensor) -> None:
        """Host block dst[i] becomes a copy of block src[i] of the caches, for all i at once.

        host is of `alloc_host_blocks`; src and dst as for `copy_blocks`, but here an id in both names two different
        blocks, and is allowed.
        """

    def swap_in(self, stack: CacheStack, host: Tensor, src: Tensor, dst: Tensor) -> None:
        """Block dst[i] of the caches becomes a copy of host block src[i]; otherwise as `swap_out`."""

    def argmax(self, logits: Tensor) -> Tensor:
        """logits [R, V] float32 -> [R] int32, the lowest id among equals. NaN counts as minus infinity."""

    def sample(
        self, logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor
    ) -> Tensor:
        """Draws one id per row: logits [R, V] float32 -> [R] int32.

        temperature [R] float32 > 0; top_k [R] int32, 0 off; top_p [R] float32, 1 off; min_p [R] float32, 0 off;
        uniform [R] float64 in [0, 1). p = softmax(logits / temperature). Kept are the top_k largest; of these the
        smallest set of most probable ids whose share reaches top_p; of these the ids with p >= min_p * max p. Ids that
        tie with the last one kept are kept. The draw is the first id whose cumulative kept mass, in id order, exceeds
        uniform * total. NaN counts as minus infinity, which is never drawn; a row of nothing else gives 0.
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
        """Changes logits [R, V] float32 in place, for the tokens that each row has seen.

        ids [n] int32: the tokens of row r are at starts[r]..starts[r + 1] (starts [R + 1] int32), none twice in a row;
        counts [n] int32: how often each was generated, 0 if it is in the prompt only. repetition, presence, frequency
        [R] float32. The repetition penalty (Hugging Face: positive logits are divided, others multiplied) applies to
        all of them, the others (OpenAI) to generated ones: logit -= presence + frequency * count.
        """

    def top_logprobs(self, logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The `count` largest log-probabilities of each row, descending, of equals the lower id first.

        logits [R, V] float32 -> log(softmax) [R, count] float32, summed in float32 or better, and ids [R, count] int32.
        NaN counts as minus infinity; a row of nothing else has only minus infinity. ValueError unless count is in 1..V.
        """

    def logprobs_of(self, logits: Tensor, ids: Tensor) -> Tensor:
        """The log-probability of one id per row: logits [R, V] float32, ids [R] int32 or int64 -> [R] float32. As in
        `top_logprobs`, bit for bit."""
