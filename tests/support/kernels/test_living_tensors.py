"""The search for all tensors finds each kind, and another thread may build tuples meanwhile."""

import sys
import threading

import torch

from tests.support.kernels.living_tensors import living_tensors


class Derived(torch.Tensor):
    pass


def test_finds_tensors_parameters_and_subclasses():
    made = [torch.zeros(3), torch.nn.Parameter(torch.zeros(3)), torch.zeros(3).as_subclass(Derived)]
    found = {id(one) for one in living_tensors()}
    assert all(id(one) in found for one in made)


def test_another_thread_may_build_tuples_meanwhile():
    done = threading.Event()

    def search() -> None:
        for _ in range(3):
            living_tensors()
        done.set()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    searching = threading.Thread(target=search)
    searching.start()
    try:
        while not done.is_set():
            assert len(tuple(number for number in range(100))) == 100
    finally:
        searching.join()
        sys.setswitchinterval(interval)
