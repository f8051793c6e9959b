from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from quire.ops.tools.gguf_writer import write_gguf
from tests.support.checkpoints import make_checkpoint

Files = Callable[..., tuple[Path, Path]]


@pytest.fixture(scope="session")
def gguf_files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Return a function from family and type to a checkpoint and the GGUF file of it; each is written once."""
    folder = tmp_path_factory.mktemp("gguf")

    def get(family: str, kind: str = "F32", **changes: float) -> tuple[Path, Path]:
        name = "-".join([family, *(f"{key}{value}" for key, value in changes.items())])
        path, file = folder / name, folder / f"{name}.{kind}.gguf"
        if not path.exists():
            make_checkpoint(path, family, **changes)
        return path, file if file.exists() else write_gguf(path, file, kind)

    return get
