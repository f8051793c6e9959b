"""A worker imports torch without its meta registrations, and models of Transformers get them."""

import subprocess
import sys

from quire.worker.lean_torch import complete_torch, import_torch


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


LEAN = "import sys; from quire.worker.lean_torch import *; import_torch(); import torch; "
# An operation whose shape only the meta registrations know.
NEEDS_META = "torch.cummax(torch.empty(3, device='meta'), 0)[0].shape"


def test_torch_computes_without_the_meta_registrations() -> None:
    code = LEAN + "print('torch._meta_registrations' in sys.modules, hasattr(torch, '_meta_registrations'), "
    assert run(code + "(torch.ones(2, 3) @ torch.ones(3, 2)).tolist())") == "False False [[3.0, 3.0], [3.0, 3.0]]"


def test_all_of_torch_can_be_had_later() -> None:
    assert run(LEAN + f"complete_torch(); complete_torch(); print({NEEDS_META})") == "torch.Size([3])"
    assert run(LEAN + f"import torch._meta_registrations; print({NEEDS_META})") == "torch.Size([3])"


def test_without_them_the_operation_fails() -> None:
    code = LEAN + f"\ntry: {NEEDS_META}\nexcept NotImplementedError: print('not there')"
    assert run(code) == "not there"


def test_nothing_happens_if_torch_is_there() -> None:
    import torch

    before = torch._meta_registrations
    import_torch()
    complete_torch()
    assert sys.modules["torch._meta_registrations"] is before is torch._meta_registrations
