"""The tensors of a GGUF file under the names of a Hugging Face checkpoint, in the order of rows of Transformers."""

from __future__ import annotations

import math
import mmap
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from quire.kernels.cpu.convert import copy_finite
from quire.kernels.weights import (
    INT4_GROUP,
    GroupedWeight,
    KQuantWeight,
    QuantizedWeight,
    grouped_part,
    grouped_rows,
    k_quant_part,
    k_quant_rows,
    quantized_part,
    quantized_rows,
)
from quire.shared.model.gguf.architectures import LONG_FACTORS, SHORT_FACTORS
from quire.shared.model.gguf.config import ROPE_FACTORS, rope_factors
from quire.shared.model.gguf.file import GGUFFile, GGUFTensor, open_gguf
from quire.shared.process.errors import AGAIN, CheckpointError, FileError
from quire.worker.models.files.gguf.blocks import EXPANSIONS, half, int4_values
from quire.worker.models.files.gguf.codes import codes_of, common_kind
from quire.worker.models.files.gguf.names import TensorNames, TensorPlace
from quire.worker.models.files.gguf.quantization import INTEGER_TYPE, quantization_of
from quire.worker.models.files.loader import Progress, Weights

CHUNK = 1 << 20  # weights that are expanded at a time
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
SAME_MODEL = "take a file that a current llama.cpp has converted"
# Frequencies of RoPE, which old files store; they follow from the metadata.
HARMLESS_ENDS = (".attn_rot_embd.weight",)


@dataclass(frozen=True)
class GGUFLayout:
    """The type of a stored tensor. integer_bits: of weights that the kernels multiply as they are stored; else 0."""

    label: str
    integer_bits: int


