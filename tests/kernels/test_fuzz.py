"""Steps over block tables that the block manager makes, with NaN in every slot that belongs to no sequence.

Prompts share cached prefixes. Forks share a partly filled last block until one of them writes. Freed blocks are used
again. The last token of a fully cached prompt is computed but not stored. A step may write only the slots given to it.
Finite and correct outputs show that the step read no other slot.
"""

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.kernels import Ops
from quire.shared.protocol.messages import SamplingParams
from quire.worker.engine.blocks import BlockManager
from quire.worker.engine.sequence import Sequence, SequenceGroup
from tests.support.kernels import oracle
from tests.support.kernels.implementations import ON_CUDA, implementations, make_ops, make_triton_ops
from tests.support.kernels.oracle import assert_close, slack
from tests.support.kernels.paged import GARBAGE

BLOCKS, LONGEST = 40, 80
PARAMS = SamplingParams(max_tokens=1)


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    d: int
    block_size: int
    window: int
    softcap: float
    has_sinks: bool


SHAPES = st.builds(
    lambda group, kv_heads, *rest: Shape(group * kv_heads, kv_heads, *rest),
    st.integers(1, 3),
    st.integers(1, 2),
    st.sampled_from([32, 48, 64]),
    st.sampled_from([8, 16, 32]),
    st.sampled_from([0, 0, 1, 10, 40]),
    st.sampled_from([0.0, 0.0, 1.5, 30.0]),
    st.booleans(),
)


