"""Fields of a checkpoint's JSON files: defaults for absent values, and errors that name place, field and value."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.worker.models.errors import CheckpointError
from quire.worker.models.fields import Fields, config_fields, read_json, special_token_ids

FIELDS = Fields({"size": 7, "zero": 0, "rate": 0.5, "tied": True, "null": None, "eos": [3, 4], "rope": {}}, "here")


def test_present_fields_are_read_and_absent_ones_have_their_defaults() -> None:
    assert (FIELDS.integer("size"), FIELDS.integer("none", 3), FIELDS.integer("null", 3)) == (7, 3, 3)
    assert (FIELDS.number("rate"), FIELDS.flag("tied", False), FIELDS.flag("none", True)) == (0.5, True, True)
    assert (FIELDS.token_ids("eos"), FIELDS.token_ids("size"), FIELDS.token_ids("none")) == ((3, 4), (7,), ())
    assert (FIELDS.has("null"), FIELDS.has("none"), FIELDS.get("null", 5)) == (True, False, 5)
    assert FIELDS.section("rope").where == "here, rope"


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (lambda: FIELDS.integer("none"), "here: none is missing; supported: an integer from 1 to 2147483647"),
        (lambda: FIELDS.integer("zero"), "here: zero is 0; supported: an integer from 1 to"),
        (lambda: FIELDS.integer("tied"), "here: tied is true; supported: an integer"),
        (lambda: FIELDS.number("zero"), "here: zero is 0; supported: a number above 0"),
        (lambda: FIELDS.flag("size", False), "here: size is 7; supported: true or false"),
        (lambda: FIELDS.section("eos"), r"here: eos is \[3, 4\]; supported: a JSON object"),
        (lambda: Fields({"eos": [-1]}, "x").token_ids("eos"), r"x: eos is \[-1\]; supported: a token id or a list"),
    ],
)
def test_wrong_values_are_named(read: Callable[[], Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read()


def test_long_values_are_cut() -> None:
    error = Fields({"text": "x" * 500}, "here").fault("text", "nothing")
    assert len(str(error)) < 180


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "this file is missing"), ("{", "not valid JSON"), ("[1]", "holds a list and not a JSON object")],
)
def test_files_without_a_json_object_are_refused(content: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(CheckpointError, match=f"{message}.*; repair it"):
        read_json(path, "repair it")


def test_special_tokens_are_those_of_the_generation_config_then_of_the_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    config = config_fields(tmp_path)
    assert special_token_ids(tmp_path, config, "eos_token_id", 9) == (2,)
    assert special_token_ids(tmp_path, config, "bos_token_id", 9) == (9,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6], "bos_token_id": None}))
    assert special_token_ids(tmp_path, config, "eos_token_id", 9) == (5, 6)
    assert special_token_ids(tmp_path, config, "bos_token_id", 9) == (9,)
