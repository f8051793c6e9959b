"""All kernels but attention, compiled for Hopper."""

import numpy as np
import pytest
import torch

from quire import kernels
from quire.kernels.gpu import invariant_matmul, lora, moe, tile_sizes
from quire.kernels.gpu.few_rows import products
from quire.kernels.gpu.grouped_matmul import KINDS
from quire.kernels.grouped_weight import BITS, FP8, MAX_ZEROS, GroupedWeight
from quire.kernels.lora import LINEARS, NO_ADAPTER, LoraPart
from quire.kernels.moe import Routing
from tests.kernels import test_sampling
from tests.kernels.gpu import test_attention_parts, test_few_rows, test_logits, test_matmul, test_moe, test_rows
from tests.kernels.gpu.test_matmul import assert_near, both
from tests.kernels.ptx.conftest import BOTH_DTYPES
from tests.kernels.ptx.emulator import Emulator
from tests.kernels.test_grouped_weight import random_weight
from tests.kernels.test_moe import HIDDEN, make_moe
from tests.support.kernels import oracle
from tests.support.kernels.implementations import make_triton_ops
from tests.support.kernels.oracle import assert_close, slack
from tests.support.kernels.stacks import make_factors, random

# --- kernels that compute each row independently, compiled for Hopper -------------------------------------------------


@pytest.mark.parametrize("width", [64, 1024, 1440])
def test_norms(emulator: Emulator, emulated_ops: kernels.Ops, width: int) -> None:
    dtype = emulated_ops.dtype
    x, residual, weight = (torch.randn(*shape).to(dtype) for shape in ((3, width), (3, width), (width,)))
    exact = oracle.rms_norm(x, weight, 1e-6)
    assert_close(emulated_ops.rms_norm(x, weight, 1e-6), exact, slack(dtype, 2000), rounds=2)
    total = (x.float() + residual.float()).to(dtype)
    found = emulated_ops.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(residual, total)
    assert_close(found, oracle.rms_norm(total, weight, 1e-6), slack(dtype, 2000), rounds=2)
    assert emulator.sources.keys() == {"rms_norm_kernel"}


def test_the_activation_takes_the_largest_values(emulator: Emulator, emulated_ops: kernels.Ops) -> None:
    test_rows.test_the_activation_takes_the_largest_values(emulated_ops)
    assert emulator.sources.keys() == {"silu_mul_kernel"}


@pytest.mark.parametrize("width", [64, 1440])
def test_rows_are_rounded_to_fp8(emulator: Emulator, emulated_ops: kernels.Ops, width: int) -> None:
    test_matmul.test_rows_are_rounded_as_the_definition_says(emulated_ops, emulated_ops.dtype, width)
    test_matmul.test_a_row_with_nan_stays_one(emulated_ops)
    assert emulator.sources.keys() == {"quantize_rows_kernel"}


def test_an_embedding_of_an_id_that_does_not_exist_is_nan(emulator: Emulator, emulated_ops: kernels.Ops) -> None:
    test_rows.test_an_embedding_of_an_id_that_does_not_exist_is_nan(emulated_ops)
    assert emulator.sources.keys() == {"embed_kernel"}


# --- rotation with the cache write, compiled for Hopper ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("heads", "kv_heads", "d", "norms"),
    [(3, 1, 64, ""), (2, 2, 80, "qk"), (16, 8, 128, "qk"), (6, 1, 256, "qk"), (4, 2, 256, "qkv")],
)
@pytest.mark.parametrize("fp8", [False, True], ids=["", "fp8"])
def test_rotation_writes_the_given_slots_and_no_others(
    emulator: Emulator,
    emulated_ops: kernels.Ops,
    monkeypatch: pytest.MonkeyPatch,
    heads: int,
    kv_heads: int,
    d: int,
    norms: str,
    fp8: bool,
) -> None:
    test_rows.test_rotation_writes_the_given_slots_and_no_others(
        emulated_ops, monkeypatch, heads, kv_heads, d, norms, fp8
    )
    assert emulator.sources.keys() == {"rope_and_cache_kernel"}


# --- moves of blocks, compiled for Hopper -----------------------------------------------------------------------------


@pytest.mark.parametrize("fp8", [False, True], ids=["", "fp8"])
def test_blocks_move_within_the_caches_and_to_the_host_and_back(
    emulator: Emulator, emulated_ops: kernels.Ops, monkeypatch: pytest.MonkeyPatch, fp8: bool
) -> None:
    test_rows.test_blocks_move_within_the_caches_and_to_the_host_and_back(emulated_ops, monkeypatch, fp8)
    assert emulator.sources.keys() == {"move_kernel"}


