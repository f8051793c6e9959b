"""The thread pool of the C++ library."""

import os
import threading

import pytest
import torch

from quire import kernels


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
