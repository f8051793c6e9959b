"""Models in several files: all parts are read as one model, and every fault of a part is refused by its name."""

from __future__ import annotations

import random
import shutil
import time
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest

from quire.shared.model.folder import find_fault, find_gguf
from quire.shared.model.gguf.file import open_gguf
from quire.shared.model.gguf.parts import part_paths
from quire.shared.model.naming import served_name
from quire.shared.process.errors import FileError
from tests.support.gguf_vocabularies import gguf_bytes, tensor, value

NUM_TENSORS = 7


def write_parts(folder: Path) -> list[Path]:
    """Write a model of seven tensors in four parts with the published package, the metadata in the first."""
    folder.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(folder / "model.gguf", "llama", split_max_tensors=2)
    writer.add_string("general.name", "test")
    for at in range(NUM_TENSORS):
        writer.add_tensor(f"t{at}", np.full((3, 8), at, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(folder.glob("*.gguf"))


def test_the_parts_of_the_published_package_are_one_model(tmp_path: Path) -> None:
    parts = write_parts(tmp_path)
    assert len(parts) == 4
    assert part_paths(parts[2]) == parts
    file = open_gguf(parts[0])
    assert file.text("general.name") == "test"
    assert len(file.tensors) == NUM_TENSORS
    for at in range(NUM_TENSORS):
        one = file.tensors[f"t{at}"]
        assert np.frombuffer(one.map, dtype="<f4", count=24, offset=one.start).tolist() == [at] * 24
    assert find_gguf(tmp_path) == parts[0]
    assert served_name(str(parts[0])) == "model"


def test_a_folder_with_two_split_models_names_their_first_parts(tmp_path: Path) -> None:
    write_parts(tmp_path)
    for path in sorted(tmp_path.glob("*.gguf")):
        shutil.copy(path, tmp_path / path.name.replace("model", "other"))
    assert find_gguf(tmp_path) is None
    said = str(find_fault(tmp_path))
    assert "several GGUF files, model-00001-of-00004.gguf, other-00001-of-00004.gguf; give one of them" in said


@pytest.mark.parametrize("missing", [1, 3])
def test_a_missing_part_is_named(missing: int, tmp_path: Path) -> None:
    parts = write_parts(tmp_path)
    parts[missing].unlink()
    with pytest.raises(FileError) as caught:
        open_gguf(parts[0])
    assert str(caught.value).startswith(f"{parts[missing]}: this file is missing: part {missing + 1} of 4; add it")


def test_a_part_that_comes_later_is_read(tmp_path: Path) -> None:
    parts = write_parts(tmp_path / "all")
    first = Path(shutil.copy(parts[0], tmp_path))
    with pytest.raises(FileError, match="is missing"):
        open_gguf(first)
    for part in parts[1:]:
        shutil.copy(part, tmp_path)
    assert len(open_gguf(first).tensors) == NUM_TENSORS


def part(number: int, count: int = 2, tensors: int = 2, name: str = "a", **keys: bytes) -> bytes:
    """A part with one tensor. keys: further metadata, with __ for a dot."""
    metadata = {"split.no": value(2, number), "split.count": value(2, count), "split.tensors.count": value(5, tensors)}
    metadata |= {key.replace("__", "."): one for key, one in keys.items()}
    return gguf_bytes(metadata.items(), [tensor(name, (32,), 0, 0)], bytes(128))


SECOND = r"00002-of-00002\.gguf: "
WRONG = {
    "the first is not the first": (part(1), part(1, name="b"), r"'split\.no' is 1, expected 0, as.*give .*00001"),
    "a part of another place": (part(0), part(0, name="b"), SECOND + r"metadata 'split\.no' is 0, expected 1"),
    "a part of another model": (part(0), part(1, 3, name="b"), r"'split\.count' is 3, expected 2, as in its name"),
    "a part without a number": (part(0), gguf_bytes(), r"00002.*'split\.no' is missing, expected 1"),
    "a tensor twice": (part(0), part(1), SECOND + r"tensor 'a' is in another part, too"),
    "another number of tensors": (part(0, tensors=3), part(1, name="b"), r"'split\.tensors\.count' is 3, expected 2"),
    "metadata in a later part": (
        part(0),
        part(1, name="b", llama__block_count=value(4, 1)),
        r"00002.*'llama\.block_count' is 1, expected no such key in a part after the first",
    ),
    "more parts than the name": (part(0, 3), part(1, 3, name="b"), r"'split\.count' is 3, expected a file name.*00003"),
    "more parts than there may be": (part(0, 2000), part(1), r"'split\.count' is 2000, expected an integer from 0 to"),
    "a damaged part": (part(0), part(1, name="b")[:-1], SECOND + r"tensor 'b' ends past the end of the file"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_parts_that_do_not_fit_together_are_refused(kind: str, tmp_path: Path) -> None:
    *contents, said = WRONG[kind]
    paths = [tmp_path / f"m-0000{at}-of-00002.gguf" for at in (1, 2)]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    with pytest.raises(FileError, match=said) as caught:
        open_gguf(paths[0])
    assert "\n" not in str(caught.value)
    assert caught.value.remedy


def test_the_second_part_names_the_first(tmp_path: Path) -> None:
    parts = write_parts(tmp_path)
    with pytest.raises(FileError, match=f"give {parts[0]}"):
        open_gguf(parts[1])


def test_a_name_like_that_of_a_part_may_be_of_a_whole_model(tmp_path: Path) -> None:
    path = tmp_path / "m-00001-of-00002.gguf"
    path.write_bytes(gguf_bytes([("k", value(4, 7))], [tensor("a", (32,), 0, 0)], bytes(128)))
    assert open_gguf(path).tensors.keys() == {"a"}
    assert part_paths(tmp_path / "m-00003-of-00002.gguf") == [tmp_path / "m-00003-of-00002.gguf"]
    assert part_paths(tmp_path / "m-00001-of-99999.gguf") == [tmp_path / "m-00001-of-99999.gguf"]


def test_damaged_parts_are_read_or_refused_in_bounded_time_and_memory(tmp_path: Path) -> None:
    """600 models, each with a few bytes changed, cut out or added in one or two of its parts."""
    whole = [path.read_bytes() for path in write_parts(tmp_path)]
    paths = sorted(tmp_path.glob("*.gguf"))
    rng = random.Random(29)
    messages, served = [], 0
    tracemalloc.start()
    began = time.process_time()
    for _ in range(600):
        for path, content in zip(paths, whole, strict=True):
            path.write_bytes(content)
        for number in rng.sample(range(len(paths)), rng.choice((1, 1, 2))):
            content = bytearray(whole[number])
            for _ in range(rng.choice((1, 2, 4))):
                at = rng.randrange(min(len(content), 300))  # mostly in the header
                change = rng.randrange(4)
                if change == 0:
                    content[at] = rng.choice((0, 1, 9, 127, 128, 255))
                elif change == 1:
                    content[at : at + 8] = rng.choice((bytes(8), b"\xff" * 8, rng.randbytes(8)))
                elif change == 2:
                    del content[at : at + rng.randrange(1, 64)]
                else:
                    content[at:at] = rng.randbytes(rng.randrange(1, 16))
            paths[number].write_bytes(content)
        try:
            file = open_gguf(paths[0])
            for one in file.tensors.values():
                assert 0 <= one.start <= one.start + one.nbytes <= len(one.map)
            served += 1
        except FileError as error:
            messages.append(str(error))
    assert min(len(messages), served) > 30
    assert not any("\n" in message for message in messages)
    assert time.process_time() - began < 60
    assert tracemalloc.get_traced_memory()[1] < 64 << 20
    tracemalloc.stop()
