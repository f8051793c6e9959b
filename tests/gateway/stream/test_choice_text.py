"""The text of one choice: what its tokens make certain, and where each token begins."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from quire.gateway.model.served_model import ServedModel, load_model
from quire.gateway.stream.call_metadata import CallMetadata
from quire.gateway.stream.choice_text import ChoiceText, ScoredTokens
from quire.shared.messages import Delta
from tests.support.gateway.running import MODEL, tokens

COMPLETION = CallMetadata("completion", 0, 1, True, (), 3, 1, False)


@pytest.fixture(scope="module")
def model(model_folder: Path) -> ServedModel:
    return load_model(str(model_folder), MODEL)


def test_a_possible_stop_string_is_held_back_until_the_choice_ends(model: ServedModel) -> None:
    choice = ChoiceText(model, replace(COMPLETION, stop=("<end>",)))
    assert choice.push(Delta(0, tuple(tokens("one <e")))) == "one "
    assert choice.finish("length") == "<e"
    assert choice.finish_reason == "length"


def test_each_scored_token_has_the_place_where_it_begins(model: ServedModel) -> None:
    choice = ChoiceText(model, COMPLETION)
    ids = tuple(tokens("abc"))
    assert choice.push_scored(Delta(0, ids), b"") == ("abc", ScoredTokens(ids, b"", (0, 1, 2)))
    more = tuple(tokens("d"))
    assert choice.push_scored(Delta(0, more), b"") == ("d", ScoredTokens(more, b"", (3,)))


def test_the_end_token_is_no_text_but_has_a_place(model: ServedModel) -> None:
    choice = ChoiceText(model, COMPLETION)
    ids = (*tokens("ab"), *model.eos_token_ids)
    text, scored = choice.push_scored(Delta(0, ids, "stop"), b"")
    assert (text, scored.offsets) == ("ab", (0, 1, 2))


def test_parts_of_scored_tokens_are_joined_in_order() -> None:
    joined = ScoredTokens.join([ScoredTokens((1,), b"a", (0,)), ScoredTokens((2, 3), b"bc", (1, 2))])
    assert joined == ScoredTokens((1, 2, 3), b"abc", (0, 1, 2))
