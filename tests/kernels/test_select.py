"""Which implementation is chosen, what happens where none can be built, and the thread pool."""

import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from quire import kernels
from quire.kernels.cpu import build, library

ROOT = Path(__file__).parents[2]


def test_the_reference_is_chosen_on_request():
    ops = kernels.select_ops("cpu", torch.float32, "reference")
    assert (ops.name, ops.row_invariant) == ("reference", False)


def test_both_implementations_meet_the_contract():
    assert isinstance(kernels.ReferenceOps(), kernels.Ops)
    assert isinstance(kernels.select_ops("cpu", torch.float32), kernels.Ops)


def test_an_unknown_preference_is_refused():
    with pytest.raises(ValueError, match="prefer"):
        kernels.select_ops("cpu", torch.float32, "fastest")


def test_a_type_without_kernels_falls_back(monkeypatch, caplog):
    monkeypatch.delenv("KERNELS_CPU_ISA", raising=False)
    assert kernels.select_ops("cpu", torch.float16).name == "reference"
    assert "torch.float16" in caplog.text
    with pytest.raises(kernels.KernelsUnavailable):
        kernels.select_ops("cpu", torch.float16, "cpu")


def test_the_level_can_be_lowered(monkeypatch, caplog):
    monkeypatch.setenv("KERNELS_CPU_ISA", "none")
    with caplog.at_level(logging.WARNING):
        assert kernels.select_ops("cpu", torch.float32).name == "reference"
    assert "KERNELS_CPU_ISA" in caplog.text
    monkeypatch.setenv("KERNELS_CPU_ISA", "avx1024")
    with pytest.raises(ValueError, match="avx2, avx512, avx512bf16, amx or none"):
        kernels.select_ops("cpu", torch.float32)


# Answers EPERM to arch_prctl, as a container's filter may, and asks for the level then.
REFUSED = """
import ctypes, struct
step = struct.Struct("=HBBI")
load, equal, give, allow, refuse, arch_prctl = 0x20, 0x15, 0x06, 0x7FFF0000, 0x00050001, 158
steps = step.pack(load, 0, 0, 0), step.pack(equal, 0, 1, arch_prctl), step.pack(give, 0, 0, refuse)
code = ctypes.create_string_buffer(b"".join([*steps, step.pack(give, 0, 0, allow)]))
program = ctypes.create_string_buffer(struct.pack("=HxxxxxxQ", 4, ctypes.addressof(code)))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, program) == 0, ctypes.get_errno()
import torch, kernels
ops = kernels.CpuOps(torch.bfloat16)
print(ops.level.name, ops.linear(torch.ones(1, 2).bfloat16(), ops.pack_linear(torch.ones(1, 2).bfloat16())).item())
"""


def test_tiles_that_the_system_does_not_give_are_not_used():
    try:
        if kernels.CpuOps(torch.bfloat16).level is not library.Level.amx:
            pytest.skip("this processor has no amx")
    except kernels.KernelsUnavailable as missing:
        pytest.skip(str(missing))
    done = subprocess.run([sys.executable, "-c", REFUSED], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "avx512bf16 2.0\n"), done.stderr


def test_without_compiler_and_library_plain_torch_is_used(monkeypatch, caplog, tmp_path):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("KERNELS_CPU_ISA", raising=False)
    monkeypatch.setattr(build, "_cache_dirs", lambda: [tmp_path])
    monkeypatch.setattr(library, "load", library.load.__wrapped__)  # as a fresh process, which has not loaded one yet
    with caplog.at_level(logging.WARNING):
        ops = kernels.select_ops("cpu", torch.float32)
    assert ops.name == "reference"
    assert len(caplog.records) == 1
    assert "install g++" in caplog.text
    assert ops.linear(torch.ones(1, 2), ops.pack_linear(torch.ones(3, 2))).tolist() == [[2.0, 2.0, 2.0]]


def test_another_processor_uses_plain_torch(monkeypatch, caplog):
    monkeypatch.delenv("KERNELS_CPU_ISA", raising=False)
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    monkeypatch.setattr(library, "load", library.load.__wrapped__)
    assert kernels.select_ops("cpu", torch.float32).name == "reference"
    assert "x86-64" in caplog.text


@pytest.mark.slow
def test_the_build_prints_one_line():
    done = subprocess.run([sys.executable, "-m", "quire.kernels.cpu.build"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stdout.startswith("kernels: ")
    assert (done.stdout.count("\n"), done.stderr) == (1, "")


@pytest.mark.slow
def test_kernels_import_nothing_of_the_project():
    code = "import sys, kernels, kernels.bench; print(*{m.split('.')[0] for m in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not {"gateway", "worker", "shared", "ops"} & set(done.stdout.split())


def test_threads_can_be_set(threads):
    threads(3)
    assert kernels.num_threads() == 3
    with pytest.raises(ValueError, match="at least 1"):
        threads(0)


def test_calls_from_several_python_threads_are_right(cpu_ops, threads):
    threads(2)
    packed = cpu_ops.pack_linear(torch.randn(300, 200).to(cpu_ops.dtype))
    x = torch.randn(64, 200).to(cpu_ops.dtype)
    expected, failures = cpu_ops.linear(x, packed), []

    def work() -> None:
        failures.extend(i for i in range(100) if not torch.equal(cpu_ops.linear(x, packed), expected))

    callers = [threading.Thread(target=work) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert failures == []


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_computes(cpu_ops, threads):
    threads(2)
    packed = cpu_ops.pack_linear(torch.randn(300, 200).to(cpu_ops.dtype))
    x = torch.randn(64, 200).to(cpu_ops.dtype)
    expected = cpu_ops.linear(x, packed)
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(cpu_ops.linear(x, packed), expected) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_an_idle_pool_uses_no_processor(threads):
    threads(2)
    ops = kernels.select_ops("cpu", torch.float32)
    packed, x = ops.pack_linear(torch.randn(300, 200)), torch.randn(64, 200)
    ops.linear(x, packed)
    before = os.times()
    threading.Event().wait(0.2)
    after = os.times()
    assert after.user + after.system - before.user - before.system < 0.1
