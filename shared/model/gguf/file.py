"""Parses the header of a GGUF file, version 2 or 3: metadata, and the type, shape and place of each tensor.

A model may be split into several files: the first has the metadata, and all together have the tensors.

Every number of the header is checked before it is used: counts and lengths have limits, tensors lie inside the file, at
their alignment and apart from each other. The file is mapped, and arrays are decoded when they are asked for, so that
memory is small even for a hostile file.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

from quire.shared.model.gguf.cursor import HeaderCursor, Scalar
from quire.shared.model.gguf.parts import MAX_PARTS, part_paths
from quire.shared.model.gguf.types import ARRAY, BOOL, OTHER_TENSOR_TYPES, SCALARS, STRING, TENSOR_TYPES, TensorType
from quire.shared.process.errors import AGAIN, FileError

MAGIC, VERSIONS = b"GGUF", (2, 3)
MAX_KEYS, MAX_TENSORS = 10_000, 100_000
MAX_KEY_BYTES, MAX_NAME_BYTES, MAX_DIMENSIONS = 65_535, 256, 4
MAX_WEIGHTS = 1 << 40  # of one tensor
ALIGNMENT_KEY, DEFAULT_ALIGNMENT, MAX_ALIGNMENT = "general.alignment", 32, 1 << 16
PART_KEY, PARTS_KEY, TENSORS_KEY = "split.no", "split.count", "split.tensors.count"


@dataclass(frozen=True)
class GGUFTensor:
    """The place of a tensor. shape: rows first, as in torch. start: of its first byte in `map`, the mapped file."""

    name: str
    type: TensorType
    shape: tuple[int, ...]
    start: int
    map: mmap.mmap = field(repr=False, compare=False)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) // self.type.block * self.type.nbytes


@dataclass(frozen=True)
class GGUFArray:
    """The place of an array in the metadata. kind: type of its elements."""

    kind: int
    count: int
    start: int


class GGUFFile:
    """A mapped GGUF file. Construction raises FileError for a file that is damaged or not supported."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.map = _map(path)
        view = memoryview(self.map)
        cursor = HeaderCursor(path, view)
        num_tensors, num_keys = self._read_start(cursor)
        self.metadata: Mapping[str, Scalar | GGUFArray] = self._read_metadata(cursor, num_keys)
        self.alignment = self._alignment()
        self.tensors: Mapping[str, GGUFTensor] = self._read_tensors(cursor, num_tensors)

    def _read_start(self, cursor: HeaderCursor) -> tuple[int, int]:
        """Read magic, version and counts."""
        start = cursor.take(len(MAGIC), "the magic number")
        if (magic := self.map[start : start + len(MAGIC)]) != MAGIC:
            raise cursor.fault("the magic number", f"is {magic!r}", f"{MAGIC!r}: this is not a GGUF file")
        version = cursor.integer(4, "the version", 0, 2**32 - 1)
        if version not in VERSIONS:
            big_endian = struct.unpack("<I", struct.pack(">I", version))[0] in VERSIONS
            what = "the file is big-endian" if big_endian else f"the version is {version}"
            remedy = "convert the model again with a current llama.cpp, for little-endian machines"
            raise FileError(self.path, f"{what}, expected version 2 or 3, little-endian", remedy)
        num_tensors = cursor.integer(10, "the number of tensors", 0, MAX_TENSORS)
        return num_tensors, cursor.integer(10, "the number of metadata keys", 0, MAX_KEYS)

    def _read_metadata(self, cursor: HeaderCursor, count: int) -> dict[str, Scalar | GGUFArray]:
        metadata: dict[str, Scalar | GGUFArray] = {}
        for index in range(count):
            key = cursor.text(f"metadata key {index}", MAX_KEY_BYTES)
            field = f"metadata {key[:100]!r}"
            if key in metadata:
                raise cursor.fault(field, "is there twice", "each key once")
            kind = cursor.integer(4, f"type of {field}", 0, 12)
            metadata[key] = GGUFArray(*cursor.skip_array(field)) if kind == ARRAY else cursor.value(kind, field)
        return metadata

    def _alignment(self) -> int:
        value = self.integer(ALIGNMENT_KEY, 8, MAX_ALIGNMENT, DEFAULT_ALIGNMENT)
        if value & (value - 1):
            raise self.fault(ALIGNMENT_KEY, "a power of two from 8")
        return value

    def _read_tensors(self, cursor: HeaderCursor, count: int) -> dict[str, GGUFTensor]:
        tensors: dict[str, GGUFTensor] = {}  # with the offset in the data as start
        for index in range(count):
            tensor = self._read_tensor(cursor, index)
            if tensor.name in tensors:
                raise cursor.fault(f"tensor {tensor.name!r}", "is there twice", "each tensor once")
            tensors[tensor.name] = tensor
        data = -(-cursor.position // self.alignment) * self.alignment
        for tensor in tensors.values():
            if tensor.start + tensor.nbytes > len(self.map) - data:
                expected = f"{tensor.nbytes} bytes at byte {data + tensor.start} of {len(self.map)}"
                raise cursor.fault(f"tensor {tensor.name!r}", "ends past the end of the file", expected)
        for first, second in pairwise(sorted(tensors.values(), key=lambda tensor: tensor.start)):
            if first.start + first.nbytes > second.start:
                what = f"begins inside tensor {first.name!r}"
                raise cursor.fault(f"tensor {second.name!r}", what, "tensors that do not overlap")
        return {name: replace(tensor, start=data + tensor.start) for name, tensor in tensors.items()}

    def _read_tensor(self, cursor: HeaderCursor, index: int) -> GGUFTensor:
        name = cursor.text(f"name of tensor {index}", MAX_NAME_BYTES)
        field = f"tensor {name!r}"
        dimensions = cursor.integer(4, f"the number of dimensions of {field}", 1, MAX_DIMENSIONS)
        sizes = [cursor.integer(10, f"dimension {at} of {field}", 1, MAX_WEIGHTS) for at in range(dimensions)]
        if math.prod(sizes) > MAX_WEIGHTS:
            raise cursor.fault(field, f"has the shape {sizes[::-1]}", f"at most {MAX_WEIGHTS} weights")
        kind = cursor.integer(4, f"type of {field}", 0, 2**32 - 1)
        if kind not in TENSOR_TYPES:
            known = ", ".join(known_type.name for known_type in TENSOR_TYPES.values())
            what = f"{field} has the type {OTHER_TENSOR_TYPES.get(kind, kind)}, expected one of {known}"
            raise FileError(self.path, what, "take a file of the same model with another quantisation, such as Q4_K_M")
        tensor_type = TENSOR_TYPES[kind]
        if sizes[0] % tensor_type.block:
            expected = f"a multiple of {tensor_type.block} for {tensor_type.name}"
            raise cursor.fault(field, f"has rows of {sizes[0]} weights", expected)
        offset = cursor.integer(10, f"offset of {field}", 0, len(self.map))
        if offset % self.alignment:
            raise cursor.fault(f"offset of {field}", f"is {offset}", f"a multiple of {self.alignment}")
        return GGUFTensor(name, tensor_type, tuple(reversed(sizes)), offset, self.map)

    # --- typed metadata -----------------------------------------------------------------------------------------------

    def fault(self, key: str, expected: str, remedy: str = AGAIN) -> FileError:
        """Return the error for a metadata value that cannot be honoured."""
        if key not in self.metadata:
            return FileError(self.path, f"metadata {key!r} is missing, expected {expected}", remedy)
        value = self.metadata[key]
        shown = f"an array of {value.count}" if isinstance(value, GGUFArray) else repr(value)[:120]
        return FileError(self.path, f"metadata {key!r} is {shown}, expected {expected}", remedy)

    def integer(self, key: str, minimum: int, maximum: int, default: int | None = None) -> int:
        """Return an integer of the metadata; `default` if the key is absent. None: the key is required."""
        value = self.metadata.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            raise self.fault(key, f"an integer from {minimum} to {maximum}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number above 0."""
        value = self.metadata.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.fault(key, "a number above 0")
        return shortest(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.metadata.get(key, default)
        if not isinstance(value, bool):
            raise self.fault(key, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self.metadata.get(key, default)
        if not isinstance(value, str):
            raise self.fault(key, "a string")
        return value

    def strings(self, key: str) -> list[str]:
        """Decode an array of strings; empty if the key is absent."""
        array = self._array(key, (STRING,), "an array of strings")
        if array is None:
            return []
        cursor = HeaderCursor(self.path, memoryview(self.map))
        cursor.position = array.start
        return [cursor.text(f"an entry of metadata {key!r}") for _ in range(array.count)]

    def numbers(self, key: str) -> list[int] | list[float]:
        """Decode an array of numbers; empty if the key is absent."""
        array = self._array(key, [kind for kind in SCALARS if kind != BOOL], "an array of numbers")
        if array is None:
            return []
        form = f"<{array.count}{SCALARS[array.kind][1][1]}"
        return list(struct.unpack_from(form, self.map, array.start))

    def flags(self, key: str) -> list[bool]:
        """Decode an array of bools; empty if the key is absent."""
        array = self._array(key, (BOOL,), "an array of bools")
        if array is None:
            return []
        values = self.map[array.start : array.start + array.count]
        if values.strip(b"\0\1"):
            raise self.fault(key, "an array of bools")
        return [bool(value) for value in values]

    def _array(self, key: str, kinds: tuple[int, ...] | list[int], expected: str) -> GGUFArray | None:
        value = self.metadata.get(key)
        if value is None:
            return None
        if not isinstance(value, GGUFArray) or value.kind not in kinds:
            raise self.fault(key, expected)
        return value


def shortest(value: float) -> float:
    """Return the shortest decimal number that rounds to the same float32: 0.7 for 0.699999988."""
    try:
        wanted = struct.pack("<f", value)
    except OverflowError:  # of float64
        return float(value)
    texts = (f"{value:.{digits}g}" for digits in range(6, 10))
    return next(float(text) for text in texts if struct.pack("<f", float(text)) == wanted)


def open_gguf(path: Path) -> GGUFFile:
    """Return the parsed file; of a split model its first part, with the tensors of all parts.

    The last one is kept, because configuration, tokenizer and weights are read separately. Raises FileError.
    """
    try:
        stats = [(path, path.stat()), *((part, part.stat()) for part in part_paths(path)[1:] if part.is_file())]
    except OSError as error:
        raise FileError(path, f"the file cannot be read ({error.strerror})", "check the path") from None
    return _opened(path, tuple((part, stat.st_ino, stat.st_size, stat.st_mtime_ns) for part, stat in stats))


@lru_cache(maxsize=1)
def _opened(path: Path, stats: tuple[tuple[Path, int, int, int], ...]) -> GGUFFile:
    file = GGUFFile(path)
    count = file.integer(PARTS_KEY, 0, MAX_PARTS, 1)
    if count > 1:
        file.tensors = _joined(file, count)
    return file


def _joined(first: GGUFFile, count: int) -> dict[str, GGUFTensor]:
    """Return the tensors of all parts of a split model. Raises FileError if the parts do not fit together."""
    paths = part_paths(first.path)
    if len(paths) != count:
        raise first.fault(PARTS_KEY, f"a file name that ends with -00001-of-{count:05}.gguf", "restore its name")
    if first.integer(PART_KEY, 0, count - 1):
        raise first.fault(PART_KEY, "0, as the first part has the metadata", f"give {paths[0]}")
    tensors = dict(first.tensors)
    for number, path in enumerate(paths[1:], start=1):
        if not path.is_file():
            raise FileError(path, f"this file is missing: part {number + 1} of {count}", "add it: all parts are needed")
        part = GGUFFile(path)
        for key, value in ((PART_KEY, number), (PARTS_KEY, count)):
            if part.metadata.get(key) != value:
                raise part.fault(key, f"{value}, as in its name")
        for key in part.metadata:
            if not key.startswith("split.") and key not in (ALIGNMENT_KEY, "general.architecture"):
                raise part.fault(key, "no such key in a part after the first")
        if twice := tensors.keys() & part.tensors.keys():
            raise FileError(path, f"tensor {min(twice)!r} is in another part, too", AGAIN)
        tensors |= part.tensors
        if len(tensors) > MAX_TENSORS:
            raise FileError(path, f"all parts together have more than {MAX_TENSORS} tensors", AGAIN)
    if first.integer(TENSORS_KEY, 0, MAX_TENSORS, len(tensors)) != len(tensors):
        raise first.fault(TENSORS_KEY, f"{len(tensors)}, the number of tensors in all parts")
    return tensors


def _map(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise FileError(path, f"the file cannot be read ({error.strerror})", "check the path") from None
    except ValueError:
        raise FileError(path, "the file is empty, expected a GGUF file") from None
