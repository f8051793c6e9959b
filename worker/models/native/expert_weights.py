"""Loads the experts of a layer."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quire.kernels.ops import ExpertNorms, ExpertWeights, PackedMoE
from quire.kernels.weights import LinearWeight, grouped_part, grouped_rows
from quire.shared.process.errors import CheckpointError
from quire.worker.models.files.weight_reader import WeightReader
from quire.worker.models.native.experts import (
    EXPERT_SCALES,
    EXPERTS_NORM,
    EXPERTS_OUTPUT_NORM,
    MLP_OUTPUT_NORM,
    ROUTER_SCALE,
    ExpertsConfig,
    Style,
)


def load_experts(config: ExpertsConfig, reader: WeightReader, layer: str) -> PackedMoE:
    """Load the experts of a layer, or the part of one rank. layer: such as `model.layers.0`. Raises CheckpointError."""
    try:
        return _load(config, reader, layer)
    except ValueError as error:  # the experts of a quantised checkpoint may differ
        if isinstance(error, CheckpointError):
            raise
        remedy = "give a checkpoint whose experts are quantised alike, or the one that is not quantised"
        raise CheckpointError(layer, str(error), remedy) from None


def _load(config: ExpertsConfig, reader: WeightReader, layer: str) -> PackedMoE:
    style = config.style
    if style.is_added:
        scales = reader.read(f"{layer}.{EXPERT_SCALES}").float()
        added = reader.router(f"{layer}.{style.router}.weight")
        return reader.pack_moe(config.routing, added, _plain_stack(config, reader, f"{layer}.experts"), scales)
    block = f"{layer}.{style.block}"
    router = f"{block}.{style.router}"
    packed_router = reader.router(f"{router}.weight", [f"{router}.bias"] if style.has_biases else ())
    if style.is_stacked:
        return reader.pack_moe(config.routing, packed_router, _stacked_experts(config, reader, f"{block}.experts"))

    def experts() -> Iterator[ExpertWeights]:
        for expert in range(config.routing.num_experts):
            gate, up, down = (f"{block}.experts.{expert}.{name}" for name in (style.gate, style.up, style.down))
            gate_up = reader.weight([f"{gate}.weight", f"{up}.weight"])
            weights = gate_up, reader.weight([f"{down}.weight"])
            biases = [[f"{gate}.bias", f"{up}.bias"], [f"{down}.bias"]] if style.has_biases else []
            yield ExpertWeights(*weights, *(reader.read(*names) for names in biases))

    return reader.pack_moe(config.routing, packed_router, experts())


def load_expert_norms(reader: WeightReader, layer: str) -> ExpertNorms:
    """Load the norms of a layer that adds up an MLP and experts."""
    router_scale = reader.read(f"{layer}.{ROUTER_SCALE}")
    return ExpertNorms(
        router=router_scale * len(router_scale) ** -0.5,
        experts=reader.norm(f"{layer}.{EXPERTS_NORM}"),
        mlp_output=reader.norm(f"{layer}.{MLP_OUTPUT_NORM}"),
        experts_output=reader.norm(f"{layer}.{EXPERTS_OUTPUT_NORM}"),
    )


def _plain_stack(config: ExpertsConfig, reader: WeightReader, experts: str) -> Iterator[ExpertWeights]:
    """Read the experts of Gemma 4: [E, 2I, H] with all gates before all ups, and [E, H, I]."""
    style, inner, everything = config.style, config.intermediate_size, slice(None)
    inside = slice(reader.rank * inner, (reader.rank + 1) * inner)
    for expert in range(config.routing.num_experts):
        gate, up = reader.stacked(f"{experts}.{style.gate}", expert, (everything, everything)).chunk(2)
        down = reader.stacked(f"{experts}.{style.down}", expert, (everything, inside))
        yield ExpertWeights(
            reader.quantized(torch.cat([gate[inside], up[inside]])), reader.quantized(down.contiguous())
        )


def _stacked_experts(config: ExpertsConfig, reader: WeightReader, experts: str) -> Iterator[ExpertWeights]:
    """Read the experts of gpt-oss: [E, H, 2I] with gates in even and ups in odd columns, and [E, I, H]."""
    style, inner, everything = config.style, config.intermediate_size, slice(None)
    first = reader.rank * inner
    inside, both = slice(first, first + inner), slice(2 * first, 2 * (first + inner))
    for expert in range(config.routing.num_experts):
        gate_up_bias = reader.stacked(f"{experts}.{style.gate}_bias", expert, (both,))
        down_bias = reader.stacked(f"{experts}.{style.down}_bias", expert, (everything,))
        gate_up, down = _stacked_weights(reader, experts, style, expert, inside, both)
        yield ExpertWeights(
            gate_up,
            down,
            torch.cat([gate_up_bias[::2], gate_up_bias[1::2]]),
            down_bias if reader.rank == 0 else torch.zeros_like(down_bias),  # outputs of ranks are added up
        )


def _stacked_weights(
    reader: WeightReader, experts: str, style: Style, expert: int, inside: slice, both: slice
) -> tuple[LinearWeight, LinearWeight]:
    """Return gate_up [2I, H] and down [H, I] of one expert: as codes if they are stored so, else as they are kept."""
    everything = slice(None)
    gate_up = reader.grouped_entry(f"{experts}.{style.gate}", expert, (both, everything))
    down = reader.grouped_entry(f"{experts}.{style.down}", expert, (everything, inside))
    if gate_up is not None and down is not None:
        halves = [grouped_part(gate_up, (slice(at, None, 2), everything)) for at in range(2)]
        joined = grouped_rows([half for half in halves if half is not None])
        assert joined is not None  # of one kind
        return joined, down
    wide = reader.stacked(f"{experts}.{style.gate}", expert, (everything, both))
    wide_down = reader.stacked(f"{experts}.{style.down}", expert, (inside, everything))
    return (
        reader.quantized(torch.cat([wide[:, ::2].T, wide[:, 1::2].T])),
        reader.quantized(wide_down.T.contiguous()),
    )
