"""The error of a grammar that answers cannot follow."""

from __future__ import annotations

_OVERLAP = (
    "oneOf has branches that may both match; use anyOf, or give each branch type object and a required property with a "
    "const of its own"
)


class GrammarError(ValueError):
    """A grammar that answers cannot be made to follow. The text is one line that names the fault."""


def one_line(error: str) -> str:
    """Return an error of llguidance as one line, without its markup and with a remedy that a client can apply."""
    if "oneOf constraints are not supported" in error:  # llguidance proposes an option that clients cannot set
        return _OVERLAP
    return " ".join(error.replace("<non-verbose/>", "").split())[:300]
