"""Fixtures of kernel tests, for the benchmarks of kernels."""

from tests.support.kernels.fixtures import cpu_ops, guards, one_torch_thread, seed

__all__ = ["cpu_ops", "guards", "one_torch_thread", "seed"]
