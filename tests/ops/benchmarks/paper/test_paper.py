"""The repetition of the paper: its workloads, its baselines, and the claims that take no more than seconds."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.ops.benchmarks.paper import memory, throughput
from quire.ops.benchmarks.paper.__main__ import main
from quire.ops.benchmarks.paper.allocators import BuddyAllocator, next_power_of_two
from quire.ops.benchmarks.paper.measured import fit
from quire.ops.benchmarks.paper.profiles import OPT_13B, Linear, StepWork
from quire.ops.benchmarks.paper.simulation import (
    ALLOCATORS,
    FASTER_TRANSFORMER,
    ORCAS,
    QUIRE,
    faster_transformer,
    make_engine,
    simulate,
)
from quire.ops.benchmarks.paper.workloads import CONTEXT, SHAREGPT, TRACES, Request, at_rate, lengths


@pytest.fixture(scope="module")
def sharegpt_memory() -> dict[str, dict]:
    """Every allocator on a short ShareGPT trace."""
    return {allocator: memory.measure(("ShareGPT", allocator, 90.0, 0)) for allocator in ALLOCATORS}


# --- workloads --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", TRACES.values(), ids=TRACES)
def test_lengths_have_the_published_means_and_fit_the_context(shape):
    pairs = np.array(lengths(shape, 300, seed=3))
    assert pairs[:, 0].mean() == pytest.approx(shape.mean_prompt, rel=0.01)
    assert pairs[:, 1].mean() == pytest.approx(shape.mean_output, rel=0.01)
    assert pairs.min() >= 4
    assert pairs.sum(axis=1).max() <= CONTEXT


# --- the baselines' memory --------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 3000), st.lists(st.tuples(st.booleans(), st.integers(1, 700)), max_size=60))
def test_buddy_regions_never_overlap_and_everything_freed_merges_back(size, operations):
    buddy = BuddyAllocator(size)
    at_first = buddy.free_regions()
    taken: list[int] = []
    for is_take, number in operations:
        if is_take:
            fits = buddy.fits([number])
            address = buddy.take(number)
            assert (address is not None) == fits
            if address is not None:
                taken.append(address)
                assert buddy.regions()[address] == next_power_of_two(number)
        elif taken:
            buddy.give_back(taken.pop(number % len(taken)))
        covered = sorted([*buddy.regions().items(), *buddy.free_regions()])
        assert sum(length for _, length in covered) == size
        ends = [address + length for address, length in covered]
        assert [address for address, _ in covered] == [0, *ends[:-1]], "a gap or an overlap"
        assert buddy.num_free == size - sum(buddy.regions().values())
    for address in taken:
        buddy.give_back(address)
    assert buddy.free_regions() == at_first


@pytest.mark.parametrize(
    ("allocator", "sampling"), list(zip(ORCAS, ({}, {"n": 3}, {"beam_width": 3}), strict=True)), ids=str
)
@pytest.mark.slow
def test_an_orca_never_preempts_keeps_its_books_and_gives_everything_back(allocator, sampling):
    requests = at_rate(lengths(SHAREGPT, 10, 0), 50.0, 0)
    engine = make_engine(allocator, num_slots=9000)

    def check(engine, seconds):
        sequences = [one for group in engine.requests.values() for one in group.sequences]
        engine.scheduler.blocks.check_integrity(sequences)

    outcome = simulate(engine, requests, OPT_13B, sampling, observe=check)
    assert len(outcome.normalised) == 10
    assert engine.groups.num_preemptions == 0
    assert engine.scheduler.blocks.num_free == 9000
    assert not engine.scheduler.blocks.regions


def test_faster_transformer_starts_a_batch_when_the_one_before_has_ended():
    requests = [Request(0.0, 10, 5), Request(0.0, 10, 20), Request(0.0, 10, 5)]
    outcome = faster_transformer(requests, OPT_13B, num_slots=2 * CONTEXT)
    first, second, third = (
        latency * one.output_tokens for latency, one in zip(outcome.normalised, requests, strict=True)
    )
    assert first == second
    assert third > second


# --- the paper's claims -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_quire_uses_96_percent_of_the_memory_that_is_short(sharegpt_memory):
    assert sharegpt_memory[QUIRE]["parts"]["token states"] >= 96.0
    assert sharegpt_memory[QUIRE]["worst_waste_slots"] < 16


@pytest.mark.slow
def test_less_foresight_wastes_more_memory_and_paging_needs_none(sharegpt_memory):
    use = [sharegpt_memory[allocator]["parts"]["token states"] for allocator in ALLOCATORS]
    assert use == sorted(use)
    batched = [sharegpt_memory[allocator]["batched"] for allocator in ALLOCATORS]
    assert batched == sorted(batched)


@pytest.mark.slow
def test_paging_sustains_a_higher_rate_than_the_best_reservation():
    rates = [
        throughput.sustained(throughput.ThroughputCase("12", system, "Alpaca", OPT_13B, 4.0))["sustained"] or 0.0
        for system in (FASTER_TRANSFORMER, "Orca (Max)", QUIRE)
    ]
    assert rates == sorted(rates)
    assert rates[2] > 1.2 * rates[1]


def test_a_shared_prefix_is_computed_once():
    case = throughput.ThroughputCase("16", QUIRE, "WMT16", OPT_13B, 4.0, prefix=341)
    other = throughput.ThroughputCase("16", "Orca (Oracle)", "WMT16", OPT_13B, 4.0, prefix=341)
    assert case.serve(5.0, float("inf"), 4.0).seconds < other.serve(5.0, float("inf"), 4.0).seconds


def test_a_fit_finds_the_coefficients_it_was_made_from():
    truth = Linear("made up", (0.01, 0.002, 0.001, 1e-6, 3e-4, 1e-8))
    works = [
        StepWork(decodes=d, context=d * c, prefill=p, attended=p * p // 2)
        for d in (0, 1, 8)
        for c in (9, 500)
        for p in (1, 64, 256)
    ]
    found, errors = fit([(work, truth.seconds(work)) for work in works], "found")
    assert found.coefficients == pytest.approx(truth.coefficients, rel=1e-3, abs=1e-9)
    assert max(map(abs, errors)) < 1e-6


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_quick_memory_and_batch_print_tables_and_write_json(tmp_path, capsys):
    assert main(["--quick", "--only", "memory,batch", "--jobs", "1", "--out", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "paper.json").read_text())
    assert set(report["experiments"]) == {"memory", "batch"}
    for experiment in report["experiments"].values():
        assert experiment["seed"] == 0
        assert experiment["machine"]["cores"] >= 1
        assert experiment["rows"]
    output = capsys.readouterr().out
    assert "Figure 2" in output
    assert "Figure 13" in output
    assert "SIMULATION" in output


def test_an_unknown_experiment_is_refused_with_the_known_ones(capsys):
    with pytest.raises(SystemExit):
        main(["--only", "memry"])
    assert "memry is not one of memory, batch" in capsys.readouterr().err
