"""Finds the folder of a model and reads its tensors. Only safetensors are read; code of a checkpoint is never run.

All headers are compared with the needs of the model before the first weight is read: a wrong checkpoint fails at once,
not after minutes. Files are mapped, and tensors are read one by one. The pages of a file leave the memory of the
process as soon as they are copied, so that the weights are in memory once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from quire.kernels.cpu.convert import copy_finite
from quire.shared.model.fields import read_json
from quire.shared.model.folder import INDEX, WEIGHTS, weights_fault
from quire.shared.model.hub import HubError, find_folder
from quire.shared.process.errors import CheckpointError
from quire.worker.models.files.mapped_files import MappedFiles
from quire.worker.models.files.tensor_names import OF_TEXT, text_tensor_name

log = logging.getLogger(__name__)

# Called with the bytes that are done, and with those of all tensors.
Progress = Callable[[int, int], None]

STORED_DTYPES = {"F32": 4, "BF16": 2, "F16": 2}  # bytes per element
TORCH_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
AGAIN = "download or copy the checkpoint again"
# Types of masks and positions, which old checkpoints store besides weights.
HARMLESS_DTYPES = ("BOOL", "I64", "U8")
# Frequencies of RoPE, which old checkpoints store; they follow from the configuration.
HARMLESS_SUFFIXES = (".rotary_emb.inv_freq",)
# Files that a model needs. Weights in subfolders, where some repositories keep other formats, are not downloaded.
DOWNLOADED = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "*.tiktoken", "merges.txt", "vocab.txt")
# The configuration of an adapter is downloaded, so that a model with an adapter is refused.
NOT_DOWNLOADED = ("*/*.safetensors", "onnx/*", "original/*", "consolidated*", "adapter_model*")
CHUNK = 1 << 20  # elements of a tensor that are copied at a time


def resolve(model: str) -> Path:
    """Return the folder of a model: `model`, or a download of that Hugging Face name. Raises CheckpointError."""
    try:
        return find_folder(model, DOWNLOADED, NOT_DOWNLOADED)
    except HubError as error:
        raise CheckpointError("model", error.reason, error.remedy) from error


class Weights:
    """The tensors of a folder by their canonical names, which start with `model.` or `lm_head.`."""

    def __init__(self, folder: Path, progress: Progress | None = None) -> None:
        """Open all files. Raises CheckpointError if a file is missing, damaged or of another format."""
        self._folder = folder
        self._progress = progress
        self._read_bytes = self._total_bytes = 0
        self._tensors: dict[str, tuple[Path, Any, str]] = {}  # canonical name: file, its handle, name inside
        files = _files(folder)
        self._mapped = MappedFiles(files)
        self._absent: dict[str, Path] = {}  # tensors that the index places in a file without them
        for path, names in files.items():
            handle = _open(path)
            inside = set(handle.keys())
            for name in sorted(inside) if names is None else names:
                if name in inside:
                    self._tensors[name] = (path, handle, name)
                else:
                    self._absent[name] = path
        if self._absent:
            log.warning("%s has %d tensors that no file has: %s", folder / INDEX, len(self._absent), min(self._absent))
        self._rename()

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def _rename(self) -> None:
        """Give the tensors their canonical names."""
        if "model.embed_tokens.weight" not in self._tensors:  # then a vision-language model may be around it
            self._tensors = {text_tensor_name(name): tensor for name, tensor in self._tensors.items()}
        # A checkpoint of the body (LlamaModel instead of LlamaForCausalLM) has names without the prefix.
        if "embed_tokens.weight" in self._tensors:
            self._tensors = {_with_prefix(name): tensor for name, tensor in self._tensors.items()}

    def outside_text(self) -> list[str]:
        """Return the tensors of a vision-language model that are not of its text model: those of its tower."""
        return [name for name in self._tensors if not name.startswith(OF_TEXT)]

    def check(self, expected: dict[str, tuple[int, ...]], ignored: Iterable[str] = ()) -> None:
        """Compare the headers with the expected shapes, and log a warning about unknown tensors.

        Raises CheckpointError for a tensor that is missing, has another shape, or is not of a floating-point type.
        """
        self._total_bytes = 0
        for name, shape in expected.items():
            path, header = self._header(name, shape)
            stored = tuple(header.get_shape())
            if stored != shape:
                what = f"tensor {name} has the shape {list(stored)}, expected {list(shape)}"
                raise CheckpointError(path, what, "config.json and the weights must be of the same model")
            if header.get_dtype() not in STORED_DTYPES:
                raise _wrong_type(path, name, header.get_dtype())
            self._total_bytes += torch.Size(shape).numel() * STORED_DTYPES[header.get_dtype()]
        unknown = [name for name in self._tensors if name not in expected and name not in set(ignored)]
        unknown = sorted(name for name in unknown if not name.endswith(HARMLESS_SUFFIXES))
        if unknown:
            names = ", ".join(unknown[:4]) + (", ..." if len(unknown) > 4 else "")
            log.warning(
                "%s: %d tensors are not part of this model and are not used: %s", self._folder, len(unknown), names
            )

    def read(
        self,
        names: Sequence[str],
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        parts: Sequence[tuple[slice, ...]] = (),
    ) -> torch.Tensor:
        """Copy tensors into memory, as one along their first dimension. Later changes of the files have no effect.

        parts: slices of the dimensions of each tensor; the rest is not kept. Raises CheckpointError for values that are
        not finite.
        """
        together = self.rows(names, dtype, device, parts)
        for at, name in enumerate(names):
            self._count(name, parts[at] if parts else ())
        return together

    def rows(
        self,
        names: Sequence[str],
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        parts: Sequence[tuple[slice, ...]] = (),
    ) -> torch.Tensor:
        """Copy tensors as `read` does, without counting them as read: some rows of them, as a rule."""
        stored = [self._stored(name, parts[at] if parts else ()) for at, name in enumerate(names)]
        rows = [len(tensor) for tensor in stored]
        together = torch.empty((sum(rows), *stored[0].shape[1:]), dtype=dtype, device=device)
        for name, tensor, out in zip(names, stored, torch.split(together, rows), strict=True):
            step = max(1, CHUNK // max(1, tensor[:1].numel()))
            for source, to in zip(torch.split(tensor, step), torch.split(out, step), strict=True):
                if not copy_finite(source, to):
                    what = f"tensor {name} has values that are not finite as {str(dtype).removeprefix('torch.')}"
                    remedy = "use another dtype" if bool(source.isfinite().all()) else AGAIN
                    raise CheckpointError(self._path(name), what, remedy)
                self._mapped.release(source)
        return together

    def finished(self, names: Sequence[str]) -> None:
        """Count tensors as read, all of whose rows `rows` has returned."""
        for name in names:
            self._count(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor that `check` has found."""
        _, handle, inside = self._tensors[name]
        return tuple(handle.get_slice(inside).get_shape())

    def _count(self, name: str, part: tuple[slice, ...] = ()) -> None:
        """Report a tensor as read. part: the slices that were read, such as one expert of a stacked tensor."""
        elements = self._elements(name)
        if part and part[0].stop is not None and part[0].stop - part[0].start == 1:
            elements //= self._tensors[name][1].get_slice(self._tensors[name][2]).get_shape()[0]
        self._read_bytes += elements * self.stored_dtype(name).itemsize
        if self._progress is not None:
            self._progress(self._read_bytes, self._total_bytes)

    def _path(self, name: str) -> Path:
        """Return the file to name in an error about a tensor."""
        return self._tensors[name][0]

    @property
    def folder(self) -> Path:
        return self._folder

    def read_plain(self, name: str) -> torch.Tensor:
        """Return a small tensor as it is stored."""
        return self._stored(name, ())

    def stored_dtype(self, name: str) -> torch.dtype:
        """Return the type in which a tensor is stored. `check` has found it to be one of STORED_DTYPES."""
        _, handle, inside = self._tensors[name]
        return TORCH_DTYPES[handle.get_slice(inside).get_dtype()]

    def _stored(self, name: str, part: tuple[slice, ...]) -> torch.Tensor:
        """Return a tensor as it is stored, or a part of it."""
        path, handle, inside = self._tensors[name]
        try:
            stored: torch.Tensor = handle.get_slice(inside)[part] if part else handle.get_tensor(inside)
        except (SafetensorError, OSError, RuntimeError) as error:
            raise CheckpointError(path, f"tensor {name} cannot be read ({error})", AGAIN) from None
        return stored

    def samples(self) -> Iterator[tuple[str, list[int], torch.Tensor]]:
        """Yield name, shape and the middle row (float32) of each tensor, ordered by name. Raises CheckpointError."""
        for name in sorted(self._tensors):
            path, handle, inside = self._tensors[name]
            if name.endswith(HARMLESS_SUFFIXES):
                continue
            try:
                header = handle.get_slice(inside)
                shape = header.get_shape()
                row = header[shape[0] // 2 : shape[0] // 2 + 1] if shape else handle.get_tensor(inside)
                wide = row.float().clone()
            except (SafetensorError, OSError, RuntimeError) as error:
                raise CheckpointError(path, f"tensor {name} cannot be read ({error})", AGAIN) from None
            self._mapped.release(row)
            yield name, shape, wide

    def num_elements(self) -> int:
        """Return the number of elements of all tensors. Raises CheckpointError for types of quantised weights."""
        return sum(self._elements(name) for name in self._tensors)

    def _elements(self, name: str) -> int:
        path, handle, inside = self._tensors[name]
        header = handle.get_slice(inside)
        if header.get_dtype() not in (*STORED_DTYPES, *HARMLESS_DTYPES):
            raise _wrong_type(path, name, header.get_dtype())
        return torch.Size(header.get_shape()).numel()

    def equal(self, first: str, second: str) -> bool:
        """Return whether two tensors hold the same values. Keeps neither in memory."""
        (_, left, left_name), (_, right, right_name) = self._tensors[first], self._tensors[second]
        pair = left.get_tensor(left_name), right.get_tensor(right_name)
        are_equal = torch.equal(*pair)
        for tensor in pair:
            self._mapped.release(tensor)
        return are_equal

    def _header(self, name: str, shape: tuple[int, ...]) -> tuple[Path, Any]:
        for absent, file in self._absent.items():
            if name in (absent, text_tensor_name(absent), _with_prefix(absent)) and name not in self._tensors:
                raise CheckpointError(file, f"tensor {absent}, which {INDEX} promises, is not in this file", AGAIN)
        if name not in self._tensors:
            what = f"tensor {name} is missing, expected with the shape {list(shape)}"
            remedy = "config.json must describe these weights, and the checkpoint must be complete"
            raise CheckpointError(self._folder, what, remedy)
        path, handle, inside = self._tensors[name]
        return path, handle.get_slice(inside)


def _wrong_type(path: Path, name: str, kind: str) -> CheckpointError:
    what = f"tensor {name} has the type {kind}, expected {', '.join(STORED_DTYPES)}"
    if kind == "F64":
        return CheckpointError(path, what, "save the model in one of these types, such as with model.to(torch.float32)")
    return CheckpointError(path, what, "use a checkpoint that is not quantised")


def _with_prefix(name: str) -> str:
    return name if name.startswith("lm_head.") else f"model.{name}"


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except FileNotFoundError:
        raise CheckpointError(path, "this file of weights is missing", AGAIN) from None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(path, f"this is not a complete safetensors file ({error})", AGAIN) from None


def _files(folder: Path) -> dict[Path, list[str] | None]:
    """Return the files to open, each with the tensors that the index places in it, or None for all of its tensors."""
    if (folder / WEIGHTS).exists():
        return {folder / WEIGHTS: None}
    if (folder / INDEX).exists():
        return _sharded(folder)
    raise CheckpointError(*weights_fault(folder))


def _sharded(folder: Path) -> dict[Path, list[str] | None]:
    index = folder / INDEX
    weight_map = read_json(index, AGAIN).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(index, "weight_map is not an object with an entry per tensor", AGAIN)
    files: dict[Path, Any] = {}
    for name, file in sorted(weight_map.items()):
        # Plain names only: an index must not make the worker open files of other folders.
        if not isinstance(file, str) or file != Path(file).name or "\\" in file or not file.endswith(".safetensors"):
            what = f"tensor {name} is placed in {str(file)[:120]!r}, which is not a safetensors file of this folder"
            raise CheckpointError(index, what, "use an index that names files of its own folder")
        files.setdefault(folder / file, []).append(name)
    return files
