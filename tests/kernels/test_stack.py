"""Layers and caches that do not fit together are refused."""

import pytest

from tests.support.kernels.stacks import (
    HEADS,
    KV_HEADS,
    stack_arguments,
)


def test_layers_that_do_not_fit_are_refused(ops):
    made, final_norm, caches, cos_sin = stack_arguments(ops, [0, 0])
    rest = HEADS, KV_HEADS, 1e-5, 0.2
    with pytest.raises(ValueError, match="2 layers and 1 caches"):
        ops.stack_layers(made, final_norm, caches[:1], cos_sin, *rest)
    with pytest.raises(ValueError, match="final_norm"):
        ops.stack_layers(made, final_norm[1:], caches, cos_sin, *rest)
    made[1].o, made[1].down = made[1].down, made[1].o
    with pytest.raises(ValueError, match="o of layer 1"):
        ops.stack_layers(made, final_norm, caches, cos_sin, *rest)
