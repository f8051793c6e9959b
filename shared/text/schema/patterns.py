"""Patterns that other patterns and finite sets of texts become, because llguidance has no lookaheads."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

_ANY = r"[\s\S]*"
# Characters of the texts that one pattern excludes.
_MAX_EXCLUDED = 2000
_LITERAL = re.compile(r"(?:[A-Za-z0-9_ \-,:;@#%&=<>/!\"'`~]|\\[^A-Za-z0-9])*")


def none_of(texts: Iterable[str]) -> str | None:
    """Return a pattern that matches every text except these; None if the texts are too long."""
    return _without(texts, "")


def none_starting_with(texts: Iterable[str]) -> str | None:
    """Return a pattern for every text that starts with none of these; None if no text does, or if these are long."""
    return _without(texts, _ANY)


def length_between(low: int, high: int | None) -> str:
    """Return a pattern that matches texts of `low` to `high` characters."""
    return f"^[\\s\\S]{{{low},{'' if high is None else high}}}$"


def _without(texts: Iterable[str], rest: str) -> str | None:
    """Return a pattern for all texts except these, followed by `rest`: an empty pattern, or a pattern for any text."""
    tree: dict[str, Any] = {}
    texts = list(texts)
    if sum(map(len, texts)) > _MAX_EXCLUDED or any(len(text) > _MAX_EXCLUDED // 10 for text in texts):
        return None
    for text in texts:
        node = tree
        for letter in text:
            node = node.setdefault(letter, {})
        node[""] = {}
    outside = _outside(tree, rest)
    return None if outside is None else f"^{outside}$"


def _outside(tree: dict[str, Any], rest: str) -> str | None:
    """Return an expression for the texts that do not lead to an end of the tree; None without such a text."""
    if "" in tree and rest:
        return None
    letters = [letter for letter in tree if letter]
    branches = [] if "" in tree else [""]
    branches.append(f"[^{''.join(map(_escaped, letters))}]{_ANY}" if letters else f"[\\s\\S]{_ANY}")
    for letter in letters:
        if (inner := _outside(tree[letter], rest)) is not None:
            branches.append(_escaped(letter) + inner)
    return f"(?:{'|'.join(branches)})"


def _escaped(text: str) -> str:
    return "".join(letter if letter.isalnum() and letter.isascii() else f"\\x{{{ord(letter):x}}}" for letter in text)


def without_lookaheads(pattern: str) -> list[str] | None:
    """Return patterns that together match as one pattern whose lookaheads are at its beginning.

    A negative lookahead must be for constant texts. None if the pattern has other lookaheads.
    """
    if not pattern.startswith("^(?=") and not pattern.startswith("^(?!"):
        return None
    patterns: list[str] = []
    rest = pattern[1:]
    while rest.startswith(("(?=", "(?!")):
        if (end := _end_of_group(rest)) is None:
            return None
        sign, inner, rest = rest[2], rest[3:end], rest[end + 1 :]
        if sign == "=":
            patterns.append(f"^(?:{inner})")
        elif (excluded := _excluding(inner)) is not None:
            patterns.append(excluded)
        else:
            return None
    # `^(?=a)b|c` is `(?:^(?=a)b)|(?:c)`.
    return None if _has_branches(rest) else [*patterns, f"^{rest}"]


def _excluding(inner: str) -> str | None:
    """Return a pattern for texts at whose beginning `inner` does not match."""
    while inner.startswith("(?:") and _end_of_group(inner) == len(inner) - 1:
        inner = inner[3:-1]
    is_whole = inner.endswith(")$") or (inner.endswith("$") and "|" not in inner)
    inner = inner[:-1] if is_whole else inner
    for opening in ("(?:", "("):
        if inner.startswith(opening) and _end_of_group(inner) == len(inner) - 1:
            inner = inner[len(opening) : -1]
            break
    texts = inner.split("|")
    if not all(_LITERAL.fullmatch(text) for text in texts):
        return None
    plain = [re.sub(r"\\(.)", r"\1", text) for text in texts]
    return none_of(plain) if is_whole else none_starting_with(plain)


def _has_branches(text: str) -> bool:
    return any(letter == "|" and depth == 0 for _, letter, depth in _letters(text))


def _end_of_group(text: str) -> int | None:
    """Return the place of the parenthesis that closes the group at the beginning."""
    return next((at for at, letter, depth in _letters(text) if letter == ")" and depth == 0), None)


def _letters(text: str) -> Iterator[tuple[int, str, int]]:
    """Yield the letters that are neither escaped nor in a class, each with its place and depth in parentheses."""
    depth, in_class, escaped = 0, False, False
    for at, letter in enumerate(text):
        if escaped or letter == "\\":
            escaped = not escaped
        elif in_class:
            in_class = letter != "]"
        elif letter == "[":
            in_class = True
        else:
            depth += (letter == "(") - (letter == ")")
            yield at, letter, depth
