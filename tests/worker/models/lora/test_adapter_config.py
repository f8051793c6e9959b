"""The fields of `adapter_config.json` that change results are read as PEFT reads them."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from quire.worker.models.errors import CheckpointError
from quire.worker.models.lora.adapter_config import (
    READ,
    REASONS,
    WITHOUT_EFFECT,
    AdapterConfig,
    read_adapter_config,
)

MODULE = "model.layers.3.mlp.up_proj"


def read(**fields: Any) -> AdapterConfig:
    return read_adapter_config(json.dumps({"peft_type": "LORA", "r": 8, "lora_alpha": 16} | fields).encode(), "file")


def test_the_scale_is_alpha_by_rank_or_by_its_root() -> None:
    assert read().scale_of(MODULE, 8) == 2
    assert read(use_rslora=True).scale_of(MODULE, 64) == 2


@pytest.mark.parametrize(
    "key",
    [
        "up_proj",
        "mlp.up_proj",
        "model.layers.3.mlp.up_proj",
        r"layers\.(1|3)\..*",
        "^model.layers.3.mlp.up_proj",
        "ers"
        r".[23].mlp.up_proj",
        "^up_proj",
        "p_proj",
        "mlp",
        "layers.3",
    ],
)
def test_patterns_are_matched_as_in_peft(key: str) -> None:
    from peft.utils.other import get_pattern_key

    config = read(rank_pattern={"x": 3, key: 4}, alpha_pattern={key: 3})
    matches = get_pattern_key(["x", key], MODULE) == key
    assert config.rank_of(MODULE) == (4 if matches else 8)
    assert config.scale_of(MODULE, 4) == (0.75 if matches else 4)


def test_each_field_of_peft_is_honoured_or_refused() -> None:
    from peft import LoraConfig

    fields = {field.name for field in dataclasses.fields(LoraConfig)}
    assert not fields - READ - WITHOUT_EFFECT - set(REASONS)


def test_an_unknown_field_is_refused_only_if_it_has_a_value() -> None:
    assert read(use_news=False, news_config=None, news=[], news_scale=0.0, news_type="none", name="").rank == 8
    for value in (True, 1, "x", [1], {"x": 1}):
        with pytest.raises(CheckpointError, match=r"^file: news is .*: this field is not known; merge it into"):
            read(news=value)


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
