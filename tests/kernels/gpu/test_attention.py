"""The attention kernels in each of their cases, on shapes made for the interpreter, against attention in float64.

NaN fills the pages that no sequence owns, the free slots of a partly filled page, and the output before the call.
"""

import math
from dataclasses import dataclass, replace

import pytest
import torch

from quire.kernels.gpu import attention, prefill_plan
from quire.kernels.gpu.decode_plan import MIN_CHUNK
from tests.support.kernels.implementations import LONG_WITHOUT_GPU, ON_CUDA, TRITON_DTYPES, make_triton_ops
from tests.support.kernels.interpreter import make_dot_row_invariant
from tests.support.kernels.oracle import assert_close, slack
from tests.support.kernels.paged import GARBAGE, Paged

LONG = 2 * MIN_CHUNK + 60  # keys of a row that the kernel always splits


@dataclass(frozen=True)
class Case:
    dtype: torch.dtype
    heads: int
    kv_heads: int
    d: int
    block_size: int
    window: int = 0
    softcap: float = 0.0  # a case with a cap has sinks, too

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        extra = "-cap-and-sinks" if self.softcap else ""
        return f"{dtype}-{self.heads}of{self.kv_heads}-d{self.d}-page{self.block_size}-window{self.window}{extra}"


# Every head size that models have, every page size, groups of 1 to 20, each dtype with and without a window.
# The first one, which CI runs, has keys that programs share, a window, a cap and sinks.
CASES = [
    Case(torch.float16, 8, 1, 64, 32, window=128, softcap=30.0),
    Case(torch.float32, 2, 2, 64, 16),
    Case(torch.float16, 3, 1, 80, 32),
    Case(torch.float32, 4, 2, 96, 64, window=50),
    Case(torch.float16, 7, 1, 128, 128, window=300),
    Case(torch.float32, 2, 1, 256, 32),
    Case(torch.float16, 20, 1, 64, 64, window=1),
    Case(torch.bfloat16, 8, 2, 128, 16),
    Case(torch.bfloat16, 5, 1, 64, 32, window=40),
    Case(torch.float32, 4, 2, 64, 16, softcap=2.5),
    Case(torch.bfloat16, 8, 1, 512, 16),
    Case(torch.float16, 6, 2, 272, 64, window=128, softcap=30.0),
]


@pytest.fixture(params=CASES, ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    if request.param.dtype not in TRITON_DTYPES:
        pytest.skip("Triton is not installed")
    return request.param


def make(case: Case, monkeypatch: pytest.MonkeyPatch, lengths: list[int], queries: list[int], **options) -> Paged:
    ops = make_triton_ops(case.dtype, monkeypatch, **options)
    sinks = torch.linspace(-4, 8, case.heads) if case.softcap else None
    shape = case.heads, case.kv_heads, case.d, case.block_size, case.window
    return Paged(ops, lengths, queries, *shape, sinks, case.softcap)


def check(paged: Paged, rows: list[torch.Tensor]) -> None:
    for s, found in enumerate(rows):
        assert_close(found, paged.exact(s), slack(paged.ops.dtype, 2000))


@pytest.mark.slow
def test_decoding_with_rows_of_one_chunk_and_of_several(case, monkeypatch):
    paged = make(case, monkeypatch, [1, LONG, 150], [1, 1, 1])
    check(paged, paged.attend())


@pytest.mark.slow
def test_a_plan_does_for_all_layers_of_a_step(case, monkeypatch):
    """A layer whose window may differ uses the same plan first."""
    paged = make(case, monkeypatch, [1, 150, 40], [1, 1, 3])
    expected = paged.attend()
    for found, rows in zip(paged.attend(times=2), expected, strict=True):
        assert torch.equal(found, rows)


@pytest.mark.slow
@pytest.mark.parametrize("d", [64, 128, 256, 512] if ON_CUDA else [64, pytest.param(512, marks=pytest.mark.soak)])
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (50, 0.0), (0, 2.5), (50, 2.5)])
@pytest.mark.parametrize("dtype", TRITON_DTYPES, ids=str)
def test_a_row_has_the_same_bits_in_any_batch_and_chunk_in_batch_invariant_mode(monkeypatch, dtype, window, softcap, d):
    if not ON_CUDA:
        make_dot_row_invariant(monkeypatch)
    monkeypatch.setattr(attention, "INVARIANT_PIECE", 256)
    if d > 256 and dtype == torch.float32:
        pytest.skip("heads of more than 256 are supported in 16 bits alone")
    case = Case(dtype, 2, 1, d, 16, window, softcap)
    paged = make(case, monkeypatch, [LONG, 7, 90], [40, 7, 3], batch_invariant=True)
    together = paged.attend()
    check(paged, together)
    assert torch.equal(paged.attend([1, 0], [1, 7, 3])[1], together[0][-1:])  # in one batch with a prompt
    for queries in (1, 9):
        assert torch.equal(paged.attend([0], [queries, 7, 3])[0], together[0][-queries:])
        assert torch.equal(paged.attend([2, 0], [queries, 7, 1])[1], together[0][-queries:])
    assert torch.equal(paged.attend([2, 1, 0], [1, 1, 1])[1], together[1][-1:])


