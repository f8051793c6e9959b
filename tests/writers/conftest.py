"""The environments of published tools that write checkpoints."""

from __future__ import annotations

from tests.clients.conftest import environments

__all__ = ["environments"]
