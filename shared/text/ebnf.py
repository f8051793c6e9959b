r"""Grammars in EBNF, as xgrammar and llama.cpp (GBNF) write them, become Lark grammars of llguidance.

    root  ::= "[" (item ("," item)*)? "]"   # a comment
    item  ::= root | [0-9]{1,3} | "\u00e4"

A rule that does not contain itself is a regular expression and becomes one terminal, together with its neighbours:
llguidance's lexer takes the longest match of a terminal, so terminals that overlap would lose answers. In a grammar
with recursion, optional white space is not part of terminals, because it often stands before white space that is
required.

llguidance's own converter, `llguidance.gbnf_to_lark`, is not used: of the 14 grammars in
tests/shared/text/test_grammar.py::test_an_answer_follows_the_grammar, version 1.9.1 refuses 4 or gets them wrong
(terminals that overlap, the escape `\-`, a line feed for `.`, `{,n}`). It also accepts a rule that is defined twice,
and 5,000 nested parentheses end in RecursionError.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field

from quire.shared.text.grammar_error import GrammarError

# Deepest nesting of parentheses.
MAX_DEPTH = 100
ROOT = "root"

_SPACE = re.compile(r"(?:\s|#[^\n]*)*")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_DEFINES = re.compile(r"(?:\s|#[^\n]*)*::=")
_REPEAT = re.compile(r"\{\s*([0-9]{0,7})\s*(,?)\s*([0-9]{0,7})\s*\}")
_ESCAPED = re.compile(r"x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}")
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"} | {sign: sign for sign in "\\\"'[]-^/."}


@dataclass(slots=True)
class EbnfNode:
    """A part of a rule.

    lark: the text of a leaf, or the sign of a repetition. name: of the rule that is referred to.
    is_blank: a leaf that matches white space only.
    """

    lark: str = ""
    name: str = ""
    kind: str = "leaf"  # leaf, name, sequence, choice, repeat
    parts: list[EbnfNode] = field(default_factory=list)
    is_blank: bool = False


def to_lark(text: str) -> str:
    """Return the Lark grammar of an EBNF grammar, whose first rule is `root`. Raise GrammarError."""
    start, lines = rules(text, "e")
    return "\n".join([f"start: {start}", *lines])


def rules(text: str, prefix: str) -> tuple[str, list[str]]:
    """Return the symbol of the rule `root` and the lines of a Lark grammar, whose names begin with `prefix`."""
    parsed = _EbnfReader(text).read()
    if ROOT not in parsed:
        raise GrammarError(f"the grammar has no rule {ROOT}; write {ROOT} ::= ...")
    return _EbnfWriter(parsed, prefix).write()


class _EbnfReader:
    """Reads the rules of a text."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0

    def read(self) -> dict[str, EbnfNode]:
        rules: dict[str, EbnfNode] = {}
        self._skip()
        while self._at < len(self._text):
            name = self._match(_NAME)
            if not name or not self._match(_DEFINES):
                raise self._wrong("a rule `name ::= ...` must begin here")
            if name[0] in rules:
                raise GrammarError(f"the grammar has two rules {name[0][:80]}")
            rules[name[0]] = self._choice()
        return rules

    def _choice(self) -> EbnfNode:
        branches = [self._sequence()]
        while self._take("|"):
            branches.append(self._sequence())
        return branches[0] if len(branches) == 1 else EbnfNode(kind="choice", parts=branches)

    def _sequence(self) -> EbnfNode:
        parts: list[EbnfNode] = []
        while (part := self._repeated()) is not None:
            parts.append(part)
        return parts[0] if len(parts) == 1 else EbnfNode(kind="sequence", parts=parts)

    def _repeated(self) -> EbnfNode | None:
        node = self._atom()
        if node is None:
            return None
        while True:
            if sign := self._match(re.compile(r"[*+?]")):
                node = EbnfNode(sign[0], kind="repeat", parts=[node])
            elif counts := self._match(_REPEAT):
                low, comma, high = counts.groups()
                if (not low and not high) or (high and comma and int(low or 0) > int(high)) or (high and not comma):
                    raise self._wrong("a repetition must be {m}, {m,}, {m,n} or {,n}")
                bounds = f"{{{low or 0},{high}}}" if comma else f"{{{low}}}"
                node = EbnfNode(bounds, kind="repeat", parts=[node])
            else:
                self._skip()
                return node

    def _atom(self) -> EbnfNode | None:
        self._skip()
        sign = self._text[self._at : self._at + 1]
        if sign == '"':
            return self._string()
        if sign == "[":
            return self._class()
        if self._take("."):
            return EbnfNode("/(?s:.)/")
        if self._take("("):
            if self._text.startswith("=", self._at):
                raise self._wrong("a lookahead is not supported")
            self._depth += 1
            if self._depth > MAX_DEPTH:
                raise GrammarError(f"the grammar has more than {MAX_DEPTH} nested parentheses")
            inner = self._choice()
            self._depth -= 1
            if not self._take(")"):
                raise self._wrong("a parenthesis must be closed here")
            return inner
        began = self._at
        if (name := self._match(_NAME)) is None:
            if sign and sign not in "|)":
                raise self._wrong("a string, class, name or parenthesis must be here")
            return None
        if self._text.startswith("(", self._at):
            raise self._wrong(f"{name[0][:80]}(...) is not supported")
        if _DEFINES.match(self._text, self._at):  # the next rule begins
            self._at = began
            return None
        return EbnfNode(name=name[0], kind="name")

    def _string(self) -> EbnfNode:
        self._at += 1
        letters: list[str] = []
        while not self._text.startswith('"', self._at):
            letters.append(self._letter("a string must be closed"))
        self._at += 1
        text = "".join(letters)
        return EbnfNode(json.dumps(text, ensure_ascii=False), is_blank=text.isspace())

    def _class(self) -> EbnfNode:
        self._at += 1
        negated = self._text.startswith("^", self._at)
        self._at += negated
        ranges: list[str] = []
        is_blank = not negated
        while not self._text.startswith("]", self._at):
            low = high = self._letter("a class must be closed by ]")
            if self._text.startswith("-", self._at) and not self._text.startswith("-]", self._at):
                self._at += 1
                high = self._letter("a class must be closed by ]")
            if low > high:
                raise self._wrong("the ends of a range are in the wrong order")
            is_blank = is_blank and low == high and low.isspace()
            ranges.append(f"\\x{{{ord(low):x}}}-\\x{{{ord(high):x}}}")
        self._at += 1
        if not ranges:
            raise self._wrong("a class must not be empty")
        return EbnfNode(f"/[{'^' * negated}{''.join(ranges)}]/", is_blank=is_blank)

    def _letter(self, otherwise: str) -> str:
        """Read one character of a string or class, which may be escaped."""
        letter = self._text[self._at : self._at + 1]
        if not letter or letter == "\n":
            raise self._wrong(otherwise)
        self._at += 1
        if letter != "\\":
            return letter
        if code := self._match(_ESCAPED):
            number = int(code[0][1:], 16)
            if number > 0x10FFFF or 0xD800 <= number < 0xE000:
                raise self._wrong("an escape must be a Unicode character")
            return chr(number)
        escaped = self._text[self._at : self._at + 1]
        if escaped not in _ESCAPES:
            raise self._wrong("an unknown escape is before this place")
        self._at += 1
        return _ESCAPES[escaped]

    def _match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        match = pattern.match(self._text, self._at)
        if match:
            self._at = match.end()
        return match

    def _take(self, sign: str) -> bool:
        self._skip()
        has = self._text.startswith(sign, self._at)
        self._at += has
        return has

    def _skip(self) -> None:
        self._match(_SPACE)

    def _wrong(self, why: str) -> GrammarError:
        line = self._text.count("\n", 0, self._at) + 1
        return GrammarError(f"line {line} of the grammar, at {self._text[self._at : self._at + 20]!r}: {why}")


