"""A worker says at start if keys or values are too large for an FP8 cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quire import kernels
from quire.worker.device.cache_range import warn_of_saturation
from quire.worker.models.decoder import Decoder
from quire.worker.models.transformers_backend import TransformersModel
from quire.worker.models.transformers_config import read_transformers_config
from tests.support.checkpoints import make_checkpoint
from tests.support.transformers_checkpoints import make_kind
from tests.worker.models.test_kv_scales import FP8, LARGE, with_large_keys


@pytest.mark.parametrize("implementation", ["reference", "cpu"])
@pytest.mark.parametrize(
    ("kv_dtype", "scales", "is_warned"),
    [(FP8, {}, True), (FP8, LARGE, False), (None, {}, False), (torch.int8, {}, False)],
    ids=["too-large", "with-scales", "wide-cache", "int8"],
)
def test_large_keys_are_reported_unless_they_have_scales_or_a_wide_cache(
    implementation: str,
    kv_dtype: torch.dtype | None,
    scales: dict[str, float],
    is_warned: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = with_large_keys(make_checkpoint(tmp_path / "a", "llama"), tmp_path / "b", scales)
    ops = kernels.select_ops("cpu", torch.float32, implementation, kv_dtype)
    model = Decoder.load(path, ops, torch.float32, "cpu")
    caplog.clear()
    warn_of_saturation(model, 16)
    layers = model.config.num_layers
    expected = f"--kv-cache-dtype fp8: keys or values of {layers} of {layers} layers exceed 448, "
    assert [line.startswith(expected) for line in caplog.messages] == [True] * is_warned


def test_models_of_transformers_are_checked_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ops = kernels.select_ops("cpu", torch.float32, "cpu", FP8)
    model = TransformersModel.load(read_transformers_config(make_kind(tmp_path, "gpt2")), ops, "cpu")
    caplog.clear()
    warn_of_saturation(model, 16)
    assert caplog.messages == []
