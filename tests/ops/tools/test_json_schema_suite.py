"""The runner of the JSON Schema Test Suite, with a suite of three schemas."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest

from quire.ops.tools import json_schema_suite
from quire.ops.tools.json_schema_suite import VOCABULARY, Case, cases, draw, main, run
from quire.shared.text.grammar import write


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    integer = [{"data": 1, "valid": True}, {"data": "a", "valid": False}]
    order = [{"data": {"b": 2, "a": 1}, "valid": True}]
    groups = [
        {"description": "a type", "schema": {"type": "integer"}, "tests": integer},
        {"description": "any order", "schema": {"const": {"a": 1, "b": 2}}, "tests": order},
        {"description": "elsewhere", "schema": {"$ref": "https://example.com"}, "tests": []},
    ]
    folder = tmp_path / json_schema_suite.DRAFT
    folder.mkdir(parents=True)
    (folder / "some.json").write_text(json.dumps(groups))
    return tmp_path


def test_refused_schemas_and_missing_values_are_counted(checkout: Path) -> None:
    found = [run(case, 5) for case in cases(checkout)]
    assert [one.case.name for one in found] == ["some: a type", "some: any order", "some: elsewhere"]
    assert [bool(one.refused) for one in found] == [False, False, True]
    assert [one.missing for one in found] == [(), ('{"b": 2, "a": 1}',), ()]
    assert not any(one.wrong for one in found)
    assert found[1].answers == 5


def test_what_a_grammar_accepts_against_its_schema_is_found() -> None:
    assert run(Case("wrong", {"type": "integer"}, [(1, False)]), 0).wrong == ("1",)


def test_drawn_answers_follow_the_grammar() -> None:
    text = write("json_schema", {"type": "array", "items": {"type": "integer"}, "minItems": 1})
    drawn = [draw(text, VOCABULARY.tokenizer(has_all_ids=False), random.Random(seed)) for seed in range(20)]
    assert sum(one is not None for one in drawn) > 10
    assert all(type(json.loads(one)) is list for one in drawn if one is not None)


def test_the_counts_are_printed(
    checkout: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["json_schema_suite", str(checkout), "--draws", "1", "--refused"])
    main()
    printed = capsys.readouterr().out
    assert "refused  some: elsewhere" in printed
    assert "3 schemas: 1 refused, 0 wrong, 1 valid values missing" in printed
