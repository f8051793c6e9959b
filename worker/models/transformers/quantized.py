"""Quantised weights of models that Transformers computes.

Transformers gets the numbers that the weights stand for, so that a model is examined and tried with them. When a layer
is packed, a digest of its numbers finds the layer of the checkpoint that has them, and the kernels get its codes.

Names do not find it. Transformers renames tensors, puts gates and ups side by side and stacks the weights of experts,
by rules that differ by model and by release, and it does not say which tensors a parameter was made of. Numbers
survive that. Layers with equal numbers are the same for a product, so it does not matter which of them is found.

If Transformers changes numbers while it loads them, or a parameter is made of parts that no digest here has, the layer
keeps its numbers: the results are right, and the layer takes more memory. The log line of the reader counts the layers
that were found. Each weight is digested once when it is read and once or twice when it is packed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from quire.kernels.ops import Ops
from quire.kernels.weights import (
    MAX_INTEGER_FEATURES,
    GroupedWeight,
    LinearWeight,
    QuantizedWeight,
    grouped_rows,
    quantize,
    quantized_rows,
    to_fp8,
)
from quire.shared.model.folder import is_gguf
from quire.worker.models.files.formats import NumbersOfTensors, make_reader, open_numbers, refuse_gpu
from quire.worker.models.files.loader import Progress
from quire.worker.models.files.weight_reader import HEAD_BITS, Unsplit
from quire.worker.models.transformers.config import TransformersConfig
from quire.worker.models.transformers.layer_weights import AS_THEY_ARE, LayerWeights

# Names of linear layers that choose experts, and are never rounded: rounding would change the choice.
ROUTERS = ("gate", "router", "shared_expert_gate")


class StoredWeights(LayerWeights):
    """The weights of a quantised checkpoint, as it stores them if the kernels can hold that without rounding."""

    def __init__(self, config: TransformersConfig, ops: Ops, progress: Progress | None = None) -> None:
        """Open the checkpoint. Raises CheckpointError."""
        checkpoint = open_numbers(config.folder, config.quantization, (ops.dtype,), progress)
        assert checkpoint is not None
        self._checkpoint = checkpoint
        self._reader = make_reader(self._checkpoint, Unsplit(), ops, ops.dtype, ops.device, 0)
        self._names: dict[bytes, str] = {}  # by the content of the dequantised weights
        self._dtype = ops.dtype
        rounds_activations = config.quantization is not None and config.quantization.rounds_activations
        self.has_integers = rounds_activations and bool(ops.quantized_bits)

    def tensors(self) -> dict[str, Tensor]:
        tensors = {}
        for name, values, is_quantized in self._checkpoint.tensors(self._dtype):
            tensors[name] = values
            if is_quantized:
                self._names[_content(values)] = name
        return tensors

    def kind(self, weight: Tensor) -> object:
        return tuple(dict.fromkeys(map(self._checkpoint.layout, self._names_of(weight))))

    def joined(self, weights: Sequence[Tensor]) -> LinearWeight:
        names = [self._names_of(weight) for weight in weights]
        if all(names):
            return self._reader.weight([name for group in names for name in group])
        return super().joined(weights)

    def finish(self) -> None:
        self._reader.finish()

    def _names_of(self, weight: Tensor) -> list[str]:
        """Return the layers of the checkpoint that these weights [N, K] are, along N; empty if there is no such layer.

        Transformers puts gates and ups of experts side by side.
        """
        for parts in ([weight], weight.chunk(2)):
            names = [self._names.get(_content(part)) for part in parts]
            if None not in names:
                return [name for name in names if name is not None]
        return []


class RoundedWeights(LayerWeights):
    """The weights of linear layers, rounded on load to 8 or 4 bits or FP8."""

    def __init__(
        self, bits: int | str, checkpoint: NumbersOfTensors | None = None, dtype: torch.dtype = torch.float32
    ) -> None:
        """bits: 8, 4, or FP8. checkpoint: one that Transformers cannot read itself. dtype: of its numbers."""
        self._bits, self._checkpoint, self._dtype = bits, checkpoint, dtype
        self.has_integers = not isinstance(bits, str)
        self._codes: dict[bytes, QuantizedWeight | GroupedWeight] = {}  # by the content of the rounded weights

    def tensors(self) -> dict[str, Tensor] | None:
        if self._checkpoint is None:
            return None
        return {name: values for name, values, _ in self._checkpoint.tensors(self._dtype)}

    def round(self, model: Any, layers: Iterable[Any], stacks: Iterable[Any]) -> None:
        """Round the weights of these linear layers and modules of stacked experts, so that a trial has them, too."""
        head = model.get_output_embeddings()
        names = {module: name.rpartition(".")[2] for name, module in model.named_modules()}
        for layer in layers:
            if names[layer] in ROUTERS:
                continue
            is_plain = type(layer) is nn.Linear
            weight = layer.weight.data if is_plain else layer.weight.data.t()
            rounded = self._rounded(weight, HEAD_BITS if layer is head else self._bits)
            # A new parameter, because a tied head shares its parameter with the embedding.
            layer.weight = nn.Parameter(rounded if is_plain else rounded.t(), requires_grad=False)
        for stack in stacks:
            for values in list(stack.parameters(recurse=False)):
                if values.dim() == 3:
                    entries = values.data.transpose(1, 2) if stack.is_transposed else values.data
                    for entry in entries:
                        entry.copy_(self._rounded(entry, self._bits))

    def kind(self, weight: Tensor) -> object:
        codes = self._codes.get(_content(weight))
        return None if codes is None else codes.bits

    def joined(self, weights: Sequence[Tensor]) -> LinearWeight:
        codes = [self._codes.get(_content(weight)) for weight in weights]
        whole = [weight for weight in codes if isinstance(weight, QuantizedWeight)]
        if len(whole) == len(codes):
            return quantized_rows(whole)
        groups = [weight for weight in codes if isinstance(weight, GroupedWeight)]
        together = grouped_rows(groups) if len(groups) == len(codes) else None
        return super().joined(weights) if together is None else together

    def finish(self) -> None:
        self._codes.clear()

    def _rounded(self, weight: Tensor, bits: int | str) -> Tensor:
        """Return weights [N, K] rounded, in their dtype."""
        if isinstance(self._bits, str):
            codes: QuantizedWeight | GroupedWeight = to_fp8(weight)
        elif weight.shape[1] > MAX_INTEGER_FEATURES:
            return weight
        else:
            codes = quantize(weight, int(bits))
        rounded = codes.dequantized().to(weight.dtype)
        self._codes[_content(rounded)] = codes
        return rounded


def layer_weights(config: TransformersConfig, ops: Ops, bits: int | str, progress: Progress | None) -> LayerWeights:
    """Return how the weights of a model are packed. bits: of `--quantization`; 0: none. Raises CheckpointError."""
    refuse_gpu(config.folder, ops.device)
    if config.quantization is None and bits:
        return RoundedWeights(bits, open_numbers(config.folder, None, (ops.dtype,), progress), ops.dtype)
    if config.quantization is not None or is_gguf(config.folder):
        return StoredWeights(config, ops, progress)
    return AS_THEY_ARE


def _content(weight: Tensor) -> bytes:
    """Return a digest of the shape, the type and the values of weights [N, K]."""
    plain = weight.detach().cpu().contiguous()
    digest = hashlib.blake2b(f"{tuple(plain.shape)} {plain.dtype}".encode(), digest_size=16)
    digest.update(plain.view(torch.uint8).numpy().data)
    return digest.digest()