# --- the kernels that plan attention, compiled for Hopper -------------------------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "chunks"), [([1024], 16), ([1024] * 256, 256), ([32 * 1024] + [1024] * 63, None)], ids=str
)
def test_keys_are_cut_so_that_every_program_has_work(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch, lengths: list[int], chunks: int | None
) -> None:
    test_attention_parts.test_keys_are_cut_so_that_every_program_has_work_and_no_more(monkeypatch, lengths, chunks)
    assert emulator.sources.keys() == {"plan_rows_kernel", "plan_items_kernel"}


@pytest.mark.parametrize("window", [0, 20])
def test_every_query_of_a_prompt_is_in_one_tile(emulator: Emulator, wide_ops: kernels.Ops, window: int) -> None:
    test_attention_parts.test_every_query_of_a_prompt_is_in_one_tile(wide_ops, window)
    assert emulator.sources.keys() == {"plan_sequences_kernel", "plan_tiles_kernel"}


@pytest.mark.parametrize("seed", range(3))
def test_every_key_of_a_tile_is_in_one_chunk(
    emulator: Emulator, wide_ops: kernels.Ops, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    test_attention_parts.test_every_key_of_a_tile_is_in_one_chunk(wide_ops, monkeypatch, seed)
    assert {"plan_chunks_kernel", "plan_chunk_items_kernel"} <= emulator.sources.keys()


def test_new_prompts_have_a_list_of_their_own(wide_ops: kernels.Ops) -> None:
    test_attention_parts.test_new_prompts_have_a_list_of_their_own(wide_ops)


# --- the kernels over logits, compiled for Hopper: argmax, draws, penalties and log-probabilities ---------------------

SAMPLERS = {"parts_kernel", "count_kernel", "mass_kernel", "kept_kernel", "draw_kernel"}


@pytest.mark.parametrize("vocabulary", [1, 17, 4097, 9000])
def test_argmax(emulator: Emulator, wide_ops: kernels.Ops, vocabulary: int) -> None:
    test_logits.test_argmax_takes_the_lowest_of_equals(wide_ops, vocabulary)
    assert emulator.sources.keys() == {"best_of_segment_kernel", "argmax_kernel"}


@pytest.mark.parametrize("vocabulary", [300, 3, 4099])
def test_every_row_is_drawn_by_its_own_settings(emulator: Emulator, wide_ops: kernels.Ops, vocabulary: int) -> None:
    test_logits.test_every_row_is_drawn_by_its_own_settings(wide_ops, vocabulary)
    assert emulator.sources.keys() == SAMPLERS


@pytest.mark.soak
def test_draws_follow_the_uniform_numbers(wide_ops: kernels.Ops) -> None:
    test_logits.test_draws_follow_the_uniform_numbers_through_what_is_kept(wide_ops)


def test_a_greedy_choice_as_a_draw_is_that_of_argmax(wide_ops: kernels.Ops) -> None:
    test_sampling.test_a_greedy_choice_as_a_draw_is_that_of_argmax(wide_ops, 17)


@pytest.mark.soak
def test_ties_and_broken_rows(wide_ops: kernels.Ops) -> None:
    test_logits.test_ties_and_broken_rows(wide_ops)


@pytest.mark.soak
@pytest.mark.parametrize("rank", [1, 1500])
def test_thresholds_of_rows_of_several_programs(emulator: Emulator, wide_ops: kernels.Ops, rank: int) -> None:
    test_logits.test_top_k_keeps_as_many_ids_as_it_says_in_rows_of_several_programs(wide_ops, "adjacent", rank)
    test_logits.test_top_p_ends_at_the_id_that_reaches_the_share(wide_ops, "adjacent", rank, 0)


@pytest.mark.soak
def test_the_least_mass_counts(wide_ops: kernels.Ops) -> None:
    test_logits.test_the_least_mass_counts_for_a_uniform_number_of_zero(wide_ops)


def test_penalties_change_what_was_seen(emulator: Emulator, wide_ops: kernels.Ops) -> None:
    test_logits.test_penalties_change_what_was_seen_and_nothing_else(wide_ops)
    assert emulator.sources.keys() == {"penalties_kernel"}


@pytest.mark.parametrize("vocabulary", [40, 4097])
def test_log_probabilities(emulator: Emulator, wide_ops: kernels.Ops, vocabulary: int) -> None:
    test_logits.test_log_probabilities_are_exact_and_ordered(wide_ops, vocabulary)
    assert emulator.sources.keys() == {"keys_kernel", "normaliser_kernel", "pick_kernel"}


# --- the products of the batch-invariant mode and of grouped weights, compiled for Hopper -----------------------------

# Every size of tiles that `matmul_tiles` gives to 16-bit types.
SIZES = [(64, 32, 64, 4, 8), (64, 64, 64, 4, 6), (128, 64, 64, 8, 4), (128, 128, 64, 8, 4)]


@pytest.mark.parametrize("dtype", BOTH_DTYPES)
@pytest.mark.parametrize("depth", [200, 448])
def test_a_row_has_the_same_bits_in_tiles_of_any_size(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, depth: int
) -> None:
    ops = make_triton_ops(dtype, monkeypatch, batch_invariant=True)
    weight, bias, x = (random(*s, dtype=dtype) for s in [(136, depth), (136,), (130, depth)])
    packed = ops.pack_linear(weight, bias)
    exact = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    together = ops.linear_logits(x, packed)
    assert_close(together, exact, 20)
    assert_close(ops.linear(x, packed), exact, 20 * slack(dtype, 300))
    assert torch.equal(ops.linear_logits(x[:1], packed), together[:1])
    for size in SIZES:
        tiles = tile_sizes.MatmulTiles(*size)
        monkeypatch.setattr(invariant_matmul, "matmul_tiles", lambda *_, tiles=tiles: tiles)
        assert torch.equal(ops.linear_logits(x, packed), together)
    assert emulator.sources.keys() == {"matmul_kernel"}


@pytest.mark.parametrize("dtype", BOTH_DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "k", "n"), [(1, 77, 34), (16, 64, 70), (70, 96, 130)])
def test_products_with_codes_are_those_of_the_dequantised_weights(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, kind: str, rows: int, k: int, n: int
) -> None:
    ops = make_triton_ops(dtype, monkeypatch)
    weight = random_weight(kind, n, k)
    if kind == FP8:  # float16 has no large products
        weight = GroupedWeight(weight.codes, weight.scales / 64, kind)
    bias, x = torch.randn(n).to(dtype), torch.randn(rows, k).to(dtype)
    exact = x.double() @ weight.dequantized(dtype).double().T + bias.double()
    found = ops.linear_logits(x, ops.pack_linear(weight, bias))
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5 * float(exact.abs().max()))
    assert emulator.sources.keys() == {"grouped_matmul_kernel"}


