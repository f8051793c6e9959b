"""The result of one check of `quire doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """What a check found."""

    OK = "ok"
    #: Quire works, with a risk or more slowly.
    WARNING = "warning"
    #: Quire does not start, or loses requests.
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Check:
    """What was checked and seen. remedy: what to do; empty for OK."""

    name: str
    verdict: Verdict
    seen: str
    remedy: str = ""


def found(name: str, seen: str, remedy: str = "", verdict: Verdict = Verdict.WARNING) -> Check:
    """Return a check: OK without a remedy."""
    return Check(name, verdict if remedy else Verdict.OK, seen, remedy)
