"""Benchmarks of the whole stack: `make bench`."""
