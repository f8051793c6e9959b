"""Packs the weights of a quantised checkpoint for the kernels, and logs how they are kept.

Weights are never rounded twice. A format that rounds activations to 8 bits, as the kernels
do, is kept in its integers. Codes of 4 bits or FP8 in groups are kept as they are, and activations are not rounded. All
other layers are dequantised and kept in 16 bits, and activations are not rounded, either.
--quantization may name the stored format: then the integer kernels multiply its integers, and the other layers are
rounded on load.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

from quire.kernels.grouped_weight import MXFP4, GroupedWeight, LinearWeight
from quire.kernels.ops import Ops
from quire.kernels.quantization import QuantizedWeight
from quire.shared.gguf.model_files import is_gguf
from quire.worker.models.config import ModelConfig
from quire.worker.models.errors import CheckpointError
from quire.worker.models.gguf.weights import GGUFWeights
from quire.worker.models.loader import Progress, Weights
from quire.worker.models.quantized.checkpoint import QuantizedCheckpoint
from quire.worker.models.quantized.mxfp4 import Mxfp4
from quire.worker.models.quantized.mxfp4_checkpoint import Mxfp4Checkpoint
from quire.worker.models.sharding import Shard
from quire.worker.models.weight_reader import WeightReader

log = logging.getLogger(__name__)


def open_weights(
    folder: Path,
    config: ModelConfig,
    dtypes: Sequence[torch.dtype],
    device: torch.device | str,
    progress: Progress | None = None,
) -> Weights:
    """Open the files of a checkpoint.

    dtypes: of weights that the kernels multiply by. Raises CheckpointError; for a GGUF file on a GPU, too.
    """
    quantization = config.quantization
    if is_gguf(folder):
        if torch.device(device).type != "cpu":
            raise CheckpointError(folder, "GGUF files are computed on CPUs only", "take --device cpu")
        return GGUFWeights(folder, dtypes, progress)
    if quantization is None:
        return Weights(folder, progress)
    wide = torch.float16 if config.dtype == "float16" else torch.bfloat16
    kind = Mxfp4Checkpoint if isinstance(quantization, Mxfp4) else QuantizedCheckpoint
    return kind(folder, quantization, dtypes, wide, progress)


def make_reader(
    weights: Weights, shard: Shard, ops: Ops, dtype: torch.dtype, device: torch.device | str, bits: int | str
) -> WeightReader:
    """Return a reader of weights. Arguments as of `WeightReader`."""
    if isinstance(weights, QuantizedCheckpoint) or (isinstance(weights, GGUFWeights) and weights.quantization):
        return QuantizedReader(weights, shard, ops, dtype, device, bits)
    return WeightReader(weights, shard, ops, dtype, device, bits)


class QuantizedReader(WeightReader):
    """Reads the weights of a quantised checkpoint."""

    def __init__(
        self,
        weights: QuantizedCheckpoint | GGUFWeights,
        shard: Shard,
        ops: Ops,
        dtype: torch.dtype,
        device: torch.device | str,
        bits: int | str = 0,
    ) -> None:
        super().__init__(weights, shard, ops, dtype, device, bits)
        self._checkpoint = weights
        self._kinds: Counter[str] = Counter()  # how layers are kept: number of layers
        self._has_float_activations = False

    def _weight(self, names: Sequence[str], bits: int) -> LinearWeight:
        layouts = [self._checkpoint.layout(name) for name in names]
        labels = {layout.label if layout else "not quantised" for layout in layouts}
        stored = " and ".join(sorted(labels))
        if any(layouts):
            parts = [self._shard.part(name) for name in names]
            for wanted in self._wanted(names, bits):
                exact = self._checkpoint.exact(names, wanted, parts)
                if exact is not None:
                    self._count(names, f"{stored} as int{wanted} without further rounding")
                    return exact
            grouped = self._grouped(names, parts)
            if grouped is not None:
                self._count(names, f"{stored} as {grouped.kind} without further rounding")
                self._has_float_activations = True
                return grouped
            weight: LinearWeight = self._read(names, self._kept(names))
            self._has_float_activations = True
        else:
            weight = super()._weight(names, bits)
        if isinstance(weight, torch.Tensor):
            kept = f"{str(weight.dtype).removeprefix('torch.')}"
        else:
            kept = (f"int{weight.bits}" if isinstance(weight, QuantizedWeight) else weight.kind) + ", rounded on load"
        self._count(names, f"{stored} as {kept}")
        return weight

    def _grouped(self, names: Sequence[str], parts: Sequence[tuple[slice, ...]]) -> GroupedWeight | None:
        """Return layers as codes with a scale per group; None if they are not stored so, or the kernels lack them."""
        if not isinstance(self._checkpoint, QuantizedCheckpoint):
            return None
        grouped = self._checkpoint.grouped(names, parts)
        return grouped if grouped is not None and grouped.kind in self._ops.grouped_kinds else None

    def grouped_entry(self, name: str, index: int, part: tuple[slice, ...]) -> GroupedWeight | None:
        if MXFP4 not in self._ops.grouped_kinds or not isinstance(self._checkpoint, QuantizedCheckpoint):
            return None
        return self._checkpoint.grouped_entry(name, index, part)

    def _wanted(self, names: Sequence[str], bits: int) -> list[int]:
        """Return the bits to try: those that the user asked for, else those of a format that rounds activations."""
        if isinstance(self._bits, str):
            return []
        if self._bits:
            wanted = [self._bits, bits]
        else:
            layouts = [self._checkpoint.layout(name) for name in names]
            wanted = [layout.integer_bits for layout in layouts if layout is not None]
            if len(wanted) < len(names) or len(set(wanted)) > 1:
                return []
        return [at for at in dict.fromkeys(wanted) if at in self._ops.quantized_bits]

    def _count(self, names: Sequence[str], kind: str) -> None:
        self._kinds[kind] += len(names)

    def log(self) -> None:
        kept = "; ".join(f"{count} layers: {kind}" for kind, count in self._kinds.most_common())
        note = "; activations are not rounded" if self._has_float_activations else ""
        quantization = self._checkpoint.quantization
        log.info("quantised checkpoint, %s: %s%s", quantization.label if quantization else "", kept, note)
