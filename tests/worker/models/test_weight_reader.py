"""Weights are packed in the type of the checkpoint, or quantised; norms have the type of activations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import kernels
from quire.kernels.grouped_weight import FP8, to_fp8
from quire.kernels.quantization import quantize
from quire.worker.models.config import EMBEDDING, FINAL_NORM, read_config
from quire.worker.models.decoder import Decoder
from quire.worker.models.loader import Weights
from quire.worker.models.sharding import Shard
from quire.worker.models.weight_reader import WeightReader
from tests.support.checkpoints import make_checkpoint

GATE, UP = (f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up"))


def stored_as(folder: Path, dtypes: dict[str, torch.dtype], other: torch.dtype) -> Path:
    """Convert the tensors of a checkpoint. Returns the folder."""
    file = folder / "model.safetensors"
    tensors = {name: tensor.to(dtypes.get(name, other)) for name, tensor in load_file(file).items()}
    save_file(tensors, file)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": str(other)[6:]}))
    return folder


def reader_of(folder: Path, ops: kernels.Ops, bits: int | str = 0) -> WeightReader:
    return WeightReader(Weights(folder), Shard(read_config(folder)), ops, ops.dtype, "cpu", bits)


def float_ops() -> kernels.CpuOps:
    try:
        return kernels.CpuOps(torch.float32)
    except kernels.KernelsUnavailable as missing:
        pytest.skip(str(missing))


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_weights_keep_16_bits_and_norms_do_not(tmp_path: Path, stored: torch.dtype) -> None:
    folder = stored_as(make_checkpoint(tmp_path / "llama", "llama"), {}, stored)
    reader = reader_of(folder, float_ops())
    packed = reader.gate_up([GATE, UP])
    elements = packed.in_features * packed.out_features
    assert 2 * elements <= packed.nbytes < 4 * elements
    assert reader.embedding(EMBEDDING).dtype is stored
    assert reader.read(FINAL_NORM).dtype is torch.float32


def test_weights_of_two_types_side_by_side_become_activations(tmp_path: Path) -> None:
    folder = stored_as(make_checkpoint(tmp_path / "llama", "llama"), {GATE: torch.float16}, torch.bfloat16)
    ops, tensors = float_ops(), load_file(folder / "model.safetensors")
    packed = reader_of(folder, ops).linear([GATE, UP])
    x = torch.randn(3, packed.in_features)
    expected = ops.pack_linear(torch.cat([tensors[GATE].float(), tensors[UP].float()]))
    assert torch.equal(ops.linear(x, packed), ops.linear(x, expected))


def test_a_type_that_the_kernels_lack_is_converted(tmp_path: Path) -> None:
    folder = stored_as(make_checkpoint(tmp_path / "llama", "llama"), {}, torch.float16)
    assert reader_of(folder, kernels.ReferenceOps("cpu", torch.float32)).embedding(EMBEDDING).dtype is torch.float32


@pytest.mark.parametrize("bits", [8, 4])
def test_quantised_layers_have_few_bits_and_the_head_has_8(tmp_path: Path, bits: int) -> None:
    folder = make_checkpoint(tmp_path / "llama", "llama")
    tensors = load_file(folder / "model.safetensors")
    for ops in (float_ops(), kernels.ReferenceOps("cpu", torch.float32)):
        reader = reader_of(folder, ops, bits)
        packed = reader.linear([GATE])
        x = torch.randn(3, packed.in_features)
        assert torch.equal(ops.linear(x, packed), ops.linear(x, ops.pack_linear(quantize(tensors[GATE], bits))))
        head = reader.head(EMBEDDING, tensors[EMBEDDING])
        expected = ops.pack_linear(quantize(tensors[EMBEDDING], 8))
        x = torch.randn(3, head.in_features)
        assert torch.equal(ops.linear_logits(x, head), ops.linear_logits(x, expected))


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_a_decoder_computes_with_16_bit_weights_as_with_the_same_floats(tmp_path: Path, stored: torch.dtype) -> None:
    short = stored_as(make_checkpoint(tmp_path / "short", "qwen3"), {}, stored)
    decoder = Decoder.load(short, float_ops(), torch.float32, "cpu")
    long = tmp_path / "long"
    long.mkdir()
    for file in short.iterdir():
        (long / file.name).write_bytes(file.read_bytes())
    exact = Decoder.load(stored_as(long, {}, torch.float32), float_ops(), torch.float32, "cpu")
    assert decoder.weight_bytes < 0.6 * exact.weight_bytes
    hidden = torch.randn(5, decoder.hidden_size)
    assert torch.equal(decoder._logits(hidden), exact._logits(hidden))


def test_layers_and_the_head_are_fp8_on_load(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "llama", "llama")
    tensors = load_file(folder / "model.safetensors")
    for ops in (float_ops(), kernels.ReferenceOps("cpu", torch.float32)):
        reader = reader_of(folder, ops, FP8)
        for packed, name in ((reader.linear([GATE]), GATE), (reader.head("lm_head.weight", None), "lm_head.weight")):
            x = torch.randn(3, packed.in_features)
            assert torch.equal(ops.linear(x, packed), ops.linear(x, ops.pack_linear(to_fp8(tensors[name]))))
