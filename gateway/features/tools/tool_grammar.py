"""The parts of which the grammars of tool calls are made, in the Lark dialect of llguidance.

A special token is no text: a grammar names it by its id, and free text never contains one. For llguidance, the added
tokens of the form `<...>` are special too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from quire.gateway.features.grammars.schema_fault import find_fault
from quire.gateway.features.tools.reasoning import Reasoning
from quire.gateway.output.tools import ANY_ARGUMENTS, Tool, ToolChoice, ToolMode
from quire.shared.text.grammar import framed, lark_json, write
from quire.shared.text.grammar_error import GrammarError

# With what the other modules of tools need of the grammars that clients give.
__all__ = [
    "Beginning",
    "Calls",
    "GrammarError",
    "SpecialTokens",
    "StrictToolError",
    "answer_grammar",
    "between",
    "find_fault",
    "framed",
    "grammar_after_reasoning",
    "json_names_and_arguments",
    "lark_arguments",
    "lark_json",
    "lark_text",
    "pattern",
    "quoted",
    "several",
    "text_and_end",
    "with_content",
    "write",
]

# By text: the ids of the special tokens of a tokenizer.
SpecialTokens = Mapping[str, int]

_ANY = "/(?s:.*)/"


class StrictToolError(GrammarError):
    """The format of the model cannot follow the schema of a strict tool."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"in this model's format, {reason}")


def lark_arguments(tool: Tool) -> str:
    """Return the expression for the arguments of a tool: a JSON object that follows its schema.

    Raises GrammarError if the tool is strict and its schema cannot be followed; without `strict` any object is allowed.
    """
    try:
        return lark_json({**tool.parameters, "type": "object"})
    except GrammarError:
        if tool.strict:
            raise
        return lark_json(dict(ANY_ARGUMENTS))


def json_names_and_arguments(tools: Sequence[Tool], arguments_key: str) -> str:
    """Return the expression for the rest of a call in JSON, `"name", "arguments": {...}`, of any of the tools."""
    names = [json.dumps(tool.name, ensure_ascii=False) for tool in tools]
    heads = [quoted(f'{name}, "{arguments_key}": ') for name in names]
    return " | ".join(f"{head} {lark_arguments(tool)}" for head, tool in zip(heads, tools, strict=True))


def quoted(text: str) -> str:
    """Return the Lark string of a text."""
    return json.dumps(text, ensure_ascii=False)


def lark_text(text: str, special_tokens: SpecialTokens) -> str:
    """Return the expression for a text that may contain special tokens."""
    special = [name for name in special_tokens if name in text]
    names = "|".join(re.escape(name) for name in sorted(special, key=len, reverse=True))
    pieces = re.split(f"({names})", text) if names else [text]
    return " ".join(
        f"<[{special_tokens[piece]}]>" if piece in special_tokens else quoted(piece) for piece in pieces if piece
    )


def pattern(text: str) -> str:
    """Return the regular expression of a text, as it stands between the slashes of a Lark grammar."""
    return re.sub(r"([^\w\s<>\"'=,:;-])", r"\\\1", text).replace("\n", r"\n")


def several(item: str, start: str, is_parallel: bool) -> str:
    """Return the expression for one item, or for several of which all but the first begin with `start`.

    The newlines between and after them are optional: a model that ends its answer with a newline must be able to end.
    """
    return f"{item} (NEWLINES {start} {item})* NEWLINES" if is_parallel else f"{item} NEWLINES"


class Beginning(NamedTuple):
    """A way in which the calls of an answer begin, after which they are forced to be well-formed.

    text: the text that begins them, anywhere in the answer. pattern: alternatively a regular expression that begins
    them at the beginning of the answer. rest: the expression for the rest of the answer.
    """

    rest: str
    text: str = ""
    pattern: str = ""


class Calls(NamedTuple):
    """The parts of a grammar that hold calls.

    forced: the expression for an answer that is calls and nothing else. rules: those that the expressions use.
    """

    forced: str
    beginnings: Sequence[Beginning]
    rules: Sequence[str]


def answer_grammar(
    choice: ToolChoice,
    special_tokens: SpecialTokens,
    reasoning: Reasoning | None,
    forced: str,
    beginnings: Sequence[Beginning],
    rules: Sequence[str],
    content_marks: tuple[str, str] = ("", ""),
) -> str:
    """Return the grammar of a whole answer: perhaps reasoning, then free text or calls as `choice` demands.

    forced, beginnings, rules: those of `Calls`. content_marks: texts that may be around an answer without calls.
    """
    is_auto = choice.mode == ToolMode.AUTO
    lines = _free_text(special_tokens, reasoning, beginnings, content_marks) if is_auto else [f"answer: {forced}"]
    lines += rules
    start = "answer"
    if reasoning:
        lines += _thought(special_tokens, reasoning, is_auto)
        start = "thought answer" if is_auto else "thought NEWLINES answer"
        start += "" if reasoning.starts_inside else " | answer"
        start += " | unended" if is_auto else ""
    return "\n".join([f"start: {start}", *lines, f"ANY: {_ANY}", "NEWLINES: /\\n{0,2}/", ""])


