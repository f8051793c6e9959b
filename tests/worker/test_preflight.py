"""Settings that contradict each other are refused before a model is loaded, with the remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire.shared.errors import StartError
from quire.worker.device import memory_plan
from quire.worker.models.config import read_config
from quire.worker.preflight import check_settings, check_weights
from quire.worker.settings import WorkerSettings
from tests.support.checkpoints import make_checkpoint
from tests.support.quantized import quantize_checkpoint

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


def test_the_defaults_pass() -> None:
    check_settings(WorkerSettings(), CPU)
    check_settings(WorkerSettings(max_num_seqs=4096), CPU)


@pytest.mark.parametrize("name", ["", "awq", "w8a8"])
def test_quantising_on_load_is_a_remedy_only_for_weights_that_are_not_quantised(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_checkpoint(tmp_path / "plain", "llama")
    if name:
        folder = quantize_checkpoint(folder, tmp_path / name, name)
    monkeypatch.setattr(memory_plan, "free_memory", lambda device: 1)
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
    monkeypatch.setattr(memory_plan, "free_memory", lambda device: int(weights * most) + 1)
    check_weights(file, config, torch.float32, CPU)
    monkeypatch.setattr(memory_plan, "free_memory", lambda device: int(weights * least) - 1)
    with pytest.raises(
        StartError, match=rf"a\.gguf: its weights take .* as GGUF, {kind}, .*take a smaller model"
    ) as caught:
        check_weights(file, config, torch.float32, CPU)
    assert "--quantization" not in str(caught.value)
