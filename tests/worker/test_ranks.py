"""A model over several processes computes what one process computes; graphs and caches have the same number on all."""

from __future__ import annotations

import gc
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import kernels
from shared.messages import SamplingParams
from tests.worker.checkpoints import make_checkpoint
from tests.worker.test_engine_parity import MAX_TOKENS, by_hugging_face, prompts
from worker.engine.engine import Engine
from worker.engine.limits import EngineLimits
from worker.engine.offline import complete, generate
from worker.models.batch import ForwardBatch
from worker.models.decoder import Decoder
from worker.ranks.collectives import Collectives, Sizes, meet, meeting
from worker.ranks.follower import Follower
from worker.ranks.leader import Followers, LeadingDecoder, OutOfStep
from worker.settings import WorkerSettings

pytestmark = pytest.mark.usefixtures("one_thread")


@contextmanager
def ranks_of(
    path: Path, size: int, prefer: str = "auto", on_death: Callable[[int, int, str], None] | None = None
) -> Iterator[LeadingDecoder]:
    """A model over `size` real processes, this one among them."""
    ops = kernels.select_ops("cpu", torch.float32, prefer)
    settings = WorkerSettings(model=str(path), tensor_parallel_size=size, kernels=prefer, threads=1)
    deaths: list[tuple[int, int]] = []
    died = on_death or (lambda rank, code, said: deaths.append((rank, code)))
    followers = Followers(settings, path, ops, died)
    try:
        yield LeadingDecoder.lead(followers, path, ops, torch.float32, "cpu")
    finally:
        followers.close()
    assert deaths == []


@pytest.mark.parametrize(
    ("family", "size", "prefer", "preemption"),
    [
        ("llama-bias", 2, "auto", "recompute"),  # biases that only one rank may add
        ("llama3-rope", 4, "auto", "swap"),  # one key-value head for all ranks
        ("qwen2", 2, "reference", "swap"),  # tied embeddings, and a vocabulary that is not divisible
        ("qwen3-bias", 4, "auto", "swap"),  # two ranks per key-value head, and windows
        ("mistral", 2, "auto", "swap"),
    ],
)
def test_greedy_outputs_equal_those_of_hugging_face(
    family: str, size: int, prefer: str, preemption: str, tmp_path: Path
) -> None:
    path = make_checkpoint(tmp_path, family, sharded=family == "qwen3-bias")
    with ranks_of(path, size, prefer) as model:
        limits = EngineLimits(
            num_blocks=40,
            num_host_blocks=60,
            block_size=8,
            max_num_seqs=12,
            max_num_batched_tokens=32,
            max_model_len=model.max_model_len,
            preemption=preemption,
        )
        engine = Engine(model, limits, model.config.eos_token_ids, None)
        outputs = generate(engine, prompts(), SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0))
        assert engine.scheduler.num_preemptions > 0
    assert [choices[0] for choices in outputs] == by_hugging_face(path)


KINDS = (
    SamplingParams(max_tokens=20, temperature=0, logprobs=True, top_logprobs=2),
    SamplingParams(max_tokens=20, temperature=1, seed=3, n=3, presence_penalty=0.5, logprobs=True),
    SamplingParams(max_tokens=20, temperature=0, n=2, beam_width=4),
    SamplingParams(max_tokens=20, temperature=0.8, top_p=0.9, seed=4, n=2, best_of=4),
)


def test_every_kind_of_request_gets_what_one_process_gives_it(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "llama")
    asked = prompts()[:8]
    params = [KINDS[index % len(KINDS)] for index in range(8)]

    def answers(model: Decoder) -> list[list[list[int]]]:
        limits = EngineLimits(90, 8, 32, 64, model.max_model_len, num_host_blocks=40)
        return generate(Engine(model, limits, model.config.eos_token_ids, None), asked, params)

    alone = Decoder.load(path, kernels.select_ops("cpu", torch.float32), torch.float32, "cpu")
    with ranks_of(path, 2) as model:
        assert answers(model) == answers(alone)