def grammar_after_reasoning(content: str, special_tokens: SpecialTokens, reasoning: Reasoning | None) -> str:
    """Return the grammar of reasoning, if any, and then an answer that is the expression `content`."""
    forced = ToolChoice(ToolMode.REQUIRED)
    return answer_grammar(forced, special_tokens, reasoning, "content", [], [f"content: {content}"])


def with_content(grammar: str, content: str) -> str:
    """Return a grammar of `answer_grammar` in which an answer may also be the expression `content`."""
    head, calls, rest = grammar.partition("\nanswer: ")
    assert calls
    forced, end, rest = rest.partition("\n")
    return f"{head}\nanswer: {forced} | content\ncontent: {content}{end}{rest}"


def between(content: str, marks: tuple[str, str], special_tokens: SpecialTokens) -> str:
    """Return the expression for content that may be between two marks."""
    before, after = (f"({lark_text(mark, special_tokens)})?" if mark else "" for mark in marks)
    return f"{before} {content} {after}".strip()


def text_and_end(name: str, end: str, special_tokens: SpecialTokens) -> list[str]:
    """Return the rules of `name`: any text up to the first `end`, and that."""
    terminal = name.upper()
    if end in special_tokens:
        text = f"ANY & ~/(?s:.*){pattern(end)}(?s:.*)/"
        return [f"{name}: {terminal} <[{special_tokens[end]}]>", f"{terminal}: {text}"]
    return [f"{name}[lazy]: {terminal}", f"{terminal}: /(?s:.*){pattern(end)}/"]


def _free_text(
    special_tokens: SpecialTokens,
    reasoning: Reasoning | None,
    beginnings: Sequence[Beginning],
    content_marks: tuple[str, str],
) -> list[str]:
    """Return the rules of an answer that is free text, until calls begin."""
    excluded = [beginning.pattern for beginning in beginnings if beginning.pattern]
    if reasoning and not reasoning.starts_inside and reasoning.format.start not in special_tokens:
        excluded.append(r"\s*" + pattern(reasoning.format.start))
    without = "".join(f" & ~/({name})(?s:.*)/" for name in excluded)
    lines = [f"TEXT: ANY{without}"]
    # Marks that are no tokens are text.
    start, end = (mark if mark in special_tokens else "" for mark in content_marks)
    answers = [between("TEXT", (start, end), special_tokens)]
    for index, (rest, text, begin) in enumerate(beginnings):
        lines.append(f"rest_{index}: {rest}")
        if begin:
            lines.append(f"HEAD_{index}: /{begin}/")
            answers.append(f"HEAD_{index} rest_{index}")
        else:
            # Lazy: it ends where the text begins for the first time.
            lines += [f"HEAD_{index}: (ANY {quoted(text)}){without}", f"head_{index}[lazy]: HEAD_{index}"]
            answers.append(f"head_{index} rest_{index}")
            if text in special_tokens:
                answers.append(f"TEXT <[{special_tokens[text]}]> rest_{index}")
    return ["answer: " + " | ".join(answers), *lines]


def _thought(special_tokens: SpecialTokens, reasoning: Reasoning, may_end_in_it: bool) -> list[str]:
    """Return the rules of the reasoning before an answer. The rule `unended` is reasoning without its end."""
    start, end = reasoning.format.start, reasoning.format.end
    if end in special_tokens:
        begin = "" if reasoning.starts_inside else lark_text(start, special_tokens)
        lines = [f"thought: {begin} THOUGHT <[{special_tokens[end]}]>", f"unended: {begin} THOUGHT"]
        lines.append(f"THOUGHT: ANY & ~/(?s:.*){pattern(end)}(?s:.*)/")
    else:
        begin = "" if reasoning.starts_inside else rf"\s*{pattern(start)}"
        lines = ["thought[lazy]: THOUGHT", f"THOUGHT: /{begin}(?s:.*){pattern(end)}/"]
        lines += [f"unended: /{begin}(?s:.*)/"]
    return lines if may_end_in_it else [line for line in lines if not line.startswith("unended")]
