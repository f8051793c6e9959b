"""Which modules of models are replaced, and that the results stay those of single rows."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from quire.worker.models import transformers_trial as trial
from quire.worker.models.transformers_fused import packed_bytes
from tests.support.checkpoints import VOCAB_SIZE
from tests.support.parity import load
from tests.support.transformers_checkpoints import make_kind

pytestmark = pytest.mark.usefixtures("one_thread", "cpu_kernels")

NAMES = ("norms", "gated MLPs", "joined products", "rotary embeddings", "mixtures of experts", "whole layers")


@pytest.mark.parametrize(
    ("kind", "counts"),
    [
        ("gpt2", (0, 0, 0, 0, 0, 0)),  # torch's own norms; merged projections
        ("opt", (0, 0, 3, 0, 0, 0)),
        ("gemma3", (19, 0, 6, 3, 0, 0)),  # GELU; weights that are offsets from 1; two kinds of rotation
        ("cohere2", (4, 3, 3, 0, 0, 0)),  # layer norms without bias; interleaved rotation
        ("phi3", (7, 3, 0, 3, 0, 0)),  # gate and up in one layer
        ("granite", (7, 3, 3, 3, 0, 0)),  # residuals are scaled, so that the layer is not Llama's
        ("smollm3", (7, 3, 3, 2, 0, 2)),  # one layer does not rotate
        ("diffllama", (7, 3, 3, 0, 0, 0)),  # rotated queries are changed before the attention
        ("llama-heads-of-20", (7, 3, 3, 0, 0, 0)),  # the cache pads the keys
        ("llama-yarn", (7, 3, 3, 3, 0, 3)),
        ("qwen3-moe", (13, 0, 3, 3, 3, 0)),
        ("longcat", (9, 2, 2, 0, 0, 0)),
    ],
)
def test_one_line_says_how_many_modules_are_replaced(
    kind: str, counts: tuple[int, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "quire.worker.models.transformers_fused"):
        model = load(make_kind(tmp_path / kind, kind))
    expected = ", ".join(f"{count} {name}" for count, name in zip(counts, NAMES, strict=True))
    lines = [one.getMessage() for one in caplog.records if one.name.endswith("transformers_fused")]
    stack = " as one operation" if kind == "llama-yarn" else ""
    assert lines == [f"{type(model._model).__name__}: the kernels compute {expected}{stack}"]


@pytest.mark.parametrize("kind", ["llama-yarn", "phi3", "olmo2", "gemma3"])
def test_rows_keep_their_bits_in_any_batch(kind: str, tmp_path: Path) -> None:
    model = load(make_kind(tmp_path / kind, kind))
    assert model.is_row_invariant
    texts = trial.texts(VOCAB_SIZE, 256)
    assert torch.equal(trial.over_pages(model, texts), trial.one_by_one(model, texts))


def test_the_memory_of_every_weight_is_counted_once(tmp_path: Path) -> None:
    plain = load(make_kind(tmp_path / "gelu", "llama-gelu"))
    fused = load(make_kind(tmp_path / "silu", "llama-gelu", hidden_act="silu"))
    assert packed_bytes(fused._model) == packed_bytes(plain._model)
    read = sum(one.numel() for one in plain._model.parameters()) * 4
    assert plain.weight_bytes >= packed_bytes(plain._model) + read
