"""Patterns of layers: names, Linear, and regular expressions of strangers."""

from __future__ import annotations

import time

import pytest

from quire.worker.models.layer_names import MAX_PATTERNS, LayerNames, PatternError

UP = "model.layers.1.mlp.up_proj"


@pytest.mark.parametrize(
    ("patterns", "closeness"),
    [
        ([UP, "Linear"], 3),
        (["re:.*up_proj$", "Linear"], 2),
        (["Linear"], 1),
        (["re:.*lm_head", "model.layers.1.mlp"], 0),
        (["re:mlp"], 0),
        (["re:model\\.layers\\.(0|1)\\.mlp.*"], 2),
        ([], 0),
    ],
)
def test_the_closest_pattern_counts(patterns, closeness):
    assert LayerNames(patterns).match(UP) == closeness


@pytest.mark.parametrize(
    "pattern", ["re:(a*)*b", "re:(a|b)+c", "re:" + "a*" * 7, "re:(", "re:(a)\\1", "re:" + "x" * 600, "re:((a){2,})+"]
)
def test_an_expression_that_could_take_long_is_refused(pattern):
    with pytest.raises(PatternError, match="has the expression"):
        LayerNames([pattern])


def test_too_many_patterns_are_refused():
    with pytest.raises(PatternError, match="entries"):
        LayerNames(["a"] * (MAX_PATTERNS + 1))


def test_the_worst_expression_that_is_allowed_is_fast():
    names = LayerNames(["re:" + ".*" * 6 + "X"])
    started = time.process_time()
    assert names.match("model.layers.100.self_attn.q_proj") == 0
    assert time.process_time() - started < 5
