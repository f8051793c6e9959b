"""Simulates CUDA devices in a process, as soon as it imports torch. For processes that a test starts.

Python imports this file at its start if its folder is in PYTHONPATH; the root of the project must be there, too.

SIMULATED_CUDA_BYTES: memory of a device. SIMULATED_CUDA_DEVICES: their number, 1 by default; operations on several
devices run at their launch. SIMULATED_CUDA_FAULT: "NUMBER REASON"; operation NUMBER of the first device fails, and the
device is lost.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from types import ModuleType
from typing import Any


class AfterTorch(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds torch as usual, and simulates devices once it is loaded."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        if not hasattr(sys.modules["torch._meta_registrations"], "__file__"):
            del sys.modules["torch._meta_registrations"]  # the placeholder of quire.worker.lean_torch
        from tests.support.simulated_cuda.driver import simulated_cuda

        count = int(os.environ.get("SIMULATED_CUDA_DEVICES", "1"))
        total = int(os.environ.get("SIMULATED_CUDA_BYTES", str(1 << 30)))
        simulation = simulated_cuda(count, total, is_late=count == 1)
        driver = simulation.__enter__()
        globals()["simulation"] = simulation  # until the process ends
        if fault := os.environ.get("SIMULATED_CUDA_FAULT"):
            number, _, reason = fault.partition(" ")
            driver.devices[0].fault = int(number), reason


sys.meta_path.insert(0, AfterTorch())
