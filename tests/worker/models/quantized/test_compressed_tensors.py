"""compressed-tensors: integers, packed and plain."""

from __future__ import annotations

import pytest
import torch

NAMES = ("w8a8", "w8a16", "w4a16", "w4a16-asym", "w4a16-order", "w4a16-channel")


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_those_that_were_written(read_weights, name):
    for found, written in read_weights(name):
        assert torch.equal(found, written.to(torch.bfloat16).float())
