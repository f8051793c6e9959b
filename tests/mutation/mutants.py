"""Mutants: copies of a source file with one small fault; in Python by the operators of mutmut, in Lua by a few here."""

from __future__ import annotations

import ast
import difflib
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# What mutmut mutates in a call of these is the wording of a log line, which no test asserts.
LOG_CALLS = frozenset(("debug", "info", "warning", "error", "exception", "critical", "log"))


@dataclass(frozen=True)
class Mutant:
    """One fault.

    path:  the file, relative to the root of the tree
    line:  the first line that differs, counted from 1
    before, after: the lines that differ, without indentation
    code:  the whole file with the fault
    """

    path: str
    line: int
    before: str
    after: str
    code: str

    @property
    def name(self) -> str:
        """A name that survives edits elsewhere in the file."""
        return f"{self.path}: {self.before} -> {self.after}"


def sample(root: Path, paths: list[str], number: int, seed: int) -> list[Mutant]:
    """Return at most `number` mutants of the files, the same ones for the same files and seed."""
    rng = random.Random(seed)
    sources = {path: (root / path).read_text() for path in paths}
    candidates = [(path, at) for path in sorted(paths) for at in range(_count(path, sources[path]))]
    rng.shuffle(candidates)
    chosen: dict[str, Mutant] = {}
    for path, at in candidates:
        if len(chosen) == number:
            break
        mutant = _mutant(path, sources[path], at)
        if mutant is not None:
            chosen.setdefault(mutant.name, mutant)
    return list(chosen.values())


def _count(path: str, source: str) -> int:
    return len(list(_lua_edits(source))) if path.endswith(".lua") else len(_python_mutations(path, source)[1])


def _mutant(path: str, source: str, at: int) -> Mutant | None:
    if path.endswith(".lua"):
        start, end, text = list(_lua_edits(source))[at]
        code = source[:start] + text + source[end:]
    else:
        module, mutations, skipped = _python_mutations(path, source)
        mutation = mutations[at]
        code = module.deep_replace(mutation.original_node, mutation.mutated_node).code
    change = _change(source, code)
    if change is None or (path.endswith(".py") and change[0] in skipped):
        return None
    mutant = Mutant(path, *change, code)
    return None if _has_no_effect(mutant) else mutant


def _has_no_effect(mutant: Mutant) -> bool:
    """Return whether only the `strict` of a `zip` differs: it states what the lines before it have made sure of."""
    before, after = mutant.before.replace("strict=True", ""), re.sub(r"strict=(None|False)", "", mutant.after)
    return before.split() == after.split()


def _change(source: str, code: str) -> tuple[int, str, str] | None:
    before, after = source.splitlines(), code.splitlines()
    for kind, i, i_end, j, j_end in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if kind != "equal":
            return i + 1, " ".join(map(str.strip, before[i:i_end])), " ".join(map(str.strip, after[j:j_end]))
    return None


_parsed: dict[tuple[str, str], tuple[Any, list[Any], frozenset[int]]] = {}


def _python_mutations(path: str, source: str) -> tuple[Any, list[Any], frozenset[int]]:
    """Return the module, mutmut's mutations inside functions but of messages, and the lines of log calls."""
    if (path, source) not in _parsed:
        from mutmut.mutation.file_mutation import create_mutations

        module, mutations, *_ = create_mutations(path, source)
        _parsed[path, source] = (
            module,
            [m for m in mutations if _is_in_function(m) and not _is_message(m)],
            frozenset(_log_lines(source)),
        )
    return _parsed[path, source]


def _is_in_function(mutation: Any) -> bool:
    """Return whether a function contains the place; the values of fields and constants are left out."""
    return type(mutation.contained_by_top_level_function).__name__ == "FunctionDef"


def _is_message(mutation: Any) -> bool:
    """Return whether the mutated node is a string with a space: text for people."""
    return type(mutation.original_node).__name__ == "SimpleString" and " " in mutation.original_node.value


def _log_lines(source: str) -> Iterator[int]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LOG_CALLS:
            yield from range(node.lineno, (node.end_lineno or node.lineno) + 1)


_LUA_TOKEN = re.compile(
    r"--\[\[.*?\]\]|--[^\n]*"  # comments
    r"|'(?:\\.|[^'\\\n])*'|\"(?:\\.|[^\"\\\n])*\""  # strings
    r"|[A-Za-z_][A-Za-z0-9_]*|\d+(?:\.\d+)?|==|~=|<=|>=|\.\.\.?|[^\s\w]",
    re.DOTALL,
)
_LUA_SWAPS = {
    "==": "~=",
    "~=": "==",
    "<": "<=",
    "<=": "<",
    ">": ">=",
    ">=": ">",
    "+": "-",
    "*": "/",
    "/": "*",
    "and": "or",
    "or": "and",
    "true": "false",
    "false": "true",
    "not": "",
}
# A call that is a statement of its own, on one line: without it, Redis is not written.
_LUA_CALL = re.compile(r"^[ \t]*((?:redis\.p?call|[a-z_]+)\([^\n]*\))$", re.MULTILINE)
_LUA_ASSIGNMENT = re.compile(r"^[ \t]*(?!local\b)[a-z_.\[\]#+ 0-9]+ = ([^\n]+[^\n,({])$", re.MULTILINE)


def _lua_edits(source: str) -> Iterator[tuple[int, int, str]]:
    """Yield every edit: start, end and the text in place of it."""
    before = ""
    for match in _LUA_TOKEN.finditer(source):
        token = match[0]
        if token.startswith("--"):
            continue
        if token in _LUA_SWAPS:
            yield match.start(), match.end(), _LUA_SWAPS[token]
        elif token == "-" and (before[-1:].isalnum() or before[-1:] in ")]_"):
            yield match.start(), match.end(), "+"
        elif token.isdigit():
            yield match.start(), match.end(), str(int(token) + 1)
        before = token
    for match in _LUA_CALL.finditer(source):
        if match[0].count("(") == match[0].count(")"):
            yield match.start(1), match.end(1), "do end"
    for match in _LUA_ASSIGNMENT.finditer(source):
        if all(match[1].count(a) == match[1].count(b) for a, b in ("()", "{}", "[]")) and match[1].count("'") % 2 == 0:
            yield match.start(1), match.end(1), "nil"
