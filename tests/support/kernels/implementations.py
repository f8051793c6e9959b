"""The implementations of the operations that this machine runs, for tests.

The Triton kernels run on a CUDA device if there is one, and else in Triton's interpreter.
"""

import importlib.util
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from quire import kernels
from quire.kernels.cpu.levels import LEVELS
from tests.support.kernels.accesses import Accesses
from tests.support.kernels.interpreter import patch_once

ON_CUDA = torch.cuda.is_available()
# For tests that take long in the interpreter, and whose kernels CI tries with others.
LONG_WITHOUT_GPU = pytest.mark.slow if ON_CUDA else pytest.mark.soak
HAS_TRITON = importlib.util.find_spec("triton") is not None
if HAS_TRITON and not ON_CUDA:
    # Triton, and these kernels, read it when functions are decorated, so neither may have been imported before.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        import quire.kernels.gpu.hopper_prefill  # Gluon, too
        import quire.kernels.gpu.ops
    import triton

    HAS_TRITON = not isinstance(triton.language.sum, triton.JITFunction)
    if HAS_TRITON:
        patch_once()
        Accesses().install()
TRITON_DTYPES = (torch.float32, torch.float16, torch.bfloat16) if HAS_TRITON else ()


def implementations() -> list:
    """Parameters for `make_ops`: every implementation at every instruction-set level and in every dtype."""
    found = [pytest.param(("reference", "", dtype), id=f"reference-{dtype}") for dtype in LEVELS]
    for dtype, levels in LEVELS.items():
        found += [pytest.param(("cpu", level.name, dtype), id=f"cpu-{level.name}") for level in levels]
    found += [pytest.param(("triton", "", dtype), id=f"triton-{dtype}") for dtype in TRITON_DTYPES]
    return found


def of_each_kind() -> list:
    """Parameters for tests that the dtype of activations does not affect: the C++ kernels at every level, and one
    reference and one Triton implementation."""
    again = {"reference-torch.bfloat16", "triton-torch.float16", "triton-torch.bfloat16"}
    return [param for param in implementations() if param.id not in again]


def of_narrow_caches() -> list:
    """Parameters for `make_ops`: the reference and every level of the C++ kernels, with every cache that has another
    type than the activations."""
    found = []
    for dtype, levels in LEVELS.items():
        for kv_dtype in (torch.bfloat16, torch.int8, torch.float8_e4m3fn):
            name = str(kv_dtype).removeprefix("torch.")
            if kv_dtype is not dtype:
                found += [pytest.param(("reference", "", dtype, kv_dtype), id=f"reference-{dtype}-{name}")]
                found += [
                    pytest.param(("cpu", level.name, dtype, kv_dtype), id=f"cpu-{level.name}-{name}")
                    for level in levels
                ]
    return found


def make_ops(
    kind: str,
    level: str,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
    kv_dtype: torch.dtype | None = None,
) -> kernels.Ops:
    """Make an implementation; skip the test if this machine cannot run it. level: of the C++ kernels."""
    if kind == "reference":
        return kernels.ReferenceOps("cpu", dtype, kv_dtype)
    if kind == "triton":
        return make_triton_ops(dtype, monkeypatch, kv_dtype=kv_dtype)
    monkeypatch.setenv("KERNELS_CPU_ISA", level)
    try:
        ops = kernels.CpuOps(dtype, kv_dtype)
    except kernels.KernelsUnavailable as missing:
        pytest.skip(str(missing))
    if ops.level.name != level:
        pytest.skip(f"this processor has no {level}")
    return ops


def make_triton_ops(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, **options: object
) -> "quire.kernels.gpu.ops.TritonOps":
    """Make the Triton kernels, with checks of ids."""
    from quire.kernels.gpu.ops import TritonOps

    if ON_CUDA:
        torch.set_default_device("cuda")  # where tests make their tensors; `seed` undoes it
    else:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    return TritonOps("cuda" if ON_CUDA else "cpu", dtype, check_ids=True, **options)


def fewer(ops: kernels.Ops, count: int) -> int:
    """Return the number of rows for a test that draws many: a twentieth of `count` in Triton's interpreter."""
    return count // 20 if ops.name == "triton" and not ON_CUDA else count


def few_without_gpu(cases: Iterable[Any], step: int = 3) -> list[Any]:
    """Return all cases on a card, which compiles a kernel for each, and otherwise one in `step`."""
    return list(cases)[:: 1 if ON_CUDA else step]
