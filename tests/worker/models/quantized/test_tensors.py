"""bitsandbytes, NVFP4 and AutoRound: what their tensors say beyond their shapes, and layers of other formats in one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from quire.kernels.weights import NVFP4, UINT4, UINT8, GroupedWeight
from quire.shared.model.fields import Fields
from quire.shared.process.errors import CheckpointError
from quire.worker.models.files.quantized.auto_round import read_auto_round
from quire.worker.models.files.quantized.bitsandbytes import BLOCK, FourBitLayer
from quire.worker.models.files.quantized.layout import TensorFault
from quire.worker.models.files.quantized.nvfp4 import compressed_nvfp4
from quire.worker.models.native.config import read_config
from tests.support.quantized import edit_config, edit_tensors
from tests.support.quantized_floats import TABLES, bnb_4bit
from tests.worker.models.quantized.conftest import open_quantized

UP = "model.layers.1.mlp.up_proj"
STATE = f"{UP}.weight.quant_state.bitsandbytes__nf4"


def with_state(**fields: Any) -> Callable[[dict[str, torch.Tensor]], None]:
    """Return a change of the text of a layer. A field that is None is left out."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        state = json.loads(bytes(tensors[STATE].tolist())) | fields
        text = json.dumps({name: value for name, value in state.items() if value is not None})
        tensors[STATE] = torch.tensor([*text.encode()], dtype=torch.uint8)

    return change


def put(end: str, value: torch.Tensor) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors.__setitem__(f"{UP}.{end}", value)


def text(value: str) -> Callable[[dict[str, torch.Tensor]], None]:
    return put(STATE.removeprefix(f"{UP}."), torch.tensor([*value.encode()], dtype=torch.uint8))


def drop(end: str) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors.pop(f"{UP}.{end}")


NAN, INFINITY = torch.tensor(torch.nan), torch.tensor(torch.inf)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("nf4-double", with_state(blocksize=128), f"tensor {STATE} has the blocksize 128, expected 64"),
        ("nf4-double", with_state(quant_type="fp4"), f"tensor {STATE} has the quant_type 'fp4', expected 'nf4'"),
        ("nf4-double", with_state(nested_blocksize=64), f"tensor {STATE} has the nested_blocksize 64, expected 256"),
        ("nf4-double", with_state(nested_offset=None), f"tensor {STATE} has the nested_offset None, expected a number"),
        ("nf4-double", with_state(shape=[96]), f"tensor {STATE} has the shape [96], expected two numbers"),
        (
            "nf4-double",
            with_state(shape=[64, 96]),
            f"tensor {STATE} has the shape [64, 96], expected 64 input features",
        ),
        ("nf4-double", with_state(nested_offset=1e39), "nested_absmax makes scales that are not"),
        ("nf4", text("{"), f"tensor {STATE} is not valid JSON"),
        ("nf4", text("[]"), f"tensor {STATE} has the quant_type None"),
        ("nf4", text("1" * 5000), "expected a text of at most 4096 bytes"),
        ("nf4", lambda tensors: tensors.pop(STATE), f"tensor {STATE} is missing"),
        ("nf4", put("weight.absmax", NAN.repeat(96)), f"tensor {UP}.weight.absmax has values that are not finite"),
        ("nf4", put("weight.absmax", torch.ones(95)), f"tensor {UP}.weight.absmax has the shape [95], expected [96]"),
        (
            "nf4",
            put("weight.quant_map", torch.ones(15)),
            f"tensor {UP}.weight.quant_map has the shape [15], expected [",
        ),
        ("bnb-int8", put("SCB", INFINITY.repeat(96)), f"tensor {UP}.SCB has values that are not finite"),
        ("bnb-int8", drop("SCB"), f"tensor {UP}.SCB is missing"),
        ("bnb-int8", put("weight_format", torch.tensor(1).byte()), f"tensor {UP}.weight_format is [1], expected [0]"),
        ("modelopt-nvfp4", drop("weight_scale_2"), f"tensor {UP}.weight_scale_2 is missing"),
        ("modelopt-nvfp4", put("pre_quant_scale", torch.ones(64)), f"no {UP}.pre_quant_scale, which scales"),
        ("modelopt-nvfp4", put("weight_scale_2", NAN), f"tensor {UP}.weight_scale_2 has values that are not finite"),
        ("ct-nvfp4", put("weight_global_scale", torch.zeros(1)), f"tensor {UP}.weight_global_scale is 0, expected"),
        ("ct-nvfp4", put("weight_scale", torch.ones(96, 4)), f"tensor {UP}.weight_scale has the type F32, expected F8"),
        (
            "ct-mxfp4",
            put("weight_scale", torch.full((96, 2), 255).byte()),
            f"tensor {UP}.weight_scale has the value 255",
        ),
    ],
)
def test_a_bad_tensor_is_refused_by_its_name(quantized, name, change, message) -> None:
    folder = quantized(name)
    edit_tensors(folder, change)
    with pytest.raises(CheckpointError) as caught:
        open_quantized(folder).read([f"{UP}.weight"], torch.float32)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("n", "k"), [(5, 31), (6, 96), (3, 40), (1, 64)])
