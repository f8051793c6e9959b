"""Models that Transformers computes, from quantised checkpoints and with weights that are rounded on load."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from quire import kernels
from quire.kernels.grouped_weight import FP8, GroupedWeight
from quire.kernels.quantization import QuantizedWeight
from quire.shared.process.errors import CheckpointError
from quire.shared.protocol.messages import SamplingParams
from quire.worker.engine.engine import Engine
from quire.worker.engine.limits import EngineLimits
from quire.worker.engine.offline import generate
from quire.worker.models.transformers import trial
from quire.worker.models.transformers.bridge import TransformersModel
from quire.worker.models.transformers.config import read_transformers_config
from quire.worker.models.transformers.layer_weights import AS_THEY_ARE
from quire.worker.models.transformers.quantized import RoundedWeights, StoredWeights, _content
from tests.support.checkpoints import EOS_TOKEN_ID
from tests.support.hybrid_checkpoints import make_hybrid
from tests.support.parity import assert_greedy, load_reference
from tests.support.quantized import MIXTRAL_EXPERTS, PROJECTIONS, edit_config, quantize_checkpoint
from tests.support.selection import one_in
from tests.support.transformers_checkpoints import LLAMA_LIKE, make_other

# Linear layers of hybrid models, besides those of attention and MLPs.
OTHERS = ("in_proj", "out_proj", "in_proj_qkvz", "in_proj_qkv", "in_proj_z", "q_b_proj", "kv_a_proj_with_mqa",
          "kv_b_proj", "f_a_proj", "g_a_proj")  # fmt: skip
LAYERS = PROJECTIONS + MIXTRAL_EXPERTS + OTHERS
GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
LIMITS = EngineLimits(60, 8, 4, 32, 128, num_state_slots=40, snapshot_interval=16)
PROMPTS = [tuple((37 * at + 11 * at * length) % 250 + 1 for at in range(length)) for length in (5, 17, 33, 40)]

# Family and format. Transformers stacks the experts of Qwen3-Next and Nemotron-H, and renames tensors of Kimi-Linear.
CASES = [
    ("qwen3-next", "fp8-block"),
    ("nemotron-h", "gptq"),
    ("kimi-linear", "w4a16"),
    ("qwen3.5", "w4a16-asym"),  # groups of 16, which the kernels do not have
]
MORE_CASES = [
    ("qwen3-next", "gptq-order-32"),
    ("lfm2", "awq"),
    ("falcon-h1", "w8a16"),
    ("granite-moe-hybrid", "ct-fp8-channel"),
    ("qwen3-next", "modelopt-nvfp4"),
    ("lfm2", "nf4-double"),
    ("falcon-h1", "bnb-int8"),
]


def make_model(
    folder: Path, bits: int | str = 0, dtype: torch.dtype = torch.float32, name: str = "auto"
) -> TransformersModel:
    """Load a model. name: of the kernels."""
    ops = kernels.select_ops("cpu", dtype, name)
    return TransformersModel.load(read_transformers_config(folder), ops, "cpu", 128, bits=bits)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        *(pytest.param(*one, marks=pytest.mark.slow) for one in CASES),
        *(pytest.param(*one, marks=pytest.mark.soak) for one in MORE_CASES),
    ],
)
def test_quantised_checkpoints_give_the_tokens_of_their_dequantised_weights(
    family: str, name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = quantize_checkpoint(make_hybrid(tmp_path / "plain", family), tmp_path / name, name, layers=LAYERS)
    caplog.set_level(logging.INFO)
    model = make_model(folder)
    outputs = [choices[0] for choices in generate(Engine(model, LIMITS, (EOS_TOKEN_ID,), None), PROMPTS, GREEDY)]
    assert_greedy(load_reference(folder / "plain"), PROMPTS, outputs, tie=0.0)
    kept = [record.getMessage() for record in caplog.records if record.getMessage().startswith("quantised checkpoint")]
    assert len(kept) == 1
    stored = load_file(folder / "plain" / "model.safetensors")
    quantised = sum(name.split(".")[-2] in LAYERS and name.endswith(".weight") for name in stored)
    absorbed = family == "kimi-linear"  # one layer has a latent cache, which multiplies by the numbers
    assert sum(int(part.split()[0]) for part in kept[0].partition(": ")[2].split("; ")[:-1]) == quantised - absorbed
    has_codes = name != "w4a16-asym"
    assert ("without further rounding" in kept[0]) is has_codes
    assert (model.weight_bytes < 0.7 * make_model(folder / "plain").weight_bytes) is has_codes


@pytest.mark.slow
@pytest.mark.parametrize("dtype", one_in(2, [torch.float32, torch.bfloat16]))
@pytest.mark.parametrize("name", ["fp8-block", "awq", "w8a8", "nf4-double", "modelopt-nvfp4"])
def test_logits_are_those_of_the_dequantised_weights(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    try:
        kernels.CpuOps(dtype)  # plain torch keeps the weights in 16 bits
    except kernels.KernelsUnavailable as error:
        pytest.skip(str(error))
    source = make_other(tmp_path / "plain", "phi3", **(LLAMA_LIKE | {"pad_token_id": 0}))  # merged layers
    layers = (*PROJECTIONS, "qkv_proj", "gate_up_proj")
    folder = quantize_checkpoint(source, tmp_path / name, name, layers=layers)
    model, plain = make_model(folder, dtype=dtype), make_model(folder / "plain", dtype=dtype)
    assert model._has_integers is (name == "w8a8" and dtype is torch.float32)
    assert model.weight_bytes < plain.weight_bytes
    if model._has_integers:  # activations are rounded, too: the reference kernels do it in the same way
        plain = make_model(folder, dtype=dtype, name="reference")
    found, expected = (trial.over_pages(one, trial.texts(256, 64)) for one in (model, plain))
    assert (found - expected).norm() < {torch.float32: 1e-4, torch.bfloat16: 0.03}[dtype] * expected.norm()


@pytest.mark.slow
@pytest.mark.parametrize("bits", one_in(3, [4, 8, FP8]))
def test_weights_are_rounded_on_load(bits: int | str, tmp_path: Path) -> None:
    folder = make_hybrid(tmp_path / "plain", "qwen3-next")
    rounded, plain, reference = make_model(folder, bits), make_model(folder), make_model(folder, bits, name="reference")
    found, other, expected = (trial.over_pages(one, trial.texts(256, 64)) for one in (rounded, plain, reference))
    assert (found - expected).norm() < 1e-4 * expected.norm()
    assert (found - other).norm() > 0.01 * expected.norm()
    assert rounded.weight_bytes < {8: 0.5, 4: 0.42, FP8: 0.55}[bits] * plain.weight_bytes
    outputs = generate(Engine(rounded, LIMITS, (EOS_TOKEN_ID,), None), PROMPTS, GREEDY)
    again = generate(Engine(make_model(folder, bits), LIMITS, (EOS_TOKEN_ID,), None), PROMPTS[::-1], GREEDY)
    assert outputs == again[::-1]


def test_routers_and_a_tied_table_of_embeddings_are_not_rounded() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.gate, self.up = nn.Embedding(40, 64), nn.Linear(64, 4), nn.Linear(64, 96)
            self.head = nn.Linear(64, 40, bias=False)
            self.head.weight = self.embedding.weight

        def get_output_embeddings(self) -> nn.Module:
            return self.head

    model = Model()
    before = {name: values.clone() for name, values in model.state_dict().items()}
    weights = RoundedWeights(4)
    weights.round(model, [model.gate, model.up, model.head], [])
    changed = [name for name, values in model.state_dict().items() if not torch.equal(values, before[name])]
    assert changed == ["up.weight", "head.weight"]
    up, head = (weights.joined([layer.weight.data]) for layer in (model.up, model.head))
    assert isinstance(up, QuantizedWeight)
    assert isinstance(head, QuantizedWeight)
    assert (up.bits, head.bits) == (4, 8)
    assert torch.equal(up.dequantized(), model.up.weight)
    assert isinstance(weights.joined([model.gate.weight.data]), torch.Tensor)


def test_layers_with_the_same_input_are_joined_as_codes_if_all_are_codes() -> None:
    model: Any = nn.Module()
    model.first, model.second, model.other = nn.Linear(64, 8), nn.Linear(64, 24), nn.Linear(64, 8)
    model.get_output_embeddings = lambda: None
    weights = RoundedWeights(FP8)
    weights.round(model, [model.first, model.second], [])
    both = weights.joined([model.first.weight.data, model.second.weight.data])
    assert isinstance(both, GroupedWeight)
    assert torch.equal(both.dequantized(), torch.cat([model.first.weight, model.second.weight]))
    given = [model.first.weight.data, model.other.weight.data]
    assert torch.equal(weights.joined(given), torch.cat(given))
    assert torch.equal(AS_THEY_ARE.joined(given), torch.cat(given))
    weights.finish()
    assert isinstance(weights.joined([model.first.weight.data]), torch.Tensor)


def test_stored_weights_are_found_by_their_content(tmp_path: Path) -> None:
    source = make_other(tmp_path / "plain", "stablelm", **LLAMA_LIKE)
    folder = quantize_checkpoint(source, tmp_path / "gptq", "gptq")
    progress: list[tuple[int, int]] = []
    ops = kernels.select_ops("cpu", torch.float32, "reference")
    weights = StoredWeights(read_transformers_config(folder), ops, lambda *now: progress.append(now))
    tensors = weights.tensors()
    assert progress == sorted(progress)
    assert progress[-1][0] == progress[-1][1] > 0
    gate, up = (tensors[f"model.layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up"))
    for given in ([gate, up], [torch.cat([gate, up])]):
        found = weights.joined(given)
        assert isinstance(found, GroupedWeight)
        assert torch.equal(found.dequantized(), torch.cat([gate, up]))
    assert isinstance(weights.joined([gate + 1]), torch.Tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_with_values_in_other_places_have_another_content(dtype: torch.dtype) -> None:
    weight = torch.randn(12, 30).to(dtype)
    others = [weight.flip(0), weight.flip(1), weight[:, torch.randperm(30)], weight.t(), weight[:11], weight * 2]
    swapped = weight.clone()
    swapped[[3, 5]] = weight[[5, 3]]
    other = weight.clone()
    other[7, 9] += 1
    contents = {_content(one) for one in (weight, *others, swapped, other)}
    assert len(contents) == 9
    assert _content(weight.clone()) == _content(weight)


def test_formats_that_are_not_read_are_refused(tmp_path: Path) -> None:
    folder = make_other(tmp_path / "plain", "stablelm", **LLAMA_LIKE)
    for method, why in (("hqq", "awq, bitsandbytes, compressed-tensors"), ("mxfp4", "formats other than mxfp4")):
        edit_config(folder, quantization_config={"quant_method": method})
        with pytest.raises(CheckpointError, match=why):
            read_transformers_config(folder)
