"""The fingerprint of blocks: a digest of all that determines their bytes besides what the prefix cache hashes.

It is strict: a worker whose fingerprint differs computes again, although its blocks might be equal.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import quire.kernels
import quire.worker
from quire.shared.model.folder import gguf_files
from quire.worker.engine.limits import EngineLimits

# Files of a checkpoint that are no texts for people.
CHECKPOINT_SUFFIXES = (".safetensors", ".gguf", ".json", ".py", ".model")
SOURCE_SUFFIXES = (".py", ".cpp", ".h")
LIBRARIES = ("torch", "transformers", "triton", "numpy")
READERS = 4


def fingerprint_of(parts: Mapping[str, str], checkpoint: Path, limits: EngineLimits, block_bytes: int) -> bytes:
    """Return the fingerprint, 32 bytes.

    parts: labels of the arithmetic. checkpoint: a file, or a folder, all of which is read. The longest context counts,
    since the frequencies of some rotary embeddings depend on it.
    """
    code = [Path(package.__path__[0]) for package in (quire.kernels, quire.worker)]
    content = {
        **parts,
        **{name: _version(name) for name in LIBRARIES},
        "checkpoint": _of_files(checkpoint, CHECKPOINT_SUFFIXES),
        "code": [_of_files(folder, SOURCE_SUFFIXES) for folder in code],
        "sizes": (limits.block_size, block_bytes, limits.max_model_len),
    }
    return hashlib.blake2b(repr(sorted(content.items())).encode(), digest_size=32).digest()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _of_files(place: Path, suffixes: Iterable[str]) -> str:
    """Digest of the names and contents of the files of a folder with these suffixes; or of a file with its parts."""
    is_file = place.is_file()
    paths = gguf_files(place) if is_file else sorted(path for path in place.rglob("*") if path.suffix in suffixes)
    digest = hashlib.blake2b(digest_size=32)
    with ThreadPoolExecutor(READERS) as pool:
        for path, content in zip(paths, pool.map(_of_file, paths), strict=True):
            digest.update(f"{'.' if is_file else path.relative_to(place)}\n".encode() + content)
    return digest.hexdigest()


def _of_file(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").digest()
