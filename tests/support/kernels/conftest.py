"""Fixtures for the tests of helper modules."""

from tests.support.kernels.fixtures import cpu_ops, guards, one_torch_thread, seed

__all__ = ["cpu_ops", "guards", "one_torch_thread", "seed"]
