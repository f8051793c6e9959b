"""quantization_config: known fields are read, and other fields are refused by name."""

from __future__ import annotations

import pytest

from quire.worker.models.errors import CheckpointError
from quire.worker.models.fields import Fields
from quire.worker.models.quantized.config import read_quantization
from tests.support.quantized import FORMATS, group, scheme


def parse(quantization, name="quantization_config"):
    return read_quantization(Fields({name: quantization}, "config.json"))


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_read(name):
    quantization = parse(FORMATS[name][1])
    assert quantization is not None
    assert quantization.label
    assert quantization.rounds_activations == (name == "w8a8")


def test_a_plain_checkpoint_has_none():
    assert read_quantization(Fields({}, "config.json")) is None


def test_the_old_field_without_a_method_is_compressed_tensors():
    quantization = {key: value for key, value in FORMATS["w4a16"][1].items() if key != "quant_method"}
    found = parse(quantization, "compression_config")
    assert found is not None
    assert found.label.startswith("compressed-tensors")


@pytest.mark.parametrize("method", ["bitsandbytes", "modelopt", "hqq", "quark", 4, None])
def test_other_methods_are_refused_by_name(method):
    with pytest.raises(CheckpointError, match=r"config.json, quantization_config: quant_method is .*supported: awq"):
        parse({"quant_method": method})


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128}
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
        (scheme("nvfp4-pack-quantized", PACKED[1]), 'format is "nvfp4-pack-quantized"'),
        (scheme(*PACKED, quantization_status="frozen"), 'quantization_status is "frozen"; supported: compressed'),
        (scheme(*PACKED, sparsity_config={"format": "sparse-24-bitmask"}), 'sparsity_config: format is "sparse-24'),
        (scheme(*PACKED, transform_config={"config_groups": {"u": {}}}), "transform_config: config_groups is"),
        (scheme(*PACKED, ignore="lm_head"), 'ignore is "lm_head"; supported: a list of names'),
        (scheme(*PACKED, ignore=["re:(a+)+"]), "ignore is"),
        (scheme(*PACKED, novelty=7), "novelty is 7"),
        (scheme(*PACKED, config_groups={}), "config_groups is"),
        (with_weights(bits=3), "num_bits is 3; supported: 4 or 8"),
        (with_weights(kind="odd"), 'type is "odd"; supported: int or float'),
        (with_weights(bits=4, kind="float"), "num_bits is 4; supported: 8 for floating-point"),
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
