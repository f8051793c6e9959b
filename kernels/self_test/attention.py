"""Cases of attention: rows of one chunk and of several, prompts behind cached keys, and steps that mix both."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from quire.kernels import kv_values
from quire.kernels.ops import Ops
from quire.kernels.reference import ReferenceOps, indexable
from quire.kernels.self_test.cases import KernelCase
from quire.kernels.self_test.inputs import FULL, CaseInputs
from quire.kernels.uses import AttentionUse

# In units of the type of activations. Weights are rounded before the product with the values, and so is the result.
# Right kernels deviate by one at most; without one of 700 keys, a row in bfloat16 deviates by more than three.
TOLERANCE = 3
SPARE_BLOCKS = 2  # that no sequence owns
# Sequences of a step: the length of the context, and how many of its last tokens are queries.
Sequences = Sequence[tuple[int, int]]

DECODING: Sequences = [(1, 1), (16, 1), (63, 1), (64, 1), (65, 1), (130, 1), (257, 1)]
SPLIT: Sequences = [(700, 1), (3, 1)]
EXTENDING: Sequences = [(340, 40), (290, 33), (65, 64)]
MIXED: Sequences = [(330, 1), (1, 1), (130, 21), (200, 70), (40, 40)]
NEW: Sequences = [(37, 37), (129, 129), (2, 2)]
IMAGES = "images"
LONG_SPLIT: Sequences = [(4000, 1), (2049, 1), (255, 1)]
LONG_EXTENDING: Sequences = [(2100, 257), (1500, 128), (600, 5)]


@dataclass(frozen=True, eq=False)
class AttentionInputs:
    """Random sequences in a paged cache. The blocks that no sequence owns hold NaN."""

    inputs: CaseInputs
    use: AttentionUse
    block_size: int
    sequences: Sequences
    has_images: bool = False

    @cached_property
    def generator(self) -> torch.Generator:
        return self.inputs.generator(zlib.crc32(repr((self.use, self.sequences)).encode()))

    @cached_property
    def lengths(self) -> list[int]:
        return [length for length, _ in self.sequences]

    @cached_property
    def counts(self) -> list[int]:
        return [count for _, count in self.sequences]

    @cached_property
    def num_blocks(self) -> int:
        return sum(-(-length // self.block_size) for length in self.lengths) + SPARE_BLOCKS

    @cached_property
    def kv(self) -> tuple[Tensor, Tensor]:
        """Keys and values of all tokens [tokens, H_kv, D]."""
        shape, ops = (sum(self.lengths), self.use.kv_heads, self.use.head_dim), self.inputs.ops
        k, v = (self.inputs.normal(*shape, generator=self.generator) for _ in range(2))
        if ops.kv_dtype is torch.float8_e4m3fn:  # kernels of GPUs compute with the keys of new prompts as they are
            k, v = (kv_values.decode(kv_values.encode(rows, ops.kv_dtype), ops.dtype) for rows in (k, v))
        return k, v

    @cached_property
    def q(self) -> Tensor:
        """The queries of the step [T, H, D]. Scores have a standard deviation of about one."""
        made = self.inputs.normal(sum(self.counts), self.use.heads, self.use.head_dim, generator=self.generator)
        scaled: Tensor = made / (self.use.scale * self.use.head_dim**0.5)
        return scaled.to(made.dtype)

    @cached_property
    def sinks(self) -> Tensor | None:
        """The logits of the sinks [H]: about as large as the largest scores."""
        if not self.use.has_sinks:
            return None
        return self.inputs.normal(self.use.heads, generator=self.generator, dtype=torch.float32) + 3

    @cached_property
    def tokens(self) -> Tensor:
        """The index of each token of the step among all tokens."""
        firsts = [sum(self.lengths[: s + 1]) - count for s, count in enumerate(self.counts)]
        return self.inputs.integers(
            [first + at for first, count in zip(firsts, self.counts, strict=True) for at in range(count)], torch.int64
        )

    @cached_property
    def tables(self) -> tuple[Tensor, Tensor, Tensor]:
        """Block tables, lengths and starts of queries. Entries beyond a sequence's blocks name a block of NaN."""
        shuffle = torch.Generator("cpu").manual_seed(self.num_blocks)
        order = torch.randperm(self.num_blocks, generator=shuffle, device="cpu").tolist()
        spare, owned = order[-1], iter(order)
        longest = -(-max(self.lengths) // self.block_size) + 1
        rows = []
        for length in self.lengths:
            mine = [next(owned) for _ in range(-(-length // self.block_size))]
            rows.append(mine + [spare] * (longest - len(mine)))
        starts = [sum(self.counts[:s]) for s in range(len(self.counts) + 1)]
        flat = self.inputs.integers([block for row in rows for block in row])
        return flat.view(len(rows), longest), self.inputs.integers(self.lengths), self.inputs.integers(starts)

    @cached_property
    def slots(self) -> Tensor:
        """The slot of each token of each sequence."""
        blocks, size = self.tables[0].tolist(), self.block_size
        slots = [
            blocks[s][at // size] * size + at % size for s, length in enumerate(self.lengths) for at in range(length)
        ]
        return self.inputs.integers(slots, torch.int64)

    @cached_property
    def caches(self) -> tuple[Tensor, Tensor]:
        """The caches of the operations."""
        return self.caches_of(self.inputs.ops)

    def caches_of(self, ops: Ops) -> tuple[Tensor, Tensor]:
        """Return caches of other operations with the same keys and values."""
        use = self.use
        caches = ops.alloc_kv_cache(self.num_blocks, use.kv_heads, self.block_size, use.head_dim)
        for cache in caches:
            cache.view(torch.uint8).fill_(255)  # NaN, also as a scale
        if ops.name == "triton":  # whose blocks have the plain order: the cases of other kernels do not depend on these
            block, offset = self.slots // self.block_size, self.slots % self.block_size
            for cache, rows in zip(caches, self.kv, strict=True):
                indexable(cache)[block, :, offset] = indexable(kv_values.encode(rows, ops.kv_dtype))
            return caches
        k, v = (rows.to(ops.dtype) for rows in self.kv)
        still = torch.zeros(1, use.head_dim, device=ops.device)
        still[:, : use.head_dim // 2] = 1  # an angle of zero leaves keys unchanged
        positions = torch.zeros(len(k), dtype=torch.int32, device=ops.device)
        qkv = torch.cat([k, k, v], dim=1).flatten(1)
        ops.rope_and_cache(qkv, positions, still, self.slots, *caches, use.kv_heads, use.kv_heads)
        return caches

    @cached_property
    def key_ends(self) -> Tensor | None:
        """The ends of keys [T], with an image in the middle of the queries of each sequence that has several."""
        if not self.has_images:
            return None
        ends = []
        for length, count in self.sequences:
            own = list(range(length - count + 1, length + 1))
            first, end = count // 5, count - count // 5
            own[first:end] = [length - count + end] * (end - first)
            ends += own
        return self.inputs.integers(ends)

    def attend(self) -> Tensor:
        """Compute the step by the operations, [T, H * D]."""
        return self.inputs.ops.paged_attention(
            self.q, *self.caches, *self.tables, self.use.scale, self.use.window, None, None, self.sinks,
            self.use.softcap, self.key_ends,
        )  # fmt: skip

    @cached_property
    def exact(self) -> Tensor:
        """The step in float32, from what the caches store [T, H * D]."""
        ops = self.inputs.ops
        reference = ReferenceOps(ops.device, torch.float32)
        k, v = (kv_values.decode(cache, torch.float32) for cache in ops.plain_kv_cache(*self.caches))
        return reference.paged_attention(
            self.q.float(), k, v, *self.tables, self.use.scale, self.use.window, None, None, self.sinks,
            self.use.softcap, self.key_ends,
        )  # fmt: skip

    def rows(self, values: Tensor, is_wanted: Callable[[int, int], bool]) -> list[Tensor]:
        """Return the rows of the sequences that are wanted. is_wanted: of a length and a number of queries."""
        parts = zip(torch.split(values, self.counts), self.sequences, strict=True)
        return [torch.cat([part for part, sequence in parts if is_wanted(*sequence)])]


def attention_cases(
    inputs: CaseInputs, uses: Sequence[AttentionUse], block_size: int, longest: int
) -> Iterator[KernelCase]:
    """Yield the cases of attention. longest: context of the model, in tokens."""
    for use in uses:
        steps: list[tuple[str, str, Sequences]] = [
            ("decode", "decode", DECODING),
            ("split decode", "decode", SPLIT),
            ("extend", "prefill", EXTENDING),
            ("mixed step, rows", "decode", MIXED),
            ("mixed step, prompts", "prefill", MIXED),
        ]
        if use.window and use.window + 70 <= longest:
            beyond = [(use.window + 70, 1), (use.window + 45, 33)]
            steps += [("window, rows", "decode", beyond), ("window, prompts", "prefill", beyond)]
        if inputs.level == FULL:
            steps += [("long split decode", "decode", LONG_SPLIT), ("long extend", "prefill", LONG_EXTENDING)]
        if use.has_key_ends:
            steps += [(IMAGES, "prefill", MIXED)]
        for name, kernel, sequences in steps:
            fitting = fit(sequences, longest)
            if any(is_of(kernel, *sequence) for sequence in fitting):
                yield attention_case(name, kernel, AttentionInputs(inputs, use, block_size, fitting, name == IMAGES))


def fit(sequences: Sequences, longest: int) -> Sequences:
    """Return the sequences, cut to contexts of `longest` tokens."""
    return [(min(length, longest), min(count, longest)) for length, count in sequences]


def is_of(kernel: str, length: int, count: int) -> bool:
    """Return whether the rows of a sequence are computed by a kernel: one query by decode, several by prefill."""
    return (count == 1) == (kernel == "decode")


def attention_case(name: str, kernel: str, step: AttentionInputs) -> KernelCase:
    """Return the case of the rows of a step that a kernel computes: "decode" or "prefill"."""

    def wanted(length: int, count: int) -> bool:
        return is_of(kernel, length, count)

    return KernelCase(
        name,
        kernel,
        f"{step.use}, blocks of {step.block_size}, {step.inputs.types}",
        lambda: step.rows(step.attend(), wanted),
        lambda: step.rows(step.exact, wanted),
        TOLERANCE * step.inputs.unit,
    )