def test_the_bits_of_a_request_do_not_depend_on_the_others_with_any_number_of_ranks(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "llama")
    sampling = SamplingParams(max_tokens=12, temperature=0, logprobs=True, ignore_eos=True)
    with ranks_of(path, 4) as model:

        def engine() -> Engine:
            return Engine(model, EngineLimits(200, 8, 40, 64, model.max_model_len), (), None)

        crowd = complete(engine(), prompts(), sampling)
        for number in (0, 5, 9):
            assert complete(engine(), [prompts()[number]], sampling) == [crowd[number]]


def test_a_rank_that_dies_ends_every_later_step(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "llama")
    died = threading.Event()
    deaths: list[tuple[int, int]] = []

    def on_death(rank: int, code: int, words: str) -> None:
        deaths.append((rank, code))
        died.set()

    with ranks_of(path, 2, on_death=on_death) as model:
        engine = Engine(model, EngineLimits(40, 8, 4, 32, model.max_model_len), (), None)
        generate(engine, [(1, 2, 3)], SamplingParams(max_tokens=2, temperature=0))
        model.followers._processes[0].kill()
        assert died.wait(10)
        for _ in range(2):
            with pytest.raises(OutOfStep):
                generate(engine, [(1, 2, 3)], SamplingParams(max_tokens=2, temperature=0))
            engine.fail("test")
        with pytest.raises(OutOfStep):
            engine.runner.check()  # what ends the engine's thread
    assert deaths == [(1, -9)]


IN_ORDER = """
import itertools, json, sys, torch
from worker.interpreter import leave
from worker.ranks.collectives import Distributed

rank, file = map(int, sys.argv[1:])
ranks = Distributed(rank, 3, file, torch.device("cpu"), keeps_order=True)
orders = torch.tensor(list(itertools.permutations((2.0**30, 1.0, -(2.0**30)))))
sums = ranks.add_up(orders[:, rank].contiguous())
rounded = ranks.add_up(torch.tensor([256.0 if rank == 0 else 1.0]).bfloat16())
said = ranks.broadcast(torch.tensor([rank + 5]))
parts = ranks.gather(torch.tensor([rank, 7]))
print(json.dumps([sums.tolist(), rounded.tolist(), said.tolist(), parts if parts is None else parts.tolist()]))
ranks.close()
leave(0)
"""


