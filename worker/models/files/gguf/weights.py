"""The tensors of a GGUF file under the names of a Hugging Face checkpoint, in the order of rows of Transformers."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator, Sequence
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
from quire.shared.model.gguf.config import ROPE_FACTORS, rope_factors
from quire.shared.model.gguf.file import GGUFFile, GGUFTensor, open_gguf
from quire.shared.process.errors import AGAIN, CheckpointError, FileError
from quire.worker.models.files.gguf.blocks import EXPANSIONS, half, int4_values
from quire.worker.models.files.gguf.codes import codes_of, common_kind
from quire.worker.models.files.gguf.names import row_order, stored_name
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


def _stored_name_or_none(name: str) -> str | None:
    """Return the name in a GGUF file of a tensor; None if GGUF has no such tensor, such as scales of a KV cache."""
    try:
        return stored_name(name)
    except KeyError:
        return None


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
        self._names: dict[str, GGUFTensor] = {}  # canonical names that were asked for
        architecture = self._file.text("general.architecture")
        self._orders: dict[str, int] = {}  # heads of the projections whose rows are in llama.cpp's order
        if architecture == "llama":
            heads = self._heads("llama.attention.head_count", 1)
            self._orders = {".q_proj.": heads, ".k_proj.": self._heads("llama.attention.head_count_kv", heads)}
        self.quantization = quantization_of(self._file)

    def _heads(self, key: str, default: int) -> int:
        """Return the number of heads, which `model_config` has found to be the same for all layers."""
        value = self._file.metadata.get(key, default)
        return value if isinstance(value, int) else int(self._file.numbers(key)[0])

    def __contains__(self, name: str) -> bool:
        return _stored_name_or_none(name) in self._file.tensors

    def check(self, expected: dict[str, tuple[int, ...]], ignored: Iterable[str] = ()) -> None:
        """Compare the tensors with the expected shapes. Raises CheckpointError, also for an unknown tensor."""
        self._total_bytes = 0
        for name, shape in expected.items():
            tensor = self._tensor(name)
            if tensor.shape != shape:
                what = f"tensor {tensor.name} has the shape {list(tensor.shape)}, expected {list(shape)}"
                raise CheckpointError(self._folder, what, SAME_MODEL)
            if len(shape) == 1 and tensor.type.is_quantized:
                what = f"tensor {tensor.name} has the type {tensor.type.name}, expected one that is not quantised"
                raise CheckpointError(self._folder, what, SAME_MODEL)
            self._total_bytes += tensor.nbytes
        known = {_stored_name_or_none(name) for name in (*expected, *ignored)} | {ROPE_FACTORS}
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
            self._read_bytes += self._tensor(name).nbytes
            if self._progress is not None:
                self._progress(self._read_bytes, self._total_bytes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensor(name).shape

    def layout(self, name: str) -> GGUFLayout | None:
        """Return the layout of a quantised tensor; None for any other tensor."""
        kind = self._tensor(name).type
        return GGUFLayout(kind.name, 4 if kind.name == INTEGER_TYPE else 0) if kind.is_quantized else None

    def exact(self, names: Sequence[str], bits: int, parts: Sequence[tuple[slice, ...]]) -> QuantizedWeight | None:
        """Return quantised layers as one in a layout of the kernels; None if it cannot hold them without rounding."""
        if bits != 4 or any(self._tensor(name).type.name != INTEGER_TYPE for name in names):
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
            blocks = torch.from_numpy(self._stored_rows(tensor)[rows.numpy()]).reshape(-1, tensor.type.nbytes)
            self._drop_pages(name)
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

    def samples(self) -> Iterator[tuple[str, list[int], Tensor]]:
        for name, tensor in sorted(self._file.tensors.items()):
            yield name, list(tensor.shape), self._expand(tensor, torch.tensor([tensor.shape[0] // 2])).float()

    def equal(self, first: str, second: str) -> bool:
        left, right = self._tensor(first), self._tensor(second)
        data = self._file.map
        return (
            left.type == right.type
            and data[left.start : left.start + left.nbytes] == data[right.start : right.start + right.nbytes]
        )

    def _tensor(self, name: str) -> GGUFTensor:
        if name not in self._names:
            stored = stored_name(name)
            if stored not in self._file.tensors:
                what = f"tensor {stored} is missing"
                raise CheckpointError(self._folder, what, f"{AGAIN}, or {SAME_MODEL}")
            self._names[name] = self._file.tensors[stored]
        return self._names[name]

    def _path(self, name: str) -> Path:
        return self._folder

    def _part_shape(self, name: str, part: tuple[slice, ...]) -> tuple[int, ...]:
        shape = self._tensor(name).shape
        return tuple(len(range(*part[at].indices(size))) if at < len(part) else size for at, size in enumerate(shape))

    def _chunks(self, name: str, part: tuple[slice, ...]) -> Iterator[Tensor]:
        """Yield the rows of a tensor, or of a part of it, a few at a time."""
        tensor = self._tensor(name)
        rows = self._rows(name, part[0] if part else slice(None))
        step = max(1, CHUNK // (tensor.shape[1] if len(tensor.shape) > 1 else 1))
        for start in range(0, len(rows), step):
            chunk = self._expand(tensor, rows[start : start + step])
            yield chunk[(slice(None), *part[1:])].contiguous() if len(part) > 1 else chunk

    def _rows(self, name: str, part: slice) -> Tensor:
        """Return the stored row of each row, int64."""
        num_rows = self._tensor(name).shape[0]
        heads = next((heads for end, heads in self._orders.items() if end in name), 0)
        return (row_order(heads, num_rows) if heads else torch.arange(num_rows))[part]

    def _stored_rows(self, tensor: GGUFTensor) -> numpy.ndarray[Any, numpy.dtype[numpy.uint8]]:
        """Return a view of the file: the bytes of each row. Rows that are taken from it are copied."""
        bytes_of = numpy.frombuffer(self._file.map, dtype=numpy.uint8, count=tensor.nbytes, offset=tensor.start)
        return bytes_of.reshape(tensor.shape[0], -1)

    def _drop_pages(self, name: str) -> None:
        """Take the pages of a tensor out of the memory of this process. The next use reads them again."""
        tensor = self._tensor(name)
        first = -(-tensor.start // mmap.PAGESIZE) * mmap.PAGESIZE
        size = tensor.start + tensor.nbytes - first
        if size > 0:
            self._file.map.madvise(mmap.MADV_DONTNEED, first, size)

    def _expand(self, tensor: GGUFTensor, rows: Tensor) -> Tensor:
        """Return rows as float32, or in their stored type if they are not quantised. rows: stored rows, int64 [R]."""
        stored = torch.from_numpy(self._stored_rows(tensor)[rows.numpy()])
        if tensor.type.name in PLAIN:
            return stored.view(PLAIN[tensor.type.name]).reshape(len(rows), *tensor.shape[1:])
        blocks = stored.reshape(-1, tensor.type.nbytes)
        return EXPANSIONS[tensor.type.name](blocks).reshape(len(rows), *tensor.shape[1:])

    def _int4(self, name: str, part: slice) -> QuantizedWeight:
        """Read rows of a tensor of INTEGER_TYPE as they are stored."""
        tensor = self._tensor(name)
        rows, k = self._rows(name, part), tensor.shape[1]
        n, step = len(rows), max(1, CHUNK // k)
        values = torch.empty((n, k), dtype=torch.int8)
        scales = torch.empty((n, k // INT4_GROUP), dtype=torch.float16)
        stored = self._stored_rows(tensor)
        for start in range(0, n, step):
            blocks = torch.from_numpy(stored[rows[start : start + step].numpy()]).reshape(-1, tensor.type.nbytes)
            values[start : start + step] = int4_values(blocks).reshape(-1, k)
            scales[start : start + step] = half(blocks, 0).reshape(-1, k // INT4_GROUP)
        if not bool(scales.isfinite().all()):
            raise CheckpointError(self._folder, f"tensor {tensor.name} has scales that are not finite", AGAIN)
        return QuantizedWeight(values, scales, 4)


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
