"""Dialogues with tools: the call has what the question asks for, and the answer has the result."""

from __future__ import annotations

import json
import re
from itertools import islice

from models.demo.training.tool_check import call_of
from models.demo.training.tool_dialogues import ToolDialogues, tool_documents, written


def test_the_answer_of_a_call_has_its_result() -> None:
    dialogues = ToolDialogues(1)
    for _ in range(200):
        tool = next(one for one in dialogues.tools() if one.kind != "other")
        (_, _), (_, call), (_, result), (_, answer) = dialogues.called(tool)
        found = call_of(call)
        assert found is not None
        assert found[0] == tool.name
        assert list(found[1]) == [tool.argument]
        value = re.sub(r"</?tool_response>", "", result).strip().removeprefix("error: ")
        assert value in answer


def test_the_value_of_an_expression_is_right() -> None:
    dialogues = ToolDialogues(2)
    for _ in range(200):
        _, expression, result = dialogues.arithmetic()
        assert re.fullmatch(r"[-+*/(). 0-9]+", expression)
        try:
            value = eval(expression)  # of our own digits and operators
        except ZeroDivisionError:
            assert result == "error: division by zero"
        else:
            assert abs(float(result) - value) <= 1e-6 * max(1, abs(value))


def test_every_dialogue_declares_its_tools_and_the_same_seed_gives_the_same() -> None:
    first, second = (list(islice(tool_documents(3), 50)) for _ in range(2))
    assert first == second
    assert all(role == "system" and "Tools:" in text for (role, text), *_ in first)
    assert any("<tool_call>" in text for document in first for _, text in document)


def test_results_are_written_as_a_calculator_writes_them() -> None:
    from fractions import Fraction

    assert [written(one) for one in (Fraction(7), Fraction(1, 4), None)] == ["7", "0.25", "error: division by zero"]
    assert json.dumps(written(Fraction(1, 3))) == '"0.333333333"'
