"""From the name of a model to its tensors: safetensors only, no code of the checkpoint is ever run.

All headers are checked against what the model needs before the first weight is read: a wrong checkpoint fails at once,
not after minutes. Files are mapped, and tensors are read one by one: the weights are in memory once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from quire.shared.model.folder import INDEX, WEIGHTS, gguf_fault, weights_fault
from quire.shared.model.hub import HubError, download
from quire.worker.models.errors import CheckpointError
from quire.worker.models.fields import read_json

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]  # bytes read so far, bytes of all tensors that will be read

STORED_DTYPES = {"F32": 4, "BF16": 2, "F16": 2}  # bytes per element
AGAIN = "download or copy the checkpoint again"
# Masks and positions, which old checkpoints carry beside their weights.
HARMLESS_DTYPES = ("BOOL", "I64", "U8")
# Not weights: old checkpoints carry the frequencies of RoPE, which follow from the configuration.
HARMLESS_SUFFIXES = (".rotary_emb.inv_freq",)
# What a model needs, by name; nothing below the top folder, where some repositories keep other formats.
DOWNLOADED = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "*.tiktoken", "merges.txt", "vocab.txt")
# The configuration of an adapter is downloaded: a model with one is refused, and its base is not served in its place.
NOT_DOWNLOADED = ("*/*", "consolidated*", "adapter_model*")


def resolve(model: str) -> Path:
    """The folder of a model: `model` itself if it is a folder, else a download of the Hugging Face name `model`.

    Raises CheckpointError if there is no such folder and the name is unknown, private, or cannot be reached.
    """
    folder = Path(model).expanduser()
    if model and folder.is_dir():
        return folder
    if model and folder.exists():
        if folder.suffix == ".gguf":
            raise CheckpointError(*gguf_fault(folder))
        raise CheckpointError(model, "this is a file", "give the folder that holds config.json")
    if not model or model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise CheckpointError(repr(model), "there is no such folder", "give the folder that holds config.json")
    try:
        return download(model, DOWNLOADED, NOT_DOWNLOADED)
    except HubError as error:
        raise CheckpointError("model", error.reason, error.remedy) from error


class Weights:
    """The tensors of a folder by their canonical names, which start with `model.` or `lm_head.`."""

    def __init__(self, folder: Path, progress: Progress | None = None) -> None:
        """Opens all files. Raises CheckpointError if one is missing, damaged or of another format."""
        self._folder = folder
        self._progress = progress
        self._read_bytes = self._total_bytes = 0
        self._tensors: dict[str, tuple[Path, Any, str]] = {}  # canonical name: file, its handle, name inside
        for path, names in _files(folder).items():
            handle = _open(path)
            inside = set(handle.keys())
            for name in sorted(inside) if names is None else names:
                if name not in inside:
                    raise CheckpointError(path, f"tensor {name}, which {INDEX} promises, is not in this file", AGAIN)
                self._tensors[name] = (path, handle, name)
        # A checkpoint of the body alone (LlamaModel, not LlamaForCausalLM) has no prefix.
        if "embed_tokens.weight" in self._tensors:
            self._tensors = {_with_prefix(name): tensor for name, tensor in self._tensors.items()}

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def check(self, expected: dict[str, tuple[int, ...]], ignored: Iterable[str] = ()) -> None:
        """Compare the headers with the shapes that a model needs, and warn once of tensors that it does not know.

        Raises CheckpointError for a tensor that is missing, or has another shape or a type that is not a float.
        """
        self._total_bytes = 0
        for name, shape in expected.items():
            path, header = self._header(name, shape)
            found = tuple(header.get_shape())
            if found != shape:
                what = f"tensor {name} has the shape {list(found)}, expected {list(shape)}"
                raise CheckpointError(path, what, "config.json and the weights must be of the same model")
            if header.get_dtype() not in STORED_DTYPES:
                what = f"tensor {name} has the type {header.get_dtype()}, expected {', '.join(STORED_DTYPES)}"
                raise CheckpointError(path, what, "use a checkpoint that is not quantised")
            self._total_bytes += torch.Size(shape).numel() * STORED_DTYPES[header.get_dtype()]
        unknown = [name for name in self._tensors if name not in expected and name not in set(ignored)]
        unknown = sorted(name for name in unknown if not name.endswith(HARMLESS_SUFFIXES))
        if unknown:
            names = ", ".join(unknown[:4]) + (", ..." if len(unknown) > 4 else "")
            log.warning(
                "%s: %d tensors are not part of this model and are not used: %s", self._folder, len(unknown), names
            )

    def read(
        self, name: str, dtype: torch.dtype, device: torch.device | str = "cpu", part: tuple[slice, ...] = ()
    ) -> torch.Tensor:
        """A copy in memory, so that later changes of the file do no harm. CheckpointError if it is not finite.

        part: slices of its dimensions; nothing else of it is kept.
        """
        path, handle, inside = self._tensors[name]
        try:
            header = handle.get_slice(inside)
            stored: torch.Tensor = header[part] if part else handle.get_tensor(inside)
        except (SafetensorError, OSError, RuntimeError) as error:
            raise CheckpointError(path, f"tensor {name} cannot be read ({error})", AGAIN) from None
        tensor = stored.to(device=device, dtype=dtype, copy=True, memory_format=torch.contiguous_format)
        low, high = tensor.aminmax()  # NaN if there is one: a single pass, without a mask of the size of the tensor
        if not (low.isfinite() and high.isfinite()):
            what = f"tensor {name} has values that are not finite as {str(dtype).removeprefix('torch.')}"
            remedy = "use another dtype" if bool(stored.isfinite().all()) else AGAIN
            raise CheckpointError(path, what, remedy)
        self._read_bytes += torch.Size(header.get_shape()).numel() * stored.itemsize
        if self._progress is not None:
            self._progress(self._read_bytes, self._total_bytes)
        return tensor

    def samples(self) -> Iterator[tuple[str, list[int], torch.Tensor]]:
        """Name, shape and one row of each tensor, by name: from the middle, float32. Raises CheckpointError."""
        for name in sorted(self._tensors):
            path, handle, inside = self._tensors[name]
            if name.endswith(HARMLESS_SUFFIXES):
                continue
            try:
                header = handle.get_slice(inside)
                shape = header.get_shape()
                row = header[shape[0] // 2 : shape[0] // 2 + 1] if shape else handle.get_tensor(inside)
            except (SafetensorError, OSError, RuntimeError) as error:
                raise CheckpointError(path, f"tensor {name} cannot be read ({error})", AGAIN) from None
            yield name, shape, row.float()

    def num_elements(self) -> int:
        """Of all tensors. Raises CheckpointError for one whose type is not a float, as quantised ones are."""
        return sum(self._elements(name) for name in self._tensors)

    def _elements(self, name: str) -> int:
        path, handle, inside = self._tensors[name]
        header = handle.get_slice(inside)
        if header.get_dtype() not in (*STORED_DTYPES, *HARMLESS_DTYPES):
            what = f"tensor {name} has the type {header.get_dtype()}, expected {', '.join(STORED_DTYPES)}"
            raise CheckpointError(path, what, "use a checkpoint that is not quantised")
        return torch.Size(header.get_shape()).numel()

    def equal(self, first: str, second: str) -> bool:
        """Whether two tensors hold the same values, without keeping either."""
        (_, one, one_name), (_, two, two_name) = self._tensors[first], self._tensors[second]
        return torch.equal(one.get_tensor(one_name), two.get_tensor(two_name))

    def _header(self, name: str, shape: tuple[int, ...]) -> tuple[Path, Any]:
        if name not in self._tensors:
            what = f"tensor {name} is missing, expected with the shape {list(shape)}"
            remedy = "config.json must describe these weights, and the checkpoint must be complete"
            raise CheckpointError(self._folder, what, remedy)
        path, handle, inside = self._tensors[name]
        return path, handle.get_slice(inside)


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
    """The files to open, with the tensors that the index places in each; None stands for all."""
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
        # A plain name only: an index must not make the worker open files elsewhere.
        if not isinstance(file, str) or file != Path(file).name or "\\" in file or not file.endswith(".safetensors"):
            what = f"tensor {name} is placed in {str(file)[:120]!r}, which is not a safetensors file of this folder"
            raise CheckpointError(index, what, "use an index that names files beside it")
        files.setdefault(folder / file, []).append(name)
    return files
