"""The process of a worker: its imports, commands, memory and end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from quire.shared.config.command_line import CommandError
from quire.worker import commands
from quire.worker.lean_torch import complete_torch, import_torch
from quire.worker.replay.commands import WorkerCommandSettings
from quire.worker.settings import WorkerSettings


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


LEAN = "import sys; from quire.worker.lean_torch import *; import_torch(); import torch; "

# An operation whose shape only the meta registrations know.
NEEDS_META = "torch.cummax(torch.empty(3, device='meta'), 0)[0].shape"


@pytest.mark.slow
def test_torch_computes_without_the_meta_registrations_and_can_have_them_later() -> None:
    code = LEAN + "print('torch._meta_registrations' in sys.modules, hasattr(torch, '_meta_registrations'))"
    code += "; print((torch.ones(2, 3) @ torch.ones(3, 2)).tolist())"
    code += f"\ntry: {NEEDS_META}\nexcept NotImplementedError: print('not there')"
    code += f"\ncomplete_torch(); complete_torch(); print({NEEDS_META})"
    assert run(code).splitlines() == ["False False", "[[3.0, 3.0], [3.0, 3.0]]", "not there", "torch.Size([3])"]


@pytest.mark.soak
def test_an_import_of_the_meta_registrations_completes_torch() -> None:
    assert run(LEAN + f"import torch._meta_registrations; print({NEEDS_META})") == "torch.Size([3])"


def test_nothing_happens_if_torch_is_there() -> None:
    import torch

    before = torch._meta_registrations
    import_torch()
    complete_torch()
    assert sys.modules["torch._meta_registrations"] is before is torch._meta_registrations


BUSY = """
import sys, threading, torch
from quire.worker.interpreter import leave

computes = threading.Event()

def compute():
    x = torch.randn(200, 200)
    while True:
        torch.argmax((x @ x)[:5], 1)
        computes.set()

torch.set_num_threads(1)
threading.Thread(target=compute, daemon=True).start()
computes.wait(60)
print("the last line")
"""


@pytest.mark.slow
def test_a_thread_inside_of_torch_does_not_abort_the_process_at_its_end() -> None:
    command = [sys.executable, "-c", f"{BUSY}\nleave(3)"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[2])
    assert (done.returncode, done.stdout, done.stderr) == (3, "the last line\n", "")


RELEASE = """
from pathlib import Path
from quire.worker.interpreter import release_free_memory

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 20

blocks = [bytearray(60_000) for _ in range(2000)]  # below the size that malloc maps
keep = blocks[-1]
blocks = None
before = resident()
release_free_memory()
print(before - resident() > 80)
"""


def test_memory_that_malloc_keeps_goes_back_to_the_system() -> None:
    done = subprocess.run([sys.executable, "-c", RELEASE], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("True\n", "")


def test_the_worker_gets_the_absolute_folder_of_the_model(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[WorkerSettings] = []
    monkeypatch.setattr("quire.worker.main.run", lambda settings, canary: seen.append(settings) or canary or 0)
    monkeypatch.chdir(tiny_model.parent)
    assert commands.run_worker(WorkerCommandSettings(model=f"./{tiny_model.name}"), {}) == 0
    assert [Path(settings.model) for settings in seen] == [tiny_model.resolve()]


def test_a_folder_without_a_model_is_refused_before_the_worker_starts(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=r"config\.json is missing"):
        commands.run_worker(WorkerCommandSettings(model=str(tmp_path)), {})
