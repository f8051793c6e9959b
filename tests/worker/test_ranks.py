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
from quire.shared.messages import SamplingParams
from quire.worker.engine.engine import Engine
from quire.worker.engine.limits import EngineLimits
from quire.worker.engine.offline import complete, generate
from quire.worker.models.batch import ForwardBatch
from quire.worker.models.decoder import Decoder
from quire.worker.ranks.collectives import BatchSizes, Collectives, meet, meeting
from quire.worker.ranks.leader import Followers, LeadingDecoder, OutOfStep
from quire.worker.settings import WorkerSettings
from tests.worker.checkpoints import make_checkpoint
from tests.worker.engine.test_engine_parity import MAX_TOKENS, by_hugging_face, prompts

pytestmark = pytest.mark.usefixtures("one_thread")


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
        assert engine.groups.num_preemptions > 0
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
from quire.worker.interpreter import leave
from quire.worker.ranks.collectives import Distributed

rank, file = map(int, sys.argv[1:])
ranks = Distributed(rank, 3, file, torch.device("cpu"), keeps_order=True)
orders = torch.tensor(list(itertools.permutations((2.0**30, 1.0, -(2.0**30)))))
sums = ranks.all_reduce(orders[:, rank].contiguous())
rounded = ranks.all_reduce(torch.tensor([256.0 if rank == 0 else 1.0]).bfloat16())
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


@pytest.mark.parametrize("level", ["amx", "none"])
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
        assert has_ended.wait(10)
    assert [one.message for one in caplog.records if "more.weight" in one.message], "rank 0 says it"
    said = capfd.readouterr().err
    assert "more.weight" not in said
    (line,) = [json.loads(one) for one in said.splitlines() if one.startswith("{")]
    assert (line["msg"], line["rank"], line["worker"]) == ("rank 1 failed", "1", WorkerSettings().name)
    assert "no order at all" in line["exception"]


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

    def all_reduce(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def gather(self, values: torch.Tensor) -> torch.Tensor | None:
        return values[None]

    def give_up(self) -> None:
        pass

    def close(self) -> None:
        pass


def test_a_batch_arrives_as_it_was_sent_and_its_parts_begin_where_kernels_want_them() -> None:
    lengths = 5, 5, 5, (3, 2), 3, 4, 1  # most of them fill no place of 16 bytes
    *parts, rows = (torch.randint(1, 2**31 - 1, shape if isinstance(shape, tuple) else (shape,)) for shape in lengths)
    sent = ForwardBatch(*(part.int() for part in parts), rows)
    echo = Echo()
    echo.send(sent)
    assert BatchSizes.of(sent) == (5, 3, 2, 1)
    received = echo.receive(BatchSizes.of(sent))
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
