"""The decoder computes quantised checkpoints: as their dequantised weights, or with the kernels' integers."""

from __future__ import annotations

import logging

import pytest
import torch
from safetensors.torch import load_file

from quire.kernels.cpu import linear
from quire.kernels.fp8_rows import FP8_DYNAMIC, quantize_rows
from quire.kernels.grouped_weight import FP8
from quire.kernels.quantization import QuantizedWeight, quantized_linear
from quire.shared.process.errors import CheckpointError
from quire.worker.models.files.formats import make_reader
from quire.worker.models.native.config import read_config
from quire.worker.models.native.decoder import Decoder
from quire.worker.models.native.sharding import Shard
from tests.support.checkpoints import make_checkpoint
from tests.support.kernels.implementations import HAS_TRITON, make_triton_ops
from tests.support.quantized import FORMATS, KINDS, PROJECTIONS, STORED_AS, edit_tensors, quantize_checkpoint
from tests.worker.models.quantized.conftest import open_quantized
from tests.worker.models.test_decoder import TOLERANCE, Stepper, draw_prompts, operations, transformers_logits

ATTENTION = [f"self_attn.{name}" for name in "qkv"]
GATE_UP = ["mlp.gate", "mlp.up"]
# The type of dequantised weights, of formats whose weights are not kept in groups.
KEPT = {
    "gptq-order": torch.float16,  # groups of 16
    "w4a16-asym": torch.bfloat16,  # groups of 16
}


def logits(folder, ops="cpu", bits=0):
    prompts = draw_prompts(1)
    decoder = Decoder.load(folder, operations(ops), torch.float32, "cpu", 64, bits=bits)
    return Stepper(decoder, prompts).run([{at: len(prompt) for at, prompt in enumerate(prompts)}])


def largest_difference(found, expected):
    return max(float((one - two).abs().max()) for one, two in zip(found, expected, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FORMATS if name != "w8a8"])
def test_logits_are_those_of_the_dequantised_weights(quantized, name, caplog):
    kept = KEPT.get(name)
    folder = quantized(name, kept or torch.float32)
    expected = transformers_logits(folder / "plain", draw_prompts(1), torch.float32)
    with caplog.at_level(logging.INFO):
        found = logits(folder)
    assert largest_difference(found, expected) < TOLERANCE
    of_name = "fp8" if "fp8" in name or name == "fbgemm" else "uint8" if "8" in name else "uint4"
    kind = KINDS.get(name, of_name)
    assert (f"as {str(kept)[6:]}" if kept else f"as {kind} without further rounding") in caplog.text
    assert "activations are not rounded" in caplog.text


@pytest.mark.parametrize("ops", ["cpu", "reference"])
def test_8_bits_with_rounded_activations_are_computed_in_integers(quantized, ops, caplog):
    folder = quantized("w8a8")
    checkpoint = open_quantized(folder)
    with caplog.at_level(logging.INFO):
        found = logits(folder, ops)
    assert "14 layers: 8 bits, per channel as int8 without further rounding" in caplog.text
    expected = integer_logits(folder / "plain", checkpoint)
    # A value at the border between two integers may fall on either side, for another order of sums in a norm.
    assert largest_difference(found, expected) < 0.25
    assert torch.cat(found).argmax(1).eq(torch.cat(expected).argmax(1)).float().mean() > 0.97


