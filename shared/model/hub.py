"""Finds the folder of a model: a local folder, or a download of its files from the Hugging Face Hub."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from quire.shared.model.folder import TOKENIZER, find_gguf, is_gguf
from quire.shared.model.gguf.downloads import download_gguf, has_gguf_alone, split_tag
from quire.shared.model.hub_client import HubError, download

__all__ = ["HubError", "find_folder"]


def find_folder(model: str, wanted: Sequence[str], unwanted: Sequence[str] = ()) -> Path:
    """Return the folder of a model: `model` itself if it is a folder, else a download of that Hugging Face name.

    For a GGUF file, and for a folder that holds one in place of `config.json`, the path of the file is returned.
    wanted, unwanted: patterns of the files to download. Raises HubError for a file, for a path without a folder, and if
    the download fails.
    """
    path = Path(model).expanduser()
    if model and path.is_dir():
        return find_gguf(path) or path
    if model and is_gguf(path):
        return path
    if model and path.exists():
        remedy = "give a GGUF file, or the folder that holds config.json and tokenizer.json"
        raise HubError(f"{model} is a file", remedy)
    name, tag = split_tag(model)
    if not name or model.startswith((".", "/", "~")) or name.count("/") > 1:
        remedy = "give a folder with config.json and tokenizer.json, or a Hugging Face name such as owner/model"
        raise HubError(f"there is no folder {model!r}", remedy)
    if tag:
        return download_gguf(name, tag)
    folder = download(name, wanted, unwanted)
    needed = "*.safetensors" if "*.safetensors" in wanted else TOKENIZER  # a gateway wants no weights
    return folder if any(folder.glob(needed)) or not has_gguf_alone(name) else download_gguf(name)
