from __future__ import annotations

import pytest

from quire.shared.text.schema.words import words


@pytest.mark.parametrize(
    ("pattern", "texts"),
    [
        ("^score$", ["score"]),
        ("^(a|bc)$", ["a", "bc"]),
        ("^(?:ab|ac)?$", ["", "ab", "ac"]),
        ("^[a-c_]$", ["_", "a", "b", "c"]),
        ("^a{2,3}$", ["aa", "aaa"]),
        ("^a$|^b$", ["a", "b"]),
        ("^(^a$)$", ["a"]),
        (r"^\x61\.$", ["a."]),
        (r"^[\s\S]{0,0}$", [""]),
        ("$^", [""]),
        ("^a$b", []),
        ("a^b$", None),
        ("^(){1000000}$", [""]),
        ("^((((){200}){200}){200}){200}$", [""]),
    ],
)
def test_few_texts_are_listed(pattern: str, texts: list[str] | None) -> None:
    found = words(pattern)
    assert (found if found is None else sorted(found)) == texts


@pytest.mark.parametrize(
    "pattern",
    [
        "", "a", "^a", "a$", "^a$|b", "^a*$", "^a+$", "^.$", "^[^a]$", r"^\d$", "(?i)^a$", "^(?i:a)$", r"^(a)\1$",
        "^(?=a)a$", "^[[a]]$", "^a{,3}$", "^[0-9]{3}$", "^(a{0,60}){0,60}$", "^a{9999}$", "^(",
        "^" + "(" * 5000 + ")" * 5000 + "$",
    ],
)  # fmt: skip
def test_many_texts_are_not_listed(pattern: str) -> None:
    assert words(pattern) is None
