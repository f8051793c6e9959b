"""Experts: how they are routed, loaded in the formats of linear layers, and shared by ranks."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import kernels
from quire.kernels.moe import Routing
from quire.kernels.quantization import quantize
from quire.shared.model.fields import Fields
from quire.shared.process.errors import CheckpointError
from quire.worker.models.files.loader import Weights
from quire.worker.models.files.weight_reader import WeightReader
from quire.worker.models.native.config import read_config
from quire.worker.models.native.decoder import Decoder
from quire.worker.models.native.expert_weights import load_experts
from quire.worker.models.native.experts import ExpertsConfig, parse_experts
from quire.worker.models.native.families import FAMILIES
from quire.worker.models.native.sharding import NotDivisible, Shard
from tests.support.checkpoints import make_checkpoint
from tests.support.quantized import edit_config, edit_tensors, quantize_checkpoint
from tests.worker.models.test_decoder import TOLERANCE, WHOLE, Stepper, draw_prompts, transformers_logits

MIXTRAL, QWEN3 = FAMILIES["MixtralForCausalLM"], FAMILIES["Qwen3MoeForCausalLM"]


def parse(family: Any, **values: Any) -> ExpertsConfig:
    found = parse_experts(Fields({"intermediate_size": 96} | values, "here"), family, 4)
    assert found is not None
    return found


def test_absent_fields_have_the_defaults_of_transformers() -> None:
    found = parse(MIXTRAL)
    assert (found.routing, found.intermediate_size, found.layers) == (Routing(8, 2, True), 96, (True,) * 4)
    found = parse(QWEN3)
    assert (found.routing, found.intermediate_size, found.layers) == (Routing(128, 8, False), 768, (True,) * 4)


def test_fields_are_honoured() -> None:
    assert parse(MIXTRAL, num_local_experts=4, num_experts_per_tok=3).routing == Routing(4, 3, True)
    fields = {"num_experts": 6, "num_experts_per_tok": 1, "moe_intermediate_size": 32, "norm_topk_prob": True}
    found = parse(QWEN3, decoder_sparse_step=2, mlp_only_layers=[3], **fields)
    assert (found.routing, found.intermediate_size) == (Routing(6, 1, True), 32)
    assert found.layers == (False, True, False, False)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_experts": 4, "num_local_experts": 8}, "num_experts is 4.*num_local_experts, which is 8"),
        ({"num_experts": 0}, "num_experts is 0"),
        ({"num_experts": 1 << 20}, "num_experts is 1048576"),
        ({"num_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok is 5; supported: an integer from 1 to 4"),
        ({"norm_topk_prob": 1}, "norm_topk_prob is 1"),
        ({"mlp_only_layers": "1"}, 'mlp_only_layers is "1"'),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ({"moe_intermediate_size": -1}, "moe_intermediate_size is -1"),
    ],
)
def test_wrong_values_are_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        parse(QWEN3, **values)


LAYER = "model.layers.0"


def load(folder: Path, ops: kernels.Ops, bits: int = 0, rank: int = 0, size: int = 1) -> kernels.ops.PackedMoE:
    shard = Shard(read_config(folder), rank, size)
    reader = WeightReader(Weights(folder), shard, ops, ops.dtype, "cpu", bits)
    assert shard.local.experts is not None
    return load_experts(shard.local.experts, reader, LAYER)


@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe", "gemma4-moe", "gpt-oss"])
@pytest.mark.parametrize("size", [2, 4])
def test_outputs_of_the_parts_add_up_to_those_of_the_whole(family: str, size: int, tmp_path: Path) -> None:
    folder, ops = make_checkpoint(tmp_path / family, family), kernels.ReferenceOps("cpu", torch.float32)
    x = torch.randn(7, 64)
    whole = ops.moe(x, load(folder, ops))
    parts = [load(folder, ops, rank=rank, size=size) for rank in range(size)]
    torch.testing.assert_close(sum(ops.moe(x, part) for part in parts), whole, rtol=1e-4, atol=1e-4)
    assert parts[0].inner * size == load(folder, ops).inner


def test_inner_features_that_cannot_be_shared_are_refused(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "moe", "qwen3-moe", moe_intermediate_size=33, num_key_value_heads=4)
    with pytest.raises(NotDivisible, match="33 inner features"):
        Shard(read_config(folder), 0, 2)


@pytest.mark.parametrize("bits", [8, 4])
def test_experts_are_quantised_on_load_and_the_router_is_not(bits: int, tmp_path: Path) -> None:
    folder, ops = make_checkpoint(tmp_path / "moe", "mixtral"), kernels.select_ops("cpu", torch.float32)
    rounded = tmp_path / "rounded"
    rounded.mkdir()
    (rounded / "config.json").write_bytes((folder / "config.json").read_bytes())
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if ".experts." in name:
            tensors[name] = quantize(tensors[name], bits).dequantized()
    save_file(tensors, rounded / "model.safetensors")
    x = torch.randn(9, 64)
    packed, wide = load(folder, ops, bits), load(rounded, ops)
    assert packed.nbytes < wide.nbytes / (3 if bits == 8 else 5)
    # The kernels round activations to 8 bits.
    found, exact = ops.moe(x, packed), ops.moe(x, wide)
    assert float((found - exact).norm() / exact.norm()) < 0.03


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_experts_keep_16_bits(stored: torch.dtype, tmp_path: Path) -> None:
    folder, ops = make_checkpoint(tmp_path / "moe", "mixtral", dtype=stored), kernels.CpuOps(torch.float32)
    packed = load(folder, ops)
    assert packed.nbytes < 2.2 * packed.routing.num_experts * 3 * packed.hidden * packed.inner


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "moe", "mixtral")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    del tensors[name]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"tensor {name} is missing"):
        Decoder.load(folder, kernels.ReferenceOps("cpu", torch.float32), torch.float32, "cpu")


SIZES: dict[str, dict[str, int]] = {"qwen3-moe": {"moe_intermediate_size": 64}, "mixtral": {"intermediate_size": 64}}


def quantized(folder: Path, family: str, name: str, dtype: torch.dtype = torch.float32) -> Path:
    """Write a checkpoint with quantised experts and attention; the router is not quantised."""
    source = make_checkpoint(folder / "moe", family, num_hidden_layers=2, **SIZES[family])
    made = quantize_checkpoint(source, folder / name, name, dtype)
    quantization = json.loads((made / "config.json").read_text())["quantization_config"]
    if quantization["quant_method"] == "compressed-tensors":
        edit_config(made, quantization_config=quantization | {"ignore": ["lm_head", "re:.*(mlp|moe).gate$"]})
    return made


KEPT = [
    *((name, "uint4 without further rounding") for name in ("gptq", "gptq-asym", "awq", "w4a16", "w4a16-order")),
    *((name, "uint8 without further rounding") for name in ("gptq-8", "gptq-8-asym", "w8a16", "w8a16-asym")),
    *((name, "fp8 without further rounding") for name in ("fp8-block", "fp8-tensor", "ct-fp8-channel")),
    ("gptq-order", "float16"),
    ("w8a16-float32", "sint8 without further rounding"),
]


# CI has each format with one of the families.
@pytest.mark.parametrize(
    ("family", "name", "kept"),
    [
        pytest.param(family, *one, marks=pytest.mark.slow if at % 2 == number else pytest.mark.soak)
        for at, one in enumerate(KEPT)
        for number, family in enumerate(SIZES)
    ],
)
def test_experts_of_quantised_checkpoints_are_computed_as_their_dequantised_weights(
    family: str, name: str, kept: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = quantized(tmp_path, family, name, getattr(torch, kept, torch.float32))
    prompts = draw_prompts(1)
    expected = transformers_logits(folder / "plain", prompts, torch.float32)
    with caplog.at_level(logging.INFO):
        decoder = Decoder.load(folder, kernels.select_ops("cpu", torch.float32), torch.float32, "cpu", 64)
    assert f"{2 * (4 + 3 * 5)} layers: " in caplog.text
    assert f" as {kept}" in caplog.text
    found = Stepper(decoder, prompts).run(WHOLE)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("family", SIZES)
def test_experts_of_8_bits_with_rounded_activations_are_computed_in_integers(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = quantized(tmp_path, family, "w8a8")
    prompts = draw_prompts(1)
    with caplog.at_level(logging.INFO):
        decoder = Decoder.load(folder, kernels.select_ops("cpu", torch.float32), torch.float32, "cpu", 64)
    assert "38 layers: 8 bits, per channel as int8 without further rounding" in caplog.text
    found = torch.cat(Stepper(decoder, prompts).run(WHOLE))
    expected = torch.cat(transformers_logits(folder / "plain", prompts, torch.float32))
    assert float(torch.cosine_similarity(found, expected, dim=1).median()) > 0.99


def test_experts_that_are_quantised_differently_are_refused(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "moe", "qwen3-moe", moe_intermediate_size=64)
    folder = quantize_checkpoint(source, tmp_path / "w8a8", "w8a8", torch.bfloat16)
    layers = "model.layers.0.mlp.experts.3"
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    edit_config(folder, quantization_config=config | {"ignore": ["lm_head", "re:.*mlp.gate$", f"{layers}.down_proj"]})
    plain = load_file(folder / "plain" / "model.safetensors")[f"{layers}.down_proj.weight"].bfloat16()

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith(f"{layers}.down_proj.")]:
            del tensors[name]
        tensors[f"{layers}.down_proj.weight"] = plain

    edit_tensors(folder, change)
    with pytest.raises(CheckpointError, match="several formats in down: bfloat16, int8; give a checkpoint whose"):
        Decoder.load(folder, kernels.CpuOps(torch.float32), torch.float32, "cpu", 64)


@pytest.mark.parametrize("family", ["gpt-oss", "gemma4-moe"])
@pytest.mark.parametrize("bits", [0, 8, 4])
def test_stacked_experts_are_read_one_by_one(bits: int, family: str, tmp_path: Path) -> None:
    """Quantised experts are near those of float32, and the progress ends at its end."""
    path = make_checkpoint(tmp_path / family, family)
    seen: list[tuple[int, int]] = []
    ops = kernels.select_ops("cpu", torch.float32)
    decoder = Decoder.load(path, ops, torch.float32, "cpu", 64, progress=lambda *at: seen.append(at), bits=bits)
    assert seen[-1][0] == seen[-1][1]
    assert decoder.weight_bytes > 0
    x = torch.randn(9, 64)
    found, exact = ops.moe(x, load(path, ops, bits)), ops.moe(x, load(path, kernels.select_ops("cpu", torch.float32)))
    assert float((found - exact).norm() / exact.norm()) < {0: 1e-6, 8: 0.03, 4: 0.3}[bits]
