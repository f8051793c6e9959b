"""The arithmetic of the decoder. Imports nothing else of the project; `select_ops` chooses an implementation.

`ops.Ops` is the contract and `reference` its definition in plain torch. `cpu` implements it in C++ for x86-64, `gpu` in
Triton for CUDA devices.
"""

from quire.kernels.cpu.library import (
    bind_threads,
    interleave_memory,
    num_threads,
    report_builds,
    set_num_threads,
    unbind_threads,
)
from quire.kernels.cpu.ops import CpuOps
from quire.kernels.gpu.cuda import PinningFailed
from quire.kernels.gpu.start import triton_ops
from quire.kernels.gpu.supported import max_head_dim as max_triton_head_dim
from quire.kernels.gpu.triton_support import TritonFailure, outdated_assembler, outdated_triton, triton_failure
from quire.kernels.interrupt import Interrupt, StepInterrupted
from quire.kernels.latent import MAX_LATENT_VALUE, MAX_LATENT_WIDTH, LatentOps, PackedGroups
from quire.kernels.mkl_warmup import warm_up_mkl
from quire.kernels.ops import KernelsUnavailable, Ops, PackedLinear
from quire.kernels.reference import ReferenceOps
from quire.kernels.select import latent_ops, select_ops
from quire.kernels.self_test.cases import (
    KernelFault,
    ReplaceableKernels,
    SelfTestReport,
    WrongKernel,
    replace_kernels,
    replaced_mask,
)
from quire.kernels.self_test.devices import RecordGraph, Replayable
from quire.kernels.self_test.registry import run_self_test

__all__ = [
    "MAX_LATENT_VALUE",
    "MAX_LATENT_WIDTH",
    "CpuOps",
    "Interrupt",
    "KernelFault",
    "KernelsUnavailable",
    "LatentOps",
    "Ops",
    "PackedGroups",
    "PackedLinear",
    "PinningFailed",
    "RecordGraph",
    "ReferenceOps",
    "ReplaceableKernels",
    "Replayable",
    "SelfTestReport",
    "StepInterrupted",
    "TritonFailure",
    "WrongKernel",
    "bind_threads",
    "interleave_memory",
    "latent_ops",
    "max_triton_head_dim",
    "num_threads",
    "outdated_assembler",
    "outdated_triton",
    "replace_kernels",
    "replaced_mask",
    "report_builds",
    "run_self_test",
    "select_ops",
    "set_num_threads",
    "triton_failure",
    "triton_ops",
    "unbind_threads",
]

warm_up_mkl()  # at import, before any code of the project computes on several threads