class _EbnfWriter:
    """Writes the rules that are reached from `root` as Lark."""

    def __init__(self, rules: dict[str, EbnfNode], prefix: str) -> None:
        self._rules = rules
        self._prefix = prefix
        self._lines: list[str] = []
        self._order, self._recursive = _analyse(rules)
        # Rules that are no terminals.
        self._open = set(self._recursive)
        if self._recursive:
            self._open |= {name for name in self._order if self._has_optional_space(rules[name], set())}
        self._symbols = {
            name: f"{prefix}_{index}" if name in self._open else f"{prefix.upper()}_{index}"
            for index, name in enumerate(self._order)
        }

    def write(self) -> tuple[str, list[str]]:
        for name, symbol in self._symbols.items():
            self._lines.append(f"{symbol}: {self._expression(self._rules[name], name not in self._open)}")
        return self._symbols[ROOT], self._lines

    def _is_terminal(self, node: EbnfNode) -> bool:
        if node.kind == "name":
            return node.name not in self._open
        if self._recursive and node.kind != "leaf" and node.kind != "sequence" and self._is_blank(node):
            return False
        return all(self._is_terminal(part) for part in node.parts)

    def _is_blank(self, node: EbnfNode) -> bool:
        """Return whether a part matches nothing but white space."""
        if node.kind == "name":
            return node.name not in self._recursive and self._is_blank(self._rules[node.name])
        return node.is_blank if node.kind == "leaf" else all(self._is_blank(part) for part in node.parts)

    def _has_optional_space(self, node: EbnfNode, seen: set[str]) -> bool:
        if node.kind == "name":
            if node.name in seen or node.name in self._recursive:
                return False
            seen.add(node.name)
            return self._has_optional_space(self._rules[node.name], seen)
        if node.kind in ("repeat", "choice") and self._is_blank(node):
            return True
        return any(self._has_optional_space(part, seen) for part in node.parts)

    def _expression(self, node: EbnfNode, inside: bool) -> str:
        """Return the text of a part; `inside` a terminal, or in a rule, which refers to terminals by name."""
        if node.kind == "name":
            return self._symbols[node.name]
        if not inside and self._is_terminal(node):
            return self._terminal(node)
        if node.kind == "leaf":
            return node.lark
        if node.kind == "repeat":
            return f"({self._expression(node.parts[0], inside)}){node.lark}"
        if node.kind == "choice":
            return f"({' | '.join(self._expression(part, inside) for part in node.parts)})"
        if not node.parts:
            return '""'
        if inside:
            return " ".join(self._expression(part, True) for part in node.parts)
        joined: list[str] = []
        run: list[EbnfNode] = []
        for part in node.parts:
            if self._is_terminal(part):
                run.append(part)
                continue
            joined += [self._terminal(EbnfNode(kind="sequence", parts=run))] if run else []
            joined.append(self._expression(part, False))
            run = []
        joined += [self._terminal(EbnfNode(kind="sequence", parts=run))] if run else []
        return " ".join(joined)

    def _terminal(self, node: EbnfNode) -> str:
        name = f"{self._prefix.upper()}_T{len(self._lines)}"
        self._lines.append("")  # takes the number
        self._lines[-1] = f"{name}: {self._expression(node, True)}"
        return name