class GGUFWeights(Weights):
    """The tensors of a file.

    dtypes: of weights that the kernels multiply by. Quantised weights are read as float16 if it is one of these, since
    their scales are float16, else as the first of these.
    """

    def __init__(
        self, path: Path, dtypes: Sequence[torch.dtype] = (torch.float32,), progress: Progress | None = None
    ) -> None:
        self._folder = path
        self._tensors = {}  # of safetensors
        self._progress = progress
        self._read_bytes = self._total_bytes = 0
        self._file = open_gguf(path)
        self._wide = torch.float16 if torch.float16 in dtypes else dtypes[0]
        self._names = TensorNames(self._file)
        self._places: dict[str, tuple[TensorPlace, GGUFTensor]] = {}  # of canonical names that were asked for
        self.quantization = quantization_of(self._file)

    def __contains__(self, name: str) -> bool:
        place = self._names.find(name)
        return place is not None and place.stored in self._file.tensors

    def check(self, expected: dict[str, tuple[int, ...]], ignored: Iterable[str] = ()) -> None:
        """Compare the tensors with the expected shapes. Raises CheckpointError, also for an unknown tensor."""
        self._total_bytes = 0
        for name, shape in expected.items():
            tensor = self._tensor(name)
            if self.shape(name) != shape:
                what = f"tensor {tensor.name} has the shape {list(self.shape(name))}, expected {list(shape)}"
                what += f" for each of {tensor.shape[0]} experts" if self._entry(name) is not None else ""
                raise CheckpointError(self._folder, what, SAME_MODEL)
            if len(shape) == 1 and tensor.type.is_quantized:
                what = f"tensor {tensor.name} has the type {tensor.type.name}, expected one that is not quantised"
                raise CheckpointError(self._folder, what, SAME_MODEL)
            self._total_bytes += self._nbytes(name)
        places = [self._names.find(name) for name in (*expected, *ignored)]
        self._refuse_others({place.stored for place in places if place is not None} | {ROPE_FACTORS})

    def _refuse_others(self, known: Collection[str]) -> None:
        """Raise CheckpointError for a stored tensor that is not known."""
        unknown = [name for name in self._file.tensors if name not in known and not name.endswith(HARMLESS_ENDS)]
        if unknown:
            what = f"tensor {unknown[0]!r} is not part of this architecture"
            raise CheckpointError(self._folder, what, "give the Hugging Face folder that it was made from")

    def read(
        self,
        names: Sequence[str],
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        parts: Sequence[tuple[slice, ...]] = (),
    ) -> Tensor:
        together = self.rows(names, dtype, device, parts)
        self.finished(names)
        return together

    def rows(
        self,
        names: Sequence[str],
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        parts: Sequence[tuple[slice, ...]] = (),
    ) -> Tensor:
        shapes = [self._part_shape(name, parts[at] if parts else ()) for at, name in enumerate(names)]
        together = torch.empty((sum(shape[0] for shape in shapes), *shapes[0][1:]), dtype=dtype, device=device)
        outs = torch.split(together, [shape[0] for shape in shapes])
        for at, (name, out) in enumerate(zip(names, outs, strict=True)):
            done = 0
            for chunk in self._chunks(name, parts[at] if parts else ()):
                if not copy_finite(chunk, out[done : done + len(chunk)]):
                    what = f"tensor {self._tensor(name).name} has values that are not finite as {str(dtype)[6:]}"
                    raise CheckpointError(self._folder, what, AGAIN)
                done += len(chunk)
            self._drop_pages(name)
        return together

    def finished(self, names: Sequence[str]) -> None:
        for name in names:
            self._read_bytes += self._nbytes(name)
            if self._progress is not None:
                self._progress(self._read_bytes, self._total_bytes)

    def shape(self, name: str) -> tuple[int, ...]:
        place, tensor = self._found(name)
        return place.shape or _own_shape(place, tensor)

    def layout(self, name: str) -> GGUFLayout | None:
        """Return the layout of a quantised tensor; None for any other tensor."""
        kind = self._tensor(name).type
        return GGUFLayout(kind.name, 4 if kind.name == INTEGER_TYPE else 0) if kind.is_quantized else None

    def exact(self, names: Sequence[str], bits: int, parts: Sequence[tuple[slice, ...]]) -> QuantizedWeight | None:
        """Return quantised layers as one in a layout of the kernels; None if it cannot hold them without rounding."""
        if bits != 4 or any(self._tensor(name).type.name != INTEGER_TYPE for name in names):
            return None
        if any(self._found(name)[0].columns is not None for name in names):
            return None
        weights = []
        for name, part in zip(names, parts, strict=True):
            weight = quantized_part(self._int4(name, part[0] if part else slice(None)), _columns(part))
            self._drop_pages(name)
            if weight is None:
                return None
            weights.append(weight)
        return quantized_rows(weights)

    def codes(
        self, names: Sequence[str], parts: Sequence[tuple[slice, ...]], layer: Sequence[str] = ()
    ) -> GroupedWeight | KQuantWeight | None:
        """Return quantised weights as one, as codes with scales; None if that would round them.

        layer: the names of all weights that are packed as one, `names` if it is empty.
        """
        kind = common_kind([self._tensor(name).type.name for name in layer or names])
        if kind is None:
            return None
        grouped: list[GroupedWeight] = []
        of_blocks: list[KQuantWeight] = []
        for name, part in zip(names, parts, strict=True):
            tensor = self._tensor(name)
            rows = self._rows(name, part[0] if part else slice(None))
            blocks = self._blocks(name, rows)
            self._drop_pages(name)
            if blocks is None:
                return None
            try:
                weight = codes_of(tensor.type.name, blocks, len(rows), kind)
            except ValueError as error:
                raise CheckpointError(self._folder, f"tensor {tensor.name}: {error}", AGAIN) from None
            if isinstance(weight, GroupedWeight):
                if (grouped_columns := grouped_part(weight, _columns(part))) is None:
                    return None
                grouped.append(grouped_columns)
            else:
                if (block_columns := k_quant_part(weight, _columns(part))) is None:
                    return None
                of_blocks.append(block_columns)
        return k_quant_rows(of_blocks) if of_blocks else grouped_rows(grouped)

    def stored_dtype(self, name: str) -> torch.dtype:
        return PLAIN.get(self._tensor(name).type.name, self._wide)

    def num_elements(self) -> int:
        return sum(math.prod(tensor.shape) for tensor in self._file.tensors.values())

    def tensors(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor, bool]]:
        """Yield canonical name, values and whether they were quantised: those in `dtype`, others as they are stored.

        Raises CheckpointError, also for a stored tensor that is not of the architecture.
        """
        names: list[str] = []
        known = {LONG_FACTORS, SHORT_FACTORS}  # the configuration has them
        for stored, tensor in self._file.tensors.items():
            if (canonical := self._names.canonical(tensor)) is not None:
                names += canonical
                known.add(stored)
        self._refuse_others(known)
        self._total_bytes = sum(map(self._nbytes, names))
        for name in names:
            is_quantized = self._tensor(name).type.is_quantized
            values = self.read([name], dtype if is_quantized else self.stored_dtype(name))
            yield name, values.reshape(self.shape(name)), is_quantized

    def samples(self) -> Iterator[tuple[str, list[int], Tensor]]:
        for name, tensor in sorted(self._file.tensors.items()):
            whole = TensorPlace(name)
            row = self._expand(whole, tensor, torch.tensor([tensor.shape[0] // 2]))
            yield name, list(tensor.shape), row.float()

    def equal(self, first: str, second: str) -> bool:
        left, right = self._tensor(first), self._tensor(second)
        contents = [one.map[one.start : one.start + one.nbytes] for one in (left, right)]
        return left.type == right.type and contents[0] == contents[1]

    def _found(self, name: str) -> tuple[TensorPlace, GGUFTensor]:
        """Return the place of a tensor, and the stored tensor. Raises CheckpointError if there is none that fits."""
        if name not in self._places:
            place = self._names.find(name)
            tensor = None if place is None else self._file.tensors.get(place.stored)
            if place is None or tensor is None:
                what = f"tensor {name if place is None else place.stored} is missing"
                raise CheckpointError(self._folder, what, f"{AGAIN}, or {SAME_MODEL}")
            if place.entry is not None and not (len(tensor.shape) > 1 and place.entry < tensor.shape[0]):
                what = f"tensor {tensor.name} has the shape {list(tensor.shape)}, expected an entry {place.entry}"
                raise CheckpointError(self._folder, what, SAME_MODEL)
            shape = _own_shape(place, tensor)
            for at, order in enumerate((place.rows, place.columns)):
                if order is not None and (len(shape) <= at or len(order) != shape[at]):
                    what = f"tensor {tensor.name} has the shape {list(shape)}, expected {len(order)} in dimension {at}"
                    raise CheckpointError(self._folder, what, SAME_MODEL)
            self._places[name] = place, tensor
        return self._places[name]

    def _tensor(self, name: str) -> GGUFTensor:
        return self._found(name)[1]

    def _entry(self, name: str) -> int | None:
        return self._found(name)[0].entry

    def _nbytes(self, name: str) -> int:
        place, tensor = self._found(name)
        return tensor.nbytes if place.entry is None else tensor.nbytes // tensor.shape[0]

    def _path(self, name: str) -> Path:
        return self._folder

    def _part_shape(self, name: str, part: tuple[slice, ...]) -> tuple[int, ...]:
        shape = _own_shape(*self._found(name))
        return tuple(len(range(*part[at].indices(size))) if at < len(part) else size for at, size in enumerate(shape))

    def _chunks(self, name: str, part: tuple[slice, ...]) -> Iterator[Tensor]:
        """Yield the rows of a tensor, or of a part of it, a few at a time."""
        place, tensor = self._found(name)
        rows = self._rows(name, part[0] if part else slice(None))
        step = max(1, CHUNK // math.prod(_own_shape(place, tensor)[1:]))
        for start in range(0, len(rows), step):
            chunk = self._expand(place, tensor, rows[start : start + step])
            if place.columns is not None:
                chunk = chunk[:, place.columns]
            if place.undo is not None:
                chunk = place.undo(chunk.float())
            yield chunk[(slice(None), *part[1:])].contiguous() if len(part) > 1 else chunk

    def _rows(self, name: str, part: slice) -> Tensor:
        """Return the stored row of each row, int64."""
        place, tensor = self._found(name)
        num_rows = _own_shape(place, tensor)[0]
        return (torch.arange(num_rows) if place.rows is None else place.rows)[part]

    def _bytes_of(self, place: TensorPlace, tensor: GGUFTensor) -> numpy.ndarray[Any, numpy.dtype[numpy.uint8]]:
        """Return a view of the file: the bytes of each row. Rows that are taken from it are copied."""
        nbytes, start = tensor.nbytes, tensor.start
        if place.entry is not None:
            nbytes //= tensor.shape[0]
            start += place.entry * nbytes
        view = numpy.frombuffer(tensor.map, dtype=numpy.uint8, count=nbytes, offset=start)
        return view.reshape(_own_shape(place, tensor)[0], -1)

    def _blocks(self, name: str, rows: Tensor) -> Tensor | None:
        """Return the blocks of some stored rows, uint8 [B, bytes]; None if the order of columns cuts blocks."""
        place, tensor = self._found(name)
        stored = torch.from_numpy(self._bytes_of(place, tensor)[rows.numpy()])
        blocks = stored.reshape(len(rows), -1, tensor.type.nbytes)
        if place.columns is not None:
            order = place.columns.reshape(-1, tensor.type.block)
            runs = order[:, :1] + torch.arange(tensor.type.block)
            if not torch.equal(order, runs) or bool((order[:, 0] % tensor.type.block).any()):
                return None
            blocks = blocks[:, order[:, 0] // tensor.type.block]
        return blocks.reshape(-1, tensor.type.nbytes)

    def _drop_pages(self, name: str) -> None:
        """Take the pages of a tensor out of the memory of this process. The next use reads them again."""
        place, tensor = self._found(name)
        nbytes, start = self._nbytes(name), tensor.start
        start += nbytes * (place.entry or 0)
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        size = start + nbytes - first
        if size > 0:
            tensor.map.madvise(mmap.MADV_DONTNEED, first, size)

    def _expand(self, place: TensorPlace, tensor: GGUFTensor, rows: Tensor) -> Tensor:
        """Return rows as float32, or in their stored type if they are not quantised. rows: stored rows, int64 [R]."""
        stored = torch.from_numpy(self._bytes_of(place, tensor)[rows.numpy()])
        shape = len(rows), *_own_shape(place, tensor)[1:]
        if tensor.type.name in PLAIN:
            return stored.view(PLAIN[tensor.type.name]).reshape(shape)
        return EXPANSIONS[tensor.type.name](stored.reshape(-1, tensor.type.nbytes)).reshape(shape)

    def _int4(self, name: str, part: slice) -> QuantizedWeight:
        """Read rows of a tensor of INTEGER_TYPE as they are stored."""
        place, tensor = self._found(name)
        rows, k = self._rows(name, part), tensor.shape[-1]
        n, step = len(rows), max(1, CHUNK // k)
        values = torch.empty((n, k), dtype=torch.int8)
        scales = torch.empty((n, k // INT4_GROUP), dtype=torch.float16)
        stored = self._bytes_of(place, tensor)
        for start in range(0, n, step):
            blocks = torch.from_numpy(stored[rows[start : start + step].numpy()]).reshape(-1, tensor.type.nbytes)
            values[start : start + step] = int4_values(blocks).reshape(-1, k)
            scales[start : start + step] = half(blocks, 0).reshape(-1, k // INT4_GROUP)
        if not bool(scales.isfinite().all()):
            raise CheckpointError(self._folder, f"tensor {tensor.name} has scales that are not finite", AGAIN)
        return QuantizedWeight(values, scales, 4)


def _own_shape(place: TensorPlace, tensor: GGUFTensor) -> tuple[int, ...]:
    """Return the shape of a tensor, or of the entry of a stacked one."""
    return tensor.shape if place.entry is None else tensor.shape[1:]


def _columns(part: tuple[slice, ...]) -> tuple[slice, ...]:
    """Return the part of rows that were read as a part says: the same columns of all of them."""
    return (slice(None), *part[1:]) if len(part) > 1 else ()


def read_rope_divisors(file: GGUFFile, head_dim: int) -> tuple[float, ...]:
    """Return the divisors of RoPE of a file; empty if it has none. Raises CheckpointError."""
    try:
        divisors = rope_factors(file)
    except FileError as error:
        raise CheckpointError(error.where, error.what, error.remedy) from error
    if divisors and len(divisors) != head_dim // 2:
        what = f"tensor {ROPE_FACTORS} has {len(divisors)} numbers, expected {head_dim // 2}, half of head_dim"
        raise CheckpointError(file.path, what, AGAIN)
    return divisors
