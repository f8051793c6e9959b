"""Formats of quantised weights: their configurations, words and layouts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.kernels.weights import quantized_part
from quire.shared.model.fields import Fields
from quire.shared.model.folder import WEIGHTS
from quire.shared.process.errors import CheckpointError
from quire.worker.models.files.quantized import weight as weight_module
from quire.worker.models.files.quantized.checkpoint import QuantizedCheckpoint
from quire.worker.models.files.quantized.config import parse_quantization
from quire.worker.models.files.quantized.gptq import GptqLayer, read_gptq
from quire.worker.models.files.quantized.layout import TensorFault, group_order, required
from quire.worker.models.files.quantized.mxfp4 import mxfp4_weight
from quire.worker.models.files.quantized.weight import ScaledWeight
from quire.worker.models.files.quantized.words import unpack_columns, unpack_rows
from quire.worker.models.native.config import read_config
from tests.support.quantized import FORMATS, bnb, edit_config, group, quantize_checkpoint, scheme
from tests.support.vision_checkpoints import make_vision


def parse(quantization, name="quantization_config"):
    return parse_quantization(Fields({name: quantization}, "config.json"))


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_read(name):
    quantization = parse(FORMATS[name][1])
    assert quantization is not None
    assert quantization.label
    assert quantization.rounds_activations == (name == "w8a8")


def test_the_old_field_without_a_method_is_compressed_tensors():
    quantization = {key: value for key, value in FORMATS["w4a16"][1].items() if key != "quant_method"}
    found = parse(quantization, "compression_config")
    assert found is not None
    assert found.label.startswith("compressed-tensors")


@pytest.mark.parametrize("method", ["hqq", "quark", 4, None])
def test_other_methods_are_refused_by_name(method):
    with pytest.raises(
        CheckpointError, match=r"config.json, quantization_config: quant_method is .*supported: auto-round, awq"
    ):
        parse({"quant_method": method})


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128}

NF4 = bnb(load_in_4bit=True, bnb_4bit_quant_type="nf4")

NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4"}

MIXED = NVFP4 | {"quant_algo": "MIXED_PRECISION"}

ROUND = {"quant_method": "auto-round", "packing_format": "auto_round", "bits": 4, "group_size": 32, "sym": True}

FOUR_BITS = group(4, "float", strategy="group", group_size=32, symmetric=False)

PACKED = ("pack-quantized", group(4, strategy="group", group_size=128))


def with_weights(**fields):
    return scheme("pack-quantized", group(**({"bits": 4, "strategy": "group", "group_size": 128} | fields)))


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        (GPTQ | {"bits": 3}, "bits is 3; supported: 4 or 8"),
        (GPTQ | {"bits": None}, "bits is null"),
        (GPTQ | {"group_size": 0}, "group_size is 0; supported: -1 or a number above 0"),
        (GPTQ | {"group_size": "128"}, 'group_size is "128"'),
        (GPTQ | {"checkpoint_format": "marlin"}, 'checkpoint_format is "marlin"; supported: gptq or gptq_v2'),
        (GPTQ | {"format": "gptq_p"}, 'format is "gptq_p"'),
        (GPTQ | {"desc_act": "yes"}, 'desc_act is "yes"; supported: true or false'),
        (GPTQ | {"sym": 1}, "sym is 1; supported: true or false"),
        (GPTQ | {"pack_dtype": "int64"}, 'pack_dtype is "int64"; supported: int32'),
        (GPTQ | {"is_marlin_format": True}, "is_marlin_format is true; supported: no such field"),
        (GPTQ | {"rotation": "hadamard"}, 'rotation is "hadamard"'),
        (GPTQ | {"dynamic": {"+:.*down": {"bits": 8}}}, "only patterns of layers that are not quantised"),
        (GPTQ | {"novelty": 7}, "novelty is 7; supported: no such field"),
        (AWQ | {"bits": 8}, "bits is 8; supported: 4"),
        (AWQ | {"version": "gemv"}, 'version is "gemv"; supported: gemm'),
        (AWQ | {"zero_point": False}, "zero_point is false; supported: true"),
        (AWQ | {"group_size": 0}, "group_size is 0"),
        (AWQ | {"novelty": 7}, "novelty is 7"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, 'fmt is "e5m2"; supported: e4m3'),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size is"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, "weight_block_size is"),
        ({"quant_method": "fp8", "activation_scheme": "odd"}, 'activation_scheme is "odd"'),
        ({"quant_method": "fp8", "novelty": 7}, "novelty is 7"),
        (scheme("marlin-24", PACKED[1]), 'format is "marlin-24"; supported: pack-quantized'),
        (scheme("nvfp4-pack-quantized", PACKED[1]), 'type is "int"; supported: float'),
        (NF4 | {"load_in_8bit": True}, "load_in_4bit is true; supported: either load_in_4bit or load_in_8bit"),
        (NF4 | {"bnb_4bit_quant_type": "int4"}, 'bnb_4bit_quant_type is "int4"; supported: nf4 or fp4'),
        (NF4 | {"bnb_4bit_quant_storage": "bfloat16"}, 'bnb_4bit_quant_storage is "bfloat16"; supported: uint8'),
        (NF4 | {"novelty": 7}, "novelty is 7"),
        (bnb(load_in_8bit=True, llm_int8_has_fp16_weight=True), "llm_int8_has_fp16_weight is true"),
        (NVFP4 | {"quant_algo": "NVFP4_AWQ"}, 'quant_algo is "NVFP4_AWQ"; supported: FP8,'),
        (NVFP4 | {"quant_algo": None}, "quant_algo is null"),
        (NVFP4 | {"group_size": 32}, "group_size is 32; supported: 16"),
        (NVFP4 | {"has_zero_point": True}, "has_zero_point is true; supported: false"),
        (NVFP4 | {"pre_quant_scale": True}, "pre_quant_scale is true; supported: no such field"),
        (NVFP4 | {"quant_algo": "MIXED_PRECISION"}, "quantized_layers is missing"),
        (MIXED | {"quantized_layers": {"up": {"quant_algo": "W4A8_AWQ"}}}, 'quantized_layers, up: quant_algo is "W4A8'),
        (
            ROUND | {"packing_format": "auto_round:mlx"},
            'packing_format is "auto_round:mlx"; supported: auto, auto_round',
        ),
        (ROUND | {"packing_format": None, "sym": False}, "packing_format is null"),
        (ROUND | {"bits": 2}, "bits is 2; supported: 4 or 8"),
        (ROUND | {"packing_format": "auto_round:awq", "bits": 8}, "bits is 8; supported: 4"),
        (ROUND | {"group_size": 0}, "group_size is 0"),
        (ROUND | {"data_type": "nv_fp"}, 'data_type is "nv_fp"; supported: int'),
        (ROUND | {"packing_format": "auto_round:llm_compressor"}, "data_type is missing"),
        (ROUND | {"rotation_configs": [{}]}, "rotation_configs is [{}]"),
        (ROUND | {"extra_config": {"up": {"bits": 3}}}, "extra_config, up: bits is 3"),
        (ROUND | {"extra_config": {"up": {"novelty": 7}}}, "extra_config, up: novelty is 7"),
        (ROUND | {"extra_config": {"(a+)+": {"bits": 8}}}, "extra_config: (a+)+ is"),
        (GPTQ | {"data_type": "nv_fp"}, 'data_type is "nv_fp"; supported: int'),
        (scheme(*PACKED, quantization_status="frozen"), 'quantization_status is "frozen"; supported: compressed'),
        (scheme(*PACKED, sparsity_config={"format": "sparse-24-bitmask"}), 'sparsity_config: format is "sparse-24'),
        (scheme(*PACKED, transform_config={"config_groups": {"u": {}}}), "transform_config: config_groups is"),
        (scheme(*PACKED, ignore="lm_head"), 'ignore is "lm_head"; supported: a list of names'),
        (scheme(*PACKED, ignore=["re:(a+)+"]), "ignore is"),
        (scheme(*PACKED, novelty=7), "novelty is 7"),
        (scheme(*PACKED, config_groups={}), "config_groups is"),
        (with_weights(bits=3), "num_bits is 3; supported: 4 or 8"),
        (with_weights(kind="odd"), 'type is "odd"; supported: int or float'),
        (with_weights(bits=4, kind="float"), 'strategy is "group"; supported: tensor_group with group_size 16 (nvfp4'),
        (with_weights(bits=2, kind="float"), "num_bits is 2; supported: 8 or 4 for floating-point"),
        (scheme("nvfp4-pack-quantized", group(4, "float", strategy="group", group_size=32)), "strategy is"),
        (scheme("mxfp4-pack-quantized", FOUR_BITS), "symmetric is false"),
        (with_weights(strategy="tensor_group"), 'strategy is "tensor_group"; supported: tensor, channel'),
        (with_weights(group_size=0), "group_size is 0"),
        (with_weights(actorder="odd"), 'actorder is "odd"'),
        (with_weights(dynamic=True), "dynamic is true; supported: false"),
        (with_weights(novelty=7), "novelty is 7"),
        (scheme("pack-quantized", PACKED[1] | {"targets": ["Embedding"]}), "targets is"),
        (scheme("pack-quantized", PACKED[1] | {"weights": None}), "weights is null"),
        (scheme("pack-quantized", PACKED[1] | {"output_activations": {"num_bits": 8}}), "output_activations is"),
        (scheme("float-quantized", group(8, "float", strategy="block")), "block_structure is missing"),
        (scheme("float-quantized", group(8, "float", strategy="odd")), 'strategy is "odd"'),
        (scheme("float-quantized", group(8, "float", symmetric=False)), "symmetric is false"),
        (scheme("float-quantized", PACKED[1]), 'type is "int"; supported: float'),
    ],
)
def test_a_field_that_would_change_the_weights_is_refused(quantization, message):
    with pytest.raises(CheckpointError) as caught:
        parse(quantization)
    said = str(caught.value)
    assert said.startswith("config.json, quantization_config")
    assert message in said
    assert "\n" not in said


def test_a_tensor_that_was_checked_is_there():
    with pytest.raises(AssertionError):
        required(lambda _: None, "scales")


@pytest.mark.parametrize("group", [-1, 3])
def test_a_group_that_does_not_exist_is_refused(group):
    with pytest.raises(TensorFault) as caught:
        group_order(torch.tensor([0, 0, 0, 1, 1, 1, group]), "weight_g_idx", 7, 3)
    assert caught.value.end == "weight_g_idx"
    assert "expected groups from 0 to 2" in caught.value.what


@pytest.mark.parametrize("name", FORMATS)
def test_weights_are_those_that_were_written(read_weights, name):
    rounded = torch.float16 if name.startswith(("gptq", "awq")) else torch.bfloat16
    for found, written in read_weights(name):
        assert torch.equal(found, written.to(rounded).float())


def test_the_lowest_bits_are_the_first_column():
    words = torch.tensor([[0x76543210, -0x01234568]], dtype=torch.int32)  # the second is 0xFEDCBA98
    assert unpack_columns(words, 4, 16).tolist() == [[at - 8 for at in range(16)]]


def test_bytes_are_less_half_of_their_range():
    words = torch.tensor([[-0x7F00_0100]], dtype=torch.int32)  # 0x80FFFF00
    assert unpack_columns(words, 8, 3).tolist() == [[-128, 127, 127]]


def test_an_order_moves_the_columns():
    words = torch.tensor([[0x76543210]], dtype=torch.int32)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    assert unpack_columns(words, 4, 8, order).tolist() == [[at - 8 for at in (0, 4, 1, 5, 2, 6, 3, 7)]]


@pytest.mark.parametrize("bits", [4, 8])
def test_rows_are_packed_along_the_first_dimension(bits):
    words = torch.arange(6, dtype=torch.int32).view(2, 3)
    unpacked = unpack_rows(words, bits, 32 // bits + 1)
    half = 1 << (bits - 1)
    assert unpacked.shape == (3, 32 // bits + 1)
    assert (unpacked[:, 0] + half).tolist() == [0, 1, 2]
    assert (unpacked[:, -1] + half).tolist() == [3, 4, 5]


def integers(low: int, high: int, n: int = 6, k: int = 64) -> torch.Tensor:
    return torch.randint(low, high + 1, (n, k), generator=torch.Generator().manual_seed(1)).to(torch.int8)


def scales(n: int, groups: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.rand(n, groups, generator=torch.Generator().manual_seed(2)).add(0.01).to(dtype)


def test_every_weight_has_the_scale_and_the_zero_of_its_block(monkeypatch):
    monkeypatch.setattr(weight_module, "CHUNK", 128)  # two rows at a time
    zeros = torch.arange(8, dtype=torch.int16).view(2, 4)
    made = ScaledWeight(integers(-8, 7), scales(2, 4), (3, 16), zeros)
    found = made.dequantized(torch.float32)
    for n in range(6):
        for k in range(64):
            block = n // 3, k // 16
            assert found[n, k] == (float(made.values[n, k]) - float(zeros[block])) * made.scales[block].float()


def test_groups_say_which_input_features_belong_together():
    groups = torch.arange(64) % 4
    made = ScaledWeight(integers(-8, 7), scales(6, 4), (1, 16), groups=groups)
    expected = made.values.float() * made.scales.float()[:, groups]
    assert torch.equal(made.dequantized(torch.float32), expected)
    assert made.exact(4) is None


def test_a_channel_that_is_no_multiple_of_a_group_fits():
    made = ScaledWeight(integers(-8, 7, k=40), scales(6, 1), (1, 40))
    exact = made.exact(4)
    assert exact is not None
    assert torch.equal(exact.dequantized(), made.dequantized(torch.float32))


@pytest.mark.parametrize(
    "made",
    [
        ScaledWeight(integers(-8, 7), scales(6, 4), (1, 16)),
        ScaledWeight(integers(-8, 7), scales(6, 2), (1, 32), torch.ones(6, 2, dtype=torch.int16)),
        ScaledWeight(integers(-8, 7), torch.full((6, 2), 1e-9), (1, 32)),
        ScaledWeight(integers(-8, 7), torch.full((6, 2), 1e9), (1, 32)),
        ScaledWeight(integers(-8, 7).float(), scales(6, 2), (1, 32)),
        ScaledWeight(integers(-9, 7), scales(6, 2), (1, 32)),
    ],
    ids=["groups of 16", "zero points", "small scales", "large scales", "floats", "more than 4 bits"],
)
def test_what_does_not_fit_is_not_rounded(made):
    assert made.exact(4) is None
    assert made.exact(8) is None


def test_a_part_is_that_of_the_dequantised_weights():
    for bits, k in ((8, 1), (4, 2)):
        whole = ScaledWeight(integers(-8, 7), scales(6, k), (1, 64 // k)).exact(bits)
        assert whole is not None
        for part in ((slice(2, 4), slice(None)), (slice(None), slice(32, 64))):
            cut = quantized_part(whole, part)
            assert cut is not None
            assert torch.equal(cut.dequantized(), whole.dequantized()[part])
    assert whole is not None
    assert quantized_part(whole, (slice(None), slice(16, 48))) is None
    assert quantized_part(whole, ()) is whole


def test_version_1_stores_zero_points_less_1_with_borrows():
    """The zero point is 0 where all weights of a group are above zero."""
    layout = GptqLayer(bits=4, group_size=32, act_order=False, is_v1=True)
    tensors = {
        "qweight": torch.full((4, 8), 0x33333333, dtype=torch.int32),
        "qzeros": torch.tensor([[0x0000_0200 - 0x1111_1111]], dtype=torch.int32),
        "scales": torch.ones(1, 8, dtype=torch.float16),
    }
    weight = layout.weight(8, 32, tensors.get)
    assert weight.dequantized(torch.float32)[:, 0].tolist() == [3, 3, 1, 3, 3, 3, 3, 3]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("checkpoint_format", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("stored", [0, 1], ids=["middle", "less-1"])
def test_the_zero_point_of_symmetric_layers_is_the_middle_whatever_is_stored(
    bits: int, checkpoint_format: str, stored: int
) -> None:
    fields = {"bits": bits, "group_size": 32, "sym": True, "checkpoint_format": checkpoint_format}
    layout = read_gptq(Fields(fields, "config.json")).layer("q_proj", {"q_proj.qweight": "I32"}.get)
    values, zeros = (0x99999999, 0x88888888) if bits == 4 else (0x81818181, 0x80808080)
    zeros -= stored * (0x11111111 if bits == 4 else 0x01010101)
    tensors = {
        "qweight": torch.full((bits, 8), values, dtype=torch.int64).to(torch.int32),
        "qzeros": torch.full((1, bits // 4), zeros, dtype=torch.int64).to(torch.int32),
        "scales": torch.full((1, 8), 0.5, dtype=torch.float16),
    }
    assert layout is not None
    assert set(layout.weight(8, 32, tensors.get).dequantized(torch.float32).flatten().tolist()) == {0.5}


def test_layers_of_a_pattern_that_are_not_quantised_have_plain_weights():
    quantization = read_gptq(Fields({"bits": 4, "group_size": 32, "dynamic": {"-:.*down.*": {}}}, "config.json"))
    stored = {"model.layers.0.mlp.down_proj.weight": "BF16", "lm_head.weight": "BF16"}
    assert quantization.layer("model.layers.0.mlp.down_proj", stored.get) is None
    assert quantization.layer("model.layers.0.mlp.up_proj", stored.get) is not None
    assert quantization.layer("lm_head", stored.get) is None
    assert quantization.layer("lm_head", {"lm_head.qweight": "I32"}.get) is not None


O_PROJ = "layers.0.self_attn.o_proj"


@pytest.mark.parametrize("stored", ["model.language_model.", "language_model.model."])
@pytest.mark.parametrize("listed", ["model.language_model.", "language_model.model.", "model.", "re:", "re:escaped"])
@pytest.mark.parametrize("field", ["ignore", "targets"])
def test_lists_of_a_vision_language_model_have_names_of_any_version(
    stored: str, listed: str, field: str, tmp_path: Path
) -> None:
    """One layer is in 16 bits: `ignore` has it, or `targets` have all others."""
    path = quantize_checkpoint(make_vision(tmp_path / "gemma3", "gemma3"), tmp_path / "quantized", "w4a16")
    own, plain = "language_model.model.", load_file(path / "plain" / WEIGHTS)
    tensors = {name: one for name, one in load_file(path / WEIGHTS).items() if f"{own}{O_PROJ}." not in name}
    tensors[f"{own}{O_PROJ}.weight"] = plain[f"{own}{O_PROJ}.weight"].bfloat16()
    save_file({name.replace(own, stored): one for name, one in tensors.items()}, path / WEIGHTS)
    prefix = {"re:": "re:.*language_model.*", "re:escaped": r"re:model\.language_model\."}.get(listed, listed)
    layers = [name.removeprefix(own).removesuffix(".weight_packed") for name in tensors if name.endswith("_packed")]
    quantization = FORMATS["w4a16"][1]
    if field == "ignore":
        quantization = quantization | {"ignore": ["lm_head", prefix + O_PROJ, "re:.*vision_tower.*"]}
    else:
        group = quantization["config_groups"]["group_0"] | {"targets": [prefix + name for name in layers]}
        quantization = quantization | {"config_groups": {"group_0": group}}
    edit_config(path, quantization_config=quantization)
    config = read_config(path)
    assert config.quantization is not None
    weights = QuantizedCheckpoint(path, config.quantization, (torch.float32, torch.bfloat16))
    weights.check(config.tensor_shapes())
    assert weights.layout(f"model.{O_PROJ}.weight") is None
    assert weights.layout("model.layers.1.self_attn.o_proj.weight") is not None


def test_every_number_and_scale():
    blocks = torch.arange(16, dtype=torch.uint8).repeat(1, 1) * 17  # both nibbles alike
    scales = torch.tensor([127, 130, 0], dtype=torch.uint8)[:, None]
    weights = mxfp4_weight(blocks.expand(3, 1, 16), scales).dequantized()
    numbers = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    expected = torch.tensor([value for value in (*numbers, *(-at for at in numbers)) for _ in range(2)])
    assert torch.equal(weights, torch.stack([expected, expected * 8, expected * 2.0**-127]))


def test_the_lower_bits_are_the_first_number():
    blocks = torch.full((1, 1, 16), 0x21, dtype=torch.uint8)
    weights = mxfp4_weight(blocks, torch.tensor([[127]], dtype=torch.uint8)).dequantized(torch.bfloat16)
    assert weights[0, :2].tolist() == [0.5, 1.0]


def test_experts_equal_transformers():
    integration = pytest.importorskip("transformers.integrations.mxfp4")
    generator = torch.Generator().manual_seed(4)
    blocks = torch.randint(0, 256, (2, 6, 3, 16), generator=generator).to(torch.uint8)
    scales = torch.randint(100, 140, (2, 6, 3), generator=generator).to(torch.uint8)
    theirs = integration.convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    for expert in range(2):
        weights = mxfp4_weight(blocks[expert], scales[expert]).dequantized(torch.bfloat16)
        assert torch.equal(weights.t(), theirs[expert])


@pytest.mark.parametrize("scale", [253, 255])
def test_a_scale_that_is_no_number_or_too_large_is_refused(scale):
    scales = torch.tensor([[127], [scale]], dtype=torch.uint8)
    with pytest.raises(ValueError, match=f"has the value {scale}, expected at most 252"):
        mxfp4_weight(torch.zeros((2, 1, 16), dtype=torch.uint8), scales)