@pytest.mark.parametrize("double", [False, True])
def test_blocks_of_bitsandbytes_may_cross_the_ends_of_rows(n: int, k: int, double: bool) -> None:
    tensors, expected = bnb_4bit("nf4", double)(torch.randn(n, k, generator=torch.Generator().manual_seed(k)))
    layout = FourBitLayer("nf4", double)
    assert layout.shape(lambda _: None, tensors.get) == (n, k)
    weight = layout.weight(n, k, tensors.get)
    assert torch.equal(weight.dequantized(torch.float32), expected)
    assert (weight.grouped() is None) is bool(k % 32)


def test_a_table_of_other_values_is_expanded() -> None:
    table = TABLES["nf4"] * 0.5
    tensors, expected = bnb_4bit("nf4", table=table)(torch.randn(4, BLOCK, generator=torch.Generator().manual_seed(1)))
    weight = FourBitLayer("nf4", False).weight(4, BLOCK, tensors.get)
    assert torch.equal(weight.dequantized(torch.float32), expected)
    assert weight.grouped() is None


@pytest.mark.parametrize("name", ["nf4", "bnb-int8", "modelopt-nvfp4", "ct-nvfp4"])
def test_one_layer_may_be_plain(quantized, name: str) -> None:
    """The tensors show it, except for compressed-tensors, where the list of layers counts."""
    folder = quantized(name)
    plain = load_file(folder / "plain" / "model.safetensors")[f"{UP}.weight"].bfloat16()

    def unpack(tensors: dict[str, torch.Tensor]) -> None:
        for at in [at for at in tensors if at.startswith(UP)]:
            del tensors[at]
        tensors[f"{UP}.weight"] = plain

    edit_tensors(folder, unpack)
    if name == "ct-nvfp4":
        config = json.loads((folder / "config.json").read_text())["quantization_config"]
        edit_config(folder, quantization_config=config | {"ignore": ["lm_head", UP]})
    checkpoint = open_quantized(folder)
    assert checkpoint.layout(f"{UP}.weight") is None
    assert torch.equal(checkpoint.read([f"{UP}.weight"], torch.float32), plain.float())


def test_a_configuration_of_model_optimizer_may_be_in_a_file_of_its_own(quantized) -> None:
    folder: Path = quantized("modelopt-nvfp4")
    edit_config(folder, quantization_config=None)
    quantization = {
        "quant_algo": "NVFP4",
        "group_size": 16,
        "kv_cache_quant_algo": "FP8",
        "exclude_modules": ["lm_head"],
    }
    path = folder / "hf_quant_config.json"
    path.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": quantization}))
    weight = open_quantized(folder).codes([f"{UP}.weight"], [()])
    assert weight is not None
    assert weight.kind == NVFP4
    path.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": None}}))
    assert read_config(folder).quantization is None
    path.write_text(json.dumps({"quantization": quantization | {"quant_algo": "W4A16_AWQ"}}))
    with pytest.raises(CheckpointError, match=r"hf_quant_config.json, quantization: quant_algo is .W4A16_AWQ."):
        read_config(folder)


def test_input_features_that_are_no_multiple_of_a_group_are_refused() -> None:
    with pytest.raises(TensorFault) as caught:
        compressed_nvfp4().weight(2, 24, lambda _: torch.ones(2, 2))
    assert caught.value.what == "is of 24 input features, expected a multiple of 16"


def test_layers_of_auto_round_may_have_other_bits() -> None:
    fields = {"bits": 4, "group_size": 32, "sym": True, "packing_format": "auto_round:auto_gptq"}
    extra = {"down_proj.*": {"bits": 8}, "model.layers.0.mlp.down_proj": {"bits": 4}, "lm_head": {"bits": 16}}
    found = read_auto_round(Fields(fields | {"extra_config": extra}, "config.json"))
    kinds = {}
    for layer, bits in (("0.mlp.down_proj", 4), ("1.mlp.down_proj", 8), ("1.mlp.up_proj", 4)):
        name = f"model.layers.{layer}"
        layout = found.layer(name, {f"{name}.qweight": "I32"}.get)
        assert layout is not None
        tensors = {"qweight": torch.zeros(bits, 8).int(), "scales": torch.ones(1, 8, dtype=torch.float16)}
        codes = layout.weight(8, 32, tensors.get).grouped()
        assert isinstance(codes, GroupedWeight)
        kinds[layer] = codes.kind
    assert kinds == {"0.mlp.down_proj": UINT4, "1.mlp.down_proj": UINT8, "1.mlp.up_proj": UINT4}
    assert found.layer("lm_head", {"lm_head.weight": "BF16"}.get) is None
