"""Models with MLA keep one latent row per token, and give the tokens of Transformers."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from quire import kernels
from quire.worker.engine.offline import generate
from quire.worker.models import latent_attention
from quire.worker.models.latent_attention import find_latent_layers
from quire.worker.models.transformers_attention import AttentionShape
from quire.worker.models.transformers_trial import over_pages, texts
from tests.support.architectures import ARCHITECTURES
from tests.support.parity import GREEDY, load, make_engine, prompts
from tests.support.transformers_checkpoints import make_other

pytestmark = pytest.mark.usefixtures("one_thread")

# All types of Transformers with MLA that are served, and sizes that are no multiples of 16.


def make(folder: Path, kind: str, **changes: Any) -> Path:
    model_type, fields = ARCHITECTURES[kind]
    return make_other(folder / kind, model_type, **(fields | changes))


def test_a_token_takes_one_row_per_layer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sizes of DeepSeek-V3: 512 latent values and 64 with positions, in place of keys and values of each head."""
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "head_dim": 64}
    path = make(tmp_path, "deepseek-v3", **sizes)
    with caplog.at_level(logging.INFO):
        model = load(path)
    assert "3 layers have a latent KV cache: 576 values per token instead of 1536 for keys and values" in caplog.text
    assert model.kv_bytes_per_block(16) == 3 * 16 * 576 * 4
    cache = model.alloc_kv_cache(5, 16)
    assert sum(layer[0].nbytes for layer in cache.layers) == 5 * model.kv_bytes_per_block(16)
    monkeypatch.setattr(latent_attention, "latent_ops", lambda ops: None)
    expanded = load(path)
    assert expanded.kv_bytes_per_block(16) == 3 * 16 * 4 * 2 * 192 * 4
    both = texts(model.vocab_size, 64)
    found, expected = over_pages(model, both), over_pages(expanded, both)
    assert float((found - expected).abs().max()) < 1e-4 * float(expected.abs().max())


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.int8, torch.float8_e4m3fn])
def test_narrow_latent_caches_serve(kv_dtype: torch.dtype, tmp_path: Path) -> None:
    from quire.worker.models.choice import choose_model
    from quire.worker.models.transformers_backend import TransformersModel

    path = make(tmp_path, "deepseek_v2")
    ops = kernels.select_ops("cpu", torch.float32, kv_dtype=kv_dtype)
    model = TransformersModel.load(choose_model(path), ops, "cpu")  # type: ignore[arg-type]
    assert model.kv_bytes_per_block(16) == 3 * 16 * (32 * kv_dtype.itemsize + (4 if kv_dtype is torch.int8 else 0))
    outputs = generate(make_engine(model), prompts()[:4], GREEDY)
    assert all(len(choices[0]) > 0 for choices in outputs)


class Expanding(nn.Module):
    """An attention module with the parts of MLA. scale: of the keys, 1 as `LatentHeads` assumes."""

    kv_lora_rank, qk_rope_head_dim, qk_nope_head_dim = 24, 8, 16

    def __init__(self, scale: float = 1.0, bias: bool = False) -> None:
        super().__init__()
        self.kv_b_proj, self.scale = nn.Linear(24, 2 * (16 + 16), bias=bias), scale

    def expand_kv(self, latents: torch.Tensor, positional: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        both = self.kv_b_proj(latents).view(1, latents.shape[2], 2, 32).transpose(1, 2)
        keys, values = both.split([16, 16], dim=-1)
        return torch.cat([keys * self.scale, positional.expand(1, 2, -1, -1)], dim=-1), values


SHAPE = AttentionShape(2, 2, 24, 16, 0.2, 0)


@pytest.mark.parametrize(
    ("module", "shape", "is_found"),
    [
        (Expanding(), SHAPE, True),
        (Expanding(scale=2.0), SHAPE, False),
        (Expanding(bias=True), SHAPE, False),
        (Expanding(), AttentionShape(2, 2, 32, 16, 0.2, 0), False),  # the keys have more than these parts
        (Expanding(), AttentionShape(2, 2, 24, 16, 0.2, 0, softcap=5.0), False),
        (Expanding(), AttentionShape(2, 2, 24, 16, 0.2, 0, shared_with=0), False),
        (nn.Linear(2, 2), SHAPE, False),
    ],
)
def test_only_modules_that_expand_as_expected_get_a_latent_cache(
    module: nn.Module, shape: AttentionShape, is_found: bool
) -> None:
    ops = kernels.select_ops("cpu", torch.float32)
    layers, [found] = find_latent_layers(ops, [module.requires_grad_(False)], [shape], set())
    assert bool(layers) == is_found == (found.latent is not None)
    if is_found:
        assert found.latent is not None
        assert (found.latent.value_dim, found.latent.width) == (32, 48)


def test_a_projection_whose_weight_is_read_elsewhere_stays_expanded() -> None:
    module = Expanding().requires_grad_(False)
    ops = kernels.select_ops("cpu", torch.float32)
    assert find_latent_layers(ops, [module], [SHAPE], {module.kv_b_proj}) == ([], [SHAPE])