@pytest.mark.parametrize("invariant", [False, True], ids=["", "batch-invariant"])
def test_no_page_before_every_window_is_read(monkeypatch, invariant):
    """Pages before every window may have been freed, and may belong to another sequence now."""
    case = Case(TRITON_DTYPES[0], 2, 1, 16, 8, window=30)
    paged = make(case, monkeypatch, [300, 200], [4, 1], batch_invariant=invariant)
    spare = int(next(iter({*range(len(paged.k_cache))} - {*paged.tables.flatten().tolist()})))  # pages of NaN
    for s, (length, queries) in enumerate(zip(paged.lengths, paged.queries, strict=True)):
        paged.tables[s, : (length - queries - case.window + 1) // case.block_size] = spare
    check(paged, paged.attend())


@pytest.mark.slow
def test_chunks_on_cached_pages_together_with_decode_rows(case, monkeypatch):
    paged = make(case, monkeypatch, [LONG - 200, 40, 1, 130], [1, 40, 1, 21])
    check(paged, paged.attend())


def share_keys(paged: Paged, monkeypatch: pytest.MonkeyPatch, least: int = 40) -> list[torch.Tensor]:
    """Let several programs share the keys of a tile in such small steps. Returns a list of the rows that are summed.

    least: keys of a chunk.
    """
    from quire.kernels.gpu import prefill

    options = replace(paged.ops.launch_options, multiprocessors=12 * paged.kv_heads)
    paged.ops.launch_options = options
    monkeypatch.setattr(prefill_plan, "MIN_SPLIT_KEYS", least)
    right, summed = prefill.sum_chunks, []

    def watched(rows, *rest):
        summed.append(rows)
        right(rows, *rest)

    monkeypatch.setattr(prefill, "sum_chunks", watched)
    return summed


@pytest.mark.slow
def test_programs_share_the_keys_of_few_queries_behind_a_long_context(case, monkeypatch):
    """In a step with a decode row, a short context and a new prompt, and alone, where a tile has more chunks."""
    paged = make(case, monkeypatch, [LONG, 150, 1, 70, 9], [9, 1, 1, 17, 9])
    summed = share_keys(paged, monkeypatch)
    check(paged, paged.attend())
    (rows,) = summed
    is_cut = case.window in (0, 128, 300)  # a tile sees too few keys of a smaller window
    assert (rows[:, 6] > 1).any() == is_cut
    check(paged, [*paged.attend([0]), *[paged.exact(s) for s in range(1, 5)]])
    most = summed[-1][:, 6].max()
    assert (3 if case.window in (0, 300) else 2 if is_cut else 0) <= most <= 12


@LONG_WITHOUT_GPU
@pytest.mark.parametrize("dtype", TRITON_DTYPES, ids=str)
def test_programs_share_the_keys_of_a_cache_of_fp8(monkeypatch, dtype):
    ops = make_triton_ops(dtype, monkeypatch, kv_dtype=torch.float8_e4m3fn)
    paged = Paged(ops, [LONG, 130], [9, 21], 4, 2, 64, 32)
    summed = share_keys(paged, monkeypatch)
    check(paged, paged.attend())
    assert (summed[0][:, 6] > 1).any()


@pytest.mark.slow
def test_queries_that_see_no_key_of_the_last_chunks(monkeypatch):
    """The first query of a tile sees no key of the 17th chunk, and the kernel sums 16 chunks at a time."""
    case = Case(torch.float32, 1, 1, 64, 16)
    paged = make(case, monkeypatch, [17 * 32], [33])
    summed = share_keys(paged, monkeypatch, least=32)
    paged.ops.launch_options = replace(paged.ops.launch_options, multiprocessors=17)
    check(paged, paged.attend())
    assert summed[0][:, 6].tolist() == [17] * 33


def test_no_keys_are_shared_in_batch_invariant_mode(monkeypatch):
    """The kernel sums pieces of a fixed size in order, whatever else is in the step."""
    paged = make(Case(TRITON_DTYPES[0], 2, 1, 64, 16), monkeypatch, [LONG], [9], batch_invariant=True)
    summed = share_keys(paged, monkeypatch)
    check(paged, paged.attend())
    assert not summed


@pytest.mark.slow
@pytest.mark.parametrize("invariant", [False, True], ids=["", "batch-invariant"])
@pytest.mark.parametrize("programs", [3, 1, 2, 5, 8, 1000])
def test_any_number_of_programs_gives_the_same_bits(monkeypatch, invariant, programs):
    """Each piece of work is computed by one program, in one round or another, forwards or backwards."""
    from quire.kernels.gpu import decode, prefill

    case = Case(TRITON_DTYPES[0], 4, 2, 16, 16)
    paged = make(case, monkeypatch, [700, 40, 1, 130], [40, 40, 1, 21], batch_invariant=invariant)
    if not invariant:
        share_keys(paged, monkeypatch)
    expected = paged.attend()
    check(paged, expected)
    monkeypatch.setattr(prefill, "num_programs", lambda full, most, resident: programs)
    monkeypatch.setattr(decode, "SUMS_PER_SM", programs)
    for found, rows in zip(paged.attend(), expected, strict=True):
        assert torch.equal(found, rows)


@dataclass
class Launches:
    """Replaces kernels, and keeps the number of programs of each launch."""

    programs: list[int]

    def __getitem__(self, grid: tuple[int, ...]):
        return lambda *args, **constants: self.programs.append(math.prod(grid))


@pytest.mark.parametrize(
    ("tokens", "sequences", "expected"),
    # Prompts with cached keys, sums of their chunks, new prompts. A tile has 32 tokens of one sequence: the first step
    # may have 272 tiles, and 32 more chunks, for each of 8 heads.
    [(512, 256, [132, 66 * 32, 132]), (2048, 64, [512, 66 * 32, 512]), (16, 15, [132, 16 * 32, 64])],
)
def test_a_step_of_any_shape_launches_few_programs_without_work(monkeypatch, tokens, sequences, expected):
    """Llama-3.1-8B on an H200, with the shapes of graphs of mixed steps."""
    from quire.kernels.gpu import decode, prefill
    from quire.kernels.gpu.attention import AttentionPlan

    launches = Launches([])
    for module, kernel in ((prefill, "prefill_kernel"), (decode, "reduce_kernel"), (decode, "decode_kernel")):
        monkeypatch.setattr(module, kernel, launches if kernel != "decode_kernel" else Launches([]))
    ops = make_triton_ops(torch.bfloat16, monkeypatch)
    options = replace(ops.launch_options, multiprocessors=132)
    caches = ops.alloc_kv_cache(1, 8, 16, 128)
    tables = torch.zeros(sequences, 2, dtype=torch.int32)
    lengths, starts = torch.zeros(sequences, dtype=torch.int32), torch.zeros(sequences + 1, dtype=torch.int32)
    q = torch.zeros(tokens, 32, 128, dtype=torch.bfloat16)
    step = AttentionPlan(options, tables, lengths, starts, split=True)
    fresh = q[:, :8], q[:, :8]
    step.attend(q, *caches, 0.1, 0, q, fresh)
    assert launches.programs == expected


@pytest.mark.slow
def test_new_prompts_are_computed_from_their_own_keys(case, monkeypatch):
    """A sequence that begins in this step reads no page, so the test fills the pages of such sequences with NaN."""
    paged = make(case, monkeypatch, [37, 150, 61, 3], [37, 1, 20, 3])
    for s in (0, 3):
        mine = paged.tables[s, : -(-paged.lengths[s] // paged.block_size)].long()
        paged.k_cache[mine], paged.v_cache[mine] = float("nan"), float("nan")
    counts = paged.queries
    last = [slice(n - count, n) for n, count in zip(paged.lengths, counts, strict=True)]
    q = torch.cat([rows[of] for rows, of in zip(paged.q, last, strict=True)])
    kv = torch.cat([rows[:, of] for rows, of in zip(paged.kv, last, strict=True)], dim=1)
    # The q, k and v of a token are adjacent in memory, as in the output of a fused projection.
    qkv = torch.cat([q, *kv], dim=1)
    fresh = tuple(qkv[:, case.heads :].split(case.kv_heads, dim=1))
    out = torch.full_like(q, float("nan"))
    lengths = torch.tensor(paged.lengths, dtype=torch.int32)
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    from quire.kernels.gpu.attention import AttentionPlan

    step = AttentionPlan(paged.ops.launch_options, paged.tables, lengths, starts, split=True)
    step.attend(q, paged.k_cache, paged.v_cache, paged.scale, paged.window, out, fresh, paged.sinks, paged.softcap)
    check(paged, list(out.flatten(1).split(counts)))


@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("invariant", [False, True], ids=["", "batch-invariant"])
def test_tokens_of_an_image_see_all_of_it(monkeypatch, window, invariant):
    """Prompts read the keys of the step itself, or pages. In the batch-invariant mode text has the same bits without
    the images."""
    if invariant and not ON_CUDA:
        make_dot_row_invariant(monkeypatch)
    case = Case(torch.float32, 2, 1, 32, 16, window)
    paged = make(case, monkeypatch, [90, 1, 130], [90, 1, 60], batch_invariant=invariant)
    plain = paged.attend()
    paged.images = {0: [(0, 3), (17, 60)], 2: [(75, 125)]}
    rows = paged.attend()
    check(paged, rows)
    if invariant:
        assert all(torch.equal(rows[s][-5:], plain[s][-5:]) for s in range(3))
        return
    new = paged.q[0], *paged.kv[0]
    out, starts = torch.full_like(new[0], float("nan")), torch.tensor([0, 90]).int()
    tables = paged.tables[:1], torch.tensor([90]).int(), starts
    step = attention.AttentionPlan(paged.ops.launch_options, *tables, split=True)
    ends = paged.key_ends([0], paged.queries)
    step.attend(new[0], paged.k_cache, paged.v_cache, paged.scale, window, out, new[1:], key_ends=ends)
    assert_close(out.flatten(1), paged.exact(0))


def test_tokens_that_fill_up_a_captured_batch_give_finite_rows(monkeypatch):
    """A captured graph may have more rows than a step. The padding rows belong to no sequence."""
    case = Case(torch.float32, 2, 2, 64, 16)
    paged = make(case, monkeypatch, [LONG, 5], [1, 1])
    expected = torch.cat(paged.attend())
    ops, d = paged.ops, case.d
    q = torch.full((4, case.heads, d), 3.0).to(ops.dtype)
    q[:2] = torch.stack([rows[-1] for rows in paged.q])
    tables = torch.cat([paged.tables, torch.full_like(paged.tables, 2**31 - 1)])
    lengths, starts = torch.tensor([LONG, 5, 0, 0]).int(), torch.tensor([0, 1, 2, 2, 2]).int()
    out = torch.full_like(q, float("nan"))
    from quire.kernels.gpu.attention import AttentionPlan

    AttentionPlan(ops.launch_options, tables, lengths, starts).attend(
        q, paged.k_cache, paged.v_cache, paged.scale, 0, out
    )
    assert_close(out[:2].flatten(1), expected.double())
    assert not out[2:].any()


@pytest.mark.parametrize("invariant", [False, True], ids=["", "batch-invariant"])
def test_steps_without_sequences_or_tokens_do_nothing(monkeypatch, invariant):
    ops = make_triton_ops(TRITON_DTYPES[0], monkeypatch, batch_invariant=invariant)
    ops.check_ids = False
    caches = ops.alloc_kv_cache(2, 1, 16, 16)
    for tokens, sequences in ((0, 0), (0, 3), (3, 3), (5, 3), (5, 0)):  # no token belongs to a sequence
        q = torch.ones(tokens, 1, 16).to(ops.dtype)
        tables = torch.full((sequences, 4), GARBAGE, dtype=torch.int32)
        lengths, starts = (torch.zeros(n, dtype=torch.int32) for n in (sequences, sequences + 1))
        out = torch.full((tokens, 16), 7.0).to(ops.dtype)
        ops.paged_attention(q, *caches, tables, lengths, starts, 0.1, 0, out)
        assert ((out == 7) | (out == 0)).all()


@pytest.mark.parametrize("invariant", [False, True], ids=["", "batch-invariant"])
def test_a_group_may_have_more_heads_than_a_tile_of_decoding_has_rows(monkeypatch, invariant):
    case = Case(torch.float16, 71, 1, 16, 16)
    paged = make(case, monkeypatch, [70, 3], [1, 2], batch_invariant=invariant)
    check(paged, paged.attend())


FP8_HEADS = [*((dtype, 64) for dtype in TRITON_DTYPES), (torch.bfloat16, 512), (torch.float16, 512)]


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "d"), FP8_HEADS if TRITON_DTYPES else [], ids=str)
def test_a_cache_of_fp8_is_read(monkeypatch, dtype, d):
    ops = make_triton_ops(dtype, monkeypatch, kv_dtype=torch.float8_e4m3fn)
    paged = Paged(ops, [LONG, 40, 130], [1, 40, 21], 4, 2, d, 32)
    check(paged, paged.attend())


FP8_STEPS = [([LONG, 40], [1, 1]), ([LONG, 40], [9, 21])]  # rows of decode, tiles of prefill


def fp8_step(monkeypatch, lengths: list[int], queries: list[int], **options) -> Paged:
    ops = make_triton_ops(torch.bfloat16, monkeypatch, kv_dtype=torch.float8_e4m3fn, **options)
    return Paged(ops, lengths, queries, 4, 2, 64, 16)


@pytest.mark.slow
@pytest.mark.parametrize("softcap", [0.0, 2.5])
@pytest.mark.parametrize(("lengths", "queries"), FP8_STEPS, ids=["decode", "prefill"])
def test_queries_of_any_size_give_the_same_bits_with_a_cache_of_fp8(monkeypatch, lengths, queries, softcap):
    """Products are computed in float16, whose range is smaller than that of bfloat16."""
    paged = fp8_step(monkeypatch, lengths, queries)
    paged.softcap = softcap
    rows, q, scale = paged.attend(), paged.q, paged.scale
    for exponent in (-100, -30, 20, 90):
        paged.q = [one * 2.0**exponent for one in q]
        paged.scale = scale * 2.0**-exponent
        for found, expected in zip(paged.attend(), rows, strict=True):
            assert torch.equal(found, expected)


@LONG_WITHOUT_GPU
@pytest.mark.parametrize(("lengths", "queries"), FP8_STEPS, ids=["decode", "prefill"])
def test_the_small_weights_of_many_keys_count_with_a_cache_of_fp8(monkeypatch, lengths, queries):
    """The first key has nearly all of the weight, and the other 571 keys 2**-28 of it each, with far larger values.

    Without a factor, float16 would round such weights to zero.
    """
    paged = fp8_step(monkeypatch, lengths, queries)
    k, v = torch.zeros_like(paged.kv[0])
    k[0, :, 0] = 28
    v[0], v[1:] = 2.0**-9, 448
    paged.kv[0] = torch.stack([k, v])
    paged.write(0)
    paged.q[0] = torch.zeros_like(paged.q[0])
    paged.q[0][..., 0] = math.log(2) / paged.scale
    assert paged.exact(0).min() > 2.0**-9 + 570 * 2.0**-28 * 448
    for found in (paged.attend()[0], paged.attend([0])[0]):
        assert_close(found, paged.exact(0), 1e-2 * 2.0**-9)


@LONG_WITHOUT_GPU
@pytest.mark.parametrize(("lengths", "queries"), FP8_STEPS, ids=["decode", "prefill"])
def test_weights_in_float16_are_more_exact_than_in_bfloat16(monkeypatch, lengths, queries):
    """Before the results are rounded to bfloat16. bfloat16 has 8 bits, float16 has 11."""
    from quire.kernels.gpu import decode, prefill
    from quire.kernels.gpu.attention import AttentionPlan

    paged = fp8_step(monkeypatch, lengths, queries)
    q = torch.cat([rows[length - n :] for rows, length, n in zip(paged.q, lengths, queries, strict=True)])
    step = paged.tables, torch.tensor(lengths).int(), torch.tensor([0, *queries]).cumsum(0).int()
    exact = torch.cat([paged.exact(s) for s in range(len(lengths))])
    deviations = []
    for half in (True, False):
        for module in (decode, prefill):
            monkeypatch.setattr(module, "computes_in_float16", lambda *_, half=half: half)
        out = torch.empty_like(q, dtype=torch.float32)
        AttentionPlan(paged.ops.launch_options, *step).attend(q, paged.k_cache, paged.v_cache, paged.scale, 0, out)
        deviations.append((out.flatten(1) - exact).pow(2).mean().sqrt().item())
    assert deviations[0] < 0.2 * deviations[1]


@LONG_WITHOUT_GPU
def test_a_row_has_the_same_bits_with_a_cache_of_fp8_in_batch_invariant_mode(monkeypatch):
    """Queries and weights in float16 have factors that depend on the row alone."""
    if not ON_CUDA:
        make_dot_row_invariant(monkeypatch)
    monkeypatch.setattr(attention, "INVARIANT_PIECE", 256)
    paged = fp8_step(monkeypatch, [LONG, 90], [21, 3], batch_invariant=True)
    together = paged.attend()
    check(paged, together)
    for queries in (1, 5):
        assert torch.equal(paged.attend([0], [queries, 1])[0], together[0][-queries:])
        assert torch.equal(paged.attend([1, 0], [queries, 1])[1], together[0][-queries:])
