"""The Hugging Face Hub: from the name of a model to a folder with the files that a service needs of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


class HubError(Exception):
    """A model cannot be had from the hub: `reason` says why, `remedy` what to do."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(f"{reason}; {remedy}")
        self.reason, self.remedy = reason, remedy


def download(name: str, wanted: Sequence[str], unwanted: Sequence[str] = ()) -> Path:
    """The folder of the model `name`: from the local cache, or downloaded into it.

    `wanted` and `unwanted` are patterns of file names. Raises HubError.
    """
    # Imported here: a local folder needs neither the package nor the time that its import takes.
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
    except Exception as error:  # the hub's client lets through whatever its transport and the disk raise
        reason = f"{here} could not be downloaded ({type(error).__name__}: {error})"
        raise HubError(reason, "check the network and the disk, or give a folder") from error
