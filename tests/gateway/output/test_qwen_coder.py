from __future__ import annotations

import pytest

from quire.gateway.output.formats import FORMATS
from quire.gateway.output.parts import AnswerPart
from quire.gateway.output.tools import Tool
from tests.support.gateway.output_answers import call, content, every_split, parse

CODER = FORMATS["qwen3_coder"]
TOOL = Tool(
    "run",
    parameters={
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "count": {"type": "integer"},
            "list": {"type": "array"},
            "untyped": {},
        },
    },
)


def written(*arguments: tuple[str, str]) -> str:
    values = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments)
    return f"<tool_call>\n<function=run>\n{values}</function>\n</tool_call>"


@pytest.mark.parametrize("is_forced", [False, True])
@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (written(), call("run", "{}")),
        (written(("text", 'a "b"\n\n<c>\\n\t😀\n')), call("run", r'{"text": "a \"b\"\n\n<c>\\n\t😀\n"}')),
        (written(("text", "3"), ("count", "3")), call("run", '{"text": "3", "count": 3}')),
        (written(("maybe", "null")), call("run", '{"maybe": null}')),
        (written(("maybe", "nullable")), call("run", '{"maybe": "nullable"}')),
        (written(("list", '[1, {"a": "b"}]')), call("run", '{"list": [1, {"a": "b"}]}')),
        (written(("list", "None"), ("count", " 7 ")), call("run", '{"list": null, "count": 7}')),
        (written(("count", "many")), call("run", '{"count": "many"}')),
        (written(("untyped", "3"), ("unknown", "x")), call("run", '{"untyped": "3", "unknown": "x"}')),
        (written(("text", "")), call("run", '{"text": ""}')),
        ("<tool_call><function=run><parameter=text>x</parameter></function></tool_call>", call("run", '{"text": "x"}')),
        ("Hi.\n<function=run>\n</function>", [content("Hi."), *call("run", "{}")]),
        (written()[:-3], call("run", "{}")),
        ("<tool_call>\n<function=ran>\n</function>", [content("<tool_call>\n<function=ran>\n</function>")]),
        ("a <tool_call> b <func", [content("a <tool_call> b <func")]),
    ],
)
def test_parts(text: str, parts: list[AnswerPart], is_forced: bool) -> None:
    assert parse(CODER.parser([TOOL], is_forced), text) == parts
    every_split(lambda: CODER.parser([TOOL], is_forced), text)


@pytest.mark.parametrize("rest", ["<parameter=text>\nabc", "<parameter=text>\nabc\n</parameter>\nx</function>"])
def test_a_broken_call_is_content(rest: str) -> None:
    text = f"<tool_call>\n<function=run>\n{rest}"
    assert parse(CODER.parser([TOOL]), text) == [content(text)]
    every_split(lambda: CODER.parser([TOOL]), text)


def test_a_string_is_passed_on_as_it_grows() -> None:
    parser = CODER.parser([TOOL], is_forced=True)
    parser.push("<tool_call>\n<function=run>\n<parameter=text>\n")
    assert "".join(part.text for part in parser.push("abc")) == "abc"
    assert "".join(part.text for part in parser.push("\n")) == ""
    assert "".join(part.text for part in parser.push('"')) == '\\n\\"'
