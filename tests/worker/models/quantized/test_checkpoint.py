"""Quantised checkpoints: faults of tensors are refused in one line, and tensors are read as numbers."""

from __future__ import annotations

import math
import shutil
from itertools import islice
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tokenizers import Tokenizer

from quire import kernels
from quire.ops.paths import PROJECT_ROOT
from quire.shared.process.errors import CheckpointError
from quire.worker.engine.forward_batch import ForwardBatch
from quire.worker.models.files.quantized.checkpoint import is_finite
from quire.worker.models.files.quantized.dequantized_checkpoint import DequantizedCheckpoint
from quire.worker.models.native.config import read_config
from quire.worker.models.native.decoder import Decoder
from quire.worker.models.native.sharding import ALL
from tests.support.quantized import FORMATS, edit_config, edit_tensors, quantize_checkpoint
from tests.worker.models.quantized.conftest import open_quantized

# --- perplexity -------------------------------------------------------------------------------------------------------
# The perplexity of the demo model, by the C++ kernels.

DEMO = PROJECT_ROOT / "models" / "demo"
Document = tuple[list[int], list[int]]  # token ids and labels; a negative label is not predicted
BLOCK_SIZE, BLOCKS = 16, 64


def perplexity(model: Decoder, documents: list[Document]) -> float:
    """Return the perplexity of the labels that are not negative. Each document is one prefill."""
    cache = model.alloc_kv_cache(BLOCKS, BLOCK_SIZE)
    total, count = 0.0, 0
    for ids, labels in documents:
        targets = torch.tensor(labels[1:])
        total += float(F.cross_entropy(model.forward(document_batch(ids), cache)[:-1], targets, reduction="sum"))
        count += int((targets >= 0).sum())
    return math.exp(total / count)


def document_batch(ids: list[int]) -> ForwardBatch:
    """Return one prefill of a document with logits of all tokens."""
    length = len(ids)
    return ForwardBatch(
        token_ids=torch.tensor(ids, dtype=torch.int32),
        positions=torch.arange(length, dtype=torch.int32),
        slot_mapping=torch.arange(length, dtype=torch.int32),
        block_tables=torch.arange(BLOCKS, dtype=torch.int32)[None],
        seq_lens=torch.tensor([length], dtype=torch.int32),
        query_start_loc=torch.tensor([0, length], dtype=torch.int32),
        logits_rows=torch.arange(length),
    )


def read_documents(tokenizer: Tokenizer, count: int) -> list[Document]:
    """Return held-out documents: their nouns and requests are not in the training data of the demo model."""
    from models.demo.training.corpus import encoded_stream  # a folder of the repository, not of the package

    return [(one.ids, one.labels) for one in islice(encoded_stream("perplexity", tokenizer, True), count)]


UP = "model.layers.1.mlp.up_proj"


def drop(name):
    return lambda tensors: tensors.pop(name)


def put(name, change):
    return lambda tensors: tensors.__setitem__(name, change(tensors[name]).contiguous())


