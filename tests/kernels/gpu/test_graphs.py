"""A step of any mix of decodes and chunks is the same from a graph as kernel by kernel, whatever it is padded with."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

import pytest
import torch

from quire.ops.benchmarks.stack.random_model import random_decoder
from quire.shared.protocol.messages import SamplingParams
from quire.worker.device.cuda.graphs import DRAWN, GREEDY, MIXED, GraphBucket, record_on_cuda
from quire.worker.device.cuda.runner import DeviceRunner
from quire.worker.engine.engine import Engine
from quire.worker.engine.limits import EngineLimits
from quire.worker.engine.offline import generate
from quire.worker.engine.transfers import send
from tests.support.kernels import stacks
from tests.support.kernels.implementations import HAS_TRITON, LONG_WITHOUT_GPU, ON_CUDA, make_triton_ops

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton, interpreted or on a GPU")


BUCKET = GraphBucket(MIXED, num_tokens=16, num_sequences=4)


def mix(draw: random.Random) -> dict[str, torch.Tensor]:
    """Make a random step of decodes, chunks after a context and new prompts, in separate blocks."""
    lengths, queries = [], []
    for kind in [draw.choice(["decode", "chunk", "new"]) for _ in range(draw.randint(1, BUCKET.num_sequences))]:
        count = 1 if kind == "decode" else draw.randint(1, 9)
        if sum(queries) + count <= BUCKET.num_tokens:
            queries.append(count)
            lengths.append(count if kind == "new" else count + draw.randint(1, 40))
    blocks = iter(draw.sample(range(stacks.BLOCKS), stacks.BLOCKS))
    tables = [[next(blocks) for _ in range(4)] for _ in lengths]
    positions = [range(length - count, length) for length, count in zip(lengths, queries, strict=True)]
    size = stacks.BLOCK
    slots = [table[at // size] * size + at % size for table, mine in zip(tables, positions, strict=True) for at in mine]
    starts = [sum(queries[:i]) for i in range(len(queries) + 1)]
    step = {
        "positions": [at for mine in positions for at in mine],
        "slot_mapping": slots,
        "block_tables": tables,
        "seq_lens": lengths,
        "query_start_loc": starts,
    }
    return {name: torch.tensor(values, dtype=torch.int32) for name, values in step.items()} | {
        "rows": torch.tensor([end - 1 for end in starts[1:]])
    }


@pytest.mark.slow
@pytest.mark.parametrize("shares", [False, True], ids=["", "shared-keys"])
def test_a_replay_computes_any_mix_and_writes_no_page_but_its_own(monkeypatch, shares):
    """With rubbish wherever nothing was written, and in all that fills the step up.

    shares: programs share the keys of a tile. The device decides that for each replay.
    """
    ops = make_triton_ops(torch.float32, monkeypatch)
    ops.check_ids = False
    chunks = []
    if shares:
        from quire.kernels.gpu import prefill, prefill_plan

        monkeypatch.setattr(prefill_plan, "MIN_SPLIT_KEYS", 16)
        ops.launch_options = replace(ops.launch_options, multiprocessors=24)
        right = prefill.sum_chunks
        monkeypatch.setattr(prefill, "sum_chunks", lambda rows, *rest: (chunks.append(rows), right(rows, *rest)))
    stack, caches = stacks.make_stack(ops, [0])
    static = {
        "residual": torch.zeros(BUCKET.num_tokens, stacks.HIDDEN),
        "positions": torch.zeros(BUCKET.num_tokens, dtype=torch.int32),
        "slot_mapping": torch.full((BUCKET.num_tokens,), -1, dtype=torch.int32),
        "block_tables": torch.zeros(BUCKET.num_sequences, 4, dtype=torch.int32),
        "seq_lens": torch.zeros(BUCKET.num_sequences, dtype=torch.int32),
        "query_start_loc": torch.zeros(BUCKET.num_sequences + 1, dtype=torch.int32),
        "rows": torch.zeros(BUCKET.num_sequences, dtype=torch.int64),
    }
    result = torch.zeros(BUCKET.num_sequences, stacks.HIDDEN)

    def launch():
        # Layers work in the residual: it is a copy, as an embedding is.
        residual, *rest = static.values()
        result.copy_(ops.decoder_layers(residual.clone(), stack, *rest))

    launch()
    graph, _ = recorder()(launch, None)
    rubbish = {"residual": float("nan"), "positions": 7, "slot_mapping": -1, "block_tables": 2**30, "seq_lens": 0}
    has_cut = set()
    for seed in range(3):
        step = mix(random.Random(seed))
        tokens, sequences = len(step["positions"]), len(step["seq_lens"])
        residual = torch.randn(tokens, stacks.HIDDEN)
        before = [cache.clone() for pair in caches for cache in pair]
        expected = ops.decoder_layers(residual.clone(), stack, *step.values())
        written = [cache.clone() for pair in caches for cache in pair]
        for cache, old in zip((cache for pair in caches for cache in pair), before, strict=True):
            cache.copy_(old)
        for name, values in ({"residual": residual} | step).items():
            filler = tokens if name == "query_start_loc" else rubbish.get(name, 0)
            static[name].fill_(filler)
            static[name][: len(values)] = values
        graph.replay()
        if shares:
            has_cut.add(bool((chunks[1][:, 6] > 1).any()))  # the rows of the capture: its first launch, then it
        torch.testing.assert_close(result[:sequences], expected, rtol=1e-4, atol=1e-5)
        for cache, old, new in zip((cache for pair in caches for cache in pair), before, written, strict=True):
            torch.testing.assert_close(cache, new, rtol=1e-4, atol=1e-5)
            assert torch.equal(cache == old, new == old)
    assert has_cut == ({False, True} if shares else set())


def recorder():
    if ON_CUDA:
        return record_on_cuda
    from tests.support.kernels.recording import record

    return record


def make_engine(ops, buckets: list[GraphBucket], **limits: int) -> Engine:
    torch.manual_seed(7)
    model = random_decoder("small", ops, torch.float32, 64)
    sizes = {"num_blocks": 24, "block_size": 8, "max_num_seqs": 4, "max_num_batched_tokens": 12, "max_model_len": 64}
    runner = partial(DeviceRunner, graph_buckets=buckets, record=recorder())
    engine = Engine(model, EngineLimits(**(sizes | limits)), (), None, runner=runner)
    while engine.prepare():
        pass
    return engine


@pytest.mark.skipif(not ON_CUDA, reason="only a CUDA device captures")
def test_a_capture_that_fails_leaves_stream_and_memory_as_they_were():
    device = torch.device("cuda")
    stream, numbers = torch.cuda.current_stream(), torch.ones(1 << 20, device=device)
    graph, pool = record_on_cuda(lambda: numbers.add_(1), None)
    for shared in (None, pool):
        with pytest.raises(RuntimeError):
            record_on_cuda(lambda: (numbers * 2).sum().item(), shared)
        assert torch.cuda.current_stream() == stream
        torch.cuda.empty_cache()  # it raises while a capture is under way
        assert send(torch.ones(3, device="cpu"), device).sum().item() == 3  # through pinned memory
        # Not into the pool of the one that failed. And without this torch draws no more random numbers.
        record_on_cuda(lambda: numbers.mul_(1), None)
        assert torch.rand(3, device=device).max() < 1
    graph.replay()
    assert numbers.sum().item() == 2 << 20


@LONG_WITHOUT_GPU
def test_texts_from_graphs_are_those_of_kernels_launched_one_by_one(monkeypatch):
    ops = make_triton_ops(torch.float32, monkeypatch)
    ops.check_ids = False
    torch.set_default_device(None)
    draw = random.Random(3)
    prompts = [tuple(draw.randrange(500) for _ in range(length)) for length in (3, 1, 22)]
    params = [SamplingParams(3, temperature=t, seed=5, ignore_eos=True) for t in (0.0, 0.9, 0.9)]
    engine = make_engine(
        ops, [GraphBucket(DRAWN, 3, 3), GraphBucket(GREEDY, 3, 3), GraphBucket(MIXED, 8, 4), GraphBucket(MIXED, 12, 4)]
    )
    replayed, launched = [], []
    find = engine.runner.graphs.find

    def watched(kind, tokens, sequences):
        found = find(kind, tokens, sequences)
        (replayed if found else launched).append((kind, tokens, sequences))
        return found

    engine.runner.graphs.find = watched
    texts = generate(engine, prompts, params)
    assert texts == generate(make_engine(ops, []), prompts, params)
    assert not launched
    assert {(tokens > 8) for kind, tokens, _ in replayed if kind == MIXED} == {False, True}
    assert any(one[0] != MIXED for one in replayed)
