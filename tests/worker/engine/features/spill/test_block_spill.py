"""Engines whose prefix cache spills: every text is that of the request alone, and evicted prefixes come back."""

from __future__ import annotations

import logging
import random
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.shared.protocol.messages import GenerationRequest, SamplingParams, StepItem
from quire.worker.engine.engine import Engine
from quire.worker.engine.features.spill.block_file import ENTRY, PAGE, BlockFile
from quire.worker.engine.features.spill.block_spill import BlockSpill, SpillCosts
from tests.support.mock_model import assert_idle, continuation, final, make_engine, request, run, steps
from tests.support.spills import assert_no_place_lost, attach, settle, spilling

SMALL: dict[str, Any] = {"num_blocks": 24, "block_size": 4, "max_model_len": 80, "prefix_caching": True, "spills": True}
LONG = tuple(range(1, 61))
FULL = 60  # tokens of LONG in full blocks


def ask(engine: Engine, *requests: GenerationRequest) -> int:
    """Run requests together, and check each text. Returns how many tokens of prompts the prefix cache supplied."""
    before = engine.groups.blocks.counters.prefix_hits
    for one in requests:
        engine.add(one)
    items = run(engine)
    for one in requests:
        expected = continuation(one.prompt, one.sampling.max_tokens, one.sampling.ignore_eos)
        assert list(final(items, one.id)[0].token_ids) == expected
    return engine.groups.blocks.counters.prefix_hits - before


def rest(engine: Engine) -> None:
    """Let an idle engine write the blocks that it may evict."""
    spill = engine.scheduler.spill
    while isinstance(spill, BlockSpill) and spill.has_file and engine.groups.blocks.released:
        engine.prepare()
        settle(spill)


def evict(engine: Engine, first: int = 0) -> None:
    """Fill the cache with other prompts, so that all earlier blocks are evicted."""
    for number in range(first, first + 3):
        rest(engine)
        ask(engine, request(f"other{number}", [(number * 31 + i * 7) % 96 + 1 for i in range(64)], max_tokens=2))


def spilled_engine(folder: Path | None, **options: Any) -> tuple[Engine, BlockSpill]:
    """Return an engine that writes all evicted blocks before its next step."""
    engine = make_engine(**SMALL)
    spill = attach(engine, folder, **options)
    if folder is not None:
        engine.observer = lambda step: settle(spill)
    return engine, spill


@pytest.mark.parametrize("places", [5, 64])
@pytest.mark.parametrize("has_file", [True, False])
def test_an_evicted_prefix_comes_back(has_file: bool, places: int, tmp_path: Path) -> None:
    engine, spill = spilled_engine(tmp_path if has_file else None, num_places=places)
    ask(engine, request("a", LONG))
    evict(engine)
    found = ask(engine, request("b", LONG))
    if has_file or places == 64:
        assert found == FULL
        read = spill.figures().read
        assert read["disk"] + read["host"] == FULL // 4
        assert read["disk"] > 0 if has_file else read["disk"] == 0
        # The whole prompt but its last token came from the spill, and the outcome says so.
        assert engine.num_prefill_tokens < 5 * 64
    else:
        assert found == 0, "the pool is too small for other blocks and these"
    assert_idle(engine)
    spill.close()


def test_another_worker_finds_what_was_written_and_what_was_still_in_the_cache(tmp_path: Path) -> None:
    engine, spill = spilled_engine(tmp_path)
    ask(engine, request("a", LONG))
    evict(engine)
    last = tuple(range(30, 92))
    ask(engine, request("b", last, max_tokens=2))
    spill.close()
    engine, spill = spilled_engine(tmp_path)
    assert ask(engine, request("a", LONG)) == FULL
    assert ask(engine, request("b", last)) == FULL
    # The beginning of an answer is part of the next prompt of a conversation.
    assert spill.figures().read["disk"] >= 30
    spill.close()


