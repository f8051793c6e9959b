"""The fields of `adapter_config.json` that change results are read as PEFT reads them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire.worker.models.errors import CheckpointError
from quire.worker.models.lora.adapter_config import AdapterConfig, read_adapter_config

MODULE = "model.layers.3.mlp.up_proj"


def read(**fields: Any) -> AdapterConfig:
    return read_adapter_config(json.dumps({"peft_type": "LORA", "r": 8, "lora_alpha": 16} | fields).encode(), "file")


def test_the_scale_is_alpha_by_rank_or_by_its_root() -> None:
    assert read().scale_of(MODULE, 8) == 2
    assert read(use_rslora=True).scale_of(MODULE, 64) == 2


def test_patterns_name_the_ends_of_modules() -> None:
    config = read(rank_pattern={"mlp.up_proj": 4}, alpha_pattern={"model.layers.3.mlp.up_proj": 3, "p_proj": 9})
    assert (config.rank_of(MODULE), config.rank_of("model.layers.3.mlp.down_proj")) == (4, 8)
    assert config.scale_of(MODULE, 4) == 0.75
    assert config.scale_of("model.layers.2.mlp.up_proj", 4) == 4


@pytest.mark.parametrize(
    "fields", [{"target_modules": ".*proj"}, {"target_modules": ["q_proj"], "layers_to_transform": [1]}]
)
def test_modules_selected_in_another_way_are_those_of_the_tensors(fields: dict[str, Any]) -> None:
    assert read(**fields).targets is None


def test_names_of_targets_are_kept() -> None:
    assert read(target_modules=["q_proj", "v_proj"]).targets == ("q_proj", "v_proj")


@pytest.mark.parametrize("data", [b"{", b"[]", b"\xff", b"[" * 100_000])
def test_a_file_that_is_no_object_is_refused(data: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"^file: this file is not"):
        read_adapter_config(data, "file")


@pytest.mark.parametrize("value", [True, "8", -1, 1.5, None])
def test_a_wrong_rank_is_refused(value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"r is .*, expected a whole number"):
        read(r=value)


@pytest.mark.parametrize("value", [0, -1, "1", True, float("inf")])
def test_a_wrong_alpha_is_refused(value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"lora_alpha is .*, expected a positive number"):
        read(lora_alpha=value)
