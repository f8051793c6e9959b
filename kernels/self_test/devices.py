"""Cases of what surrounds the kernels on a device: the replay of a CUDA graph, and the sum over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from quire.kernels.ops import AllReduceGroup
from quire.kernels.self_test.cases import KernelCase
from quire.kernels.self_test.inputs import CaseInputs
from quire.kernels.self_test.layers import DECODES, LayerInputs
from quire.kernels.uses import KernelUses

GRAPH = "graph"
NOWHERE = -1  # the slot of a token whose keys and values are not kept


class Replayable(Protocol):
    def replay(self) -> None:
        """Launch the recorded kernels."""


# Records the kernels that a function launches, in a new memory pool (None).
RecordGraph = Callable[[Callable[[], None], Any], tuple[Replayable, Any]]


def graph_case(inputs: CaseInputs, uses: KernelUses, record: RecordGraph) -> KernelCase:
    """Return the case of a decode step that is recorded with empty sequences and replayed with others."""
    ops, layer = inputs.ops, LayerInputs(inputs, uses.attention[0], uses, DECODES)
    tables, lengths, starts = layer.step.tables
    step = {
        "residual": layer.residual,
        "positions": layer.positions,
        "slots": layer.slots,
        "tables": tables,
        "lengths": lengths,
        "starts": starts,
        "rows": layer.rows,
    }

    def run() -> Sequence[Tensor]:
        static = {name: torch.zeros_like(values) for name, values in step.items()}
        static["slots"].fill_(NOWHERE)
        static["starts"].copy_(starts)
        stack = layer.stack(ops, layer.step.caches_of(ops))
        output = torch.zeros(len(layer.rows), layer.hidden, dtype=ops.dtype, device=ops.device)
        tokens = torch.zeros(len(layer.rows), dtype=torch.int32, device=ops.device)

        def launch() -> None:
            residual = static["residual"].clone()
            at = static["positions"], static["slots"]
            sequences = static["tables"], static["lengths"], static["starts"]
            output.copy_(ops.decoder_layers(residual, stack, *at, *sequences, static["rows"]))
            tokens.copy_(ops.argmax(output.float()))

        launch()  # a kernel is compiled at its first launch, which a graph cannot hold
        # Without graphs, as after a kernel was replaced that they need, the step is launched again.
        is_recorded = getattr(ops, "can_capture", True)
        replay = record(launch, None)[0].replay if is_recorded else launch
        for name, values in step.items():
            static[name].copy_(values)
        replay()
        return [output.clone(), tokens.float()]

    def launched() -> Sequence[Tensor]:
        (output,) = layer.compute(ops)
        return [output, ops.argmax(output.float()).float()]

    return KernelCase(
        "replay of a CUDA graph",
        GRAPH,
        f"{layer.use}, {inputs.types}",
        run,
        launched,
        inputs.unit,
        is_comparable=False,
        survives_errors=True,
    )


def all_reduce_case(inputs: CaseInputs, hidden: int, ranks: AllReduceGroup) -> KernelCase:
    """Return the case of the sum over all ranks, which run it at the same time."""
    device, dtype = inputs.ops.device, inputs.ops.dtype

    def pattern(tokens: int) -> Tensor:
        values = torch.arange(tokens * hidden, device=device) % 3  # sums stay exact in 16 bits for all numbers of ranks
        return values.view(tokens, hidden).to(dtype)

    return KernelCase(
        "all-reduce",
        "all_reduce",
        f"{ranks.size} ranks, {hidden} features, {inputs.types}",
        lambda: [ranks.all_reduce(pattern(tokens) * (ranks.rank + 1)) for tokens in (1, 33)],
        lambda: [pattern(tokens).float() * (ranks.size * (ranks.size + 1) // 2) for tokens in (1, 33)],
        inputs.unit,
        is_comparable=False,
    )