@pytest.mark.parametrize("kind", KINDS)
def test_every_code_has_its_value(emulated_ops: kernels.Ops, kind: str) -> None:
    codes = torch.arange(1 << BITS[kind], dtype=torch.uint8)
    codes = codes[(codes & 127) != 127] if kind == FP8 else codes  # these two are NaN
    zeros = torch.full((len(codes), 1), 16, dtype=torch.uint8) if kind in MAX_ZEROS else None
    weight = GroupedWeight(codes[:, None], torch.full((len(codes), 1), 0.5), kind, zeros)
    found = emulated_ops.linear_logits(torch.ones(1, 1, dtype=emulated_ops.dtype), emulated_ops.pack_linear(weight))
    assert torch.equal(found[0], weight.dequantized().flatten())


# --- mixtures of experts, compiled for Hopper -------------------------------------------------------------------------


@pytest.mark.parametrize("routing", test_moe.ROUTINGS, ids=str)
@pytest.mark.parametrize("size", [None, (64, 64, 64, 4, 3), (128, 64, 64, 8, 3)], ids=str)
def test_experts_give_the_sum_of_the_reference(
    emulator: Emulator,
    emulated_ops: kernels.Ops,
    monkeypatch: pytest.MonkeyPatch,
    routing: Routing,
    size: tuple[int, ...] | None,
) -> None:
    if size:
        monkeypatch.setattr(moe, "grouped_tiles", lambda *_: tile_sizes.MatmulTiles(*size))
    x = torch.randn(19, HIDDEN).to(emulated_ops.dtype)
    results = []
    for one in (emulated_ops, kernels.ReferenceOps("cpu", emulated_ops.dtype)):
        torch.manual_seed(1)
        results.append(one.moe(x, make_moe(one, routing)))
    found, expected = results
    assert_close(found, expected.double(), 200 * (1 + expected.double().abs()), rounds=4)
    assert emulator.sources.keys() == {"route_kernel", "grouped_kernel", "combine_kernel"}