def fill(value):
    return lambda tensor: tensor.clone().index_fill_(0, torch.tensor([1]), value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("gptq", drop(f"{UP}.qweight"), f"tensor {UP}.qweight is missing, expected with the shape [8, 96]"),
        ("gptq", drop(f"{UP}.qzeros"), f"tensor {UP}.qzeros is missing, expected with the shape [2, 12]"),
        ("gptq", drop(f"{UP}.scales"), f"tensor {UP}.scales is missing"),
        ("gptq-order", drop(f"{UP}.g_idx"), f"tensor {UP}.g_idx is missing, expected with the shape [64]"),
        ("gptq-order", put(f"{UP}.g_idx", lambda old: old + 1), f"tensor {UP}.g_idx has values from 1 to 4, expected"),
        ("gptq-order", put(f"{UP}.g_idx", lambda old: old - 1), f"tensor {UP}.g_idx has values from -1 to 2"),
        ("gptq", put(f"{UP}.scales", fill(float("nan"))), f"tensor {UP}.scales has values that are not finite"),
        ("gptq", put(f"{UP}.scales", fill(float("inf"))), f"tensor {UP}.scales has values that are not finite"),
        ("gptq", put(f"{UP}.scales", lambda old: old[:1]), f"tensor {UP}.scales has the shape [1, 96], expected [2, 9"),
        ("gptq", put(f"{UP}.qweight", lambda old: old.long()), f"tensor {UP}.qweight has the type I64, expected I32"),
        ("gptq", put(f"{UP}.scales", lambda old: old.int()), f"tensor {UP}.scales has the type I32, expected F16 or"),
        ("gptq", put(f"{UP}.scales", fill(60000.0)), f"tensor {UP}.weight has values that are not finite as"),
        (
            "gptq",
            lambda tensors: tensors.__setitem__(f"{UP}.weight", torch.zeros(96, 64)),
            f"tensors {UP}.weight and {UP}.qweight are of the same layer, expected one of them",
        ),
        ("awq", put(f"{UP}.qweight", lambda old: old.T), f"tensor {UP}.qweight has the shape [12, 64], expected [64, "),
        ("w8a8", drop(f"{UP}.weight_scale"), f"tensor {UP}.weight_scale is missing"),
        ("w8a8", put(f"{UP}.weight", lambda old: old.float()), f"tensor {UP}.weight has the type F32, expected I8"),
        ("w4a16", put(f"{UP}.weight_shape", lambda old: old + 1), f"tensor {UP}.weight_shape is [97, 65], expected"),
        ("w4a16-asym", drop(f"{UP}.weight_zero_point"), f"tensor {UP}.weight_zero_point is missing"),
        ("w4a16-order", drop(f"{UP}.weight_g_idx"), f"tensor {UP}.weight_g_idx is missing"),
        ("fp8-block", drop(f"{UP}.weight_scale_inv"), f"tensor {UP}.weight_scale_inv is missing"),
        (
            "fp8-block",
            put(f"{UP}.weight_scale_inv", lambda old: old[:, :1]),
            f"tensor {UP}.weight_scale_inv has the shape [3, 1], expected [3, 2]",
        ),
        (
            "fp8-block",
            put(f"{UP}.weight", lambda old: torch.full((96, 64), 127, dtype=torch.uint8).view(old.dtype)),
            f"tensor {UP}.weight has values that are not finite",
        ),
        (
            "fp8-block",
            put(f"{UP}.weight", lambda old: old.to(torch.float8_e5m2)),
            f"tensor {UP}.weight has the type F8_",
        ),
        (
            "gptq",
            put("model.embed_tokens.weight", lambda old: old.to(torch.int8)),
            "tensor model.embed_tokens.weight has the type I8",
        ),
    ],
)
def test_a_bad_tensor_is_refused_in_one_line(quantized, name, change, message):
    folder = quantized(name)
    edit_tensors(folder, change)
    with pytest.raises(CheckpointError) as caught:
        open_quantized(folder).read([f"{UP}.weight"], torch.float32)
    said = str(caught.value)
    assert said.startswith(str(folder))
    assert message in said
    assert said.count("; ") >= 1
    assert "\n" not in said


def test_an_ignored_layer_is_plain(quantized, plain):
    folder = quantized("w4a16")
    config = open_quantized(folder).quantization
    assert config.layer("lm_head", lambda _: None) is None
    of_group = {"targets": ["re:.*mlp.*"], "weights": {"num_bits": 4, "strategy": "group", "group_size": 32}}
    quantization = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"a": of_group}}
    edit_config(folder, quantization_config=quantization)
    with pytest.raises(CheckpointError, match=r"q_proj.weight is missing, expected with the shape \[64, 64\]"):
        open_quantized(folder)


def test_parts_are_those_of_the_whole(quantized):
    checkpoint = open_quantized(quantized("gptq-order"))
    whole = checkpoint.read([f"{UP}.weight"], torch.float32)
    part = (slice(8, 24), ALL)
    assert torch.equal(checkpoint.read([f"{UP}.weight"], torch.float32, parts=[part]), whole[part])


@pytest.mark.parametrize(
    "dtypes", [(torch.bfloat16,), (torch.float32,), (torch.float32, torch.bfloat16, torch.float16)]
)
def test_weights_are_rounded_once_to_a_type_that_the_kernels_have(quantized, dtypes):
    folder = quantized("gptq")
    exact = load_file(folder / "plain" / "model.safetensors")[f"{UP}.weight"]
    checkpoint = open_quantized(folder, dtypes)
    kept = checkpoint.stored_dtype(f"{UP}.weight")
    assert kept is (torch.float16 if len(dtypes) > 1 else dtypes[0])
    assert torch.equal(checkpoint.read([f"{UP}.weight"], kept), exact.to(kept))


def test_values_of_8_bits_that_are_no_numbers_are_found():
    for dtype, bad in ((torch.float8_e4m3fn, (127, 255)), (torch.float8_e8m0fnu, (255,))):
        codes = torch.arange(256, dtype=torch.uint8)
        found = {at for at in range(256) if not is_finite(codes[at : at + 1].view(dtype))}
        assert found == set(bad)
    assert is_finite(torch.tensor([1, 2]))
    assert not is_finite(torch.tensor([1.0, float("inf")]))


FLOATS = (torch.float32, torch.bfloat16)