def integer_logits(plain, checkpoint):
    """Compute the logits of Transformers, with linear layers by the definition of the integer kernels."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(plain, attn_implementation="eager")

    def replaced(weight: QuantizedWeight):
        return lambda x: quantized_linear(x[0], weight)[None]

    for name, module in model.named_modules():
        if name.split(".")[-1] in PROJECTIONS:
            module.forward = replaced(checkpoint.exact([f"{name}.weight"], 8, [()]))
    with torch.inference_mode():
        return [model(prompt[None]).logits[0] for prompt in draw_prompts(1)]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, value in STORED_AS.items() if value])
def test_the_setting_that_names_what_is_stored_keeps_it(quantized, name, caplog):
    folder = quantized(name)
    bits = {"int8": 8, "int4": 4}.get(STORED_AS[name], STORED_AS[name])
    with caplog.at_level(logging.INFO):
        found = logits(folder, bits=bits)
    assert "14 layers: " in caplog.text
    assert f" as {STORED_AS[name]} without further rounding" in caplog.text
    assert f"1 layers: not quantised as {'fp8' if bits == 'fp8' else 'int8'}, rounded on load" in caplog.text
    expected = transformers_logits(folder / "plain", draw_prompts(1), torch.float32)
    similarity = torch.cosine_similarity(torch.cat(found), torch.cat(expected), dim=1)
    assert float(similarity.mean()) > 0.97


def test_quantised_weights_with_yarn_are_computed_as_the_dequantised_ones(tmp_path):
    source = make_checkpoint(tmp_path / "yarn", "llama-yarn", num_hidden_layers=2, initializer_range=0.2)
    folder = quantize_checkpoint(source, tmp_path / "awq", "awq")
    expected = transformers_logits(folder / "plain", draw_prompts(1), torch.float32)
    assert largest_difference(logits(folder), expected) < TOLERANCE


def test_no_layer_is_rounded_twice(quantized, caplog):
    """Zero points do not fit the integer kernels. If 4 bits are asked for, these layers stay as they are stored."""
    folder = quantized("awq")
    with caplog.at_level(logging.INFO):
        logits(folder, bits=4)
    assert "14 layers: 4 bits, groups of 32 as uint4 without further rounding" in caplog.text


@pytest.mark.parametrize("name", FORMATS)
def test_weights_that_are_read_a_few_rows_at_a_time_are_those_of_the_whole(quantized, name, monkeypatch):
    folder, ops = quantized(name), operations("cpu")
    shard = Shard(read_config(folder), 1, 2)
    packed = []
    for chunk in (1, 1 << 20):  # a panel, all
        monkeypatch.setattr(linear, "_CHUNK", chunk)
        reader = make_reader(open_quantized(folder), shard, ops, ops.dtype, "cpu", 0)
        layer = "model.layers.1"
        qkv, mlp = ([f"{layer}.{name}_proj.weight" for name in names] for names in (ATTENTION, GATE_UP))
        layers = [reader.linear(qkv), reader.gate_up(mlp), reader.linear([f"{layer}.mlp.down_proj.weight"])]
        packed.append(layers)
    for few, whole in zip(*packed, strict=True):
        assert few.format is whole.format
        assert torch.equal(few.weight, whole.weight)
        assert (few.order is None) == (whole.order is None)
        assert few.order is None or torch.equal(few.order, whole.order)


def test_layers_with_different_orders_have_16_bits(quantized, caplog):
    """Weights side by side are one product, with one order of the input features."""
    folder = quantized("gptq-order-32")
    name = "model.layers.0.self_attn.v_proj.g_idx"
    edit_tensors(folder, lambda tensors: tensors.update({name: tensors[name].flip(0)}))
    with caplog.at_level(logging.INFO):
        logits(folder)
    assert "11 layers: 4 bits, groups of 32, act-order as uint4 without further rounding" in caplog.text
    assert "3 layers: 4 bits, groups of 32, act-order as float16" in caplog.text


@pytest.mark.parametrize(
    ("name", "limit"), [("awq", 5), ("fp8-block", 9), ("w8a8", 9), ("gptq-8-asym", 9), ("gptq-order", 16)]
)
def test_layers_on_gpus_have_the_values_of_the_checkpoint(quantized, name, limit, monkeypatch):
    if not HAS_TRITON:
        pytest.skip("Triton is not installed")
    ops = make_triton_ops(torch.float32, monkeypatch)
    folder = quantized(name)
    checkpoint = open_quantized(folder, ops.weight_dtypes)
    reader = make_reader(checkpoint, Shard(read_config(folder)), ops, ops.dtype, ops.device, 0)
    for layer in ("self_attn.q_proj", "mlp.down_proj"):
        weight = f"model.layers.0.{layer}.weight"
        packed = reader.linear([weight])
        plain = load_file(folder / "plain" / "model.safetensors")[weight].to(ops.device)
        x = torch.randn(3, packed.in_features, device=ops.device)
        torch.testing.assert_close(ops.linear(x, packed), x @ plain.T, rtol=1e-4, atol=1e-4)
        assert packed.nbytes == plain.numel() * (limit if limit < 16 else 32) // 8


@pytest.mark.parametrize("name", ["fbgemm", "fp8-tensor", "ct-fp8-channel", "ct-fp8-block"])
def test_activations_of_fp8_layers_on_gpus_are_rounded_if_that_is_asked_for(quantized, name, monkeypatch, caplog):
    if not HAS_TRITON:
        pytest.skip("Triton is not installed")
    ops = make_triton_ops(torch.float32, monkeypatch, fp8_activations=True)
    folder = quantized(name)
    checkpoint = open_quantized(folder, ops.weight_dtypes)
    reader = make_reader(checkpoint, Shard(read_config(folder)), ops, ops.dtype, ops.device, FP8)
    weight = "model.layers.0.self_attn.q_proj.weight"
    doubled = reader.linear([weight], row_factors=torch.full((checkpoint.shape(weight)[0],), 2.0))
    packed = reader.linear([weight])
    x = torch.randn(3, packed.in_features, device=ops.device)
    torch.testing.assert_close(ops.linear(x, doubled), 2 * ops.linear(x, packed))
    if name.endswith("block"):
        assert packed.kind == FP8
        with pytest.raises(CheckpointError, match=r"no layer has FP8 weights with a scale per output .*; leave it out"):
            reader.finish()
        return
    assert (packed.kind, doubled.kind) == (FP8_DYNAMIC, FP8_DYNAMIC)
    plain = load_file(folder / "plain" / "model.safetensors")[weight].to(ops.device)
    codes, scales = quantize_rows(x)
    torch.testing.assert_close(ops.linear(x, packed), codes.float() * scales @ plain.T, rtol=1e-4, atol=1e-4)
    assert reader.weight([weight]).kind == FP8  # as of an expert
    with caplog.at_level(logging.INFO):
        reader.finish()
    kept = "as fp8 without further rounding"
    assert f"2 layers: FP8 per channel or tensor {kept}, activations rounded to e4m3" in caplog.text
    assert f"1 layers: FP8 per channel or tensor {kept}; other activations are not rounded" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nf4-double", "bnb-int8", "modelopt-nvfp4"])
def test_experts_stay_as_they_are_stored(name, tmp_path, caplog):
    source = make_checkpoint(tmp_path / "source", "qwen3-moe", num_hidden_layers=2, moe_intermediate_size=64)
    folder = quantize_checkpoint(source, tmp_path / name, name)
    with caplog.at_level(logging.INFO):
        found = logits(folder)
    assert "38 layers: " in caplog.text
    assert f" as {KINDS[name]} without further rounding; 1 layers: not quantised" in caplog.text
    assert largest_difference(found, transformers_logits(folder / "plain", draw_prompts(1), torch.float32)) < TOLERANCE
