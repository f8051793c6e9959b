"""Attention calls are recorded with their parameters; unsupported ones are refused by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quire.worker.models.transformers_attention import AttentionProbe, UnsupportedAttention, cache_of_call


def asked(**changes: Any) -> AttentionProbe:
    examination = AttentionProbe(torch.float32, 64)
    q, k, v = torch.zeros(1, 4, 2, 16), torch.zeros(1, 2, 2, 16), torch.zeros(1, 2, 2, 16)
    call = {"q": q, "k": k, "v": v, "attention_mask": torch.zeros(1, 1, 2, 2), "module": SimpleNamespace()}
    examination.attend(**(call | changes))
    return examination


def test_what_a_call_of_attention_asks_for_is_noted() -> None:
    [one] = asked().shapes
    assert (one.num_heads, one.num_kv_heads, one.head_dim, one.value_dim) == (4, 2, 16, 16)
    assert (one.scale, one.sliding_window) == (0.25, 0)
    [one] = asked(scaling=2.0, sliding_window=5, attention_mask=torch.full((1, 1, 2, 2), 5.0)).shapes
    assert (one.scale, one.sliding_window) == (2.0, 5)
    [one] = asked(v=torch.zeros(1, 2, 2, 4)).shapes
    assert (one.value_dim, one.scale) == (4, 0.25)  # by the width of keys
    [one] = asked(softcap=30.0, s_aux=torch.zeros(4)).shapes
    assert one.softcap == 30.0
    [one] = asked(sliding_window=64).shapes  # wider than any context
    assert one.sliding_window == 0


def test_calls_with_the_same_keys_and_values_share_a_cache() -> None:
    probe = AttentionProbe(torch.float32, 64)
    keys = [torch.zeros(1, 2, 2, 16) for _ in range(3)]
    for k, v in [(0, 0), (1, 1), (0, 0), (2, 0), (1, 1)]:
        mask = torch.zeros(1, 1, 2, 2)
        probe.attend(SimpleNamespace(), torch.zeros(1, 4, 2, 16), keys[k], keys[v], attention_mask=mask)
    assert [one.shared_with for one in probe.shapes] == [None, None, 0, None, 1]
    assert cache_of_call(probe.shapes) == [0, 1, 0, 2, 1]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"indices": torch.zeros(4)}, "takes indices"),
        ({"softcap": -1.0}, "the cap -1.0"),
        ({"softcap": float("nan")}, "the cap nan"),
        ({"s_aux": torch.zeros(2)}, "its sinks have the shape"),
        ({"s_aux": torch.zeros(1, 4)}, "its sinks have the shape"),
        ({"attention_mask": None}, "not causal"),
        ({"is_causal": False}, "not causal"),
        ({"module": SimpleNamespace(is_causal=False)}, "not causal"),
        ({"attention_mask": torch.full((1, 1, 2, 2), 5.0)}, "a mask of its own"),
        ({"sliding_window": 5}, "a mask of its own"),
        ({"attention_mask": torch.full((1, 1, 2, 2), -1.0)}, "its masks are neither"),
        ({"attention_mask": torch.tensor([[[[0.0, 1.0]]]])}, "a mask of its own"),
        ({"q": torch.zeros(1, 3, 2, 16)}, "its heads are"),
        ({"v": torch.zeros(1, 2, 2, 32)}, "its heads are"),
        ({"v": torch.zeros(1, 4, 2, 16)}, "its heads are"),
        ({"k": torch.zeros(1, 2, 3, 16), "v": torch.zeros(1, 2, 3, 16)}, "its heads are"),
        ({"k": torch.zeros(2, 2, 2, 16), "v": torch.zeros(2, 2, 2, 16)}, "its heads are"),
        ({"k": torch.zeros(1, 2, 2, 32)}, "its heads are"),
        ({"q": torch.zeros(1, 4, 2, 16).double()}, "in torch.float64"),
        ({"scaling": -1.0}, "scaled by -1.0"),
        ({"scaling": 0.0}, "scaled by 0.0"),
        ({"scaling": float("nan")}, "scaled by nan"),
    ],
)
def test_what_attention_cannot_do_is_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(UnsupportedAttention, match=why):
        asked(**changes)


def masks(kind: str) -> Any:
    from transformers import masking_utils

    return {
        "causal": masking_utils.causal_mask_function,
        "window": masking_utils.sliding_window_causal_mask_function(9),
        "wide": masking_utils.sliding_window_causal_mask_function(64),
        "chunks": masking_utils.and_masks(
            masking_utils.causal_mask_function, lambda batch, head, q, kv: q // 16 == kv // 16
        ),
        # The first chunks have 16 tokens, later ones fewer.
        "uneven": lambda batch, head, q, kv: (kv <= q) & (kv >= torch.where(q < 40, q // 16 * 16, 40)),
        "both ways": lambda batch, head, q, kv: kv >= 0,
        "prefix": lambda batch, head, q, kv: (kv <= q) | (kv < 10),
        "none": lambda batch, head, q, kv: kv < 0,
    }[kind]


@pytest.mark.parametrize(("kind", "width"), [("causal", 0), ("window", 9), ("wide", 0), ("chunks", -16)])
@pytest.mark.parametrize("max_model_len", [60, 64, 63])
def test_the_width_of_a_mask(kind: str, width: int, max_model_len: int) -> None:
    assert AttentionProbe(torch.float32, max_model_len).width_of(masks(kind)) == width


def test_chunks_are_no_windows_where_each_position_that_is_tried_first_ends_a_chunk() -> None:
    assert AttentionProbe(torch.float32, 256).width_of(masks("chunks")) == -16
    assert AttentionProbe(torch.float32, 16).width_of(masks("chunks")) == 0


def test_the_chunk_of_a_call_is_noted() -> None:
    [one] = asked(attention_mask=torch.full((1, 1, 2, 2), -16.0)).shapes
    assert (one.chunk, one.sliding_window) == (16, 0)
    with pytest.raises(UnsupportedAttention, match="a mask of its own"):
        asked(attention_mask=torch.full((1, 1, 2, 2), -16.0), sliding_window=5)


@pytest.mark.parametrize("kind", ["uneven", "both ways", "prefix", "none"])
def test_masks_that_are_neither_causal_nor_a_window_are_refused(kind: str) -> None:
    with pytest.raises(UnsupportedAttention, match="its masks are neither causal nor"):
        AttentionProbe(torch.float32, 64).width_of(masks(kind))
