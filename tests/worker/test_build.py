"""How an engine is built from settings, and what is refused before."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quire import kernels
from quire.gateway.model.served_model import load_model
from quire.shared.config.settings import SettingError, load
from quire.shared.process.errors import StartError
from quire.worker import capacity
from quire.worker.build import build_engine, warm_up
from quire.worker.capacity import CPU_CACHE_LIMIT, GIB, choose_limits, choose_num_host_blocks
from quire.worker.device import devices
from quire.worker.engine.engine import Engine
from quire.worker.engine.limits import EngineLimits
from quire.worker.models.native.config import read_config
from quire.worker.models.transformers.bridge import TransformersModel
from quire.worker.models.transformers.config import read_transformers_config
from quire.worker.preflight import check_settings, check_weights
from quire.worker.settings import WorkerSettings
from tests.support.checkpoints import BOS_TOKEN_ID, EOS_TOKEN_ID, make_checkpoint
from tests.support.mock_model import EOS, MockModel
from tests.support.quantized import quantize_checkpoint
from tests.support.transformers_checkpoints import make_kind
from tests.support.vision_checkpoints import make_vision


def test_an_answer_ends_at_the_end_tokens_of_the_configuration_and_of_the_tokenizer(tmp_path: Path) -> None:
    def end_tokens() -> frozenset[int]:
        settings = WorkerSettings(model=str(tmp_path), device="cpu", num_blocks=32, threads=1)
        engine = build_engine(settings, "test")
        assert engine.eos_token_ids == load_model(str(tmp_path), "test").eos_token_ids
        return engine.eos_token_ids

    # A checkpoint trained from scratch may lack an end token, as Qwen's configuration class has no default.
    make_checkpoint(tmp_path, "qwen3", eos_token_id=None)
    assert end_tokens() == {EOS_TOKEN_ID}
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "eos_token_id": BOS_TOKEN_ID}))
    assert end_tokens() == {BOS_TOKEN_ID, EOS_TOKEN_ID}


def test_a_worker_of_a_model_with_images_says_why_it_computes_none(tmp_path: Path) -> None:
    def reason(folder: Path) -> str:
        return build_engine(WorkerSettings(model=str(folder), device="cpu", num_blocks=32), "test").no_images

    assert reason(make_checkpoint(tmp_path / "llama", "llama")) == ""
    blind = make_vision(tmp_path / "blind", "emu3")
    why = "images that become tokens of the vocabulary are not computed"
    assert reason(blind) == f"this worker computes no images: {why}"


def mapped(folder: Path) -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]


@pytest.mark.parametrize("model_impl", ["quire", "transformers"])
def test_no_file_of_weights_stays_mapped(model_impl: str, tmp_path: Path) -> None:
    """If the file stayed mapped, a later change of the file would change the model."""
    make_checkpoint(tmp_path, "llama")
    engine = build_engine(
        WorkerSettings(model=str(tmp_path), model_impl=model_impl, dtype="float32", num_blocks=32, threads=1), "test"
    )
    assert engine.runner.model.implementation == model_impl
    assert mapped(tmp_path) == []


def test_weights_that_plain_torch_multiplies_do_not_stay_mapped_either(tmp_path: Path) -> None:
    config = read_transformers_config(make_kind(tmp_path, "gpt2"))
    model = TransformersModel.load(config, kernels.ReferenceOps("cpu", torch.float32), "cpu")
    assert model.weight_bytes > 0
    assert mapped(tmp_path) == []


CPU = torch.device("cpu")


def test_swapping_without_memory_for_it() -> None:
    with pytest.raises(StartError, match="--preemption swap needs host memory, and --swap-gb is 0: raise it, or"):
        check_settings(WorkerSettings(preemption="swap", swap_gb=0), CPU)
    check_settings(WorkerSettings(preemption="auto", swap_gb=0), CPU)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"beat_s": 1.6}, "--beat-s 1.6 is more than half of --lease-s 3"),
        ({"max_num_batched_tokens": 8, "max_num_seqs": 9}, "--max-num-batched-tokens 8 is below --max-num-seqs 9"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(StartError, match=message):
        check_settings(WorkerSettings(**settings), CPU)


@pytest.mark.parametrize("name", ["", "awq", "w8a8"])
def test_quantising_on_load_is_a_remedy_only_for_weights_that_are_not_quantised(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_checkpoint(tmp_path / "plain", "llama")
    if name:
        folder = quantize_checkpoint(folder, tmp_path / name, name)
    monkeypatch.setattr(devices, "free_memory", lambda device: 1)
    with pytest.raises(StartError, match="its weights take") as caught:
        check_weights(folder, read_config(folder), torch.float32, CPU)
    assert ("--quantization" in str(caught.value)) == (not name)


@pytest.mark.parametrize(("kind", "least", "most"), [("Q4_0", 0.5, 0.6), ("Q8_0", 1.125, 1.125), ("Q4_1", 2.0, 2.0)])
def test_the_memory_of_a_gguf_file_is_that_of_its_types(
    kind: str, least: float, most: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """least, most: bytes per weight. Q4_0 stays 4 bits with a scale for 32 of them; Q8_0 takes 9 bits, and Q4_1 16."""
    from quire.ops.tools.gguf_writer import write_gguf

    folder = make_checkpoint(tmp_path / "model", "qwen2", hidden_size=64, intermediate_size=96)
    file = write_gguf(folder, tmp_path / "a.gguf", kind)
    config = read_config(file)
    weights = sum(count for _, count in config.quantization.weights)  # type: ignore[union-attr]
    monkeypatch.setattr(devices, "free_memory", lambda device: int(weights * most) + 1)
    check_weights(file, config, torch.float32, CPU)
    monkeypatch.setattr(devices, "free_memory", lambda device: int(weights * least) - 1)
    with pytest.raises(
        StartError, match=rf"a\.gguf: its weights take .* as GGUF, {kind}, .*take a smaller model"
    ) as caught:
        check_weights(file, config, torch.float32, CPU)
    assert "--quantization" not in str(caught.value)


MIB = 1 << 20

# A block of 16 tokens takes 16 MiB.
SIZES: Any = {"kv_bytes_per_block": lambda block_size: block_size * MIB, "least_step": lambda max_num_seqs: 0}
MODEL: Any = SimpleNamespace(max_model_len=1600, state_bytes=0, image_bytes=0, **SIZES)


def limits(monkeypatch: pytest.MonkeyPatch, free: int, **settings: Any) -> EngineLimits:
    monkeypatch.setattr(capacity, "available_memory", lambda: free)
    return choose_limits(WorkerSettings(**settings), MODEL, CPU)


def test_a_cpu_cache_is_bounded_by_a_constant_by_free_memory_and_by_need(monkeypatch: pytest.MonkeyPatch) -> None:
    assert limits(monkeypatch, 100 * GIB).num_blocks == CPU_CACHE_LIMIT // (16 * MIB)
    assert limits(monkeypatch, 6 * GIB).num_blocks == int(0.3 * 6 * GIB) // (16 * MIB)
    assert limits(monkeypatch, 100 * GIB, max_num_seqs=1).num_blocks == 100, "one sequence of a hundred blocks"


def test_a_cache_that_cannot_hold_one_sequence_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StartError, match=r"99 blocks is too small .* 100 blocks .*: raise --num-blocks, or lower"):
        limits(monkeypatch, 100 * GIB, num_blocks=99)
    remedy = "raise --kv-cache-gb, take --kv-cache-dtype int8, or lower --max-model-len to 1024"
    with pytest.raises(StartError, match=remedy):
        limits(monkeypatch, 100 * GIB, kv_cache_gb=1)


def test_on_a_cpu_all_ranks_share_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert limits(monkeypatch, 100 * GIB, kv_cache_gb=4).num_blocks == 256
    assert limits(monkeypatch, 100 * GIB, kv_cache_gb=4, tensor_parallel_size=2).num_blocks == 128


def test_host_blocks_are_what_is_asked_for_what_is_free_and_what_is_needed_at_most(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def blocks(free: int, **settings: object) -> int:
        monkeypatch.setattr(capacity, "available_memory", lambda: free)
        chosen = WorkerSettings(**settings)  # type: ignore[arg-type]
        return choose_num_host_blocks(chosen, GIB // 1024, taken=GIB, sequences=10, max_model_len=1600)

    assert blocks(100 * GIB, swap_gb=0.5) == 512
    assert blocks(100 * GIB, swap_gb=4) == 1000, "ten sequences of a hundred blocks"
    assert not caplog.records
    assert blocks(2 * GIB, swap_gb=4) == 204, "a fifth of what the cache leaves"
    assert "--swap-gb 4 is more than memory allows: 0.20 GiB" in caplog.text
    assert blocks(0, swap_gb=4) == 0
    assert blocks(100 * GIB, swap_gb=0) == 0
    assert blocks(100 * GIB, preemption="recompute") == 0


# A state takes 64 MiB, a block of 16 tokens 16 MiB.
STATEFUL: Any = SimpleNamespace(max_model_len=160, state_bytes=64 * MIB, image_bytes=0, **SIZES)


def stateful(monkeypatch: pytest.MonkeyPatch, free: int, **settings: Any) -> EngineLimits:
    monkeypatch.setattr(capacity, "available_memory", lambda: free)
    return choose_limits(WorkerSettings(**settings), STATEFUL, CPU)


def test_states_take_half_of_the_memory_for_caches_and_bound_the_sequences(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = stateful(monkeypatch, 100 * GIB)
    assert (found.num_state_slots, found.max_num_seqs, found.num_blocks) == (16, 8, 64)
    assert "half of the memory for caches has room for the recurrent states of 8 sequences at once" in caplog.text
    assert stateful(monkeypatch, 100 * GIB, prefix_caching=False).max_num_seqs == 16
    few = stateful(monkeypatch, 100 * GIB, max_num_seqs=1, state_gb=8)
    assert (few.max_num_seqs, few.num_state_slots) == (1, 128)
    many = stateful(monkeypatch, 100 * GIB, state_gb=8)
    assert (many.max_num_seqs, many.num_state_slots) == (64, 128)
    assert stateful(monkeypatch, 100 * GIB, max_num_seqs=16).max_num_seqs == 16, "no slots for snapshots"


def test_settings_of_states_that_cannot_be_honoured_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        StartError, match=r"room for the recurrent states of 16 .* of 64.0 MiB: raise --state-gb, or lo"
    ):
        stateful(monkeypatch, 100 * GIB, max_num_seqs=17)
    with pytest.raises(
        StartError, match=r"--state-gb 0.01 has room for the recurrent states of 0 .*: raise --state-gb$"
    ):
        stateful(monkeypatch, 100 * GIB, state_gb=0.01)
    with pytest.raises(StartError, match=r"--state-gb 8: 4\.00 GiB are free; lower it"):
        stateful(monkeypatch, 4 * GIB, state_gb=8)
    with pytest.raises(StartError, match="--snapshot-tokens 40 must be a multiple of --block-size 16"):
        stateful(monkeypatch, 100 * GIB, snapshot_tokens=40)
    for name, value in (("state_gb", 1), ("snapshot_tokens", 128)):
        with pytest.raises(
            StartError, match=f"--{name.replace('_', '-')} {value}: the model keeps no recurrent states"
        ):
            limits(monkeypatch, 100 * GIB, **{name: value})


@pytest.mark.parametrize(("max_model_len", "max_num_seqs"), [(64, 8), (64, 1), (3, 8)])
def test_the_engine_is_idle_afterwards(max_model_len: int, max_num_seqs: int) -> None:
    engine = Engine(MockModel(), EngineLimits(16, 16, max_num_seqs, 32, max_model_len), (EOS,), None)
    warm_up(engine)
    assert engine.num_prefill_tokens > 0
    assert engine.num_decode_tokens > 0
    assert not engine.has_work
    assert engine.scheduler.blocks.num_cached == 0, "the prompt fills no block, so nothing stays in the prefix cache"


def test_a_context_of_two_tokens_is_too_short_for_it() -> None:
    engine = Engine(MockModel(), EngineLimits(16, 8, 8, 32, 2), (EOS,), None)
    warm_up(engine)
    assert engine.num_steps == 0


def settings(*arguments: str, **environ: str) -> WorkerSettings:
    return load(WorkerSettings, arguments, environ, prog="quire worker")


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--block-size", "24"),
        ("--gpu-memory-utilization", "1.5"),
        ("--tensor-parallel-size", "-1"),
        ("--swap-gb", "-1"),
    ],
)
def test_a_value_out_of_bounds_is_refused_with_its_name(flag: str, value: str) -> None:
    with pytest.raises(SettingError, match=flag.removeprefix("--").replace("-", "[-_]")):
        settings(flag, value)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "llama")