@dataclass
class Memory:
    """Caches, and the block manager that assigns their blocks to sequences. The actions are those of a scheduler."""

    ops: Ops
    shape: Shape
    live: list[Sequence] = field(default_factory=list)

    def __post_init__(self) -> None:
        s = self.shape
        self.blocks = BlockManager(BLOCKS, s.block_size)
        self.caches = self.ops.alloc_kv_cache(BLOCKS, s.kv_heads, s.block_size, s.d)
        for cache in self.caches:
            cache.fill_(float("nan"))

    def start(self, token: int, length: int, computed: int) -> None:
        """Start a sequence whose prompt repeats one token, with `computed` tokens computed in earlier steps."""
        prompt = (token,) * length
        sequence = Sequence(SequenceGroup("", prompt, PARAMS), 0, prompt)
        prefix = self.blocks.find_prefix(sequence, length)
        if not self.blocks.can_start(prefix, length, 0):
            return
        self.blocks.start(sequence, prefix, length)
        sequence.num_computed = min(max(computed, prefix.num_tokens), length - 1)
        self.fill(sequence, prefix.num_tokens, sequence.num_computed)
        self.live.append(sequence)

    def fork(self, which: int) -> None:
        """Fork a sequence. Parent and child continue after the computed tokens, each with its own token."""
        parent = self.live[which % len(self.live)]
        if not parent.num_computed or self.blocks.num_free < 3:
            return
        child = parent.copy(1)
        self.blocks.fork(parent, child, parent.num_computed)
        child.token_ids = child.token_ids[: child.num_computed + 1]
        if len(child.block_table) < self.blocks.blocks_for(len(child.token_ids)):
            self.blocks.append(child)
        self.live.append(child)

    def free(self, which: int) -> None:
        self.blocks.free(self.live.pop(which % len(self.live)))
        for block in self.blocks._free:
            for cache in self.caches:
                cache[block] = float("nan")

    def fill(self, sequence: Sequence, first: int, end: int) -> None:
        """Write the keys and values of earlier steps. On the CPU, `rope_and_cache` does so at angle zero."""
        s, at = self.shape, torch.arange(first, max(first, end))
        if len(at):
            k, v = torch.randn(2, len(at), s.kv_heads, s.d).to(self.ops.dtype)
            if self.ops.name == "cpu":
                still = torch.cat([torch.ones(1, s.d // 2), torch.zeros(1, s.d // 2)], dim=1)
                qkv = torch.cat([k.repeat(1, s.heads // s.kv_heads, 1), k, v], dim=1).flatten(1)
                where = torch.zeros(len(at), dtype=torch.int32), still, self.slots(sequence, at)
                self.ops.rope_and_cache(qkv, *where, *self.caches, s.heads, s.kv_heads)
            else:  # the layout of a block is plain, and the interpreter is slow
                slots = self.slots(sequence, at)
                for cache, x in zip(self.caches, (k, v), strict=True):
                    cache[slots // s.block_size, :, slots % s.block_size] = x
        self.blocks.cache_full_blocks(sequence, end)

    def slots(self, sequence: Sequence, at: torch.Tensor) -> torch.Tensor:
        table, size = torch.tensor(sequence.block_table), self.shape.block_size
        return table[at // size] * size + at % size

    def make_writable(self, sequence: Sequence, end: int) -> bool:
        """Copy shared blocks before a step that stores tokens num_stored..end - 1. Return False if no block is free."""
        size = self.shape.block_size
        for index in range(max(sequence.num_computed, sequence.num_stored) // size, self.blocks.blocks_for(end)):
            if self.blocks.ref_counts[sequence.block_table[index]] > 1 and not self.blocks.num_free:
                return False
            if copy := self.blocks.make_writable(sequence, index):
                for cache in self.caches:
                    cache[copy.target] = cache[copy.source]
        return True


LENGTHS = st.integers(1, LONGEST) | st.sampled_from([16, 32, 64])  # a prompt of whole blocks may be fully cached
ACTIONS = st.one_of(
    st.tuples(st.just("start"), st.integers(1, 2), LENGTHS, st.integers(0, LONGEST)),
    st.tuples(st.just("fork"), st.integers(0, 9)),
    st.tuples(st.just("free"), st.integers(0, 9)),
)


def check_step(memory: Memory, most_queries: list[int]) -> None:
    """Run and check one step of all live sequences. most_queries: the largest number of queries of each sequence."""
    ops, s = memory.ops, memory.shape
    positions, slots, counts, lengths, tables = [], [], [], [], []
    for sequence, most in zip(memory.live, most_queries, strict=False):
        first = sequence.num_computed
        end = first + min(most, len(sequence.token_ids) - sequence.num_computed)
        if end > sequence.num_stored and not memory.make_writable(sequence, end):
            continue
        at = torch.arange(first, end)
        positions.append(at)
        slots.append(torch.where(at >= sequence.num_stored, memory.slots(sequence, at), -1))
        counts.append(end - first)
        lengths.append(end)
        row = torch.full((LONGEST // s.block_size + 2,), GARBAGE, dtype=torch.int32)
        row[: memory.blocks.blocks_for(end)] = torch.tensor(sequence.block_table[: memory.blocks.blocks_for(end)])
        if s.window:  # blocks before every window of the sequence may be freed
            row[: max(first - s.window + 1, 0) // s.block_size] = GARBAGE
        tables.append(row)
    if not counts:
        return
    memory.blocks.check_integrity(memory.live)

    tokens = sum(counts)
    qkv = torch.randn(tokens, (s.heads + 2 * s.kv_heads) * s.d).to(ops.dtype)
    angles = torch.rand(LONGEST + 1, s.d // 2) * 6
    cos_sin, at, to = torch.cat([angles.cos(), angles.sin()], dim=1), torch.cat(positions).int(), torch.cat(slots)
    expected = [cache.clone() for cache in ops.plain_kv_cache(*memory.caches)]
    q = ops.rope_and_cache(qkv, at, cos_sin, to, *memory.caches, s.heads, s.kv_heads)
    plain = ops.plain_kv_cache(*memory.caches)

    exact_q, exact_k, v = qkv.view(tokens, -1, s.d).split([s.heads, s.kv_heads, s.kv_heads], dim=1)
    assert_close(q, oracle.rotate(exact_q, cos_sin, at), exact_q.double().abs().amax(), rounds=2)
    kept = to >= 0
    where = to[kept] // s.block_size, slice(None), to[kept] % s.block_size
    exact_k = oracle.rotate(exact_k, cos_sin, at)[kept]
    if len(exact_k):
        assert_close(plain[0][where], exact_k, exact_k.abs().amax(), rounds=2)
    expected[0][where], expected[1][where] = plain[0][where], v[kept]
    for found, wanted in zip(plain, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)

    starts = torch.tensor([0, *counts]).cumsum(0).int()
    out = torch.full((tokens, s.heads * s.d), float("nan")).to(ops.dtype)
    where = torch.stack(tables), torch.tensor(lengths, dtype=torch.int32), starts
    extras = torch.randn(s.heads) * 3 if s.has_sinks else None, s.softcap
    ops.paged_attention(q, *memory.caches, *where, s.d**-0.5, s.window, out, None, *extras)
    for i, length in enumerate(lengths):
        lowest = max(length - counts[i] - s.window + 1, 0) // s.block_size * s.block_size if s.window else 0
        blocks = tables[i][lowest // s.block_size : memory.blocks.blocks_for(length)].long()
        k, v = (c[blocks].transpose(1, 2).flatten(0, 1)[: length - lowest].nan_to_num() for c in plain)
        mine = slice(int(starts[i]), int(starts[i + 1]))
        exact = oracle.attention(q[mine], k, v, s.d**-0.5, s.window, *extras)
        assert_close(out[mine], exact, slack(ops.dtype, 2000))


def run_example(ops: Ops, shape: Shape, actions: list[tuple], most_queries: list[int], seed: int) -> None:
    torch.manual_seed(seed)
    memory = Memory(ops, shape)
    for name, *numbers in actions:
        if name == "start" or memory.live:
            getattr(memory, name)(*numbers)
    check_step(memory, most_queries)


EXAMPLE = {
    "shape": SHAPES,
    "actions": st.lists(ACTIONS, min_size=2, max_size=7),
    "most_queries": st.lists(st.sampled_from([1, 1, 2, 5, 9]), min_size=7, max_size=7),
    "seed": st.integers(0, 999),
}


def fuzz(param: tuple, examples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    modes = [make_ops(*param, monkeypatch)]
    if param[0] == "triton":
        modes.append(make_triton_ops(param[2], monkeypatch, batch_invariant=True))

    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(ops=st.sampled_from(modes), **EXAMPLE)
    def run(ops: Ops, **example: object) -> None:
        run_example(ops, **example)

    run()


def name_of(param: tuple) -> str:
    return "-".join(str(part).removeprefix("torch.") for part in param if part).replace("triton-", "gpu-")


def in_ci(param: tuple) -> bool:
    """Return whether CI tries an implementation: on a device all, in the interpreter one dtype."""
    return ON_CUDA or param[0] != "triton" or param[2] is torch.float32


@pytest.mark.slow
@pytest.mark.parametrize(
    "param",
    [pytest.param(p.values[0], marks=() if in_ci(p.values[0]) else pytest.mark.soak) for p in implementations()],
    ids=name_of,
)
def test_a_step_touches_its_own_slots_only(param, monkeypatch):
    # Triton's interpreter is slow. On a device nearly every example has a new shape, which Triton must compile first.
    fuzz(param, 10 if param[0] == "triton" else 40, monkeypatch)


@pytest.mark.soak
@pytest.mark.parametrize("param", [p.values[0] for p in implementations()], ids=name_of)
def test_many_steps_touch_their_own_slots_only(param, monkeypatch):
    fuzz(param, 150, monkeypatch)
