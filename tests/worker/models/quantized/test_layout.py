"""Helpers of the formats: unknown fields, and tensors that must exist."""

from __future__ import annotations

import pytest

from quire.worker.models.errors import CheckpointError
from quire.worker.models.fields import Fields
from quire.worker.models.quantized.layout import refuse_unknown, required


@pytest.mark.parametrize("empty", [None, False, [], {}, ""])
def test_unknown_fields_that_are_empty_change_nothing(empty):
    refuse_unknown(Fields({"bits": 4, "novelty": empty}, "config.json"), ("bits",))


def test_unknown_fields_are_refused_by_name():
    with pytest.raises(CheckpointError, match=r"config.json: novelty is 0; supported: no such field; use a checkpoint"):
        refuse_unknown(Fields({"bits": 4, "novelty": 0}, "config.json"), ("bits",))


def test_a_tensor_that_was_checked_is_there():
    with pytest.raises(AssertionError):
        required(lambda _: None, "scales")
