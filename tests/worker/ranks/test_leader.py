"""A model over several processes computes what one process computes, and they end together."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import kernels
from quire.shared.protocol.messages import SamplingParams
from quire.worker.device.cuda import record_on_cuda
from quire.worker.device.out_of_step import OutOfStep
from quire.worker.engine.engine import Engine
from quire.worker.engine.limits import EngineLimits
from quire.worker.engine.offline import complete, generate
from quire.worker.models.native.decoder import Decoder
from quire.worker.ranks.leader import Followers, LeadingDecoder
from quire.worker.settings import WorkerSettings
from tests.support.checkpoints import make_checkpoint
from tests.support.parity import MAX_TOKENS, by_hugging_face, load_own, prompts
from tests.support.selection import one_in
from tests.worker.engine.features.test_pooling import by_engine, vectors

pytestmark = pytest.mark.slow


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path, "llama")


@contextmanager
def ranks_of(
    path: Path,
    size: int,
    prefer: str = "auto",
    on_death: Callable[[int, int, str], None] | None = None,
    log_format: str = "text",
) -> Iterator[LeadingDecoder]:
    """A model over `size` real processes, this one among them."""
    ops = kernels.select_ops("cpu", torch.float32, prefer)
    settings = WorkerSettings(
        model=str(path), tensor_parallel_size=size, kernels=prefer, threads=1, log_format=log_format
    )
    deaths: list[tuple[int, int]] = []
    died = on_death or (lambda rank, code, said: deaths.append((rank, code)))
    followers = Followers(settings, path, ops, record_on_cuda, died)
    try:
        yield LeadingDecoder.lead(followers, path, ops, torch.float32, "cpu")
    finally:
        followers.close()
    assert deaths == []


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LeadingDecoder, Decoder]]:
    """A model over two ranks, and the same model in one process."""
    path = make_checkpoint(tmp_path_factory.mktemp("pair"), "llama")
    with ranks_of(path, 2) as model:
        yield model, load_own(path)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("family", "size", "prefer", "preemption"),
    [
        ("llama-bias", 2, "auto", "recompute"),  # biases that only one rank may add
        ("llama3-rope", 4, "auto", "swap"),  # one key-value head for all ranks
        ("qwen2", 2, "reference", "swap"),  # tied embeddings, and a vocabulary that is not divisible
        ("qwen3-bias", 4, "auto", "swap"),  # two ranks per key-value head, and windows
        ("mistral", 2, "auto", "swap"),
        ("mixtral-window", 2, "auto", "swap"),  # a part of every expert
        ("qwen3-moe-mixed", 2, "reference", "recompute"),
        ("gpt-oss", 2, "auto", "swap"),  # sinks of heads, and biases of experts that only one rank may add
        ("gemma3", 2, "auto", "recompute"),  # norms of sums over the ranks
        ("gemma4", 2, "auto", "swap"),  # shared keys, caches of two shapes, and inputs that each rank computes
        ("gemma4-moe", 4, "auto", "recompute"),  # ranks share heads of full attention; two sums in each layer
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
        assert engine.groups.num_preemptions > 0
    assert [choices[0] for choices in outputs] == by_hugging_face(path)


KINDS = (
    SamplingParams(max_tokens=20, temperature=0, logprobs=True, top_logprobs=2),
    SamplingParams(max_tokens=20, temperature=1, seed=3, n=3, presence_penalty=0.5, logprobs=True),
    SamplingParams(max_tokens=20, temperature=0, n=2, beam_width=4),
    SamplingParams(max_tokens=20, temperature=0.8, top_p=0.9, seed=4, n=2, best_of=4),
)


def test_every_kind_of_request_gets_what_one_process_gives_it(pair: tuple[LeadingDecoder, Decoder]) -> None:
    asked = prompts()[:8]
    params = [KINDS[index % len(KINDS)] for index in range(8)]

    def answers(model: Decoder) -> list[list[list[int]]]:
        limits = EngineLimits(90, 8, 32, 64, model.max_model_len, num_host_blocks=40)
        return generate(Engine(model, limits, model.config.eos_token_ids, None), asked, params)

    model, alone = pair
    assert answers(model) == answers(alone)


def assert_computes_alike(model: LeadingDecoder, alone: Decoder) -> None:
    """Compare embeddings, and run the self-test of kernels and sums on all ranks."""
    for pooling in ("last", "mean"):
        found, expected = (vectors(by_engine(one, pooling, budget=50)) for one in (model, alone))
        for one, other in zip(found, expected, strict=True):
            assert (one - other).abs().max() < 1e-4
    report = model.self_test("quick", 8, None)
    assert report.faults == []
    assert report.num_cases == Decoder.self_test(model, "quick", 8, None).num_cases + 1


def test_embeddings_and_the_self_test_are_those_of_one_process(pair: tuple[LeadingDecoder, Decoder]) -> None:
    assert_computes_alike(*pair)


def test_plain_torch_computes_alike_and_never_writes_to_a_file_that_is_opened_later(path: Path, tmp_path: Path) -> None:
    later = tmp_path / "later"
    later.write_bytes(b"weights" * 20)
    with ExitStack() as opened:
        with ranks_of(path, 2, "reference") as model:
            for _ in range(8):  # whatever number is free, one of them gets it
                opened.enter_context(later.open("rb"))
            assert_computes_alike(model, load_own(path, "reference"))
        gc.collect()
    assert later.read_bytes() == b"weights" * 20


@pytest.mark.usefixtures("cpu_kernels")
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
        assert died.wait(60)
        for _ in range(2):
            with pytest.raises(OutOfStep):
                generate(engine, [(1, 2, 3)], SamplingParams(max_tokens=2, temperature=0))
            engine.fail("test")
        with pytest.raises(OutOfStep):
            engine.runner.check()  # what ends the engine's thread
    assert deaths == [(1, -9)]


@pytest.mark.usefixtures("cpu_kernels")
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


@pytest.mark.parametrize("level", one_in(2, ["amx", "none"]))
def test_what_a_rank_logs_has_its_number_and_does_not_repeat_rank_0(
    level: str,
    path: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """level: the bound of the C++ kernels. Without them rank 0 warns that plain torch computes."""
    monkeypatch.setenv("KERNELS_CPU_ISA", level)
    weights = path / "model.safetensors"
    save_file(load_file(weights) | {"more.weight": torch.ones(3)}, weights)
    has_ended = threading.Event()
    with ranks_of(path, 2, on_death=lambda *_: has_ended.set(), log_format="json") as model:
        model._tell("no order at all")
        assert has_ended.wait(60)
    assert [one.message for one in caplog.records if "more.weight" in one.message], "rank 0 says it"
    said = capfd.readouterr().err
    assert "more.weight" not in said
    (line,) = [json.loads(one) for one in said.splitlines() if one.startswith("{")]
    assert (line["msg"], line["rank"], line["worker"]) == ("rank 1 failed", "1", WorkerSettings().name)
    assert "no order at all" in line["exception"]


@pytest.mark.parametrize("prefer", one_in(2, ["auto", "reference"]))
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


def test_followers_may_use_the_cpus_of_all_ranks(path: Path) -> None:
    """The leader has restricted itself to its own CPUs before it starts them."""
    cpus = os.sched_getaffinity(0)
    ops = kernels.select_ops("cpu", torch.float32)
    settings = WorkerSettings(model=str(path), tensor_parallel_size=2, threads=2)
    os.sched_setaffinity(0, {min(cpus)})
    try:
        followers = Followers(settings, path, ops, record_on_cuda, cpus=cpus)
        try:
            LeadingDecoder.lead(followers, path, ops, torch.float32, "cpu")
            assert os.sched_getaffinity(followers._processes[0].pid) == cpus
        finally:
            followers.close()
    finally:
        os.sched_setaffinity(0, cpus)


def test_a_rank_with_a_wrong_kernel_ends_the_worker_with_its_reason(path: Path) -> None:
    """One rank doubles its part of each sum."""
    said: list[str] = []
    with ranks_of(path, 2, on_death=lambda rank, code, words: said.append(words)) as model:
        ranks = model.followers.ranks
        add_up = ranks.all_reduce
        ranks.all_reduce = lambda values: add_up(values * 2)  # type: ignore[method-assign]
        with pytest.raises(OutOfStep):
            model.self_test("quick", 8, None)
        model.followers.wait_for_cause(20)
    assert said[0].startswith("self-test: all-reduce (2 ranks, ")
    assert "--kernels reference" in said[0]
