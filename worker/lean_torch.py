"""Imports torch without its meta registrations, which only models of Transformers use.

The module `torch._meta_registrations` defines the shapes of results for tensors without memory. That import takes a
quarter of torch's time and 18 MiB.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

_DEFERRED = "torch._meta_registrations"


def import_torch() -> None:
    """Import torch without the meta registrations; `complete_torch` imports these. Nothing if torch is imported."""
    if "torch" in sys.modules:
        return
    placeholder = sys.modules[_DEFERRED] = ModuleType(_DEFERRED)
    try:
        torch = importlib.import_module("torch")
    finally:
        if sys.modules.get(_DEFERRED) is placeholder:
            del sys.modules[_DEFERRED]
    if vars(torch).get("_meta_registrations") is placeholder:
        del torch.__dict__["_meta_registrations"]


def complete_torch() -> None:
    """Import what `import_torch` has left out, if this torch has it. Repeatable."""
    try:
        importlib.import_module(_DEFERRED)
    except ModuleNotFoundError as error:
        if error.name != _DEFERRED:
            raise
