"""The fields of mixtures of experts."""

from __future__ import annotations

from typing import Any

import pytest

from quire.kernels.moe import Routing
from quire.worker.models.errors import CheckpointError
from quire.worker.models.experts import ExpertsConfig, parse_experts
from quire.worker.models.families import FAMILIES
from quire.worker.models.fields import Fields

MIXTRAL, QWEN3 = FAMILIES["MixtralForCausalLM"], FAMILIES["Qwen3MoeForCausalLM"]


def parse(family: Any, **values: Any) -> ExpertsConfig:
    found = parse_experts(Fields({"intermediate_size": 96} | values, "here"), family, 4)
    assert found is not None
    return found


def test_a_family_without_experts_has_none() -> None:
    assert parse_experts(Fields({"num_experts": 4}, "here"), FAMILIES["LlamaForCausalLM"], 4) is None


def test_absent_fields_have_the_defaults_of_transformers() -> None:
    found = parse(MIXTRAL)
    assert (found.routing, found.intermediate_size, found.layers) == (Routing(8, 2, True), 96, (True,) * 4)
    found = parse(QWEN3)
    assert (found.routing, found.intermediate_size, found.layers) == (Routing(128, 8, False), 768, (True,) * 4)


def test_fields_are_honoured() -> None:
    assert parse(MIXTRAL, num_local_experts=4, num_experts_per_tok=3).routing == Routing(4, 3, True)
    fields = {"num_experts": 6, "num_experts_per_tok": 1, "moe_intermediate_size": 32, "norm_topk_prob": True}
    found = parse(QWEN3, decoder_sparse_step=2, mlp_only_layers=[3], **fields)
    assert (found.routing, found.intermediate_size) == (Routing(6, 1, True), 32)
    assert found.layers == (False, True, False, False)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_experts": 4, "num_local_experts": 8}, "num_experts is 4.*num_local_experts, which is 8"),
        ({"num_experts": 0}, "num_experts is 0"),
        ({"num_experts": 1 << 20}, "num_experts is 1048576"),
        ({"num_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok is 5; supported: an integer from 1 to 4"),
        ({"norm_topk_prob": 1}, "norm_topk_prob is 1"),
        ({"mlp_only_layers": "1"}, 'mlp_only_layers is "1"'),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ({"moe_intermediate_size": -1}, "moe_intermediate_size is -1"),
    ],
)
def test_wrong_values_are_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        parse(QWEN3, **values)


def test_a_rank_has_a_part_of_every_expert() -> None:
    found = parse(MIXTRAL, num_local_experts=2).split(3)
    shapes = found.tensor_shapes("model.layers.0", 64)
    assert shapes["model.layers.0.block_sparse_moe.experts.1.w2.weight"] == (64, 32)
    assert shapes["model.layers.0.block_sparse_moe.gate.weight"] == (2, 64)
    assert len(shapes) == 7
