"""Finds the folder of a model: a local folder, or a download of its files from the Hugging Face Hub."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from quire.shared.model.folder import find_gguf, is_gguf


class HubError(Exception):
    """The folder of a model cannot be found. `reason` is the cause; `remedy` is the advice for the user."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(f"{reason}; {remedy}")
        self.reason, self.remedy = reason, remedy


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
    if not model or model.startswith((".", "/", "~")) or model.count("/") > 1:
        remedy = "give a folder with config.json and tokenizer.json, or a Hugging Face name such as owner/model"
        raise HubError(f"there is no folder {model!r}", remedy)
    return download(model, wanted, unwanted)


def download(name: str, wanted: Sequence[str], unwanted: Sequence[str] = ()) -> Path:
    """Download the missing files of the model `name`, and return its folder in the local cache. Raises HubError.

    wanted, unwanted: patterns of file names.
    """
    # Imported here: a local folder needs neither the package nor the time of its import.
    from huggingface_hub import errors, snapshot_download

    here = f"{name!r} is not a folder, and as a Hugging Face name it"
    try:
        return Path(snapshot_download(name, allow_patterns=list(wanted), ignore_patterns=list(unwanted)))
    except errors.HFValidationError:
        raise HubError(f"{here} is malformed", "give a folder, or a name like owner/model") from None
    except errors.GatedRepoError:
        raise HubError(f"{here} needs permission", "accept its licence on huggingface.co and set HF_TOKEN") from None
    except errors.RepositoryNotFoundError:
        remedy = "check the spelling, and set HF_TOKEN if it is private"
        raise HubError(f"{here} is unknown or private", remedy) from None
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        remedy = "connect to huggingface.co once (HF_HUB_OFFLINE must be unset), or give a folder"
        raise HubError(f"{here} is neither downloaded nor reachable", remedy) from None
    except Exception as error:  # the hub's client passes on all errors of its transport and of the disk
        reason = f"{here} could not be downloaded ({type(error).__name__}: {error})"
        raise HubError(reason, "check the network and the disk, or give a folder") from error