def test_sums_of_more_than_two_gpus_are_taken_in_order_where_rows_must_not_differ() -> None:
    """By gloo in place of NCCL."""
    file, project = os.memfd_create("test"), Path(__file__).parents[2]
    command = [sys.executable, "-c", IN_ORDER]
    processes = [
        subprocess.Popen([*command, str(rank), str(file)], pass_fds=[file], stdout=subprocess.PIPE, cwd=project)
        for rank in range(3)
    ]
    os.close(file)
    try:
        found = [json.loads(process.communicate(timeout=60)[0]) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    # 1.0 is lost beside the large ones, unless they are gone before.
    sums = [0.0, 1.0, 0.0, 0.0, 1.0, 0.0]
    for rank, answer in enumerate(found):
        assert answer == [sums, [258.0], [5], None if rank else [[0, 7], [1, 7], [2, 7]]]


def test_a_rank_that_cannot_even_start_is_found_out(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(rank: int, *files: int) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
        process.wait()
        return process

    monkeypatch.setattr(Followers, "_start", staticmethod(start))
    deaths: list[tuple[int, int]] = []
    with pytest.raises(OutOfStep), ranks_of(path, 2, on_death=lambda rank, code, said: deaths.append((rank, code))):
        pass
    assert deaths == [(1, 3)]


@pytest.mark.parametrize("prefer", ["auto", "reference"])
def test_why_a_rank_ended_is_said_before_the_step_fails(path: Path, prefer: str) -> None:
    said: list[tuple[int, int]] = []

    def on_death(rank: int, code: int, words: str) -> None:
        time.sleep(0.2)  # as long as it takes to say it
        said.append((rank, code))

    with ranks_of(path, 2, prefer, on_death) as model:
        engine = Engine(model, EngineLimits(40, 8, 4, 32, model.max_model_len), (), None)
        process = model.followers._processes[0]
        process.send_signal(signal.SIGSTOP)  # it has the order when it ends, and the leader waits for its part
        threading.Timer(0.3, process.kill).start()
        with pytest.raises(OutOfStep):
            generate(engine, [(1, 2, 3)], SamplingParams(max_tokens=2, temperature=0))
        assert said == [(1, -9)]


def test_a_file_that_is_opened_later_is_never_written_to(path: Path, tmp_path: Path) -> None:
    later = tmp_path / "later"
    later.write_bytes(b"weights" * 20)
    with ExitStack() as opened:
        with ranks_of(path, 2, "reference"):
            for _ in range(8):  # whatever number is free, one of them gets it
                opened.enter_context(later.open("rb"))
        gc.collect()
    assert later.read_bytes() == b"weights" * 20


class Echo(Collectives):
    """Rank 0, and a rank that hears what it has said."""

    said: torch.Tensor | None = None

    def broadcast(self, values: torch.Tensor) -> torch.Tensor:
        if self.said is None:
            self.said = values.clone()
        return values.copy_(self.said)


def test_a_batch_arrives_as_it_was_sent_and_its_parts_begin_where_kernels_want_them() -> None:
    lengths = 5, 5, 5, (3, 2), 3, 4, 1  # most of them fill no place of 16 bytes
    *parts, rows = (torch.randint(1, 2**31 - 1, shape if isinstance(shape, tuple) else (shape,)) for shape in lengths)
    sent = ForwardBatch(*(part.int() for part in parts), rows)
    echo = Echo()
    echo.send(sent)
    assert Sizes.of(sent) == (5, 3, 2, 1)
    received = echo.receive(Sizes.of(sent))
    for part, expected in zip(received.parts(), sent.parts(), strict=True):
        assert part.dtype == expected.dtype
        assert torch.equal(part, expected)
        assert part.data_ptr() % 16 == 0


def test_the_file_by_which_ranks_meet_is_closed() -> None:
    ops = kernels.select_ops("cpu", torch.float32)
    if not isinstance(ops, kernels.CpuOps):
        pytest.skip("needs the C++ kernels")
    file = meeting(1, ops)
    meet(0, 1, file, ops)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)


# --- orders ---------------------------------------------------------------------------------------------------------


class Wire:
    """In place of processes: what the leader tells and sends, for a follower in a thread of this process."""

    def __init__(self) -> None:
        self.orders: queue.Queue[list[Any]] = queue.Queue()
        self.batches: queue.Queue[ForwardBatch] = queue.Queue()
        self.ranks = self
        self.said: queue.Queue[int] = queue.Queue()
        self.is_asked = False

    rank, size = 0, 1

    def tell(self, *order: Any) -> None:
        self.orders.put(list(order))

    def answers(self) -> list[int]:
        return [self.said.get(timeout=20)] if self.is_asked else []

    def hear(self, timeout_s: float) -> None:
        pass

    def told(self) -> Iterator[list[Any]]:
        while (order := self.orders.get(timeout=20)) != ["end"]:
            yield order

    def send(self, batch: ForwardBatch) -> None:
        self.batches.put(batch)

    def receive(self, sizes: Sizes) -> ForwardBatch:
        batch = self.batches.get(timeout=20)
        assert Sizes.of(batch) == sizes
        return batch

    def add_up(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def collect(self, columns: torch.Tensor, width: int) -> torch.Tensor:
        return columns[:, :width]


class Tape:
    """A graph that says what was recorded into it, and how often it was replayed."""

    def __init__(self, log: list[str]) -> None:
        self.log, self.start = log, len(log)
        self.replays = 0

    def finish(self) -> Tape:
        self.recorded = self.log[self.start :]
        return self

    def replay(self) -> None:
        self.replays += 1


class Logged(Decoder):
    """A part of a model that notes the sizes of what it computes."""

    log: list[str]

    def forward(self, batch: ForwardBatch, kv_cache: Any) -> torch.Tensor:
        self.log.append(f"forward {len(batch.token_ids)}")
        return torch.zeros(len(batch.logits_rows), self.vocab_size)


class LoggedLeader(LeadingDecoder, Logged):
    pass


@contextmanager
def a_leader_and_a_follower(path: Path) -> Iterator[tuple[LeadingDecoder, Follower, list[str], list[Tape]]]:
    wire = Wire()
    load = path, kernels.ReferenceOps("cpu", torch.float32), torch.float32, "cpu"
    leader = LoggedLeader.lead(wire, *load)
    part = Logged.load(*load)
    leader.log, part.log = [], []
    wire.is_asked = True
    tapes: list[Tape] = []

    def record(launch: Callable[[], None], pool: Any) -> tuple[Tape, Any]:
        tape = Tape(part.log)
        launch()
        tapes.append(tape.finish())
        return tape, pool

    follower = Follower(part, wire, wire.said.put, record)
    thread = threading.Thread(target=follower.obey, args=(wire.told(),))
    thread.start()
    try:
        yield leader, follower, part.log, tapes
    finally:
        wire.tell("end")
        thread.join(20)
        assert not thread.is_alive()


def batch(tokens: int) -> ForwardBatch:
    numbers = torch.zeros(tokens, dtype=torch.int32)
    starts = torch.tensor([0, tokens], dtype=torch.int32)
    return ForwardBatch(numbers, numbers, numbers, torch.zeros(1, 3, dtype=torch.int32), starts[1:], starts, starts[:1])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path, "llama")


def test_a_graph_is_recorded_and_replayed_on_all_ranks(path: Path) -> None:
    with a_leader_and_a_follower(path) as (leader, follower, log, tapes):
        cache = leader.alloc_kv_cache(4, 8)
        own = Tape([])

        def record(launch: Callable[[], None], pool: Any) -> tuple[Tape, Any]:
            launch()
            return own, pool

        leader.forward(batch(5), cache)
        graph, _ = leader.record(lambda: leader.forward(batch(7), cache), None, record)
        leader.forward(batch(6), cache)
        for _ in range(3):
            graph.replay()
        assert own.replays == 3
    assert log == ["forward 5", "forward 7", "forward 6"]
    assert [(tape.recorded, tape.replays) for tape in tapes] == [(["forward 7"], 3)]
    assert list(follower._graphs.values()) == tapes


def test_a_graph_that_the_leader_cannot_record_is_forgotten_everywhere(path: Path) -> None:
    with a_leader_and_a_follower(path) as (leader, follower, log, tapes):
        cache = leader.alloc_kv_cache(4, 8)

        def record(launch: Callable[[], None], pool: Any) -> Any:
            launch()
            raise RuntimeError("the driver says no")

        with pytest.raises(RuntimeError, match="says no"):
            leader.record(lambda: leader.forward(batch(7), cache), None, record)
        leader.forward(batch(6), cache)  # ranks are still in step
        leader.check()
    assert log == ["forward 7", "forward 6"]
    assert len(tapes) == 1
    assert follower._graphs == {}


@pytest.mark.parametrize("is_launched", [True, False])
def test_a_graph_that_another_rank_cannot_record_is_none_anywhere(path: Path, is_launched: bool) -> None:
    with a_leader_and_a_follower(path) as (leader, follower, log, _):
        cache = leader.alloc_kv_cache(4, 8)
        replays: list[None] = []

        def fails(launch: Callable[[], None], pool: Any) -> Any:
            if is_launched:
                launch()
            raise RuntimeError("the driver says no")

        def record(launch: Callable[[], None], pool: Any) -> tuple[Any, Any]:
            launch()
            return SimpleNamespace(replay=lambda: replays.append(None)), pool

        kept, follower._record = follower._record, fails
        with pytest.raises(RuntimeError, match="another rank"):
            leader.record(lambda: leader.forward(batch(7), cache), None, record)
        if not is_launched:
            leader.followers.batches.get(timeout=20)  # what the follower did not take
        follower._record = kept
        leader.forward(batch(6), cache)  # ranks are still in step
        graph, _ = leader.record(lambda: None, None, record)
        graph.replay()
    assert log == (["forward 7"] if is_launched else []) + ["forward 6"]
    assert len(follower._graphs) == len(replays) == 1


def test_what_the_leader_no_longer_refers_to_is_gone_everywhere(path: Path) -> None:
    with a_leader_and_a_follower(path) as (leader, follower, _, _):
        first = leader.alloc_kv_cache(4, 8)
        graph, _ = leader.record(lambda: None, None, lambda launch, pool: (Tape([]), pool))
        second = leader.alloc_kv_cache(9, 8)
        del first, graph
        leader.forward(batch(1), second)
    assert [cache.layers[0][0].shape[0] for cache in follower._caches.values()] == [9]
    assert follower._graphs == {}


def test_graphs_share_a_pool_where_those_of_the_leader_do(path: Path) -> None:
    with a_leader_and_a_follower(path) as (leader, follower, _, _):
        pools: list[int | None] = []

        def noted(launch: Callable[[], None], pool: int | None) -> tuple[Tape, int]:
            launch()
            pools.append(pool)
            return Tape([]), pool or len(pools)

        def fails(*_: Any) -> Any:
            raise torch.OutOfMemoryError("no more memory")

        follower._record = noted
        of_runners = []
        for _ in range(2):  # one that measures what graphs take, and the one that stays
            with pytest.raises(torch.OutOfMemoryError):
                leader.record(lambda: None, None, fails)
            graph, pool = leader.record(lambda: None, None, lambda launch, pool: (Tape([]), "pool"))
            of_runners.append([graph, leader.record(lambda: None, pool, lambda launch, pool: (Tape([]), pool))[0]])
    assert pools == [None, None, 2, None, None, 5]


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_dropped_elsewhere_while_a_graph_is_recorded(path: Path, fails: bool) -> None:
    with a_leader_and_a_follower(path) as (leader, follower, _, _):
        caches = [leader.alloc_kv_cache(4, 8), leader.alloc_kv_cache(9, 8)]
        orders: list[str] = []
        tell = leader.followers.tell

        def noted(*order: Any) -> None:
            orders.append(order[0])
            tell(*order)

        leader.followers.tell = noted

        def record(launch: Callable[[], None], pool: Any) -> Any:
            caches.pop(0)
            launch()
            if fails:
                raise RuntimeError("the driver says no")
            return Tape([]), pool

        with pytest.raises(RuntimeError) if fails else nullcontext():
            leader.record(lambda: leader.forward(batch(7), caches[-1]), None, record)
        leader.forward(batch(6), caches[0])
    assert orders[:3] == ["capture", "forward", "captured"]
    assert [cache.layers[0][0].shape[0] for cache in follower._caches.values()] == [9]


def test_the_cache_is_as_large_as_the_rank_with_least_memory_allows(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = iter((10, 7))
    monkeypatch.setattr(Decoder, "least_free_memory", lambda self: next(free))
    with a_leader_and_a_follower(path) as (leader, _, _, _):
        assert leader.least_free_memory() == 7


def test_a_step_that_fails_on_one_rank_ends_all(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with a_leader_and_a_follower(path) as (leader, _, _, _):
        cache = leader.alloc_kv_cache(4, 8)

        def fails(*_: Any) -> None:
            raise torch.OutOfMemoryError("no more memory")

        monkeypatch.setattr(Logged, "forward", fails)
        leader.followers.tell = lambda *order: None  # the other would wait for its part of the step
        for _ in range(2):
            with pytest.raises(OutOfStep, match="failed on one rank"):
                leader.forward(batch(1), cache)
        with pytest.raises(OutOfStep):
            leader.check()
        del leader.followers.tell
        leader.followers.batches.get(timeout=20)


def test_a_replay_that_fails_on_one_rank_ends_all(path: Path) -> None:
    class Broken(Tape):
        def replay(self) -> None:
            raise torch.OutOfMemoryError("no more memory")  # the first one sends the graph to the device

    with a_leader_and_a_follower(path) as (leader, follower, _, tapes):
        graph, _ = leader.record(lambda: None, None, lambda launch, pool: (Broken([]), pool))
        with pytest.raises(OutOfStep, match="failed on one rank"):
            graph.replay()
        with pytest.raises(OutOfStep):
            leader.check()
        with pytest.raises(OutOfStep):
            graph.replay()
    assert [tape.replays for tape in tapes] == [1]
    assert list(follower._graphs.values()) == tapes
