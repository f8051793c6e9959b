"""Manifests are read strictly: names of files are a fixed list, sizes have limits."""

from __future__ import annotations

from typing import Any

import pytest

from quire.shared.messages import MessageError
from quire.shared.messages.codec import VERSION, pack
from quire.shared.messages.manifest import FILE_LIMITS, FileEntry, ModelManifest

GOOD: dict[str, Any] = {"model": "m", "aliases": ["a"], "files": [["config.json", "0" * 64, 2]], "version": VERSION}


def test_a_manifest_is_read_as_it_was_written() -> None:
    manifest = ModelManifest("m", ("a",), (FileEntry.of("config.json", b"{}"),))
    assert ModelManifest.decode(manifest.encode()) == manifest
    assert ModelManifest.decode(pack(GOOD)).files == (FileEntry("config.json", "0" * 64, 2),)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", "a b"),
        ("model", 5),
        ("aliases", ["x"] * 17),
        ("aliases", ["{m}"]),
        ("files", [["model.py", "0" * 64, 2]]),
        ("files", [["../config.json", "0" * 64, 2]]),
        ("files", [["config.json", "0" * 63, 2]]),
        ("files", [["config.json", "0" * 64, FILE_LIMITS["config.json"] + 1]]),
        ("files", [["config.json", "0" * 64, True]]),
        ("files", [["config.json", "0" * 64, 2]] * 2),
        ("files", [["config.json", "0" * 64]]),
        ("version", VERSION + 1),
        ("code", "import os"),
    ],
)
def test_everything_else_is_refused(field: str, value: Any) -> None:
    with pytest.raises(MessageError, match=field if field in GOOD else "unknown"):
        ModelManifest.decode(pack(GOOD | {field: value}))
