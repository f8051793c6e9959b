"""AWQ: its order of columns, and zero points."""

from __future__ import annotations

import pytest
import torch

NAMES = ("awq",)


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_those_that_were_written(read_weights, name):
    for found, written in read_weights(name):
        assert torch.equal(found, written.to(torch.float16).float())
