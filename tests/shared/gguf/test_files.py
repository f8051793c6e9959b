"""GGUF files: header, types, tensors, configuration, and a file as a model."""

from __future__ import annotations

import contextlib
import random
import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from quire.shared.model.fields import read_json as read_by_worker
from quire.shared.model.files import ModelError, read_json
from quire.shared.model.folder import is_gguf
from quire.shared.model.gguf import cursor
from quire.shared.model.gguf.config import model_config, rope_factors
from quire.shared.model.gguf.cursor import HeaderCursor
from quire.shared.model.gguf.file import GGUFFile, open_gguf, shortest
from quire.shared.model.gguf.model_files import gguf_json
from quire.shared.model.gguf.types import ARRAY, BOOL, OTHER_TENSOR_TYPES, SCALARS, STRING, TENSOR_TYPES
from quire.shared.process.errors import CheckpointError, FileError
from quire.worker.models.choice import choose_model
from quire.worker.models.native.config import read_config
from tests.support.gguf_vocabularies import TOKENS, gguf_bytes, tensor, text, value, write_vocabulary

# --- cursor -----------------------------------------------------------------------------------------------------------


def over(content: bytes) -> HeaderCursor:
    return HeaderCursor(Path("a.gguf"), memoryview(content))


def test_the_strings_of_all_arrays_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cursor, "MAX_STRINGS", 3)
    content = value(9, (8, ["a", "b"]))[4:]
    at = over(content * 2)
    at.skip_array("first")
    with pytest.raises(FileError, match="second brings the strings in arrays to 4, expected at most 3"):
        at.skip_array("second")


# --- types ------------------------------------------------------------------------------------------------------------
# The numbers and sizes of types are those of the published package.


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


# --- file -------------------------------------------------------------------------------------------------------------
# The parser reads what the published package writes, and refuses everything else in one line and in little time.


ONE = (tensor("a", (32, 2), 0, 0),)


def write(folder: Path, content: bytes) -> Path:
    path = folder / "a.gguf"
    path.write_bytes(content)
    return path


