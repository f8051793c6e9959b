"""ALiBi by longer queries and keys: the scores have the biases that Transformers adds."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quire.worker.models.alibi import AlibiBias, mpt_slopes_of, slopes_of, split

CPU = torch.device("cpu")


@pytest.mark.parametrize("heads", [1, 2, 6, 8, 12, 32, 71])
def test_slopes_are_those_of_transformers(heads: int) -> None:
    from transformers.models.bloom.modeling_bloom import _get_alibi_slopes
    from transformers.models.mpt import modeling_mpt

    assert torch.allclose(slopes_of(heads, CPU), _get_alibi_slopes(heads, CPU), rtol=1e-6, atol=0)
    build: Any = modeling_mpt.build_mpt_alibi_tensor
    biases = build(heads, 2, 8)  # [H, 1, 2]: those of the key before, and of the key itself
    assert torch.allclose(mpt_slopes_of(heads, 8, CPU), -biases[:, 0, 0], rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scores_have_the_bias_in_each_type(dtype: torch.dtype) -> None:
    """Summed in float32, as kernels do. The parts are products of 8 bits by 8 bits, and therefore exact."""
    slopes, scale = slopes_of(6, CPU), 128**-0.5
    positions = torch.tensor([0, 1, 255, 2047, 30_000])
    zeros = torch.zeros(1, 6, 5, 16, dtype=dtype)
    q, k = AlibiBias(slopes, scale).extend(zeros, zeros, positions)
    assert q.dtype is k.dtype is dtype
    assert q.shape == k.shape == (1, 6, 5, 25)
    scores = (q.float() @ k.float().transpose(2, 3)) * scale
    expected = (slopes[:, None, None] * positions).expand(6, 5, 5)
    assert torch.allclose(scores[0], expected, rtol=1e-6, atol=1e-6)


def test_biases_of_falcon_are_rounded_as_it_was_trained() -> None:
    from transformers.models.falcon.modeling_falcon import build_alibi_tensor

    zeros = torch.zeros(1, 6, 300, 16)
    q, k = AlibiBias(slopes_of(6, CPU), 1.0, rounded=True).extend(zeros, zeros, torch.arange(300))
    expected = build_alibi_tensor(torch.ones(1, 300, dtype=torch.int64), 6, torch.float32)
    assert torch.equal((q @ k.transpose(2, 3))[0, :, :1], expected)


def test_three_parts_are_a_whole_number_of_24_bits() -> None:
    values = torch.tensor([0.0, 1 / 3, 1234.5678, 2.0**-20])
    assert torch.equal(split(values).sum(-1), values)
    assert torch.equal(split(values).bfloat16().float(), split(values))
