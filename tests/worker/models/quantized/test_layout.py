"""Helpers of the formats: unknown fields, tensors that must exist, and the order of groups."""

from __future__ import annotations

import pytest
import torch

from quire.worker.models.errors import CheckpointError
from quire.worker.models.fields import Fields
from quire.worker.models.quantized.awq import AwqLayer
from quire.worker.models.quantized.layout import (
    TensorFault,
    group_order,
    layout_of_qweight,
    num_groups,
    refuse_unknown,
    required,
)


@pytest.mark.parametrize("empty", [None, False, [], {}, ""])
def test_unknown_fields_that_are_empty_change_nothing(empty):
    refuse_unknown(Fields({"bits": 4, "novelty": empty}, "config.json"), ("bits",))


def test_unknown_fields_are_refused_by_name():
    with pytest.raises(CheckpointError, match=r"config.json: novelty is 0; supported: no such field; use a checkpoint"):
        refuse_unknown(Fields({"bits": 4, "novelty": 0}, "config.json"), ("bits",))


def test_a_tensor_that_was_checked_is_there():
    with pytest.raises(AssertionError):
        required(lambda _: None, "scales")


@pytest.mark.parametrize(
    ("name", "stored", "is_quantised"),
    [
        ("up_proj", {"up_proj.qweight": "I32"}, True),
        ("up_proj", {"up_proj.qweight": "I32", "up_proj.weight": "F16"}, True),
        ("up_proj", {"up_proj.weight": "F16"}, False),
        ("up_proj", {}, True),
        ("lm_head", {}, False),
        ("lm_head", {"lm_head.qweight": "I32"}, True),
    ],
)
def test_layers_with_a_qweight_are_quantised(name, stored, is_quantised):
    layout = AwqLayer(128)
    assert layout_of_qweight(layout, name, stored.get) is (layout if is_quantised else None)


@pytest.mark.parametrize(("k", "group_size", "expected"), [(8, 0, 1), (8, 4, 2), (9, 4, 3)])
def test_the_last_group_may_be_shorter(k, group_size, expected):
    assert num_groups(k, group_size) == expected


@pytest.mark.parametrize("g_idx", [None, torch.tensor([0, 0, 0, 1, 1, 1, 2])])
def test_groups_of_neighbours_have_no_order(g_idx):
    assert group_order(g_idx, "g_idx", 7, 3) is None


def test_groups_of_distant_features_have_an_order():
    order = group_order(torch.tensor([2, 0, 1, 0, 1, 0, 1], dtype=torch.int32), "g_idx", 7, 3)
    assert order is not None
    assert order.dtype == torch.long
    assert order.tolist() == [2, 0, 1, 0, 1, 0, 1]


@pytest.mark.parametrize("group", [-1, 3])
def test_a_group_that_does_not_exist_is_refused(group):
    with pytest.raises(TensorFault) as caught:
        group_order(torch.tensor([0, 0, 0, 1, 1, 1, group]), "weight_g_idx", 7, 3)
    assert caught.value.end == "weight_g_idx"
    assert "expected groups from 0 to 2" in caught.value.what
