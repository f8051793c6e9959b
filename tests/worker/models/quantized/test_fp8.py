"""FP8: in blocks, per channel and per tensor."""

from __future__ import annotations

import pytest
import torch

NAMES = ("fp8-block", "fp8-tensor", "fbgemm", "ct-fp8-block", "ct-fp8-channel")


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_those_that_were_written(read_weights, name):
    for found, written in read_weights(name):
        assert torch.equal(found, written.to(torch.bfloat16).float())
