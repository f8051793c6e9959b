"""Rotation with the cache write, compiled for Hopper."""

import pytest

from quire import kernels
from tests.kernels.gpu import test_rope
from tests.kernels.ptx.emulator import Emulator


@pytest.mark.parametrize(
    ("heads", "kv_heads", "d", "norms"),
    [(3, 1, 64, ""), (2, 2, 80, "qk"), (16, 8, 128, "qk"), (6, 1, 256, "qk"), (4, 2, 256, "qkv")],
)
@pytest.mark.parametrize("fp8", [False, True], ids=["", "fp8"])
def test_rotation_writes_the_given_slots_and_no_others(
    emulator: Emulator,
    emulated_ops: kernels.Ops,
    monkeypatch: pytest.MonkeyPatch,
    heads: int,
    kv_heads: int,
    d: int,
    norms: str,
    fp8: bool,
) -> None:
    test_rope.test_rotation_writes_the_given_slots_and_no_others(
        emulated_ops, monkeypatch, heads, kv_heads, d, norms, fp8
    )
    assert emulator.sources.keys() == {"rope_and_cache_kernel"}
