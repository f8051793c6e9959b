"""Triton's interpreter, fast enough for tests.

It replaces the functions of the language at every launch and at every call of a device function, and puts them back,
which takes most of the time of a small launch. A test process that interprets needs the originals no more.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch


def patch_once() -> None:
    """Replace the functions of the language now, and never again. Triton must have been imported to interpret."""
    import triton.language as tl
    from triton.runtime import interpreter

    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    kept = SimpleNamespace(restore=lambda: None)
    interpreter._patch_lang = lambda function: kept

    # A GPU does not say when a result is infinite.
    interpreter.GridExecutor.__call__ = np.errstate(all="ignore")(interpreter.GridExecutor.__call__)

    # Tensors of the CPU are read and written in place, and need not be copied onto themselves, whole caches at a time.
    interpreter.GridExecutor._restore_args_dev = lambda *arguments: None

    # Its own conversions lose the carry where rounding up fills the mantissa, and what a tie is.
    convert = interpreter._convert_float

    def rounded(values: np.ndarray, source: tl.dtype, target: tl.dtype, mode: object) -> np.ndarray:
        if (source, target) == (tl.float32, tl.float8e4nv):
            return torch.from_numpy(values.astype(np.float32)).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        if (source, target) == (tl.float32, tl.bfloat16):
            return torch.from_numpy(values.astype(np.float32)).to(torch.bfloat16).view(torch.uint16).numpy()
        return convert(values, source, target, mode)

    interpreter._convert_float = rounded

    # It keeps numbers of bfloat16 as integers, and multiplies them as such.
    dot = interpreter.InterpreterBuilder.create_dot

    def create_dot(self, a, b, *rest):
        return dot(self, *(interpreter.TensorHandle(matrix_values(one), tl.float32) for one in (a, b)), *rest)

    interpreter.InterpreterBuilder.create_dot = create_dot


def matrix_values(matrix) -> np.ndarray:
    """The numbers of a matrix of the interpreter, as float32."""
    if str(matrix.dtype.scalar) == "bf16":
        return (matrix.data.astype(np.uint32) << 16).view(np.float32)
    return matrix.data.astype(np.float32)


def make_dot_row_invariant(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter multiplies with BLAS, whose result for a row depends on where it is in the tile; a GPU's matrix
    instructions, and this, add each element's terms to it in one order, 16 at a time."""

    from triton.runtime import interpreter

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        x, y, total = matrix_values(a), matrix_values(b), d.data
        for k in range(0, x.shape[1], 16):
            total = total + np.einsum("ik,kj->ij", x[:, k : k + 16], y[k : k + 16], optimize=False).astype(total.dtype)
        return interpreter.TensorHandle(total, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