@pytest.mark.parametrize("routing", [test_moe.ROUTINGS[0], test_moe.ROUTINGS[2]], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [5, 19 * 8])
def test_experts_of_codes_give_the_sum_of_the_reference(
    emulator: Emulator, emulated_ops: kernels.Ops, kind: str, routing: Routing, rows: int
) -> None:
    """rows: few for tiles of 16, and many for tiles of 64."""
    x = torch.randn(rows, HIDDEN).to(emulated_ops.dtype)
    results = []
    for one in (emulated_ops, kernels.ReferenceOps("cpu", emulated_ops.dtype)):
        torch.manual_seed(1)
        results.append(one.moe(x, test_moe.make_moe_of_codes(one, kind, routing)))
    found, expected = results
    assert_close(found, expected.double(), 200 * (1 + expected.double().abs()), rounds=4)
    assert emulator.sources.keys() == {"route_kernel", "grouped_kernel", "combine_kernel"}


@pytest.mark.parametrize("routing", [Routing(5, 3, True), Routing(5, 5, False), Routing(1, 1, False)], ids=str)
def test_experts_are_chosen_as_the_definition_says(emulator: Emulator, wide_ops: kernels.Ops, routing: Routing) -> None:
    test_moe.test_experts_are_chosen_as_the_definition_says(wide_ops, routing)
    assert emulator.sources.keys() == {"route_kernel"}


def test_rows_of_nan_choose_experts_that_exist(wide_ops: kernels.Ops) -> None:
    test_moe.test_rows_of_nan_choose_experts_that_exist(wide_ops)


# --- the grouped products of adapters, compiled for Hopper ------------------------------------------------------------


@pytest.mark.parametrize("name", LINEARS)
def test_rows_get_the_updates_of_their_adapters(emulator: Emulator, emulated_ops: kernels.Ops, name: str) -> None:
    adapters = [make_factors(2, 8, torch.bfloat16), make_factors(2, 80), make_factors(2, 3, torch.bfloat16)]
    index = [1, NO_ADAPTER, 0, 0, 2, 1] + [2] * 20
    found, expected = both(emulated_ops, adapters, index, name, layer=1)
    assert_near(found, expected)
    assert emulator.sources.keys() == {"shrink_kernel", "expand_kernel"}


def test_input_features_of_several_tiles(emulator: Emulator, emulated_ops: kernels.Ops) -> None:
    """Addresses of rows of 1,024 features are multiples of 16 bytes, so that copies are asynchronous."""
    a, b = (torch.randn(*shape).bfloat16() / 32 for shape in ((16, 1024), (96, 16)))
    x, y = torch.randn(3, 1024).to(emulated_ops.dtype), torch.randn(3, 96).to(emulated_ops.dtype)
    adapter = emulated_ops.pack_adapter([{"o": [LoraPart(a, b, 2.0)]}], 0)
    expected = y.float() + 2 * x.float() @ a.float().T @ b.float().T
    lora.TritonAdaptedRows([adapter], np.zeros(3, dtype=np.int32), x.device).apply(0, "o", x, y)
    assert_near(y, expected)
    assert emulator.sources.keys() == {"shrink_kernel", "expand_kernel"}


# --- steps of a few rows, compiled for Hopper -------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 96, 64), (1, 20, 1500), (5, 40, 200)], ids=str)
@pytest.mark.parametrize("gate", [products.PLAIN, products.SILU_MUL])
def test_products_of_few_rows(
    emulator: Emulator, emulated_ops: kernels.Ops, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], gate: int
) -> None:
    test_few_rows.test_products_round_where_single_operations_round(monkeypatch, emulated_ops.dtype, *shape, gate)
    assert {"one_row_kernel", "few_rows_kernel"} & emulator.sources.keys()


@pytest.mark.parametrize("count", [1, 3])
def test_layers_of_few_rows(
    emulator: Emulator, wide_ops: kernels.Ops, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    test_few_rows.test_all_layers_are_those_of_the_reference(monkeypatch, count, "norms, biases, gelu, window")
    dependent = {"few_rows_kernel" if count > 1 else "one_row_kernel", "rope_and_cache_kernel", "decode_kernel"}
    assert all("griddepcontrol.wait" in ptx for name in dependent for ptx in emulator.sources[name])
