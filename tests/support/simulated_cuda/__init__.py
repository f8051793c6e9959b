"""A stand-in for the CUDA driver, in host memory: `torch.cuda` without a GPU.

The simulation measures nothing and proves nothing about a card. It runs the host's part of CUDA code, and finds
mistakes in that code:

- Tensors claim to be on "cuda" and lie in host memory, poisoned until they are written (`tensors`).
- Operations run as late as possible: when the host waits for them (`streams`). A runner that reuses a buffer too soon,
  or reads a result too early, gives wrong results here always, and on a GPU occasionally.
- Memory is counted as torch's allocator counts it, and runs out (`devices`).
- CUDA graphs record launches and repeat them on the same memory; what a capture forbids is an error (`graphs`).
- Several devices exchange through a process group (`process_groups`).
- Allocations and operations fail on request.

`driver.simulated_cuda` installs it for a block of code; `site/sitecustomize.py` installs it in a new process.
"""
