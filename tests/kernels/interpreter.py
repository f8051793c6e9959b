"""Triton's interpreter, fast enough for tests.

It replaces the functions of the language at every launch and at every call of a device function, and puts them back,
which takes most of the time of a small launch. A test process that interprets needs the originals no more.
"""

from types import SimpleNamespace


def patch_once() -> None:
    """Replace the functions of the language now, and never again. Triton must have been imported to interpret."""
    import triton.language as tl
    from triton.runtime import interpreter

    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    kept = SimpleNamespace(restore=lambda: None)
    interpreter._patch_lang = lambda function: kept
