"""Structural tags become Lark grammars: free text, in which some beginnings ask for a given content and end.

Both forms of vLLM and xgrammar are read: `structures` with `triggers`, and the newer `format`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any

from llguidance import regex_to_lark

from quire.shared.text import ebnf, json_schema
from quire.shared.text.grammar_error import GrammarError

# Bounds of one structural tag.
MAX_TAGS = 512
MAX_DEPTH = 32

_ANY_TEXT = "/(?s:.*)/"
# The texts of special tokens that Lark can refer to by name.
_NAMEABLE = re.compile(r"<[^<>\s\[][^<>\s]*>")


def to_lark(value: Any, special_tokens: Collection[str]) -> str:
    """Return the Lark grammar of a structural tag. Raise GrammarError.

    The text of a special token within the tag matches the token itself, and its letters.
    """
    if type(value) is not dict:
        raise GrammarError("structural_tag must be an object")
    writer = _TagWriter(special_tokens)
    if "format" in value:
        _only("structural_tag", value, ("type", "format"))
        start = writer.expression(value["format"], "", True, 0)
    else:
        _only("structural_tag", value, ("type", "structures", "triggers"))
        structures = _array("structures", value.get("structures"))
        tags = []
        for structure in structures:
            structure = _object("structures", structure)
            _only("structures", structure, ("begin", "schema", "end"))
            content = {"type": "json_schema", "json_schema": structure.get("schema")}
            tags.append({"begin": structure.get("begin"), "content": content, "end": structure.get("end")})
        made = {"type": "triggered_tags", "triggers": value.get("triggers"), "tags": tags}
        start = writer.expression(made, "", True, 0)
    if value.get("type", "structural_tag") != "structural_tag":
        raise GrammarError("the type of a structural tag must be structural_tag")
    return "\n".join([f"start: {start}", *writer.lines])


class _TagWriter:
    """Collects the rules of a grammar."""

    def __init__(self, special_tokens: Collection[str]) -> None:
        self.lines: list[str] = []
        names = sorted(filter(_NAMEABLE.fullmatch, special_tokens), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, names))) if names else None
        self._tags = 0

    def expression(self, form: Any, end: str, is_last: bool, depth: int) -> str:
        """Return the expression of a format with the text `end` after it. is_last: the answer ends there."""
        form = _object("format", form)
        kind = form.get("type")
        if depth > MAX_DEPTH:
            raise GrammarError(f"the structural tag has more than {MAX_DEPTH} nested formats")
        if kind == "const_string":
            _only(kind, form, ("type", "value"))
            return self._literal(_text("value", form.get("value")) + end)
        if kind == "any_text":
            _only(kind, form, ("type",))
            return self._free_text(end, is_last)
        if kind == "json_schema":
            _only(kind, form, ("type", "json_schema", "style"))
            if form.get("style", "json") != "json":
                raise GrammarError("the style of a json_schema must be json")
            return f"%json {json_schema.compiled(form.get('json_schema'))} {self._literal(end)}"
        if kind == "regex":
            _only(kind, form, ("type", "pattern"))
            pattern = regex_to_lark(_text("pattern", form.get("pattern")), "")
            return f"{self._rule(f'/{pattern}/', is_terminal=True)} {self._literal(end)}"
        if kind == "grammar":
            _only(kind, form, ("type", "grammar"))
            start, lines = ebnf.rules(_text("grammar", form.get("grammar")), f"g{len(self.lines)}x")
            self.lines += lines
            return f"{start} {self._literal(end)}"
        if kind == "tag":
            return self._tag(form, end, is_last, depth)
        if kind == "or":
            _only(kind, form, ("type", "elements"))
            branches = _array("elements", form.get("elements"))
            return f"({' | '.join(self.expression(branch, end, is_last, depth + 1) for branch in branches)})"
        if kind == "sequence":
            return self._sequence(form, end, is_last, depth)
        if kind == "triggered_tags":
            return self._triggered_tags(form, end, is_last, depth)
        if kind == "tags_with_separator":
            return self._separated_tags(form, end, depth)
        raise GrammarError(f"the format {str(kind)[:80]!r} of a structural tag is not supported")

    def _sequence(self, form: dict[str, Any], end: str, is_last: bool, depth: int) -> str:
        _only("sequence", form, ("type", "elements"))
        elements = _array("elements", form.get("elements"))
        written: list[str] = []
        # From the last to the first: a constant string ends the text before it, so both are written together.
        for index, element in reversed(list(enumerate(elements))):
            if _kind(element) == "const_string" and index:
                end = _text("value", element.get("value")) + end
                _only("const_string", element, ("type", "value"))
                continue
            written.append(self.expression(element, end, is_last, depth + 1))
            end, is_last = "", False
        if end:
            written.append(self._literal(end))
        written.reverse()
        return f"({' '.join(written)})"

    def _tag(self, form: dict[str, Any], end: str, is_last: bool, depth: int, skipped: str = "") -> str:
        """Return the expression of a tag without its beginning `skipped`, which a trigger has matched."""
        _only("tag", form, ("type", "begin", "content", "end"))
        if form.get("type", "tag") != "tag":
            raise GrammarError("the type of a tag must be tag")
        self._tags += 1
        if self._tags > MAX_TAGS:
            raise GrammarError(f"the structural tag has more than {MAX_TAGS} tags")
        begin = _text("begin", form.get("begin"))[len(skipped) :]
        own_end = _text("end", form.get("end"))
        content = self.expression(form.get("content"), own_end, is_last and not own_end + end, depth + 1)
        return f"{self._literal(begin)} {content} {self._literal(end)}"

    def _triggered_tags(self, form: dict[str, Any], end: str, is_last: bool, depth: int) -> str:
        _only("triggered_tags", form, ("type", "triggers", "tags", "at_least_one", "stop_after_first"))
        tags = [_object("tags", tag) for tag in _array("tags", form.get("tags"))]
        triggers = [_text("triggers", trigger) for trigger in _array("triggers", form.get("triggers"))]
        if not all(triggers):
            raise GrammarError("triggers must not be empty")
        by_trigger: dict[str, list[dict[str, Any]]] = {trigger: [] for trigger in triggers}
        for tag in tags:
            begin = _text("begin", tag.get("begin"))
            matching = [trigger for trigger in by_trigger if begin.startswith(trigger)]
            if len(matching) != 1:
                raise GrammarError(f"the beginning of a tag, {begin[:80]!r}, must start with exactly one trigger")
            by_trigger[matching[0]].append(tag)
        branches = []
        for trigger, its_tags in by_trigger.items():
            if its_tags:
                bodies = " | ".join(self._tag(tag, "", False, depth, trigger) for tag in its_tags)
                branches.append(f"{self._until(trigger)} ({bodies})")
        in_text = self._rule(" | ".join(branches))
        once, first = _flag("stop_after_first", form), _flag("at_least_one", form)
        at_once = ""
        if first:
            at_once = self._rule(" | ".join(self._tag(tag, "", False, depth) for tag in tags))
        if once:
            if first:
                return f"{at_once} {self._literal(end)}"
            return f"({in_text} {self._literal(end)} | {self._free_text(end, is_last)})"
        return f"{at_once} {in_text}* {self._free_text(end, is_last)}"

    def _separated_tags(self, form: dict[str, Any], end: str, depth: int) -> str:
        _only("tags_with_separator", form, ("type", "tags", "separator", "at_least_one", "stop_after_first"))
        tags = _array("tags", form.get("tags"))
        separator = self._literal(_text("separator", form.get("separator")))
        any_tag = self._rule(" | ".join(self._tag(_object("tags", tag), "", False, depth) for tag in tags))
        many = any_tag if _flag("stop_after_first", form) else f"{any_tag} ({separator} {any_tag})*"
        return f"({many}){'' if _flag('at_least_one', form) else '?'} {self._literal(end)}"

    def _free_text(self, end: str, is_last: bool) -> str:
        if end:
            return self._until(end)
        if not is_last:
            raise GrammarError("any text must have an end: let a constant string follow, or let it be the last format")
        return self._rule(_ANY_TEXT, is_terminal=True)

    def _until(self, text: str) -> str:
        """Return a rule for any text up to and with the first occurrence of `text`."""
        spelled = f"{_ANY_TEXT} {json.dumps(text, ensure_ascii=False)}"
        lazy = self._rule(self._rule(spelled, is_terminal=True), option="[lazy]")
        if self._special is None or not (match := self._special.match(text)):
            return lazy
        rest = self._literal(text[match.end() :])
        return f"({lazy} | {self._rule(_ANY_TEXT, is_terminal=True)} {match[0]} {rest})"

    def _literal(self, text: str) -> str:
        """Return an expression for a text, in which special tokens may be tokens or letters."""
        if not text:
            return ""
        spelled = json.dumps(text, ensure_ascii=False)
        if self._special is None or not self._special.search(text):
            return spelled
        parts, at = [], 0
        for match in self._special.finditer(text):
            parts += [json.dumps(text[at : match.start()], ensure_ascii=False)] if match.start() > at else []
            parts.append(match[0])
            at = match.end()
        parts += [json.dumps(text[at:], ensure_ascii=False)] if at < len(text) else []
        return f"({' '.join(parts)} | {spelled})"

    def _rule(self, expression: str, is_terminal: bool = False, option: str = "") -> str:
        name = f"{'T' if is_terminal else 't'}_{len(self.lines)}"
        self.lines.append(f"{name}{option}: {expression}")
        return name


def _only(name: str, value: dict[str, Any], known: tuple[str, ...]) -> None:
    for key in value:
        if key not in known:
            raise GrammarError(f"{key[:80]} is not supported in {name}, which has {', '.join(known)} only")


def _kind(form: Any) -> Any:
    return form.get("type") if type(form) is dict else None


def _object(name: str, value: Any) -> dict[str, Any]:
    if type(value) is not dict:
        raise GrammarError(f"{name} must be an object")
    return value


def _array(name: str, value: Any) -> list[Any]:
    if type(value) is not list or not value:
        raise GrammarError(f"{name} must be an array that is not empty")
    return value


def _text(name: str, value: Any) -> str:
    if type(value) is not str:
        raise GrammarError(f"{name} must be a string")
    return value


def _flag(name: str, form: dict[str, Any]) -> bool:
    value = form.get(name, False)
    if type(value) is not bool:
        raise GrammarError(f"{name} must be true or false")
    return value
