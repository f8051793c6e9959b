"""The formats of checkpoints: which reader reads which files. Quantised weights and GGUF have their door here.

Plain weights are `loader`, those that a checkpoint stores as integers or codes are `quantized`, GGUF files are `gguf`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch

from quire.kernels.ops import Ops
from quire.shared.model.fields import Fields
from quire.shared.model.folder import is_gguf
from quire.shared.model.gguf.file import open_gguf
from quire.shared.process.errors import CheckpointError
from quire.worker.models.files.gguf.quantization import GGUFQuantization, quantization_of
from quire.worker.models.files.gguf.weights import GGUFWeights, read_rope_divisors
from quire.worker.models.files.loader import Progress, Weights
from quire.worker.models.files.quantized.checkpoint import QuantizedCheckpoint
from quire.worker.models.files.quantized.config import QUANTIZED, parse_quantization
from quire.worker.models.files.quantized.dequantized_checkpoint import DequantizedCheckpoint
from quire.worker.models.files.quantized.fp8 import Fp8
from quire.worker.models.files.quantized.layout import Quantization as QuantizedLayers
from quire.worker.models.files.quantized.mxfp4 import Mxfp4
from quire.worker.models.files.quantized.mxfp4_checkpoint import Mxfp4Checkpoint
from quire.worker.models.files.quantized.reader import QuantizedReader
from quire.worker.models.files.weight_reader import Held, WeightReader

__all__ = ["QUANTIZED", "Mxfp4", "QuantizedLayers", "parse_quantization"]

# The quantisation of a checkpoint: by the layers that its configuration names, or by the types of a GGUF file.
Quantization = QuantizedLayers | GGUFQuantization


# The tensors of a checkpoint as numbers, by the names that Transformers knows.
NumbersOfTensors = DequantizedCheckpoint | GGUFWeights


class StoredConfig(Protocol):
    """The fields of a configuration that say how its weights are stored."""

    @property
    def quantization(self) -> Quantization | None: ...

    @property
    def dtype(self) -> str | None:
        """The type of the weights that the checkpoint declares."""


def read_quantization(folder: Path, fields: Fields) -> Quantization | None:
    """Return how a checkpoint is quantised; None if it is not. fields: of `config.json`. Raises CheckpointError."""
    return quantization_of(open_gguf(folder)) if is_gguf(folder) else parse_quantization(fields, folder)


def kept_bytes(quantization: Quantization | None, has_integers: bool) -> int | None:
    """Return the memory of the weights of a GGUF file; None for other formats, which do not say it in advance.

    has_integers: integers are multiplied as they are stored.
    """
    return quantization.kept_bytes(has_integers) if isinstance(quantization, GGUFQuantization) else None


def scale_block(quantization: Quantization | None) -> tuple[int, ...]:
    """Return output channels and input features that share a scale of FP8; empty if whole channels or tensors do."""
    return quantization.block if isinstance(quantization, Fp8) else ()


def rope_divisors(folder: Path, head_dim: int) -> tuple[float, ...]:
    """Return the divisors of RoPE that a GGUF file stores as a tensor, as for Llama 3.1; else nothing.

    Raises CheckpointError.
    """
    return read_rope_divisors(open_gguf(folder), head_dim) if is_gguf(folder) else ()


def open_stored(folder: Path, progress: Progress | None = None) -> Weights:
    """Open the files of a checkpoint to read its tensors as they are stored. Raises CheckpointError."""
    return GGUFWeights(folder, progress=progress) if is_gguf(folder) else Weights(folder, progress)


def open_numbers(
    folder: Path, quantization: Quantization | None, dtypes: Sequence[torch.dtype], progress: Progress | None = None
) -> NumbersOfTensors | None:
    """Open a checkpoint whose tensors Transformers cannot read itself; None for one that it can read.

    Raises CheckpointError.
    """
    if is_gguf(folder):
        return GGUFWeights(folder, dtypes, progress)
    if quantization is None:
        return None
    assert not isinstance(quantization, GGUFQuantization)
    return DequantizedCheckpoint(folder, quantization, dtypes, progress)


def has_single_experts(folder: Path) -> bool:
    """Return whether each expert of a layer can be read alone, whatever its family stores elsewhere."""
    return is_gguf(folder)


def open_weights(
    folder: Path,
    config: StoredConfig,
    dtypes: Sequence[torch.dtype],
    device: torch.device | str,
    progress: Progress | None = None,
) -> Weights:
    """Open the files of a checkpoint.

    dtypes: of weights that the kernels multiply by. Raises CheckpointError; for a GGUF file on a GPU, too.
    """
    quantization = config.quantization
    if is_gguf(folder):
        refuse_gpu(folder, device)
        return GGUFWeights(folder, dtypes, progress)
    if quantization is None:
        return Weights(folder, progress)
    assert not isinstance(quantization, GGUFQuantization)
    wide = torch.float16 if config.dtype == "float16" else torch.bfloat16
    kind = Mxfp4Checkpoint if isinstance(quantization, Mxfp4) else QuantizedCheckpoint
    return kind(folder, quantization, dtypes, wide, progress)


def refuse_gpu(folder: Path, device: torch.device | str) -> None:
    """Raise CheckpointError for a GGUF file on a GPU."""
    if is_gguf(folder) and torch.device(device).type != "cpu":
        raise CheckpointError(folder, "GGUF files are computed on CPUs only", "take --device cpu")


def make_reader(
    weights: Weights, shard: Held, ops: Ops, dtype: torch.dtype, device: torch.device | str, bits: int | str
) -> WeightReader:
    """Return a reader of weights. Arguments as of `WeightReader`."""
    if isinstance(weights, QuantizedCheckpoint) or (isinstance(weights, GGUFWeights) and weights.quantization):
        return QuantizedReader(weights, shard, ops, dtype, device, bits)
    return WeightReader(weights, shard, ops, dtype, device, bits)
