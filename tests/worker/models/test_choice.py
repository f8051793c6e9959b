"""The implementation of a checkpoint: Quire's own decoder if it supports the model, else Transformers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.shared.errors import StartError
from quire.shared.model.folder import WEIGHTS
from quire.worker.device import devices
from quire.worker.models.choice import choose_model
from quire.worker.models.config import ModelConfig
from quire.worker.models.errors import CheckpointError, NotSupported
from quire.worker.models.transformers_config import TransformersConfig, read_transformers_config
from quire.worker.settings import WorkerSettings
from tests.support.checkpoints import make_checkpoint
from tests.support.parity import load, refusal
from tests.support.transformers_checkpoints import (
    change,
    make_kind,
)


def test_quires_own_decoder_is_chosen_wherever_it_knows_the_model(tmp_path: Path) -> None:
    own, other = make_checkpoint(tmp_path / "llama", "llama"), make_kind(tmp_path / "gpt2", "gpt2")
    assert isinstance(choose_model(own), ModelConfig)
    assert isinstance(choose_model(own, "quire"), ModelConfig)
    assert isinstance(choose_model(own, "transformers"), TransformersConfig)
    assert isinstance(choose_model(other), TransformersConfig)
    with pytest.raises(NotSupported, match="architectures"):
        choose_model(other, "quire")


@pytest.mark.parametrize(("kind", "fields"), [("llama-yarn", {"head_dim": 24}), ("llama-gelu", {})])
def test_a_known_family_with_a_field_that_the_decoder_lacks_goes_to_transformers(
    kind: str, fields: dict[str, int], tmp_path: Path
) -> None:
    assert isinstance(choose_model(make_kind(tmp_path / kind, kind, **fields)), TransformersConfig)


def test_what_is_wrong_with_a_checkpoint_is_said_and_not_tried_otherwise(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "llama", "llama")
    change(path, num_key_value_heads=3)
    with pytest.raises(CheckpointError, match="num_key_value_heads is 3; supported: a divisor") as caught:
        choose_model(path)
    assert not isinstance(caught.value, NotSupported)


def test_without_transformers_the_error_says_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_kind(tmp_path / "gpt2", "gpt2")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(NotSupported, match=r"GPT2LMHeadModel.*Llama.*; install Transformers"):
        choose_model(path)
    assert isinstance(choose_model(Path("models/demo")), ModelConfig)


def test_ranks_must_divide_the_heads(tmp_path: Path) -> None:
    config = choose_model(make_kind(tmp_path / "gpt2", "gpt2"))
    device = torch.device("cpu")
    devices.check_ranks(WorkerSettings(), device, config)
    devices.check_ranks(WorkerSettings(tensor_parallel_size=2), device, config)
    with pytest.raises(StartError, match=r"--tensor-parallel-size 3: 3 ranks cannot share 4 heads; 1, 2, 4 can"):
        devices.check_ranks(WorkerSettings(tensor_parallel_size=3), device, config)


@pytest.mark.parametrize("kind", ["internlm3", "iquestcoder"])
def test_a_type_that_transformers_computes_as_llama_goes_to_transformers(kind: str, tmp_path: Path) -> None:
    path = make_kind(tmp_path / kind, kind)
    config = choose_model(path)
    assert isinstance(config, TransformersConfig)
    assert config.architecture == "LlamaForCausalLM"
    with pytest.raises(NotSupported, match=f'model_type is "{kind}"; supported: llama'):
        choose_model(path, "quire")


def test_another_name_of_a_class_is_taken_only_if_it_is_named_after_the_type(tmp_path: Path) -> None:
    path = make_kind(tmp_path / "phimoe", "phimoe")
    for name in ("PhimoeForCausalLM", "PhiMoEForCausalLM"):
        change(path, architectures=[name])
        assert choose_model(path).architecture == "PhimoeForCausalLM"
    others = ("PhiMoEForSequenceClassification", "PhiMoEModel", "PhiForCausalLM", "BitnetForCausalLM", 3)
    for names in [*([name] for name in others), ["PhiMoEForCausalLM"] * 2, "PhiMoEForCausalLM", []]:
        change(path, architectures=names)
        with pytest.raises(NotSupported, match=r"supported: PhimoeForCausalLM, as model_type is phimoe; correct the"):
            read_transformers_config(path)


def test_another_name_is_not_taken_for_a_model_with_more_tensors(tmp_path: Path) -> None:
    path = make_kind(tmp_path / "phimoe", "phimoe")
    save_file(load_file(path / WEIGHTS) | {"extra.weight": torch.zeros(2)}, path / WEIGHTS, {"format": "pt"})
    load(path)
    change(path, architectures=["PhiMoEForCausalLM"])
    said = refusal(path)
    assert "1 tensors are not part of PhimoeForCausalLM, which its model_type is: extra.weight" in said
    assert 'set architectures to ["PhimoeForCausalLM"] in config.json' in said


def test_a_type_that_transformers_does_not_know_says_which_field_to_set(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "llama", "llama")
    change(path, model_type="mine")
    with pytest.raises(NotSupported, match=r'model_type is "mine", which Transformers .* set model_type to "llama"'):
        choose_model(path)
    change(path, model_type="llama")
    assert isinstance(choose_model(path), ModelConfig)
