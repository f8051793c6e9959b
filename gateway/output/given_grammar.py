"""A grammar that an answer must follow, as a call asks for it."""

from __future__ import annotations

from typing import NamedTuple


class GivenGrammar(NamedTuple):
    """A grammar, and the name of the parameter that it comes from, for errors."""

    name: str
    text: str
