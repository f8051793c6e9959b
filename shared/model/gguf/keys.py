"""The metadata of a model in a GGUF file: the keys that begin with the name of its architecture."""

from __future__ import annotations

import struct
from typing import Any

from quire.shared.model.gguf.file import GGUFArray, GGUFFile
from quire.shared.process.errors import FileError

SAFETENSORS = "give the Hugging Face folder that it was made from"
LARGEST = 2**31 - 1


class ModelKeys:
    """The keys of an architecture, without its name in front. All methods raise FileError for a wrong value."""

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        self.file, self.prefix = file, f"{architecture}."
        self.layers = self.integer("block_count", 1, 10_000)

    def __contains__(self, name: str) -> bool:
        return self.prefix + name in self.file.metadata

    def get(self, name: str) -> Any:
        return self.file.metadata.get(self.prefix + name)

    def names(self) -> list[str]:
        return [key.removeprefix(self.prefix) for key in self.file.metadata if key.startswith(self.prefix)]

    def fault(self, name: str, expected: str, remedy: str = SAFETENSORS) -> FileError:
        return self.file.fault(self.prefix + name, expected, remedy)

    def integer(self, name: str, minimum: int = 1, maximum: int = LARGEST, default: int | None = None) -> int:
        return self.file.integer(self.prefix + name, minimum, maximum, default)

    def number(self, name: str, default: float | None = None) -> float:
        return self.file.number(self.prefix + name, default)

    def text(self, name: str, default: str) -> str:
        return self.file.text(self.prefix + name, default)

    def integers(self, name: str) -> list[int]:
        """Return an array of integers; empty if the key is absent."""
        values = self.file.numbers(self.prefix + name)
        if not all(isinstance(value, int) for value in values):
            raise self.fault(name, "an array of integers")
        return [int(value) for value in values]

    def flags(self, name: str) -> list[bool]:
        """Return an array of bools, one for each layer; empty if the key is absent."""
        values = self.file.flags(self.prefix + name)
        if values and len(values) != self.layers:
            raise self.fault(name, f"a bool for each of {self.layers} layers")
        return values

    def of_all_layers(self, name: str, default: int | None = None) -> int:
        """Return an integer that may be stored once for each layer, and must be the same for all."""
        if not isinstance(self.get(name), GGUFArray):
            return self.integer(name, default=default)
        values = self.integers(name)
        first = values[0] if values else 0
        if len(values) != self.layers or set(values) != {first} or not 0 < first <= LARGEST:
            raise self.fault(name, f"the same integer for each of {self.layers} layers")
        return first

    def has_tensor(self, name: str) -> bool:
        return name in self.file.tensors

    def factors(self, name: str) -> tuple[float, ...]:
        """Return the numbers of a tensor that divides frequencies of RoPE; empty if the file has none of this name."""
        return rope_numbers(self.file, name) if self.has_tensor(name) else ()


def rope_numbers(file: GGUFFile, name: str) -> tuple[float, ...]:
    """Return the numbers of a tensor that divides frequencies of RoPE. Raises FileError."""
    tensor = file.tensors[name]
    if tensor.type.name != "F32" or len(tensor.shape) != 1 or tensor.nbytes > 4096:
        what = f"tensor {name} is {tensor.type.name} {list(tensor.shape)}, expected F32 with half of head_dim"
        raise FileError(file.path, what)
    numbers = struct.unpack_from(f"<{tensor.shape[0]}f", tensor.map, tensor.start)
    if not all(0 < number < float("inf") for number in numbers):
        raise FileError(file.path, f"tensor {name} has other values than numbers above 0")
    return numbers
