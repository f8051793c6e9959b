"""Tensors of GGUF files: names, codes, blocks, and the order of rotated rows."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from quire.kernels.grouped_weight import UINT8
from quire.kernels.k_quant_weight import K_QUANT4, K_QUANT6
from quire.ops.tools.gguf_writer import write_gguf
from quire.ops.tools.k_quants import QUANTIZERS
from quire.shared.model.gguf.architectures import ARCHITECTURES
from quire.shared.model.gguf.file import open_gguf
from quire.shared.model.gguf.types import TENSOR_TYPES
from quire.shared.process.errors import CheckpointError
from quire.worker.models.files.gguf.blocks import EXPANSIONS, K_BLOCKS
from quire.worker.models.files.gguf.codes import KINDS, codes_of, common_kind
from quire.worker.models.files.gguf.names import MODULES, WHOLE
from quire.worker.models.files.gguf.quantization import GGUFQuantization, quantization_of
from quire.worker.models.native.config import read_config
from quire.worker.models.native.rope import inverse_frequencies

# Modules that some architectures lack.
OPTIONAL = ("self_attn.q_norm", "self_attn.k_norm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "lm_head.weight")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_names_are_those_of_the_published_package(architecture: str) -> None:
    kind = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    published = gguf.get_tensor_name_map(kind, 3)
    expected = {module: published.get_name(f"model.layers.2.{module}") for module in MODULES[architecture]}
    expected |= {name: published.get_name(name, (".weight",)) for name in WHOLE}
    found = {module: f"blk.2.{stored}" for module, stored in MODULES[architecture].items()} | WHOLE
    missing = {name for name, stored in expected.items() if stored is None}
    assert missing <= {*OPTIONAL}
    assert {name: found[name] for name in found if name not in missing} == {
        name: stored for name, stored in expected.items() if name not in missing
    }


ROWS = 6


def random_blocks(kind: str, count: int) -> torch.Tensor:
    """Return blocks of any bytes with finite scales."""
    size = next(one.nbytes for one in TENSOR_TYPES.values() if one.name == kind)
    raw = np.random.default_rng(0).integers(0, 256, (count, size), dtype=np.uint8)
    places = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}.get(kind, (0,))
    for at in places:
        raw[:, at + 1] &= 0xBF  # exponents below that of 2
    return torch.from_numpy(raw)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_of_the_expansion(kind: str) -> None:
    blocks = random_blocks(kind, ROWS * 2)
    expected = EXPANSIONS[kind](blocks).reshape(ROWS, -1)
    assert torch.equal(codes_of(kind, blocks, ROWS, KINDS[kind]).dequantized(), expected)
    if kind in K_BLOCKS:
        assert torch.equal(codes_of(kind, blocks, ROWS, K_QUANT6).dequantized(), expected)


def test_scales_that_are_not_finite_are_refused() -> None:
    for kind, at in (("Q8_0", 0), ("Q4_K", 2), ("Q6_K", 208)):
        blocks = random_blocks(kind, ROWS)
        blocks[1, at], blocks[1, at + 1] = 0, 0x7C
        with pytest.raises(ValueError, match="must be finite"):
            codes_of(kind, blocks, ROWS, KINDS[kind])


@pytest.mark.parametrize(
    ("types", "kind"),
    [
        (["Q8_0", "Q8_0"], UINT8),
        (["Q8_0", "Q5_0"], UINT8),
        (["Q4_K", "Q2_K"], K_QUANT4),
        (["Q4_K", "Q6_K", "Q4_K"], K_QUANT6),
        (["Q4_K", "Q8_0"], None),
        (["F16"], None),
        (["Q4_1", "Q4_1"], None),
    ],
)
def test_weights_side_by_side_have_a_kind_that_holds_all(types: list[str], kind: str | None) -> None:
    assert common_kind(types) == kind


QUANTIZED = [one for one in TENSOR_TYPES.values() if one.is_quantized]


@pytest.mark.parametrize("kind", [one.name for one in QUANTIZED])
@pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow")
def test_any_bytes_are_expanded_as_by_the_published_package(kind: str) -> None:
    number = gguf.GGMLQuantizationType[kind]
    raw = np.random.default_rng(0).integers(0, 256, (300, gguf.GGML_QUANT_SIZES[number][1]), dtype=np.uint8)
    expected = gguf.quants.dequantize(raw, number)
    found = EXPANSIONS[kind](torch.from_numpy(raw)).numpy()
    np.testing.assert_array_equal(found, expected)
    assert found.dtype == np.float32


@pytest.mark.parametrize("kind", QUANTIZERS)
def test_the_simple_k_quants_of_the_tools_are_near_the_weights(kind: str) -> None:
    values = np.random.default_rng(1).standard_normal((4, 512)).astype(np.float32)
    raw = torch.from_numpy(QUANTIZERS[kind](values))
    blocks = raw.reshape(-1, next(one.nbytes for one in QUANTIZED if one.name == kind))
    error = float((EXPANSIONS[kind](blocks).reshape(4, 512) - torch.from_numpy(values)).square().mean().sqrt())
    assert error < {"Q2_K": 0.4, "Q3_K": 0.2, "Q4_K": 0.1, "Q5_K": 0.05, "Q6_K": 0.03}[kind]


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_a_file_without_quantised_weights_has_none(kind: str, gguf_files) -> None:  # type: ignore[no-untyped-def]
    assert quantization_of(open_gguf(gguf_files("llama", kind)[1])) is None


def test_activations_are_rounded_if_most_weights_stay_integers() -> None:
    assert GGUFQuantization((("Q4_0", 600), ("Q6_K", 400))).rounds_activations
    assert not GGUFQuantization((("Q6_K", 600), ("Q4_0", 400))).rounds_activations
    assert not GGUFQuantization((("Q8_0", 600),)).rounds_activations


def test_the_memory_is_that_of_the_types_as_they_are_kept() -> None:
    types = GGUFQuantization((("Q4_0", 320), ("Q6_K", 512), ("Q4_1", 100), ("F32", 10)))
    assert types.kept_bytes(has_integers=True) == 320 * 18 // 32 + 512 * 58 // 64 + 200 + 40
    assert types.kept_bytes(has_integers=False) == 320 * 5 // 8 + 512 * 58 // 64 + 200 + 40
    assert GGUFQuantization((("Q8_0", 64), ("Q4_K", 512))).kept_bytes(has_integers=False) == 72 + 512 * 42 // 64


def test_the_frequencies_of_llama_3_are_those_of_the_checkpoint(gguf_files) -> None:  # type: ignore[no-untyped-def]
    folder, file = gguf_files("llama3-rope")
    rope = read_config(file).rope
    assert len(rope.divisors) == 16
    assert max(rope.divisors) == 8
    expected = inverse_frequencies(read_config(folder).rope, 32)
    torch.testing.assert_close(inverse_frequencies(rope, 32), expected, rtol=1e-6, atol=0)


def test_divisors_for_another_head_size_are_refused(gguf_files, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    folder, _ = gguf_files("llama3-rope")
    sizes = {f"llama__{key}": 64 for key in ("attention__key_length", "attention__value_length")}
    file = write_gguf(folder, tmp_path / "a.gguf", **sizes, llama__rope__dimension_count=64)
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight has 16 numbers, expected 32"):
        read_config(file)
