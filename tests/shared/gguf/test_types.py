"""The numbers and sizes of types are those of the published package."""

from __future__ import annotations

import struct

import gguf

from quire.shared.gguf.types import ARRAY, BOOL, OTHER_TENSOR_TYPES, SCALARS, STRING, TENSOR_TYPES


def test_tensor_types_are_those_of_the_package() -> None:
    for number, kind in TENSOR_TYPES.items():
        known = gguf.GGMLQuantizationType(number)
        assert known.name == kind.name
        assert gguf.GGML_QUANT_SIZES[known] == (kind.block, kind.nbytes)
        assert kind.is_quantized == (kind.name not in ("F32", "F16", "BF16"))


def test_every_type_of_the_package_is_read_or_refused_by_name() -> None:
    for known in gguf.GGMLQuantizationType:
        if known.value <= 39:
            assert known.value in TENSOR_TYPES or OTHER_TENSOR_TYPES[known.value] == known.name
    assert not TENSOR_TYPES.keys() & OTHER_TENSOR_TYPES.keys()


def test_value_types_are_those_of_the_package() -> None:
    names = {kind.name.lower(): kind.value for kind in gguf.GGUFValueType}
    assert {name: number for number, (name, _) in SCALARS.items()} | {STRING: "string"}
    for number, (name, form) in SCALARS.items():
        assert names[name] == number
        assert struct.calcsize(form) in (1, 2, 4, 8)
    assert (names["string"], names["array"], names["bool"]) == (STRING, ARRAY, BOOL)
