"""Downloads from the Hugging Face Hub by its own client, with errors of one line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


class HubError(Exception):
    """The folder of a model cannot be found. `reason` is the cause; `remedy` is the advice for the user."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(f"{reason}; {remedy}")
        self.reason, self.remedy = reason, remedy


def download(name: str, wanted: Sequence[str], unwanted: Sequence[str] = ()) -> Path:
    """Download the missing files of the model `name`, and return its folder in the local cache. Raises HubError.

    wanted, unwanted: patterns of file names.
    """
    # Imported here: a local folder needs neither the package nor the time of its import.
    from huggingface_hub import snapshot_download

    with hub_errors(name):
        return Path(snapshot_download(name, allow_patterns=list(wanted), ignore_patterns=list(unwanted)))


@contextmanager
def hub_errors(name: str) -> Iterator[None]:
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
