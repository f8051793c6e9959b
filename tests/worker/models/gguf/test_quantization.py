from __future__ import annotations

import pytest

from quire.shared.gguf.file import open_gguf
from quire.worker.models.gguf.quantization import GGUFQuantization, quantization_of


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_a_file_without_quantised_weights_has_none(kind: str, gguf_files) -> None:  # type: ignore[no-untyped-def]
    assert quantization_of(open_gguf(gguf_files("llama", kind)[1])) is None


def test_the_label_names_all_types(gguf_files) -> None:  # type: ignore[no-untyped-def]
    found = quantization_of(open_gguf(gguf_files("llama", "Q8_0")[1]))
    assert found is not None
    assert found.label == "GGUF, Q8_0"
    assert found.layer("model.layers.0.mlp.up_proj", lambda name: None) is None


def test_activations_are_rounded_if_most_weights_stay_integers() -> None:
    assert GGUFQuantization((("Q4_0", 600), ("Q6_K", 400))).rounds_activations
    assert not GGUFQuantization((("Q6_K", 600), ("Q4_0", 400))).rounds_activations
    assert not GGUFQuantization((("Q8_0", 600),)).rounds_activations


def test_the_memory_is_that_of_the_types_as_they_are_kept() -> None:
    types = GGUFQuantization((("Q4_0", 320), ("Q6_K", 512), ("Q4_1", 100), ("F32", 10)))
    assert types.kept_bytes(has_integers=True) == 320 * 18 // 32 + 512 * 58 // 64 + 200 + 40
    assert types.kept_bytes(has_integers=False) == 320 * 5 // 8 + 512 * 58 // 64 + 200 + 40
    assert GGUFQuantization((("Q8_0", 64), ("Q4_K", 512))).kept_bytes(has_integers=False) == 72 + 512 * 42 // 64
