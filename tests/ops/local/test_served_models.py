"""The models of a `quire serve`: places and names."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.ops.local.served_models import LocalModel, read_models, resolve_models, split_models
from quire.shared.command_line import CommandError
from tests.support.gateway.running import write_model


def test_models_are_separated_by_commas_unless_a_path_has_one(tmp_path: Path) -> None:
    assert split_models("a/b, c/d") == ["a/b", "c/d"]
    assert split_models("a/b") == ["a/b"]
    (tmp_path / "x,y").mkdir()
    assert split_models(f"{tmp_path}/x,y") == [f"{tmp_path}/x,y"]


def test_each_model_has_a_name_of_its_own(tmp_path: Path) -> None:
    one, two = write_model(tmp_path / "one"), write_model(tmp_path / "two")
    places = resolve_models(f"{one},{two}")
    assert read_models(places, "") == [LocalModel(str(one), "one"), LocalModel(str(two), "two")]
    assert [model.name for model in read_models(places, "x, y")] == ["x", "y"]
    assert [model.name for model in read_models(str(one), "x")] == ["x"]
    with pytest.raises(CommandError, match="has 1 names for 2 models"):
        read_models(places, "x")
    with pytest.raises(CommandError, match="two models have the name 'one'"):
        read_models(f"{one},{one}", "")
    with pytest.raises(CommandError, match="'a b' cannot be a served model name"):
        read_models(str(one), "a b")
    with pytest.raises(CommandError, match="there is none at"):
        resolve_models(f"{one},{tmp_path}/three")
