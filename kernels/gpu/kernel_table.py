"""The kernels of the operations: those of Triton, and those of torch that may replace single kernels.

A kernel that gives wrong results on a device is replaced (`quire.kernels.self_test`). The batch-invariant mode replaces
none, because torch's sums depend on the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from quire.kernels.gpu import logits, logprobs, penalties, rope, rows, sampling, torch_kernels
from quire.kernels.gpu import moe as experts
from quire.kernels.gpu.attention import DECODE_KERNEL, FRESH_KERNEL, HOPPER_KERNEL, PREFILL_KERNEL
from quire.kernels.gpu.block_moves import BlockMover
from quire.kernels.gpu.fp8_matmul import fp8_matmul
from quire.kernels.gpu.grouped_matmul import grouped_matmul
from quire.kernels.gpu.lora import TritonAdaptedRows
from quire.kernels.lora import AdaptedRows, RowsWithAdapters


@dataclass(frozen=True)
class KernelTable:
    """The function of each kernel, with checked arguments. The kernels of attention are in `attention`."""

    embed: Callable[..., Tensor] = rows.embed
    rms_norm: Callable[..., Tensor] = rows.rms_norm
    silu_mul: Callable[..., Tensor] = rows.silu_mul
    gelu_mul: Callable[..., Tensor] = rows.gelu_mul
    rope_and_cache: Callable[..., Tensor] = rope.rope_and_cache
    grouped_matmul: Callable[..., Tensor] = grouped_matmul
    fp8_matmul: Callable[..., Tensor] = fp8_matmul
    moe: Callable[..., Tensor] = experts.compute
    argmax: Callable[..., Tensor] = logits.argmax
    sample: Callable[..., Tensor] = sampling.sample
    penalise: Callable[..., None] = penalties.penalise
    best_ids: Callable[..., Tensor] = logprobs.best_ids
    logprobs_of: Callable[..., Tensor] = logprobs.logprobs_of
    lora: type[RowsWithAdapters] = TritonAdaptedRows
    block_mover: type[BlockMover] | type[torch_kernels.TorchBlockMover] = BlockMover

    def with_torch(self, kernel: str) -> KernelTable:
        """Return the table with torch's function for a kernel."""
        functions = vars(torch_kernels) | {"block_mover": torch_kernels.TorchBlockMover, "lora": AdaptedRows}
        return replace(self, **{kernel: functions[kernel]})


GRAPH = "graph"  # the replay of steps as CUDA graphs
FEW_ROWS = "few_rows"  # steps of a few rows
TORCH, SLOW_TORCH = "torch", "torch, without CUDA graphs"
# The replacement of each kernel.
REPLACEMENTS = {
    **dict.fromkeys(("embed", "rms_norm", "silu_mul", "gelu_mul", "argmax", "sample"), TORCH),
    **dict.fromkeys(("penalise", "best_ids", "logprobs_of", "block_mover", "lora"), TORCH),
    **dict.fromkeys(("rope_and_cache", "grouped_matmul", "moe", DECODE_KERNEL, PREFILL_KERNEL), SLOW_TORCH),
    "fp8_matmul": "torch with activations that are not rounded",
    FRESH_KERNEL: f"the kernel {PREFILL_KERNEL}",
    HOPPER_KERNEL: f"the kernel {FRESH_KERNEL}",
    FEW_ROWS: "one kernel for each operation",
    GRAPH: "launches without CUDA graphs",
}
ATTENTION = (DECODE_KERNEL, PREFILL_KERNEL, FRESH_KERNEL, HOPPER_KERNEL)
# Without these, steps cannot be captured: their replacements read values on the host.
NEEDED_BY_GRAPHS = frozenset(kernel for kernel, how in REPLACEMENTS.items() if how == SLOW_TORCH) | {GRAPH}