def package_file(path: Path) -> Path:
    """A file of the package `gguf` with each type of value."""
    writer = gguf.GGUFWriter(None, "llama")
    writer.add_uint8("t.uint8", 255)
    writer.add_int8("t.int8", -128)
    writer.add_uint16("t.uint16", 65535)
    writer.add_int16("t.int16", -32768)
    writer.add_uint32("t.uint32", 2**32 - 1)
    writer.add_int32("t.int32", -(2**31))
    writer.add_uint64("t.uint64", 2**64 - 1)
    writer.add_int64("t.int64", -(2**63))
    writer.add_float32("t.float32", 0.7)
    writer.add_float64("t.float64", 0.1)
    writer.add_bool("t.bool", True)
    writer.add_string("t.string", "grün")
    writer.add_array("t.strings", ["a", "", "ü"])
    writer.add_array("t.integers", [1, -2, 3])
    writer.add_array("t.floats", [0.5, 1.5])
    writer.add_tensor("first", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("second", np.arange(5, dtype=np.float16))
    raw = gguf.quants.quantize(np.ones((4, 64), dtype=np.float32), gguf.GGMLQuantizationType.Q4_0)
    writer.add_tensor("third", raw, raw_dtype=gguf.GGMLQuantizationType.Q4_0)
    writer.write_header_to_file(path=path)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_file_of_the_published_package_is_read(tmp_path: Path) -> None:
    file = GGUFFile(package_file(tmp_path / "a.gguf"))
    assert file.integer("t.uint8", 0, 255) == 255
    assert file.integer("t.int8", -128, 0) == -128
    assert file.integer("t.uint64", 0, 2**64) == 2**64 - 1
    assert file.integer("t.int64", -(2**63), 0) == -(2**63)
    assert [file.metadata[f"t.{kind}"] for kind in ("uint16", "int16", "uint32", "int32")] == [
        65535,
        -32768,
        2**32 - 1,
        -(2**31),
    ]
    assert file.number("t.float32") == 0.7
    assert file.metadata["t.float64"] == 0.1
    assert file.flag("t.bool", False) is True
    assert file.text("t.string") == "grün"
    assert file.strings("t.strings") == ["a", "", "ü"]
    assert file.numbers("t.integers") == [1, -2, 3]
    assert file.numbers("t.floats") == [0.5, 1.5]
    assert {name: (one.type.name, one.shape) for name, one in file.tensors.items()} == {
        "first": ("F32", (2, 3)),
        "second": ("F16", (5,)),
        "third": ("Q4_0", (4, 64)),
    }
    reader = gguf.GGUFReader(tmp_path / "a.gguf")
    assert {one.name: (one.data_offset, one.n_bytes) for one in reader.tensors} == {
        name: (one.start, one.nbytes) for name, one in file.tensors.items()
    }


@pytest.mark.parametrize("version", [2, 3])
def test_versions_2_and_3_are_read(version: int, tmp_path: Path) -> None:
    file = GGUFFile(write(tmp_path, gguf_bytes([("k", value(4, 7))], ONE, bytes(256), version=version)))
    assert file.integer("k", 0, 9) == 7
    assert file.tensors["a"].shape == (2, 32)


def test_tensors_begin_at_the_alignment_that_the_file_names(tmp_path: Path) -> None:
    content = gguf_bytes([("general.alignment", value(4, 64))], ONE, bytes(256), alignment=64)
    assert GGUFFile(write(tmp_path, content)).tensors["a"].start % 64 == 0


def key(kind: int, content: object) -> bytes:
    return gguf_bytes([("k", value(kind, content))])


def raw_key(content: bytes) -> bytes:
    return gguf_bytes([("k", content)])


BIG = (1 << 63).to_bytes(8, "little")
WRONG = {
    "empty": (b"", "the file is empty"),
    "another format": (b"PK\3\4" + bytes(64), "the magic number is b'PK.*expected b'GGUF': this is not a GGUF file"),
    "short": (b"GGUF", "the version ends past the end of the file"),
    "version 1": (gguf_bytes(version=1), "the version is 1, expected version 2 or 3.*convert the model again"),
    "version 4": (gguf_bytes(version=4), "the version is 4"),
    "big-endian": (gguf_bytes(version=3 << 24), "the file is big-endian"),
    "many tensors": (gguf_bytes(num_tensors=2**40), "number of tensors is 1099511627776, expected 0 to 100000"),
    "many keys": (gguf_bytes(num_keys=2**63), "number of metadata keys is"),
    "a missing key": (gguf_bytes(num_keys=1), "type of metadata .* ends past the end"),
    "a missing tensor": (gguf_bytes(num_tensors=1), "tensor .* ends past the end"),
    "a key twice": (gguf_bytes([("k", value(4, 1))] * 2), "metadata 'k' is there twice"),
    "a long key": (gguf_bytes([("k" * 65_536, value(4, 1))]), "length of metadata key 0 is 65536, expected 0 to 65535"),
    "a key in another encoding": (raw_key(b"")[:24] + text(b"\xff"), "metadata key 0 is not UTF-8"),
    "an unknown type": (raw_key((13).to_bytes(4, "little")), "type of metadata 'k' is 13, expected 0 to 12"),
    "a bool of 2": (key(7, 2), "metadata 'k' is 2, expected 0 or 1"),
    "a long string": (raw_key(b"\x08\0\0\0" + BIG), "length of metadata 'k' is 9223372036854775808"),
    "a long array": (raw_key(b"\x09\0\0\0" + b"\0\0\0\0" + BIG), "length of metadata 'k' is 9223372036854775808"),
    "an array past the end": (
        raw_key(b"\x09\0\0\0" + b"\x0a\0\0\0" + (1000).to_bytes(8, "little")),
        "metadata 'k' ends past the end of the file, expected 8000 bytes",
    ),
    "an array of arrays": (raw_key(b"\x09\0\0\0" + b"\x09\0\0\0" + BIG), "metadata 'k' is an array of arrays"),
    "an alignment of 0": (gguf_bytes([("general.alignment", value(4, 0))]), "'general.alignment' is 0, expected"),
    "an odd alignment": (gguf_bytes([("general.alignment", value(4, 24))]), "is 24, expected a power of two"),
    "an alignment as text": (gguf_bytes([("general.alignment", value(8, "32"))]), "is '32', expected an integer"),
    "no dimension": (gguf_bytes((), [tensor("a", (), 0, 0)]), "number of dimensions of tensor 'a' is 0, expected 1 to"),
    "five dimensions": (gguf_bytes((), [tensor("a", (1,) * 5, 0, 0)]), "is 5, expected 1 to 4"),
    "a dimension of 0": (gguf_bytes((), [tensor("a", (0,), 0, 0)]), "dimension 0 of tensor 'a' is 0"),
    "a huge product": (gguf_bytes((), [tensor("a", (1 << 30, 1 << 30), 0, 0)]), "expected at most 1099511627776"),
    "a type that is not read": (
        gguf_bytes((), [tensor("a", (256,), 16, 0)]),
        "'a' has the type IQ2_XXS, expected one of F32.*such as Q4_K_M",
    ),
    "a type that is not known": (gguf_bytes((), [tensor("a", (256,), 99, 0)]), "has the type 99, expected one of"),
    "rows that cut a block": (gguf_bytes((), [tensor("a", (31,), 2, 0)]), "rows of 31 weights, expected a multiple of"),
    "an offset past the end": (gguf_bytes((), [tensor("a", (32,), 0, 2**60)]), "offset of tensor 'a' is"),
    "an odd offset": (gguf_bytes((), [tensor("a", (32,), 0, 8)], bytes(512)), "is 8, expected a multiple of 32"),
    "data past the end": (gguf_bytes((), ONE, bytes(255)), "'a' ends past the end of the file, expected 256 bytes"),
    "tensors that overlap": (
        gguf_bytes((), [tensor("a", (32, 2), 0, 0), tensor("b", (32,), 0, 224)], bytes(512)),
        "tensor 'b' begins inside tensor 'a', expected tensors that do not overlap",
    ),
    "a tensor twice": (gguf_bytes((), ONE * 2, bytes(512)), "tensor 'a' is there twice"),
    "a name that breaks the line": (gguf_bytes((), [tensor("a\nb\x1b", (32,), 99, 0)]), r"'a\\nb\\x1b' has the type"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_file_is_refused_in_one_line_with_file_field_and_remedy(kind: str, tmp_path: Path) -> None:
    content, said = WRONG[kind]
    path = write(tmp_path, content)
    with pytest.raises(FileError, match=said) as caught:
        GGUFFile(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)
    assert caught.value.remedy
    assert len(str(caught.value)) < 600


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="cannot be read"):
        open_gguf(tmp_path / "a.gguf")


def test_metadata_of_another_type_is_refused_by_its_key(tmp_path: Path) -> None:
    pairs = [("n", value(4, 5)), ("s", value(8, "x")), ("a", value(9, (4, [1, 2]))), ("f", value(6, float("nan")))]
    file = GGUFFile(write(tmp_path, gguf_bytes(pairs)))
    for read, said in (
        (lambda: file.integer("s", 0, 9), r"metadata 's' is 'x', expected an integer from 0 to 9"),
        (lambda: file.integer("n", 0, 4), r"metadata 'n' is 5, expected an integer from 0 to 4"),
        (lambda: file.integer("absent", 0, 4), r"metadata 'absent' is missing, expected an integer"),
        (lambda: file.number("f"), r"metadata 'f' is nan, expected a number above 0"),
        (lambda: file.flag("n", True), r"metadata 'n' is 5, expected true or false"),
        (lambda: file.text("a"), r"metadata 'a' is an array of 2, expected a string"),
        (lambda: file.strings("a"), r"metadata 'a' is an array of 2, expected an array of strings"),
        (lambda: file.numbers("s"), r"metadata 's' is 'x', expected an array of numbers"),
    ):
        with pytest.raises(FileError, match=said):
            read()
    assert file.strings("absent") == []
    assert file.numbers("absent") == []


def test_a_file_is_parsed_once_until_it_changes(tmp_path: Path) -> None:
    path = write(tmp_path, gguf_bytes([("k", value(4, 7))]))
    first = open_gguf(path)
    assert open_gguf(path) is first
    write(tmp_path, gguf_bytes([("k", value(4, 8)), ("l", value(4, 8))]))
    assert open_gguf(path).integer("k", 0, 9) == 8


def test_a_float32_is_the_number_that_was_written() -> None:
    for number in (0.7, 1e-5, 1e-6, 10_000.0, 5e5, 0.1, 1 / 3):
        read = float(np.float32(number))
        assert np.float32(shortest(read)) == np.float32(number)
    assert shortest(float(np.float32(1e-5))) == 1e-5
    assert shortest(1e300) == 1e300


def test_damaged_files_are_read_or_refused_in_bounded_time_and_memory(tmp_path: Path) -> None:
    """2000 files, each a valid one with a few bytes changed, cut out or added, mostly in the header."""
    whole = package_file(tmp_path / "whole.gguf").read_bytes()
    rng = random.Random(23)
    path = tmp_path / "a.gguf"
    messages = []
    tracemalloc.start()
    began = time.process_time()
    for _ in range(2000):
        content = bytearray(whole)
        for _ in range(rng.choice((1, 1, 2, 5))):
            at = rng.randrange(len(content))
            change = rng.randrange(4)
            if change == 0:
                content[at] = rng.choice((0, 1, 9, 127, 128, 255))
            elif change == 1:
                content[at : at + 8] = rng.choice((bytes(8), b"\xff" * 8, BIG))
            elif change == 2:
                del content[at : at + rng.randrange(1, 64)]
            else:
                content[at:at] = rng.randbytes(rng.randrange(1, 16))
        path.write_bytes(content)
        try:
            file = GGUFFile(path)
            for name in file.metadata:
                for read in (file.strings, file.numbers, file.text, file.number):
                    with contextlib.suppress(FileError):
                        read(name)
        except FileError as error:
            messages.append(str(error))
    assert 200 < len(messages) < 2000
    assert not any("\n" in message for message in messages)
    assert time.process_time() - began < 30
    assert tracemalloc.get_traced_memory()[1] < 64 << 20
    tracemalloc.stop()


# --- config -----------------------------------------------------------------------------------------------------------
# Metadata becomes the fields of `config.json`; a key that would change results is translated or refused by name.


def file(folder: Path, **changes: Any) -> GGUFFile:
    changes = {key.replace("__", "."): value for key, value in changes.items()}
    return open_gguf(write_vocabulary(folder / "a.gguf", changes))


def test_the_fields_are_those_of_config_json(tmp_path: Path) -> None:
    assert model_config(file(tmp_path)) == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(TOKENS),
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": [2, TOKENS.index("<|im_end|>")],
        "dtype": "float16",
        "attention_bias": False,
        "mlp_bias": False,
    }


def test_a_window_makes_a_mistral_model(tmp_path: Path) -> None:
    assert read_config(file(tmp_path, llama__attention__sliding_window=64).path).sliding_windows == (64,)
    for window in (0, 128, 4096):
        assert read_config(file(tmp_path, llama__attention__sliding_window=window).path).sliding_windows == (0,)


def test_values_may_be_given_for_each_layer(tmp_path: Path) -> None:
    assert model_config(file(tmp_path, llama__attention__head_count_kv=[2]))["num_key_value_heads"] == 2


@pytest.mark.parametrize(
    "changes",
    [
        {"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 4.0},
        {"llama__rope__scale_linear": 4.0},
    ],
)
def test_linear_scaling_is_read_in_the_newer_and_the_older_form(changes: dict[str, Any], tmp_path: Path) -> None:
    assert model_config(file(tmp_path, **changes))["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"llama__block_count": None}, "'llama.block_count' is missing, expected an integer from 1 to 10000"),
        ({"llama__block_count": 0}, "'llama.block_count' is 0"),
        ({"llama__context_length": "8"}, "'llama.context_length' is '8', expected an integer"),
        ({"llama__attention__layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon' is missing"),
        (
            {"llama__attention__head_count": 3},
            "'llama.attention.head_count' is 3, expected a divisor of embedding_length",
        ),
        (
            {"llama__attention__head_count_kv": [1, 2]},
            "is an array of 2, expected the same integer for each of 1 layers",
        ),
        ({"llama__attention__value_length": 32}, "'llama.attention.value_length' is 32, expected 16"),
        ({"llama__rope__dimension_count": 8}, "'llama.rope.dimension_count' is 8, expected 16"),
        ({"llama__rope__scaling__type": "longrope"}, "scaling.type' is 'longrope', expected none or linear or yarn"),
        ({"llama__rope__scaling__type": "yarn"}, "'llama.rope.scaling.factor' is missing, expected a number above 0"),
        ({"llama__rope__scaling__factor": 2.0}, "'llama.rope.scaling.type' is missing, expected linear"),
        ({"llama__expert_count": 8}, "'llama.expert_used_count' is missing, expected an integer from 1 to 8"),
        ({"llama__expert_count": 99_999}, "'llama.expert_count' is 99999, expected an integer from 1 to 65536"),
        (
            {"llama__nextn_predict_layers": 1},
            "nextn_predict_layers' is 1, expected no such key, or 0; give the",
        ),
        ({"llama__attention__something": 1}, "'llama.attention.something' is 1, expected no such key"),
        ({"llama__logit_scale": [1.0]}, "'llama.logit_scale' is an array of 1, expected no such key"),
        ({"tokenizer__ggml__tokens": [f"t{at}" for at in range(999)]}, "has 293 rows, expected 999 or more"),
    ],
)
def test_what_is_not_honoured_is_refused_by_its_key(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    changed = file(tmp_path, **changes)
    with pytest.raises(FileError, match=said) as caught:
        model_config(changed)
    assert str(caught.value).startswith(f"{changed.path}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("architecture", ["gemma4", "deepseek2", "mamba", "clip"])
def test_another_architecture_is_refused_by_its_name(architecture: str, tmp_path: Path) -> None:
    path = write_vocabulary(tmp_path / "a.gguf", architecture=architecture)
    with pytest.raises(
        FileError, match=f"'general.architecture' is '{architecture}', expected one of llama, qwen2, qwen2moe, qwen3"
    ):
        model_config(open_gguf(path))


def test_a_window_of_another_architecture_is_refused(tmp_path: Path) -> None:
    keys = {
        "context_length": 128,
        "embedding_length": 32,
        "block_count": 1,
        "feed_forward_length": 32,
        "attention.head_count": 2,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.sliding_window": 64,
    }
    changes = {f"qwen2.{key}": value for key, value in keys.items()}
    path = write_vocabulary(tmp_path / "a.gguf", changes, "qwen2")
    with pytest.raises(FileError, match=r"'qwen2.attention.sliding_window' is 64, expected no such key; give the"):
        model_config(open_gguf(path))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (gguf_bytes((), [tensor("rope_freqs.weight", (8,), 1, 0)], bytes(64)), r"is F16 \[8\], expected F32"),
        (gguf_bytes((), [tensor("rope_freqs.weight", (8,), 0, 0)], bytes(64)), "has other values than numbers above 0"),
    ],
)
def test_wrong_rope_factors_are_refused(content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(content)
    with pytest.raises(FileError, match=said):
        rope_factors(open_gguf(tmp_path / "a.gguf"))
    assert rope_factors(file(tmp_path)) == ()


# --- model files ------------------------------------------------------------------------------------------------------
# A GGUF file stands for a model folder: gateway and worker read its JSON files from the metadata.


def test_the_files_have_the_metadata(tmp_path: Path) -> None:
    file = write_vocabulary(tmp_path / "a.gguf", {"tokenizer.chat_template": "{{ messages }}"})
    assert read_json(file / "config.json", required=True)["vocab_size"] == len(TOKENS)
    assert read_by_worker(file / "config.json", "")["hidden_size"] == 32
    assert read_json(file / "generation_config.json")["bos_token_id"] == 1
    assert read_json(file / "tokenizer_config.json") == {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "chat_template": "{{ messages }}",
    }
    assert gguf_json(file, "special_tokens_map.json") == {}


def test_a_gguf_file_is_known_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "a.GGUF").write_text("")
    (tmp_path / "folder.gguf").mkdir()
    (tmp_path / "a.bin").write_text("")
    assert is_gguf(tmp_path / "a.GGUF")
    assert not any(is_gguf(tmp_path / name) for name in ("folder.gguf", "a.bin", "missing.gguf"))


def test_gateway_and_worker_refuse_a_damaged_file_with_the_same_words(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError) as by_gateway:
        read_json(tmp_path / "a.gguf" / "config.json")
    with pytest.raises(CheckpointError) as by_worker:
        choose_model(tmp_path / "a.gguf")
    assert str(by_gateway.value) == f"{by_worker.value}."


def test_transformers_does_not_compute_files_that_quires_decoder_computes(tmp_path: Path) -> None:
    file = write_vocabulary(tmp_path / "a.gguf")
    with pytest.raises(CheckpointError, match=r"a\.gguf: --model-impl is transformers, but .*give --model-impl auto"):
        choose_model(file, "transformers")
    assert choose_model(file).architecture == "LlamaForCausalLM"
