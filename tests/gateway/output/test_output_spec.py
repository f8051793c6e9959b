from __future__ import annotations

import json

import pytest

from quire.gateway.output.output_spec import MAX_SPEC_LENGTH, OutputSpec, read_spec
from quire.gateway.output.parts import AnswerPart, PartKind
from quire.gateway.output.tools import Tool
from quire.shared.validators import InvalidValue

TOOL = Tool("add", "Adds numbers.", {"type": "object", "properties": {"a": {"type": "integer"}}}, strict=True)
SPEC = OutputSpec(
    tool_format="hermes", tools=(TOOL,), is_forced=True, reasoning_format="think", starts_in_reasoning=True
)


@pytest.mark.parametrize("spec", [SPEC, OutputSpec(), OutputSpec(reasoning_format="think")], ids=str)
def test_a_gateway_reads_what_another_one_wrote(spec: OutputSpec) -> None:
    assert read_spec("spec", spec.encode()) == spec


def test_the_parser_reads_reasoning_then_calls() -> None:
    parser = SPEC.parser()
    text = 'I add.</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    parts = [*parser.push(text), *parser.finish()]
    assert [(part.kind, part.text) for part in parts if part.kind != PartKind.ARGUMENTS] == [
        (PartKind.REASONING, "I add."),
        (PartKind.CALL, "add"),
    ]
    assert "".join(part.text for part in parts if part.kind == PartKind.ARGUMENTS) == '{"a": 1}'


def test_without_formats_all_text_is_content() -> None:
    assert OutputSpec().parser().push("<tool_call>") == [AnswerPart(PartKind.CONTENT, "<tool_call>")]


@pytest.mark.parametrize(
    "value",
    [
        5,
        "",
        "[]",
        "{}",
        '{"tools": 1}',
        json.dumps({**json.loads(OutputSpec().encode()), "surprise": 1}),
        json.dumps({**json.loads(OutputSpec().encode()), "tool_format": "no such format"}),
        json.dumps({**json.loads(OutputSpec().encode()), "reasoning_format": "no such format"}),
        "x" * (MAX_SPEC_LENGTH + 1),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_specification_that_is_corrupt_is_refused(value: object) -> None:
    with pytest.raises(InvalidValue, match="spec must be the JSON"):
        read_spec("spec", value)
