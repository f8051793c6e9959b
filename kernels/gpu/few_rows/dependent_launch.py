"""Programmatic dependent launch, of compute capability 9.0 and higher: a kernel starts while the one before it ends.

A kernel that is launched with `launch_pdl` may start once all programs of the kernel before it have called
`let_next_start`. Until `wait_for_previous` returns it may read only what no kernel of the step writes, such as weights,
and write nothing. The wait is for the end of the kernel before, which itself has waited: so every kernel of the chain
must wait, and then all results of earlier kernels are there. A kernel that is launched without `launch_pdl` starts when
the kernel before it has ended. Source: PTX ISA, griddepcontrol.
"""

import triton
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def let_next_start():
    """Allow the next kernel to start. It has no effect on what the next kernel may read."""
    gdc_launch_dependents()


@triton.jit
def wait_for_previous():
    """Wait until the kernel before this one has ended and its results can be read."""
    gdc_wait()
