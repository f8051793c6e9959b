"""Makes Triton's interpreter fast enough for tests, and corrects its arithmetic.

The interpreter patches the functions of the language at every launch and at every call of a device function, and
restores them afterwards, which takes most of the time of a small launch. Here they are patched once, because a test
process does not need the originals again.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch


def patch_once() -> None:
    """Patch the functions of the language once. Triton must have been imported with TRITON_INTERPRET=1."""
    import triton.language as tl
    from triton.runtime import interpreter

    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    kept = SimpleNamespace(restore=lambda: None)
    interpreter._patch_lang = lambda function: kept

    # A GPU does not report infinite results.
    interpreter.GridExecutor.__call__ = np.errstate(all="ignore")(interpreter.GridExecutor.__call__)

    # CPU tensors are accessed in place. Without this, the interpreter copies whole caches onto themselves.
    interpreter.GridExecutor._restore_args_dev = lambda *arguments: None

    # The interpreter's conversions lose the carry if rounding up overflows the mantissa, and round ties wrongly.
    convert = interpreter._convert_float

    def rounded(values: np.ndarray, source: tl.dtype, target: tl.dtype, mode: object) -> np.ndarray:
        if (source, target) == (tl.float32, tl.float8e4nv):
            return torch.from_numpy(values.astype(np.float32)).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        if (source, target) == (tl.float32, tl.bfloat16):
            return torch.from_numpy(values.astype(np.float32)).to(torch.bfloat16).view(torch.uint16).numpy()
        return convert(values, source, target, mode)

    interpreter._convert_float = rounded

    # The interpreter stores bfloat16 values as integers, and would multiply the integers.
    dot = interpreter.InterpreterBuilder.create_dot

    def create_dot(self, a, b, *rest):
        return dot(self, *(interpreter.TensorHandle(matrix_values(one), tl.float32) for one in (a, b)), *rest)

    interpreter.InterpreterBuilder.create_dot = create_dot


def matrix_values(matrix) -> np.ndarray:
    """Return the values of a matrix of the interpreter, as float32."""
    if str(matrix.dtype.scalar) == "bf16":
        return (matrix.data.astype(np.uint32) << 16).view(np.float32)
    return matrix.data.astype(np.float32)


def make_dot_row_invariant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `tl.dot` of the interpreter row-invariant, as the matrix instructions of a GPU are.

    The interpreter multiplies with BLAS, whose result for a row depends on its place in the tile. The replacement adds
    the terms of each element in one order, 16 at a time.
    """

    from triton.runtime import interpreter

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        x, y, total = matrix_values(a), matrix_values(b), d.data
        for k in range(0, x.shape[1], 16):
            total = total + np.einsum("ik,kj->ij", x[:, k : k + 16], y[k : k + 16], optimize=False).astype(total.dtype)
        return interpreter.TensorHandle(total, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
