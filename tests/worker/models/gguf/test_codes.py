"""Codes of blocks stand for the same weights as their expansion."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.kernels.grouped_weight import UINT8
from quire.kernels.k_quant_weight import K_QUANT4, K_QUANT6
from quire.shared.gguf.types import TENSOR_TYPES
from quire.worker.models.gguf.blocks import EXPANSIONS, K_BLOCKS
from quire.worker.models.gguf.codes import KINDS, codes_of, common_kind

ROWS = 6


def random_blocks(kind: str, count: int) -> torch.Tensor:
    """Return blocks of any bytes with finite scales."""
    size = next(one.nbytes for one in TENSOR_TYPES.values() if one.name == kind)
    raw = np.random.default_rng(0).integers(0, 256, (count, size), dtype=np.uint8)
    places = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}.get(kind, (0,))
    for at in places:
        raw[:, at + 1] &= 0xBF  # exponents below that of 2
    return torch.from_numpy(raw)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_of_the_expansion(kind: str) -> None:
    blocks = random_blocks(kind, ROWS * 2)
    expected = EXPANSIONS[kind](blocks).reshape(ROWS, -1)
    assert torch.equal(codes_of(kind, blocks, ROWS, KINDS[kind]).dequantized(), expected)
    if kind in K_BLOCKS:
        assert torch.equal(codes_of(kind, blocks, ROWS, K_QUANT6).dequantized(), expected)


def test_scales_that_are_not_finite_are_refused() -> None:
    for kind, at in (("Q8_0", 0), ("Q4_K", 2), ("Q6_K", 208)):
        blocks = random_blocks(kind, ROWS)
        blocks[1, at], blocks[1, at + 1] = 0, 0x7C
        with pytest.raises(ValueError, match="must be finite"):
            codes_of(kind, blocks, ROWS, KINDS[kind])


@pytest.mark.parametrize(
    ("types", "kind"),
    [
        (["Q8_0", "Q8_0"], UINT8),
        (["Q8_0", "Q5_0"], UINT8),
        (["Q4_K", "Q2_K"], K_QUANT4),
        (["Q4_K", "Q6_K", "Q4_K"], K_QUANT6),
        (["Q4_K", "Q8_0"], None),
        (["F16"], None),
        (["Q4_1", "Q4_1"], None),
    ],
)
def test_weights_side_by_side_have_a_kind_that_holds_all(types: list[str], kind: str | None) -> None:
    assert common_kind(types) == kind
