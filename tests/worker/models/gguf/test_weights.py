"""A decoder that reads a GGUF file computes the logits of the checkpoint, or of its weights as they are rounded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.kernels import Ops
from quire.kernels.k_quant_weight import K_QUANT6
from quire.ops.tools import gguf_writer
from quire.ops.tools.gguf_writer import TYPES, fitting, quantized, write_gguf
from quire.shared.model.gguf.file import open_gguf
from quire.shared.process.errors import CheckpointError
from quire.worker.inspect.fingerprint import of_weights
from quire.worker.models.files.gguf.weights import GGUFWeights
from quire.worker.models.files.loader import Weights
from quire.worker.models.native.decoder import Decoder
from tests.support.checkpoints import VOCAB_SIZE
from tests.worker.models.test_decoder import Stepper, operations

FAMILIES = ("llama", "llama-bias", "llama3-rope", "llama-linear-rope", "qwen2", "qwen3", "qwen3-bias", "mistral")
TOLERANCE = 1e-4


def logits(path: Path, ops: Ops) -> torch.Tensor:
    """The logits of one prompt, computed in three steps."""
    model = Decoder.load(path, ops, ops.dtype, "cpu")
    prompt = torch.randint(0, VOCAB_SIZE, (40,), generator=torch.Generator().manual_seed(1))
    return Stepper(model, [prompt]).run([{0: 13}, {0: 26}, {0: 1}])[0]


def rounded(folder: Path, out: Path, kind: str) -> Path:
    """The checkpoint with the matrices that a GGUF file of this type holds, expanded to float32 by the package."""
    shutil.copytree(folder, out)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.dim() == 2:
            stored = fitting(tensor.float().numpy(), kind)
            raw = quantized(tensor.float().numpy(), stored)
            expanded = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[stored])
            tensors[name] = torch.from_numpy(np.ascontiguousarray(expanded))
    save_file(tensors, out / "model.safetensors")
    return out


def wide() -> dict[str, float]:
    """Sizes for blocks of 256 weights, and weights with which logits do not saturate."""
    return {"hidden_size": 256, "intermediate_size": 256, "initializer_range": 0.1}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_float32_file_has_the_logits_of_the_checkpoint(family: str, gguf_files) -> None:  # type: ignore[no-untyped-def]
    changes = {"use_sliding_window": False} if family == "qwen3-bias" else {}
    folder, file = gguf_files(family, **changes)
    ops = operations("cpu")
    torch.testing.assert_close(logits(file, ops), logits(folder, ops), rtol=0, atol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("kind", TYPES)
def test_weights_are_those_that_the_published_package_expands(kind: str, gguf_files, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    folder, file = gguf_files("llama", kind, **wide())
    expected = load_file(rounded(folder, tmp_path / "rounded", kind) / "model.safetensors")
    weights = GGUFWeights(file)
    for name, tensor in expected.items():
        assert torch.equal(weights.read([name], torch.float32), tensor.float()), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "family"), [("F16", "qwen3"), ("Q8_0", "llama"), ("Q4_0", "llama"), ("Q4_K", "qwen2"), ("Q6_K", "qwen3")]
)
def test_logits_are_those_of_the_expanded_weights(kind: str, family: str, gguf_files, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    folder, file = gguf_files(family, kind, **wide())
    expected = logits(rounded(folder, tmp_path / "rounded", kind), operations("reference"))
    found = logits(file, operations("cpu"))
    error = float((found - expected).square().mean().sqrt() / expected.std())
    # float16 rounds the table to 11 bits. The product of integers rounds the activations of each token to 8 bits.
    assert error < (0.1 if kind == "Q4_0" else 0.003), error


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "bits"),
    [("F16", 16), ("Q8_0", 9), ("Q5_0", 9), ("Q4_1", 16), ("Q6_K", 7.25), ("Q5_K", 7.25), ("Q4_K", 5.25),
     ("Q3_K", 5.25), ("Q2_K", 5.25)],
)  # fmt: skip
def test_codes_stay_narrow(kind: str, bits: float, dtype: torch.dtype, gguf_files) -> None:  # type: ignore[no-untyped-def]
    folder, file = gguf_files("qwen2", kind, **wide())
    model = Decoder.load(file, operations("cpu", dtype), dtype, "cpu")
    shapes = {name: tensor.shape for name, tensor in load_file(folder / "model.safetensors").items()}
    linear = sum(shape.numel() for name, shape in shapes.items() if "_proj.weight" in name)
    others = sum(shape.numel() for name, shape in shapes.items() if "_proj.weight" not in name)
    # The table has 16 bits, and the tied head is packed from it. Biases and norms are small.
    assert model.weight_bytes == pytest.approx(linear * bits / 8 + 2 * others * 2, rel=0.06)


def test_integers_of_q4_0_have_4_bits_with_activations_of_either_type(gguf_files) -> None:  # type: ignore[no-untyped-def]
    _, file = gguf_files("qwen2", "Q4_0", **wide())
    sizes = [
        Decoder.load(file, operations("cpu", dtype), dtype, "cpu").weight_bytes
        for dtype in (torch.float32, torch.bfloat16)
    ]
    assert sizes[0] < sizes[1] < sizes[0] * 1.12


def test_projections_of_several_types_have_the_codes_of_all(gguf_files, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """As in the files of llama.cpp with the ending _M: values are Q6_K where queries and keys are Q4_K."""
    folder, _ = gguf_files("qwen3", "Q4_K", **wide())
    file = write_mixed(folder, tmp_path / "mixed.gguf")
    weights = GGUFWeights(file)
    names = [f"model.layers.0.self_attn.{one}_proj.weight" for one in "qkv"]
    assert [weights.layout(name).label for name in names] == ["Q4_K", "Q4_K", "Q6_K"]
    packed = weights.codes(names, [()] * 3)
    assert packed is not None
    assert packed.kind == K_QUANT6
    assert torch.equal(packed.dequantized(), weights.read(names, torch.float32))
    assert weights.codes(names[:1], [(slice(0, 64),)], names).kind == K_QUANT6
    found, expected = (logits(file, operations(kind)) for kind in ("cpu", "reference"))
    # The table, which is also the head, has float16 on the CPU.
    assert float((found - expected).square().mean().sqrt() / expected.std()) < 0.003


def write_mixed(folder: Path, out: Path) -> Path:
    """Write a file of Q4_K whose value projections are Q6_K."""
    with pytest.MonkeyPatch.context() as patch:
        name = ""

        def fitting_of(values: np.ndarray, kind: str) -> str:
            return "Q6_K" if name.endswith("attn_v.weight") else fitting(values, kind)

        def tensors(*args: Any) -> Iterator[tuple[str, np.ndarray]]:
            nonlocal name
            for tensor in read_tensors(*args):
                name = tensor[0]
                yield tensor

        read_tensors = gguf_writer._tensors
        patch.setattr(gguf_writer, "_tensors", tensors)
        patch.setattr(gguf_writer, "fitting", fitting_of)
        return write_gguf(folder, out, "Q4_K")


def test_the_log_says_how_the_weights_are_kept(gguf_files, caplog) -> None:  # type: ignore[no-untyped-def]
    caplog.set_level("INFO")
    Decoder.load(gguf_files("qwen2", "Q4_0")[1], operations("cpu"), torch.float32, "cpu")
    assert "GGUF, Q4_0: 21 layers: Q4_0 as int4 without further rounding" in caplog.text
    caplog.clear()
    Decoder.load(gguf_files("qwen2", "Q8_0")[1], operations("cpu"), torch.float32, "cpu")
    assert "21 layers: Q8_0 as uint8 without further rounding; activations are not rounded" in caplog.text


def test_parts_are_the_slices_of_the_whole(gguf_files) -> None:  # type: ignore[no-untyped-def]
    weights = GGUFWeights(gguf_files("llama", "Q4_0")[1])
    for name in ("model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.o_proj.weight"):
        whole = weights.read([name], torch.float32)
        for part in ((slice(32, 64), slice(None)), (slice(None), slice(32, 64))):
            assert torch.equal(weights.read([name], torch.float32, parts=[part]), whole[part])
            exact = weights.exact([name], 4, [part])
            assert exact is not None
            assert torch.equal(exact.dequantized(), whole[part])
        assert weights.exact([name], 8, [()]) is None
        assert weights.exact([name], 4, [(slice(None), slice(16, 64))]) is None


def test_values_that_are_not_finite_are_refused(gguf_files, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    for kind, said in (("F16", "values that are not finite as float16"), ("Q4_0", "scales that are not finite")):
        _folder, file = gguf_files("qwen2", kind)
        content = bytearray(file.read_bytes())
        start = open_gguf(file).tensors["blk.1.ffn_up.weight"].start
        content[start : start + 2] = b"\0\x7c"  # infinity
        (tmp_path / f"{kind}.gguf").write_bytes(content)
        with pytest.raises(CheckpointError, match=rf"tensor blk\.1\.ffn_up\.weight has {said}"):
            Decoder.load(tmp_path / f"{kind}.gguf", operations("cpu"), torch.float32, "cpu")


def test_the_digest_tells_files_apart(gguf_files) -> None:  # type: ignore[no-untyped-def]
    _, file = gguf_files("llama", "Q4_0")
    assert of_weights(file) == of_weights(file)
    assert of_weights(file) != of_weights(gguf_files("llama", "Q8_0")[1])


def changed(folder: Path, out: Path, **tensors: torch.Tensor | None) -> Path:
    """A GGUF file of the checkpoint with other tensors; None leaves one out."""
    copy = out / "checkpoint"
    shutil.copytree(folder, copy)
    found = load_file(copy / "model.safetensors")
    for name, tensor in tensors.items():
        name = name.replace("__", ".")
        found.pop(name)
        if tensor is not None:
            found[name] = tensor
    save_file(found, copy / "model.safetensors")
    return write_gguf(copy, out / "a.gguf", "F16")


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        (None, r"tensor blk\.1\.ffn_up\.weight is missing"),
        (torch.ones(64, 64), r"tensor blk\.1\.ffn_up\.weight has the shape \[64, 64\], expected \[96, 64\]"),
    ],
)
def test_a_wrong_tensor_is_refused_by_its_name(tensor, said: str, gguf_files, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    file = changed(gguf_files("qwen2")[0], tmp_path, model__layers__1__mlp__up_proj__weight=tensor)
    with pytest.raises(CheckpointError, match=said) as caught:
        Decoder.load(file, operations("cpu"), torch.float32, "cpu")
    assert str(caught.value).startswith(f"{file}: ")


def test_a_tensor_of_another_architecture_is_refused(gguf_files) -> None:  # type: ignore[no-untyped-def]
    weights = GGUFWeights(gguf_files("qwen3")[1])
    expected = {"model.layers.0.mlp.up_proj.weight": (96, 64)}
    with pytest.raises(CheckpointError, match=r"tensor '.*' is not part of this architecture"):
        weights.check(expected)


def test_names_of_the_checkpoint_are_found(gguf_files) -> None:  # type: ignore[no-untyped-def]
    folder, file = gguf_files("qwen3")
    weights = GGUFWeights(file)
    assert all(name in weights for name in load_file(folder / "model.safetensors"))
    assert "model.layers.3.mlp.up_proj.weight" not in weights
    assert ("lm_head.weight" in weights) == (
        not json.loads((folder / "config.json").read_text())["tie_word_embeddings"]
    )
    assert Weights(folder).equal("model.norm.weight", "model.norm.weight")
    assert weights.equal("model.norm.weight", "model.norm.weight")
    assert not weights.equal("model.norm.weight", "model.layers.0.input_layernorm.weight")
