"""Each kind of wait, fence and barrier of the kernels is missed by the emulator if it is left out.

A run is noticed if the emulator raises, or if the result is wrong.
"""

import re

import pytest
import torch

from tests.kernels.ptx.emulator import Emulator
from tests.kernels.ptx.fault import PtxFault
from tests.kernels.ptx.test_attention import Case, check, make

KINDS = [
    "bar.sync",
    "cp.async.commit_group",
    "cp.async.wait_group",
    "fence.proxy.async",
    "wgmma.fence",
    "wgmma.commit_group",
    "wgmma.wait_group",
]


def without(text: str, kind: str) -> str:
    """Leave out all instructions of a kind."""
    return re.sub(rf"^\s*(@!?%p\d+\s+)?{re.escape(kind)}\b.*$", "", text, flags=re.MULTILINE)


@pytest.mark.parametrize("kind", KINDS)
def test_prefill(emulator: Emulator, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    paged = make(Case(), monkeypatch, [300], [33])
    emulator.edit = lambda kernel, ptx: without(ptx, kind) if kernel == "prefill_kernel" else ptx
    with pytest.raises((PtxFault, AssertionError)) as e:
        check(paged, paged.attend())
    print(repr(e.value)[:300])
    assert kind in emulator.sources["prefill_kernel"]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.startswith(("wgmma", "fence"))])
def test_decode(emulator: Emulator, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    paged = make(Case(), monkeypatch, [300], [1])
    emulator.edit = lambda kernel, ptx: without(ptx, kind) if kernel == "decode_kernel" else ptx
    with pytest.raises((PtxFault, AssertionError)) as e:
        check(paged, paged.attend())
    print(repr(e.value)[:300])
    assert kind in emulator.sources["decode_kernel"]
