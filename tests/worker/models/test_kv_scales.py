"""Scales of keys and values change what an FP8 cache holds, and nothing else."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import kernels
from quire.kernels.grouped_weight import KINDS
from quire.kernels.k_quant_weight import K_QUANTS
from quire.kernels.lora import AdapterBatch
from quire.kernels.quantization import quantize
from quire.kernels.weights import LinearWeight
from quire.shared.process.errors import CheckpointError
from quire.worker.engine.forward_batch import ForwardBatch
from quire.worker.models.files.kv_scales import KVFactors, read_kv_factors, scaled_rows
from quire.worker.models.files.loader import Weights
from quire.worker.models.native.decoder import Decoder
from tests.kernels.test_grouped_weight import random_weight
from tests.kernels.test_k_quant_weight import random_weight as random_k_quant
from tests.support.adapters import write_adapter
from tests.support.checkpoints import make_checkpoint

FP8 = torch.float8_e4m3fn
K, V = 2.0**12, 2.0**11  # as much larger than usual are the keys and the values of a checkpoint
TOKENS = 20


def with_large_keys(
    original: Path, out: Path, scales: dict[str, float] | None = None, k: float = K, v: float = V
) -> Path:
    """Copy a checkpoint with keys and values that exceed 448, and queries and outputs that make up for it.

    scales: tensors by their names after `self_attn.`, in each layer. k, v: how many times keys and values are larger.
    """
    shutil.copytree(original, out)
    tensors = load_file(out / "model.safetensors")
    has_norms = any("q_norm" in name for name in tensors)
    factors = {"v_proj": v, "o_proj.weight": 1 / v}
    factors |= {"q_norm": 1 / k, "k_norm": k} if has_norms else {"q_proj": 1 / k, "k_proj": k}
    for name, tensor in tensors.items():
        for part, factor in factors.items():
            if f".self_attn.{part}" in name:
                tensor *= factor
    layers = {name.split(".")[2] for name in tensors if name.startswith("model.layers.")}
    for layer in layers:
        for name, value in (scales or {}).items():
            tensors[f"model.layers.{layer}.self_attn.{name}"] = torch.tensor(value)
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    return out


def logits(path: Path, ops: kernels.Ops, bits: int | str = 0, adapter: Path | None = None) -> torch.Tensor:
    """Return the logits of a prompt that is computed in two chunks, so that the second reads the cache."""
    model = Decoder.load(path, ops, ops.dtype, "cpu", bits=bits)
    cache = model.alloc_kv_cache(2, 16)
    found = []
    for first, last in ((0, 13), (13, TOKENS)):
        at = torch.arange(first, last, dtype=torch.int32)
        adapters = None
        if adapter is not None:
            index = np.zeros(len(at), dtype=np.int32)
            adapters = AdapterBatch([model.load_adapter("a", adapter, 8).packed], index, index)
        batch = ForwardBatch(
            token_ids=(at * 37 + 5) % model.vocab_size,
            positions=at,
            slot_mapping=at,
            block_tables=torch.tensor([[0, 1]], dtype=torch.int32),
            seq_lens=torch.tensor([last], dtype=torch.int32),
            query_start_loc=torch.tensor([0, len(at)], dtype=torch.int32),
            logits_rows=torch.arange(len(at)),
            adapters=adapters,
        )
        with torch.inference_mode():
            found.append(model.forward(batch, cache))
    return torch.cat(found)


OPS = [
    pytest.param(lambda: kernels.ReferenceOps("cpu", torch.float32, FP8), id="reference"),
    pytest.param(lambda: kernels.select_ops("cpu", torch.float32, "cpu", FP8), id="cpu"),
]
LARGE = {"k_scale": K, "v_scale": V}


@pytest.mark.parametrize("family", ["llama", "llama-bias", "qwen2", "qwen3"])
@pytest.mark.parametrize("make", OPS)
def test_keys_and_values_that_are_too_large_are_stored_with_their_scales(make, family: str, tmp_path: Path) -> None:
    original = make_checkpoint(tmp_path / "original", family)
    expected = logits(original, make())
    assert torch.equal(logits(with_large_keys(original, tmp_path / "scaled", LARGE), make()), expected)
    without = logits(with_large_keys(original, tmp_path / "cut"), make())
    assert (without - expected).abs().max() > 0.1 * expected.abs().max(), "nothing saturates here"


@pytest.mark.parametrize("bits", [8, 4, "fp8"])
def test_weights_that_are_quantised_have_the_scales_too(bits: int | str, tmp_path: Path) -> None:
    original = make_checkpoint(tmp_path / "original", "llama", initializer_range=0.1)
    scaled = with_large_keys(original, tmp_path / "scaled", {"k_scale": 8.0, "v_scale": 4.0}, 8, 4)
    ops = kernels.select_ops("cpu", torch.float32, "cpu", FP8)
    torch.testing.assert_close(logits(scaled, ops, bits), logits(original, ops, bits), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_adapters_change_scaled_keys_and_values_as_much(family: str, tmp_path: Path) -> None:
    original = make_checkpoint(tmp_path / "original", family)
    adapter = write_adapter(tmp_path / "adapter", original)
    scaled = with_large_keys(original, tmp_path / "scaled", LARGE)
    # Trained for the scaled checkpoint, an adapter has outputs as large as those of its projections.
    shutil.copytree(adapter, tmp_path / "of-scaled")
    tensors = load_file(adapter / "adapter_model.safetensors")
    factors = {"v_proj.lora_B": V, "o_proj.lora_A": 1 / V}
    if family == "llama":
        factors |= {"q_proj.lora_B": 1 / K, "k_proj.lora_B": K}
    for name, tensor in tensors.items():
        for part, factor in factors.items():
            if part in name:
                tensor *= factor
    save_file(tensors, tmp_path / "of-scaled" / "adapter_model.safetensors")
    for make in (lambda: kernels.ReferenceOps("cpu", torch.float32, FP8), lambda: kernels.CpuOps(torch.float32, FP8)):
        expected = logits(original, make(), adapter=adapter)
        assert (expected - logits(original, make())).abs().max() > 0.1
        found = logits(scaled, make(), adapter=tmp_path / "of-scaled")
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_wider_caches_need_no_scales(tmp_path: Path) -> None:
    original = make_checkpoint(tmp_path / "original", "llama")
    scaled = with_large_keys(original, tmp_path / "scaled", LARGE)
    ops = kernels.ReferenceOps()
    assert torch.equal(logits(scaled, ops), logits(original, ops))
    assert Decoder.load(scaled, ops, torch.float32, "cpu")._kv_factors[0] == KVFactors()


@pytest.mark.parametrize(
    ("names", "factors"),
    [
        ({"k_scale": 3.0, "v_scale": 0.25}, KVFactors(0.25, 4.0)),
        ({"k_proj.k_scale": 0.3, "v_proj.v_scale": 0.5}, KVFactors(2.0, 2.0)),
        ({"k_proj.output_scale": 1.0, "v_proj.output_scale": 1.01}, KVFactors(1.0, 0.5)),
        ({"k_scale": 5.0}, KVFactors(0.125, 1.0)),
        ({}, KVFactors()),
    ],
)
def test_scales_are_found_under_each_name_and_rounded_up(
    names: dict[str, float], factors: KVFactors, tmp_path: Path
) -> None:
    folder = with_large_keys(make_checkpoint(tmp_path / "a", "llama"), tmp_path / "b", names)
    assert set(read_kv_factors(Weights(folder), 2)) == {factors}


def test_of_scales_of_heads_the_largest_counts(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.k_scale"] = torch.tensor([0.5, 4.0])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert read_kv_factors(Weights(folder), 2) == [KVFactors(0.25, 1.0), KVFactors()]


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_is_no_scale_is_refused(value: float, tmp_path: Path) -> None:
    folder = with_large_keys(make_checkpoint(tmp_path / "a", "llama"), tmp_path / "b", {"k_scale": value})
    with pytest.raises(CheckpointError, match=r"self_attn\.k_scale is .*, expected a number above 0; copy"):
        read_kv_factors(Weights(folder), 2)


@pytest.mark.parametrize("kind", ["float", "int8", "int4", *KINDS, *K_QUANTS])
def test_rows_of_every_kind_of_weights_are_scaled(kind: str) -> None:
    factors = torch.tensor([4.0, 1.0, 0.5])
    plain = torch.randn(3, 64)
    if kind == "float":
        weight: LinearWeight = plain
    elif kind in K_QUANTS:
        weight = random_k_quant(kind, 3, 256)
    else:
        weight = quantize(plain, int(kind[3:])) if kind.startswith("int") else random_weight(kind, 3, 64)

    def values(one: object) -> torch.Tensor:
        return one if isinstance(one, torch.Tensor) else one.dequantized()  # type: ignore[attr-defined]

    assert torch.equal(values(scaled_rows(weight, factors)), values(weight) * factors[:, None])
