"""Builds an engine from settings, with values from the right files of the model folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from quire import kernels
from quire.gateway.model.served_model import load_model
from quire.worker.build import build_engine
from quire.worker.models.transformers_backend import TransformersModel
from quire.worker.models.transformers_config import read_transformers_config
from quire.worker.settings import WorkerSettings
from tests.support.checkpoints import BOS_TOKEN_ID, EOS_TOKEN_ID, make_checkpoint
from tests.support.transformers_checkpoints import make_kind


def test_an_answer_ends_at_the_end_tokens_of_the_configuration_and_of_the_tokenizer(tmp_path: Path) -> None:
    def end_tokens() -> frozenset[int]:
        settings = WorkerSettings(model=str(tmp_path), device="cpu", num_blocks=32)
        engine = build_engine(settings, "test")
        assert engine.eos_token_ids == load_model(str(tmp_path), "test").eos_token_ids
        return engine.eos_token_ids

    # A checkpoint trained from scratch may lack an end token, as Qwen's configuration class has no default.
    make_checkpoint(tmp_path, "qwen3", eos_token_id=None)
    assert end_tokens() == {EOS_TOKEN_ID}
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "eos_token_id": BOS_TOKEN_ID}))
    assert end_tokens() == {BOS_TOKEN_ID, EOS_TOKEN_ID}


def mapped(folder: Path) -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]


@pytest.mark.parametrize("model_impl", ["quire", "transformers"])
def test_no_file_of_weights_stays_mapped(model_impl: str, tmp_path: Path) -> None:
    """If the file stayed mapped, a later change of the file would change the model."""
    make_checkpoint(tmp_path, "llama")
    engine = build_engine(
        WorkerSettings(model=str(tmp_path), model_impl=model_impl, dtype="float32", num_blocks=32), "test"
    )
    assert engine.runner.model.implementation == model_impl
    assert mapped(tmp_path) == []


def test_weights_that_plain_torch_multiplies_do_not_stay_mapped_either(tmp_path: Path) -> None:
    config = read_transformers_config(make_kind(tmp_path, "gpt2"))
    model = TransformersModel.load(config, kernels.ReferenceOps("cpu", torch.float32), "cpu")
    assert model.weight_bytes > 0
    assert mapped(tmp_path) == []
