"""The operations of kernels/ops.py in Triton, and the rest of the package that is for CUDA devices.

`cuda` and `triton_support` import no Triton, so that a machine without it can import them; `ops` and the modules of
kernels need Triton. The folder is not called `triton`, so that no path can shadow the compiler.
"""
