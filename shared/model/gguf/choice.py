"""Chooses one of the GGUF files of a repository on the Hub: `owner/name:Q4_K_M` names a quantisation."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from quire.shared.model.gguf.parts import part_paths

# Quantisations that are taken if none is named, as llama.cpp takes them; then the first file.
PREFERRED = ("Q4_K_M", "Q8_0")
# Parts of the names of files that are no models: projectors of images, statistics, drafts.
NO_MODELS = ("mmproj", "imatrix", "mtp-", "eagle3-", "dflash-", "dspark-")
_MAX_LISTED = 40
_LABEL = re.compile(r"(?<![A-Z0-9])(?:UD-)?(?:I?Q\d[A-Z0-9_]*|TQ\d_\d|MXFP4(?:_MOE)?|BF16|F16|F32)(?![A-Z0-9_])")


class NoSuchFile(Exception):
    """No file, or several, have the quantisation. The text is a reason without a full stop; `remedy` the advice."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(reason)
        self.remedy = remedy


def split_tag(model: str) -> tuple[str, str]:
    """Return the name on the Hub and the quantisation or file after the colon; it is empty without a colon."""
    name, _, tag = model.partition(":")
    return name, tag


def choose_files(names: Iterable[str], tag: str) -> list[str]:
    """Return the files of one model out of all files of a repository, its first part first. Raises NoSuchFile.

    tag: a quantisation as in the names of the files, in any case, or a file; empty for the preferred one.
    """
    present = {name for name in names if name.lower().endswith(".gguf") and not _is_no_model(name)}
    models = [name for name in sorted(present) if str(part_paths(Path(name))[0]) == name]
    if not models:
        raise NoSuchFile("has no GGUF file of a model", "take another repository")
    found = _tagged(models, tag) if tag else _preferred(models)
    if len(found) != 1:
        labels = sorted({_label(name) for name in models})
        said = f"has {len(found)} GGUF files for {tag!r}" if found else f"has no GGUF file for {tag!r}"
        choices = found or labels
        listed = ", ".join(choices[:_MAX_LISTED]) + (", ..." if len(choices) > _MAX_LISTED else "")
        raise NoSuchFile(said, f"give one of these after the colon: {listed}")
    parts = [str(part) for part in part_paths(Path(found[0]))]
    if missing := [part for part in parts if part not in present]:
        raise NoSuchFile(f"has no file {missing[0]}, a part of {found[0]}", "take another quantisation")
    return parts


def _tagged(models: list[str], tag: str) -> list[str]:
    wanted = tag.upper().removesuffix(".GGUF")
    of_label = [name for name in models if _label(name) == wanted]
    if of_label:
        return of_label
    of_name = [name for name in models if name.upper().removesuffix(".GGUF") == wanted]
    if of_name:
        return of_name
    pattern = re.compile(rf"(?<![A-Z0-9]){re.escape(wanted)}(?![A-Z0-9_])")
    return [name for name in models if pattern.search(name.upper())]


def _preferred(models: list[str]) -> list[str]:
    for label in PREFERRED:
        for name in models:
            if _label(name) == label:
                return [name]
    return models[:1]


def _label(name: str) -> str:
    """Return the quantisation in the name of a file, in capitals; the whole name if it has none."""
    labels = _LABEL.findall(Path(name).name.upper())
    return labels[-1] if labels else name


def _is_no_model(name: str) -> bool:
    return any(part in Path(name).name.lower() for part in NO_MODELS)
