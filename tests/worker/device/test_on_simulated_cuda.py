"""The worker's code for GPUs on a simulated device, from its start to its texts, and when the device fails.

The Triton kernels run in the interpreter, in the order of the simulated stream. What only a card can show is in
docs/gpu.md.
"""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.shared.process.errors import StartError
from quire.shared.protocol.messages import SamplingParams
from quire.worker import build
from quire.worker.device.cuda import memory_plan, runner
from quire.worker.device.cuda.runner import DeviceRunner
from quire.worker.engine.engine import Engine
from quire.worker.engine.features.spill import block_spill, start
from quire.worker.engine.offline import complete, generate
from quire.worker.settings import WorkerSettings
from tests.support.checkpoints import make_checkpoint
from tests.support.kernels.implementations import HAS_TRITON, ON_CUDA
from tests.support.simulated_cuda.driver import Driver, simulated_cuda

pytestmark = [
    pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed"),
    pytest.mark.skipif(ON_CUDA, reason="the kernels run on the GPU itself"),
]
PROMPTS = [(5, 6, 7), (9,) * 11, tuple(range(2, 20))]
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


def make_engine(model: Path, device: str = "cuda", **options: object) -> Engine:
    sizes: dict[str, object] = {
        "max_num_seqs": 2, "max_num_batched_tokens": 16, "max_model_len": 64, "block_size": 8, "num_blocks": 32,
        "threads": 1,
        "self_test": "off",  # its cases use operations of torch that the simulated device lacks
    }  # fmt: skip
    settings = WorkerSettings(model=str(model), device=device, dtype="float32", **sizes | options)  # type: ignore[arg-type]
    return build.build_engine(settings, "model")


@pytest.fixture(autouse=True)
def few_scored_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest step samples a row for each position that may be scored, which takes the interpreter long."""
    for module in (memory_plan, runner):
        monkeypatch.setattr(module, "MAX_SCORED_POSITIONS", 2)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("models") / "tiny", "llama", num_hidden_layers=1)


@pytest.fixture(scope="module")
def texts(checkpoint: Path) -> list[list[list[int]]]:
    """The texts that the worker gives on a CPU."""
    return generate(make_engine(checkpoint, "cpu"), PROMPTS, GREEDY)


def runner_of(engine: Engine) -> DeviceRunner:
    assert isinstance(engine.runner, DeviceRunner)
    return engine.runner


@pytest.mark.slow
def test_a_worker_starts_and_gives_the_texts_of_a_cpu(checkpoint: Path, texts: list[list[list[int]]]) -> None:
    """Greedy ones from graphs, then of requests that need logits, for which the engine waits once in a step."""
    kinds: list[dict[str, Any]] = [
        {"logprobs": True, "top_logprobs": 2},
        {"logit_bias": ((7, 3.0),), "min_tokens": 3, "logprobs": True},
        {"presence_penalty": 0.5, "repetition_penalty": 1.3, "allowed_token_ids": tuple(range(0, 200, 3))},
    ]
    params = [SamplingParams(max_tokens=4, temperature=0.0, **one) for one in kinds]
    expected = complete(make_engine(checkpoint, "cpu"), PROMPTS, params)
    with simulated_cuda() as driver:
        engine = make_engine(checkpoint, swap_gb=0.001)
        graphs = runner_of(engine).graphs
        assert not graphs.num_missing
        assert graphs.num_captured == 5
        before = driver.num_replays
        assert generate(engine, PROMPTS, GREEDY) == texts
        assert driver.num_replays > before + 10
        waits, steps = driver.num_waits, engine.num_steps
        found = complete(engine, PROMPTS, params)
        assert driver.num_waits - waits <= engine.num_steps - steps
    for [one], [other] in zip(found, expected, strict=True):
        assert one.token_ids == other.token_ids
        for mine, theirs in zip(one.logprobs, other.logprobs, strict=True):
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)
            assert [token_id for token_id, _ in mine.top] == [token_id for token_id, _ in theirs.top]


@pytest.mark.soak
def test_fp8_products_with_rounded_activations_are_captured_in_graphs(checkpoint: Path) -> None:
    found = []
    for cuda_graphs in (True, False):
        with simulated_cuda() as driver:
            engine = make_engine(checkpoint, quantization="fp8-dynamic", cuda_graphs=cuda_graphs)
            kinds = {use.kind for use in engine.runner.model.kernel_uses(8).linears}
            assert kinds == {"fp8-dynamic"}
            found.append(generate(engine, PROMPTS, GREEDY))
            assert bool(driver.num_replays) is cuda_graphs
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.parametrize("has_file", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_evicted_blocks_that_come_back_do_not_depend_on_when_operations_run(
    has_file: bool, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks leave the device and come back by copies for which the host does not wait."""
    monkeypatch.setattr(start, "measure_read", lambda file, pool: 0.0)
    monkeypatch.setattr(start, "measure_compute", lambda engine: 30.0)
    # The thread waits for copies that the interpreter computes, which takes as long as other processes leave it.
    monkeypatch.setattr(block_spill, "STUCK_S", 60.0)
    prompts = [tuple((first + 3 * at) % 200 for at in range(41)) for first in (2, 30, 60, 2)]
    sizes = {"num_blocks": 8, "cuda_graphs": False, "swap_gb": 0.0}
    plain = make_engine(checkpoint, "cpu", num_blocks=8)
    expected = [generate(plain, [prompt], GREEDY) for prompt in prompts]
    options = {"kv_spill_dir": str(tmp_path), "kv_spill_gb": 0.01} if has_file else {"kv_host_gb": 0.001}
    with simulated_cuda(draw=random.Random(1)):
        engine = make_engine(checkpoint, **sizes, **options)
        found = [generate(engine, [prompt], GREEDY) for prompt in prompts]
        assert found == expected
        assert engine.groups.blocks.counters.prefix_hits >= 40
        spill = engine.scheduler.spill
        assert spill is not None
        read = spill.figures().read
        assert read["host"] + read["disk"] >= 5
        engine.close()
    if has_file:
        with simulated_cuda():
            engine = make_engine(checkpoint, **sizes, **options)
            assert generate(engine, prompts[:1], GREEDY) == expected[0]
            assert engine.groups.blocks.counters.prefix_hits == 40
            engine.close()


