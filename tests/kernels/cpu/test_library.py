"""The library of the C++ kernels: its threads, memory and levels."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from quire import kernels
from quire.kernels.cpu import library
from quire.kernels.cpu.levels import Level
from quire.kernels.cpu.memory import Arena

# --- the thread pool of the C++ library -------------------------------------------------------------------------------


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


# --- memory on large pages --------------------------------------------------------------------------------------------

take = Arena.take  # conftest.py puts another in its place for each test
LARGE_PAGE = 2 << 20


def test_tensors_are_whole_zeroed_and_aligned():
    arena, taken = Arena(), []
    for at, size in enumerate((1, 4096, 5000, 3 << 20, 1 << 20, 2 << 20, 70 << 20, 1, 33 << 20, 33 << 20)):
        tensor = take(arena, size, apart=at % 3 > 0)
        assert (len(tensor), tensor.data_ptr() % 4096) == (size, 0)
        assert tensor[0] == tensor[-1] == 0
        tensor[0] = tensor[-1] = 1
        taken.append(tensor)
    ends = sorted((tensor.data_ptr(), tensor.data_ptr() + len(tensor)) for tensor in taken)
    assert all(end <= start for (_, end), (start, _) in pairwise(ends))


def test_caches_that_fill_up_together_come_to_new_pages_one_after_the_other():
    for count, size in ((8, 50 << 20), (60, 33 << 20), (160, 20 << 20), (60, 1 << 20)):
        arena = Arena()
        tensors = [take(arena, size, apart=True) for _ in range(count)]
        places = sorted(tensor.data_ptr() % LARGE_PAGE for tensor in tensors)
        gaps = [after - before for before, after in zip(places, [*places[1:], places[0] + LARGE_PAGE], strict=True)]
        assert max(gaps) < 3 * LARGE_PAGE / count


def test_the_first_tokens_of_caches_take_small_pages():
    """60 caches in large pages would take 120 MiB with their first byte."""

    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    arena = Arena()
    tensors = [take(arena, 33 << 20, apart=True) for _ in range(60)]
    before = resident()
    for tensor in tensors:
        tensor[0] = 1
    assert resident() - before < 16 << 20


# --- the choice of an instruction-set level ---------------------------------------------------------------------------

ROOT = Path(__file__).parents[3]


def test_the_level_can_be_lowered(monkeypatch, caplog):
    monkeypatch.setenv("KERNELS_CPU_ISA", "none")
    with caplog.at_level(logging.WARNING):
        assert kernels.select_ops("cpu", torch.float32).name == "reference"
    assert "KERNELS_CPU_ISA" in caplog.text
    monkeypatch.setenv("KERNELS_CPU_ISA", "avx1024")
    with pytest.raises(ValueError, match="avx2, avx512, avx512vnni, avx512bf16, amxint8, amx or none"):
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
import torch
from quire import kernels
ops = kernels.CpuOps(torch.bfloat16)
print(ops.level.name, ops.linear(torch.ones(1, 2).bfloat16(), ops.pack_linear(torch.ones(1, 2).bfloat16())).item())
"""


def test_tiles_that_the_system_does_not_give_are_not_used():
    try:
        if kernels.CpuOps(torch.bfloat16).level is not Level.amx:
            pytest.skip("this processor has no amx")
    except kernels.KernelsUnavailable as missing:
        pytest.skip(str(missing))
    done = subprocess.run([sys.executable, "-c", REFUSED], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "avx512bf16 2.0\n"), done.stderr


# --- the layouts of the C++ kernels: cache blocks ---------------------------------------------------------------------


def test_a_plain_cache_has_the_keys_in_the_order_of_their_slots(cpu_ops):
    block_size, d = 32, 16
    k_cache, v_cache = cpu_ops.alloc_kv_cache(1, 1, block_size, d)
    k = torch.randn(block_size, d).to(cpu_ops.dtype)
    qkv = torch.cat([torch.zeros_like(k), k, -k], dim=1)
    still = torch.cat([torch.ones(1, d // 2), torch.zeros(1, d // 2)], dim=1)  # the rotation by an angle of zero
    slots = torch.randperm(block_size)
    cpu_ops.rope_and_cache(qkv, torch.zeros(block_size, dtype=torch.int32), still, slots, k_cache, v_cache, 1, 1)
    plain_k, plain_v = cpu_ops.plain_kv_cache(k_cache, v_cache)
    assert torch.equal(plain_k[0, 0, slots], k)
    assert torch.equal(plain_v[0, 0, slots], -k)
    assert not torch.equal(plain_k, k_cache)


# --- threads of the C++ kernels move to the CPUs that they are bound to, and their caller stays where it is -----------

CPUS = sorted(os.sched_getaffinity(0))

PROGRAM = """
import os, torch
from quire.kernels.cpu import library, ops
from pathlib import Path

def places():
    tasks = [path for path in Path("/proc/self/task").iterdir() if (path / "comm").read_text() == "quire-kernel\\n"]
    return sorted(sorted(os.sched_getaffinity(int(task.name))) for task in tasks)

cpu = ops.CpuOps(torch.float32)
packed = cpu.pack_linear(torch.randn(4096, 512))
x, want = torch.randn(64, 512), None
cpus = sorted(os.sched_getaffinity(0))
library.set_num_threads(3)

def jobs():
    global want
    for _ in range(200):
        out = cpu.linear(x, packed)
    want = out if want is None else want
    assert torch.equal(out, want)
    return places()

print(jobs() == [cpus, cpus])
library.bind_threads([[cpus[0]], [cpus[-1]], [cpus[0]]])
print(jobs() == sorted([[cpus[-1]], [cpus[0]]]), sorted(os.sched_getaffinity(0)) == cpus)
library.unbind_threads()
print(jobs() == [cpus, cpus])
for nodes in ([0], [63]):
    try:
        library.interleave_memory(nodes)
        print("done")
    except OSError as error:
        print(error.strerror)
"""


@pytest.mark.slow
@pytest.mark.skipif(len(CPUS) < 2, reason="one CPU")
def test_bound_threads_run_on_their_cpus_and_memory_is_spread_over_nodes() -> None:
    """In a container the system may refuse to spread memory; a node that does not exist is always refused."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    *placed, first, second = done.stdout.splitlines()
    assert (placed, done.stderr) == (["True", "True True", "True"], "")
    assert first in ("done", "Operation not permitted", "Function not implemented")
    assert second != "done"


def test_a_thread_needs_a_cpu() -> None:
    with pytest.raises(ValueError, match="at least one CPU"):
        library.bind_threads([[0], []])
    with pytest.raises(ValueError, match="at least one CPU"):
        library.bind_threads([])
