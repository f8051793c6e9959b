"""Triton's interpreter, fast enough for tests.

It replaces the functions of the language at every launch and at every call of a device function, and puts them back,
which takes most of the time of a small launch. A test process that interprets needs the originals no more.
"""

from types import SimpleNamespace

import numpy as np
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

    # Its own conversion loses the carry where rounding up fills the mantissa of an 8-bit number.
    convert = interpreter._convert_float

    def rounded(values: np.ndarray, source: tl.dtype, target: tl.dtype, mode: object) -> np.ndarray:
        if (source, target) != (tl.float32, tl.float8e4nv):
            return convert(values, source, target, mode)
        return torch.from_numpy(values.astype(np.float32)).to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    interpreter._convert_float = rounded