def test_the_outcome_counts_tokens_that_came_back_as_cached(tmp_path: Path) -> None:
    engine, spill = spilled_engine(tmp_path)
    ask(engine, request("a", LONG))
    evict(engine)
    engine.add(request("b", LONG))
    first = next(item for _ in range(100) for item in engine.step())
    assert first.report is not None
    assert first.report.cached_tokens == FULL
    run(engine)
    spill.close()


def test_another_salt_and_another_scope_find_nothing(tmp_path: Path) -> None:
    engine, spill = spilled_engine(tmp_path)
    mine = replace(request("a", LONG, salt="mine"), cache_scope="me")
    ask(engine, mine)
    evict(engine)
    assert ask(engine, replace(mine, id="b", cache_salt="theirs")) == 0
    evict(engine, 3)
    assert ask(engine, replace(mine, id="c", cache_scope="them")) == 0
    evict(engine, 6)
    assert ask(engine, replace(mine, id="d", cache_salt="")) == 0
    evict(engine, 9)
    assert ask(engine, replace(mine, id="e")) == FULL
    spill.close()


def test_blocks_of_another_fingerprint_are_dropped_and_counted(tmp_path: Path) -> None:
    engine, spill = spilled_engine(tmp_path)
    ask(engine, request("a", LONG))
    spill.close()
    engine, spill = spilled_engine(tmp_path, fingerprint=bytes(32))
    assert ask(engine, request("a", LONG)) == 0
    assert spill.figures().dropped["foreign"] >= FULL // 4
    spill.close()


