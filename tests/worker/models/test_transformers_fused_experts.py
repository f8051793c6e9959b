"""Stacked experts are packed one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from quire import kernels
from quire.worker.models.transformers_fused_experts import find_experts
from quire.worker.models.transformers_parts import Parts
from tests.support.parity import load
from tests.support.transformers_checkpoints import make_kind

COUNT, HIDDEN, INNER = 6, 32, 24
FIELDS: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "moe_intermediate_size": INNER,
    "num_experts": COUNT,
    "num_local_experts": COUNT,
    "n_routed_experts": COUNT,
}
KINDS = {"qwen3_moe": Qwen3MoeExperts, "gpt_oss": GptOssExperts, "nemotron_h": NemotronHExperts}


def experts(kind: str, dtype: torch.dtype) -> Any:
    """Random experts of a kind: concatenated SiLU; interleaved, transposed, with biases and limits; without gate."""
    config = AutoConfig.for_model(kind, **FIELDS)
    config._experts_implementation = "eager"
    module: Any = KINDS[kind](config)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(parameter.numel()))
    return module.to(dtype).requires_grad_(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_packed_experts_give_the_same(kind: str, dtype: torch.dtype) -> None:
    module, ops = experts(kind, dtype), kernels.select_ops("cpu", dtype)
    rows = torch.randn(9, HIDDEN).to(dtype)
    index = torch.stack([torch.randperm(COUNT - 1)[:2] for _ in rows])  # the last expert has no rows
    weights = torch.rand(9, 2).to(dtype)
    expected = module(rows, index, weights)
    (found,) = find_experts(module, ops)
    size = found.nbytes
    found.pack(ops, Parts())
    assert sum(one.numel() for one in module.parameters()) == 0
    assert size <= module.packed.nbytes
    tolerance = 1e-4 if dtype is torch.float32 else 0.1
    torch.testing.assert_close(module(rows, index, weights), expected, rtol=tolerance, atol=tolerance)
    if kind != "qwen3_moe":
        return  # torch computes the activation: the last elements of a tensor may have other bits
    one_by_one = torch.cat([module(*(part[at : at + 1] for part in (rows, index, weights))) for at in range(9)])
    torch.testing.assert_close(module(rows, index, weights), one_by_one, rtol=0, atol=0)


@torch.inference_mode()
def test_rows_without_an_expert_here_are_zero() -> None:
    module, ops = experts("qwen3_moe", torch.float32), kernels.select_ops("cpu", torch.float32)
    (found,) = find_experts(module, ops)
    found.pack(ops, Parts())
    assert not module(torch.randn(2, HIDDEN), torch.full((2, 1), COUNT), torch.ones(2, 1)).any()


def test_experts_that_compute_something_else_are_left_alone() -> None:
    ops = kernels.select_ops("cpu", torch.float32)
    module = experts("qwen3_moe", torch.float32)
    module.forward = lambda rows, index, weights: rows * weights[:, :1]
    assert find_experts(module, ops) == []
    assert find_experts(experts("qwen3_moe", torch.bfloat16), ops) == []
    module = experts("qwen3_moe", torch.float32)
    module.has_post_expert_norm = True
    assert find_experts(module, ops) == []


def test_experts_of_a_version_without_norms_after_them_are_found() -> None:
    ops = kernels.select_ops("cpu", torch.float32)
    module = experts("qwen3_moe", torch.float32)
    del module.has_post_expert_norm
    assert len(find_experts(module, ops)) == 1


def test_a_mixture_leaves_no_weights_with_three_dimensions(tmp_path: Path) -> None:
    model = load(make_kind(tmp_path / "moe", "qwen3-moe"))
    assert model._experts == []
    assert not model.multiplies_in_torch
    assert not model.is_row_invariant  # torch multiplies in the router