def opened(folder: Path) -> DequantizedCheckpoint:
    quantization = read_config(folder).quantization
    assert quantization is not None
    return DequantizedCheckpoint(folder, quantization, FLOATS)


@pytest.mark.parametrize("name", FORMATS)
def test_all_tensors_have_the_values_that_they_stand_for(quantized, name: str) -> None:
    folder = quantized(name)
    checkpoint, plain = opened(folder), load_file(folder / "plain" / "model.safetensors")
    found = {at: (values, is_quantized) for at, values, is_quantized in checkpoint.tensors(torch.float32)}
    assert found.keys() == plain.keys()
    for at, (values, _) in found.items():
        assert torch.equal(values.float(), plain[at]), at
    assert sum(is_quantized for _, is_quantized in found.values()) == 14
    assert checkpoint.num_elements() == sum(values.numel() for values in plain.values())


def test_weights_are_rounded_to_the_asked_type_once(quantized) -> None:
    folder = quantized("awq")
    plain = load_file(folder / "plain" / "model.safetensors")
    for name, values, is_quantized in opened(folder).tensors(torch.bfloat16):
        if is_quantized:
            assert torch.equal(values, plain[name].bfloat16())


def test_names_stay_those_of_the_files(quantized) -> None:
    """A wrapper of a vision-language model has other names, for which Transformers has its own rules."""
    folder = quantized("fp8-block")

    def wrap(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith("model.")]:
            tensors[name.replace("model.", "model.language_model.", 1)] = tensors.pop(name)

    edit_tensors(folder, wrap)
    names = [name for name, _, _ in opened(folder).tensors(torch.float32)]
    assert "model.language_model.layers.0.mlp.up_proj.weight" in names
    assert not any(name.endswith("weight_scale_inv") for name in names)


@pytest.mark.parametrize(
    ("name", "end", "why"),
    [
        ("fp8-block", "weight_scale_inv", "has the type F8_E4M3"),
        ("w8a8", "weight_scale", "has the type I8"),
        ("gptq", "qzeros", "qzeros is missing"),
        ("w4a16", "weight_shape", "weight_shape is missing"),
    ],
)
def test_a_layer_without_one_of_its_tensors_is_refused(quantized, name: str, end: str, why: str) -> None:
    folder = quantized(name)
    edit_tensors(folder, lambda tensors: [tensors.pop(at) for at in list(tensors) if at.endswith(f"up_proj.{end}")])
    with pytest.raises(CheckpointError, match=why):
        opened(folder)


def test_weights_with_another_number_of_dimensions_are_refused(quantized) -> None:
    folder = quantized("gptq")
    edit_tensors(folder, lambda tensors: tensors.update({"model.layers.0.mlp.up_proj.qweight": torch.ones(4).int()}))
    with pytest.raises(CheckpointError, match=r"up_proj.qweight has the shape \[4\], expected two dimensions"):
        opened(folder)


def test_scales_that_are_not_finite_are_refused(quantized) -> None:
    folder = quantized("fp8-tensor")
    name = "model.layers.1.mlp.up_proj.weight_scale"
    edit_tensors(folder, lambda tensors: tensors.update({name: torch.tensor(torch.nan)}))
    with pytest.raises(CheckpointError, match=f"tensor {name} has values that are not finite"):
        list(opened(folder).tensors(torch.float32))


# The largest accepted ratio to the perplexity of the bfloat16 weights.
EIGHT_BITS, FOUR_BITS = 1.001, 1.006

LIMITS = {name: EIGHT_BITS if "8" in name or name == "fbgemm" else FOUR_BITS for name in FORMATS}


@pytest.mark.soak
def test_perplexity_of_each_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        ops = kernels.CpuOps(torch.float32)
    except kernels.KernelsUnavailable:
        pytest.skip("no C++ kernels")
    monkeypatch.syspath_prepend(str(PROJECT_ROOT))
    source = tmp_path / "demo"
    shutil.copytree(DEMO, source, ignore=shutil.ignore_patterns("training"))
    documents = read_documents(Tokenizer.from_file(str(source / "tokenizer.json")), 64)

    def measured(folder: Path) -> float:
        model = Decoder.load(folder, ops, torch.float32, "cpu")
        with torch.inference_mode():
            found = perplexity(model, documents)
        print(f"| {folder.name} | {found:.4f} | {model.weight_bytes / 2**20:.1f} MiB |")
        return found

    plain = measured(source)
    found = {name: measured(quantize_checkpoint(source, tmp_path / name, name)) / plain for name in FORMATS}
    assert {name: ratio for name, ratio in found.items() if not 0.99 < ratio < LIMITS[name]} == {}