def test_the_key_of_a_block_keeps_models_apart_even_if_the_header_is_changed(tmp_path: Path) -> None:
    engine, spill = spilled_engine(tmp_path)
    ask(engine, request("a", LONG))
    spill.close()
    (path,) = tmp_path.iterdir()
    theirs = path.read_bytes()
    path.unlink()
    engine, spill = spilled_engine(tmp_path, fingerprint=bytes(32))
    spill.close()
    with path.open("r+b") as file:  # their entries and blocks under the header of this model
        file.seek(4096)
        file.write(theirs[4096:])
    engine, spill = spilled_engine(tmp_path, fingerprint=bytes(32))
    assert ask(engine, request("a", LONG)) == 0
    assert spill.figures().dropped["corrupt"] >= FULL // 4
    spill.close()


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 10**9), flips=st.integers(1, 300), cut=st.sampled_from([0, 0, 0, 5, 4096, 20_000, 10**9]))
def test_flipped_bits_and_cut_files_change_no_text(
    seed: int, flips: int, cut: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder, draw = tmp_path_factory.mktemp("spill"), random.Random(seed)
    engine, spill = spilled_engine(folder, max_bytes=400_000)
    ask(engine, request("a", LONG))
    evict(engine)
    spill.close()
    (path,) = folder.iterdir()
    content = bytearray(path.read_bytes())
    used = [at for at, byte in enumerate(content) if byte]
    for _ in range(flips):
        # Half of them where something is written.
        at = draw.choice(used) if draw.random() < 0.5 else draw.randrange(len(content))
        content[at] ^= 1 << draw.randrange(8)
    path.write_bytes(content[: max(0, len(content) - cut)])
    engine, spill = spilled_engine(folder, max_bytes=400_000)
    found = [ask(engine, request("a", LONG))]
    dropped = spill.figures().dropped
    assert found[0] == FULL or dropped["corrupt"] + dropped["foreign"] > 0 or cut
    # Each time at most one damaged block is met and written anew.
    while found[-1] < FULL and len(found) <= FULL // 4 + 1:
        evict(engine)
        found.append(ask(engine, request("b", LONG)))
    assert found[-1] == FULL
    spill.close()


def test_each_damaged_block_is_counted_once_and_computed(tmp_path: Path) -> None:
    engine, spill = spilled_engine(tmp_path, num_places=5)
    ask(engine, request("a", LONG))
    evict(engine)
    (path,) = tmp_path.iterdir()
    with path.open("r+b") as file:
        content = file.read()
        file.seek(0)
        # A slot of the mock model is a token and a state, 8 bytes each.
        first, second = (token.to_bytes(8, "little") for token in LONG[20:22])
        slots = range(0, len(content), 16)
        at = next(at for at in slots if content[at : at + 8] == first and content[at + 16 : at + 24] == second)
        file.seek(at + 8)
        file.write(bytes([content[at + 8] ^ 1]))
    assert ask(engine, request("b", LONG)) == 20
    assert spill.figures().dropped["corrupt"] == 1
    evict(engine, 3)
    assert ask(engine, request("c", LONG)) == FULL
    assert spill.figures().dropped["corrupt"] == 1
    spill.close()


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 10**9),
    places=st.sampled_from([8, 40, 256]),
    file_blocks=st.sampled_from([0, 8, 200]),
    preemption=st.sampled_from(["auto", "swap"]),
)
def test_classes_swapping_and_cancelled_requests_change_no_text_and_lose_no_place(
    seed: int, places: int, file_blocks: int, preemption: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    draw = random.Random(seed)
    engine = make_engine(**SMALL | {"preemption": preemption, "num_host_blocks": 64})
    folder = tmp_path_factory.mktemp("spill") if file_blocks else None
    spill = attach(engine, folder, places, max_bytes=3 * PAGE + file_blocks * (PAGE + ENTRY.size))
    prompts = [tuple(draw.randrange(1, 90) for _ in range(draw.choice([20, 33, 40]))) for _ in range(4)]
    requests: dict[str, GenerationRequest] = {}
    items: list[StepItem] = []
    for number in range(150):
        if len(engine.requests) < 5 and draw.random() < 0.5:
            prompt = draw.choice(prompts)
            params = {"max_tokens": draw.choice([3, 10, 25]), "n": draw.choice([1, 1, 2]), "ignore_eos": True}
            one = request(f"r{number}", prompt[: draw.randrange(5, len(prompt) + 1)], **params)
            requests[one.id] = one
            engine.add(one, priority=draw.choice([0, 1, 2]))
        items += engine.step()
        if engine.requests and draw.random() < 0.05:
            name = draw.choice(sorted(engine.requests))
            engine.finish(name, "cancelled")
            del requests[name]
        if draw.random() < 0.3:
            time.sleep(0.0005)  # the thread has time for some blocks
    items += run(engine)
    for name, one in requests.items():
        expected = continuation(one.prompt, one.sampling.max_tokens, ignore_eos=True)
        assert [list(delta.token_ids) for delta in final(items, name)] == [expected] * one.sampling.n
    spill.close()
    assert_no_place_lost(spill)


class Broken:
    """A file whose reads or writes wait, or fail."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, name: str, error: OSError | None = None, of: type = BlockFile
    ) -> None:
        self.begun, self.may_go_on, self.num_calls = threading.Event(), threading.Event(), 0
        whole = getattr(of, name)

        def call(file: Any, *arguments: Any) -> Any:
            self.num_calls += 1
            self.begun.set()
            if error is not None:
                raise error
            assert self.may_go_on.wait(20)
            return whole(file, *arguments)

        monkeypatch.setattr(of, name, call)


@pytest.mark.parametrize("name", ["read", "write"])
def test_a_disk_that_fails_is_left_alone_after_one_warning(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine, spill = spilled_engine(tmp_path, num_places=5)
    ask(engine, request("a", LONG))
    evict(engine)
    broken = Broken(monkeypatch, name, OSError(5, "Input/output error"))
    with caplog.at_level(logging.WARNING):
        ask(engine, request("b", LONG))
        evict(engine, 3)
        ask(engine, request("c", LONG))
    assert broken.num_calls == 1
    assert len([record for record in caplog.records if "Input/output error" in record.message]) == 1
    assert spill.figures().dropped["error"] >= 1
    assert spill.figures().blocks["disk"] == 0
    assert_idle(engine)
    spill.close()


def test_a_disk_that_stands_still_delays_a_prompt_by_no_more_than_its_computation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    skipped_s = 0.0
    options: Any = {"num_places": 5, "costs": SpillCosts(0.0, 0.01), "clock": lambda: time.monotonic() + skipped_s}
    engine, spill = spilled_engine(tmp_path, **options)
    ask(engine, request("a", LONG))
    evict(engine)
    broken = Broken(monkeypatch, "read")
    engine.observer = None
    began = time.monotonic()
    assert ask(engine, request("b", LONG)) == 0
    assert time.monotonic() - began >= 0.15
    assert spill.figures().slower == 1
    skipped_s = 1.1
    ask(engine, request("x", range(90, 30, -1)), request("y", range(1, 50, 2)))
    ask(engine, request("c", LONG))
    assert spill.figures().slower == 1, "nobody waits for a disk that stands still"
    assert broken.num_calls == 1
    broken.may_go_on.set()
    spill.close()


def test_others_decode_while_a_prefix_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, spill = spilled_engine(tmp_path, num_places=5)
    ask(engine, request("a", LONG))
    evict(engine)
    broken = Broken(monkeypatch, "read")
    engine.observer = None
    engine.add(request("b", (1,), max_tokens=20, ignore_eos=True))
    engine.step()
    engine.add(request("c", LONG))
    items = [item for _ in range(10) for item in engine.step()]
    assert broken.begun.wait(20)
    assert {item.request_id for item in items} == {"b"}
    assert len(items) == 10
    broken.may_go_on.set()
    items += run(engine)
    assert list(final(items, "c")[0].token_ids) == continuation(LONG, 8)
    assert spill.figures().read["disk"] > 0
    spill.close()


def test_a_request_that_leaves_while_its_prefix_is_read_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, spill = spilled_engine(tmp_path, num_places=5)
    ask(engine, request("a", LONG))
    evict(engine)
    broken = Broken(monkeypatch, "read")
    engine.observer = None
    engine.add(request("b", LONG))
    engine.step()
    assert broken.begun.wait(20)
    engine.finish("b", "cancelled")
    assert not engine.has_work
    broken.may_go_on.set()
    assert ask(engine, request("c", LONG)) >= 0
    assert ask(engine, request("d", (3, 1, 4))) == 0
    assert_idle(engine)
    spill.close()


def test_a_block_that_is_lost_before_it_is_read_loses_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, spill = spilled_engine(None, num_places=5)
    ask(engine, request("a", LONG))
    ask(engine, request("other", [(i * 7) % 96 + 1 for i in range(64)], max_tokens=2))
    assert spill.figures().blocks["host"] == 5, "the end of the first prompt"
    slow = Broken(monkeypatch, "_bring", of=BlockSpill)
    engine.add(request("long", (1,), max_tokens=70, ignore_eos=True))
    engine.step()
    engine.add(request("b", LONG))
    items = [item for _ in range(60) for item in engine.step()]
    assert slow.begun.wait(20)
    slow.may_go_on.set()
    items += run(engine)
    assert list(final(items, "b")[0].token_ids) == continuation(LONG, 8)
    spill.close()
    assert_no_place_lost(spill)


def test_blocks_that_are_evicted_now_take_no_places_of_blocks_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, spill = spilled_engine(None, num_places=44)
    ask(engine, request("a", LONG))
    evict(engine)
    assert 40 <= spill.figures().blocks["host"] < 44, "the first prompt, and then others"
    slow = Broken(monkeypatch, "_bring", of=BlockSpill)
    engine.add(request("long", (1,), max_tokens=30, ignore_eos=True))
    engine.step()
    engine.add(request("b", LONG))
    steps(engine, 25)
    assert spill.figures().kept["host"] > 44
    slow.may_go_on.set()
    first = next(item for item in run(engine) if item.request_id == "b")
    assert first.report is not None
    assert first.report.cached_tokens == FULL
    spill.close()


@pytest.mark.parametrize("ends", ["cancelled", "no room"])
def test_a_request_that_starts_no_more_leaves_the_pool_to_others(ends: str) -> None:
    engine, spill = spilled_engine(None, num_places=10)
    ask(engine, request("a", LONG))
    ask(engine, request("other", [(i * 7) % 96 + 1 for i in range(64)], max_tokens=2))
    in_pool = spill.figures().blocks["host"]
    assert in_pool >= 8, "the end of the first prompt"
    engine.add(request("long", (1,), max_tokens=78, ignore_eos=True))
    items = steps(engine, 31)
    assert engine.groups.blocks.num_free == 16, "of 24 blocks; the next step takes one"
    engine.add(request("b", LONG))
    items += engine.step()
    deadline = time.monotonic() + 20
    while spill.figures().read["host"] < in_pool:
        assert time.monotonic() < deadline, "blocks are not read"
    if ends == "cancelled":
        engine.finish("b", "cancelled")
    while "long" in engine.requests:
        items += engine.step()
    assert spill.figures().dropped["queue_full"] == 0
    items += run(engine)
    assert list(final(items, "long")[0].token_ids) == continuation((1,), 78, ignore_eos=True)
    if ends == "no room":
        assert list(final(items, "b")[0].token_ids) == continuation(LONG, 8)
    spill.close()
    assert_no_place_lost(spill)


def test_blocks_that_were_evicted_before_the_spill_began_are_not_taken() -> None:
    engine = make_engine(**SMALL)
    ask(engine, request("a", LONG))
    evict(engine)
    spill = attach(engine, None, num_places=256)
    evict(engine, 3)
    assert ask(engine, request("b", LONG)) == 0
    spill.close()


def test_a_step_does_not_wait_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(**SMALL)
    with spilling(engine, tmp_path, num_places=5) as spill:
        broken = Broken(monkeypatch, "write")
        for number in range(4):
            ask(engine, request(f"r{number}", [(number * 31 + i * 7) % 96 + 1 for i in range(64)], max_tokens=2))
        assert broken.begun.wait(20)
        assert broken.num_calls == 1, "the first block is still being written"
        assert spill.figures().dropped["queue_full"] > 10
        assert spill.figures().kept["host"] == 5
        broken.may_go_on.set()


def test_a_prefix_is_computed_if_reading_it_takes_longer(tmp_path: Path) -> None:
    engine, spill = spilled_engine(tmp_path, num_places=5, costs=SpillCosts(2.0, 0.001))
    ask(engine, request("a", LONG))
    evict(engine)
    assert ask(engine, request("b", LONG)) == 0
    assert spill.figures().slower == 1
    assert spill.figures().read == {"host": 0, "disk": 0}
    spill.close()


def test_a_higher_class_preempts_only_for_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of a higher class that is being read displaces nobody while there is room."""
    engine, spill = spilled_engine(tmp_path, num_places=5)
    ask(engine, request("a", LONG))
    evict(engine)
    broken = Broken(monkeypatch, "read")
    engine.observer = None
    engine.add(request("b", (1,), max_tokens=8, ignore_eos=True), priority=2)
    engine.step()
    engine.add(request("c", LONG), priority=0)
    items = [item for _ in range(4) for item in engine.step()]
    assert broken.begun.wait(20)
    assert engine.groups.num_preemptions == 0
    broken.may_go_on.set()
    items += run(engine)
    assert list(final(items, "c")[0].token_ids) == continuation(LONG, 8)
    spill.close()


def test_choices_and_scored_prompts_use_what_comes_back(tmp_path: Path) -> None:
    engine, spill = spilled_engine(tmp_path)
    ask(engine, request("a", LONG))
    evict(engine)
    engine.add(request("n", LONG, n=3, max_tokens=4))
    items = run(engine)
    assert [list(delta.token_ids) for delta in final(items, "n")] == [continuation(LONG, 4)] * 3
    evict(engine, 3)
    engine.add(GenerationRequest("s", "mock", LONG, SamplingParams(max_tokens=2, temperature=0.0, prompt_logprobs=0)))
    run(engine)
    assert_idle(engine)
    spill.close()
