"""Weights that Transformers loads are complete and finite, and belong to the configuration."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from quire.worker.models.loader import WEIGHTS
from quire.worker.models.transformers_config import read_transformers_config
from quire.worker.models.transformers_weights import copy_weights, load_weights, nbytes_of
from tests.support.parity import refusal
from tests.support.transformers_checkpoints import make_kind


def test_bytes_are_reported_and_tied_weights_count_once(tmp_path: Path) -> None:
    reports: list[tuple[int, int]] = []
    path = make_kind(tmp_path / "gpt2", "gpt2")
    model = load_weights(read_transformers_config(path), torch.float32, lambda *one: reports.append(one))
    assert reports[-1] == (nbytes_of([*model.parameters()]),) * 2
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    assert nbytes_of([table, head]) == table.nbytes


def test_copied_weights_do_not_change_with_the_file(tmp_path: Path) -> None:
    path = make_kind(tmp_path / "gpt2", "gpt2")
    model = load_weights(read_transformers_config(path), torch.float32)
    before = {name: one.data_ptr() for name, one in model.named_parameters()}
    expected = {name: one.clone() for name, one in model.named_parameters()}
    copy_weights(model)
    assert all(one.data_ptr() != before[name] for name, one in model.named_parameters())
    assert all(torch.equal(one, expected[name]) for name, one in model.named_parameters())


def test_weights_that_are_missing_infinite_or_pickled_are_refused(tmp_path: Path) -> None:
    path = make_kind(tmp_path / "gpt2", "gpt2")
    tensors = load_file(path / WEIGHTS)
    name = "transformer.h.1.mlp.c_fc.weight"
    without = {key: value for key, value in tensors.items() if key != name}
    save_file(without, path / WEIGHTS, {"format": "pt"})
    assert f"1 tensors are missing: {name}" in refusal(path)
    tensors[name][0, 0] = float("inf")
    save_file(tensors, path / WEIGHTS, {"format": "pt"})
    assert f"tensor {name} has values that are not finite as float32; take another --dtype, or" in refusal(path)
    save_file(tensors | {name: tensors[name].to(torch.int32)}, path / WEIGHTS, {"format": "pt"})
    assert "has the type I32" in refusal(path)
    (path / WEIGHTS).unlink()
    (path / "pytorch_model.bin").write_bytes(b"x")
    assert "pickle format" in refusal(path)
