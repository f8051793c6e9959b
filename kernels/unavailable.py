"""The error of kernels that this machine cannot run."""


class KernelsUnavailable(RuntimeError):
    """The C++ or Triton kernels cannot be built, loaded or launched here. The message names the remedy."""
