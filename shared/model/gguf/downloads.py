"""GGUF files of the Hugging Face Hub: `owner/name:Q4_K_M` names a quantisation, and only its files are downloaded.

A repository of GGUF files has one model for each quantisation.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from glob import escape
from pathlib import Path

from quire.shared.model.gguf.parts import part_paths
from quire.shared.model.hub_client import HubError, download, hub_errors

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


def download_gguf(name: str, tag: str = "") -> Path:
    """Download the missing files of one GGUF model of a repository, and return the path of the first. Raises HubError.

    tag: as of `choose_files`.
    """
    try:
        files = choose_files(_list_files(name), tag)
    except NoSuchFile as error:
        raise HubError(f"the repository {name} {error}", error.remedy) from None
    folder = download(name, [escape(file) for file in files])
    for file in files:  # without a network, a folder of the cache may lack them
        if not (folder / file).is_file():
            raise HubError(f"{file} of {name} is neither downloaded nor reachable", "connect to huggingface.co once")
    return folder / files[0]


def has_gguf_alone(name: str) -> bool:
    """Return whether the weights of a repository are GGUF files."""
    with suppress(HubError):
        files = _list_files(name)
        return not any(file.endswith(".safetensors") for file in files) and any(
            file.lower().endswith(".gguf") for file in files
        )
    return False


def _list_files(name: str) -> list[str]:
    """Return the files of a repository; without a network, those in the local cache. Raises HubError."""
    from huggingface_hub import HfApi, errors, snapshot_download

    with hub_errors(name):
        try:
            return HfApi().list_repo_files(name)
        except (errors.HFValidationError, errors.RepositoryNotFoundError):  # of which gated ones are a kind
            raise
        except Exception:  # no network, or a mirror without this function
            # The pattern is of no file: without one, the client wants all files of the repository to be there.
            folder = Path(snapshot_download(name, allow_patterns=["/"], local_files_only=True))
            return [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]


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
