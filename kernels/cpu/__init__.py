"""The operations of kernels/ops.py in C++ for x86-64."""
