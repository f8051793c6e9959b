"""Finds the folder of a model: a local folder, or a download of its files from the Hugging Face Hub.

A repository of GGUF files has one model for each quantisation. `owner/name:Q4_K_M` names one, and only its files are
downloaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path

from quire.shared.model.folder import TOKENIZER, find_gguf, is_gguf
from quire.shared.model.gguf.choice import NoSuchFile, choose_files, split_tag


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
    name, tag = split_tag(model)
    if not name or model.startswith((".", "/", "~")) or name.count("/") > 1:
        remedy = "give a folder with config.json and tokenizer.json, or a Hugging Face name such as owner/model"
        raise HubError(f"there is no folder {model!r}", remedy)
    if tag:
        return download_gguf(name, tag)
    folder = download(name, wanted, unwanted)
    needed = "*.safetensors" if "*.safetensors" in wanted else TOKENIZER  # a gateway wants no weights
    is_whole = any(folder.glob(needed))
    return folder if is_whole or not _has_gguf_alone(name) else download_gguf(name)


def download(name: str, wanted: Sequence[str], unwanted: Sequence[str] = ()) -> Path:
    """Download the missing files of the model `name`, and return its folder in the local cache. Raises HubError.

    wanted, unwanted: patterns of file names.
    """
    # Imported here: a local folder needs neither the package nor the time of its import.
    from huggingface_hub import snapshot_download

    with _hub_errors(name):
        return Path(snapshot_download(name, allow_patterns=list(wanted), ignore_patterns=list(unwanted)))


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


def _has_gguf_alone(name: str) -> bool:
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

    with _hub_errors(name):
        try:
            return HfApi().list_repo_files(name)
        except (errors.HFValidationError, errors.RepositoryNotFoundError):  # of which gated ones are a kind
            raise
        except Exception:  # no network, or a mirror without this function
            # The pattern is of no file: without one, the client wants all files of the repository to be there.
            folder = Path(snapshot_download(name, allow_patterns=["/"], local_files_only=True))
            return [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]


@contextmanager
def _hub_errors(name: str) -> Iterator[None]:
    """Raise HubError for the errors of the hub's client."""
    from huggingface_hub import errors

    here = f"{name!r} is not a folder, and as a Hugging Face name it"
    try:
        yield
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