@pytest.mark.soak
def test_swapped_blocks_and_drawn_tokens_do_not_depend_on_when_operations_run(checkpoint: Path) -> None:
    prompts = [tuple(range(first, first + 17)) for first in (2, 30)]
    params = [SamplingParams(max_tokens=20, temperature=0.8, top_p=0.9, seed=i, ignore_eos=True) for i in range(2)]
    found = []
    for draw in (None, random.Random(1)):
        with simulated_cuda(draw=draw):
            engine = make_engine(checkpoint, num_blocks=8, swap_gb=0.001, cuda_graphs=False, preemption="swap")
            found.append(generate(engine, prompts, params))
            assert engine.groups.num_preemptions > 0
    assert found[0] == found[1]


# --- failures ---------------------------------------------------------------------------------------------------------


def fail_once(driver: Driver, least: int = 0) -> list[int]:
    """Let the next allocation of at least `least` bytes fail. Returns a list that receives its size."""
    failed: list[int] = []

    def fails(size: int) -> bool:
        if failed or size < least:
            return False
        failed.append(size)
        return True

    driver.devices[0].fails_allocation = fails
    return failed


def test_a_start_without_memory_is_refused_in_one_line(checkpoint: Path) -> None:
    with simulated_cuda() as driver:
        driver.devices[0].fails_allocation = lambda size: size > 4096
        with pytest.raises(StartError, match=r"out of the GPU's memory at start, with 0.71 GiB of it free: end what"):
            make_engine(checkpoint)


def test_host_memory_that_cannot_be_pinned_is_refused_in_one_line(checkpoint: Path) -> None:
    with simulated_cuda() as driver, pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "_register_host", lambda *_: 2)
        patch.setattr(torch.cuda.cudart(), "cudaHostRegister", lambda *_: 2)
        with pytest.raises(
            StartError, match=r"--swap-gb 0.001: .* cannot be pinned \(cudaHostRegister returns error 2"
        ):
            make_engine(checkpoint, swap_gb=0.001, cuda_graphs=False)


@pytest.mark.parametrize(
    "reason",
    [
        pytest.param("an illegal memory access was encountered", marks=pytest.mark.slow),
        pytest.param("uncorrectable ECC error encountered", marks=pytest.mark.soak),
    ],
)
def test_a_step_without_memory_is_launched_again_with_fewer_tokens_and_a_lost_device_ends_the_engine(
    checkpoint: Path, texts: list[list[list[int]]], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine thread then ends the process, and other workers continue its requests (worker/queue/engine_thread)."""
    caplog.set_level(logging.ERROR)
    with simulated_cuda() as driver:
        engine = make_engine(checkpoint, cuda_graphs=False)
        failed = fail_once(driver, least=4096)
        assert generate(engine, PROMPTS, GREEDY) == texts
        assert failed
        engine.runner.check()
        driver.devices[0].fault = (driver.devices[0].num_run + 100, reason)
        with pytest.raises(RuntimeError, match=f"CUDA error: {reason}"):
            generate(engine, PROMPTS, GREEDY)
        with pytest.raises(RuntimeError, match=f"CUDA error: {reason}"):
            engine.runner.check()