def _analyse(rules: dict[str, EbnfNode]) -> tuple[list[str], set[str]]:
    """Return the rules that `root` reaches, and those of them that contain themselves or a rule that does."""
    uses: dict[str, list[str]] = {}
    waiting = [ROOT]
    while waiting:
        name = waiting.pop()
        if name in uses:
            continue
        if name not in rules:
            raise GrammarError(f"the grammar has no rule {name[:80]}")
        uses[name] = list(_names(rules[name]))
        waiting += uses[name]
    # Rules whose parts are all regular are regular; the rest contain a cycle.
    regular: set[str] = set()
    users: dict[str, list[str]] = {name: [] for name in uses}
    missing = {name: len(set(used)) for name, used in uses.items()}
    for name, used in uses.items():
        for rule in set(used):
            users[rule].append(name)
    ready = [name for name, count in missing.items() if not count]
    while ready:
        name = ready.pop()
        regular.add(name)
        for user in users[name]:
            missing[user] -= 1
            if not missing[user]:
                ready.append(user)
    return list(uses), set(uses) - regular


def _names(node: EbnfNode) -> list[str]:
    waiting, names = [node], []
    while waiting:
        part = waiting.pop()
        if part.kind == "name":
            names.append(part.name)
        waiting += part.parts
    return names
