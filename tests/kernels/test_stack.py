"""Layers and caches that do not fit together are refused."""

import pytest
import torch

from tests.support.kernels.stacks import HEADS, HIDDEN, KV_HEADS, gemma4_arguments, random, stack_arguments, step


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


def test_layers_of_several_shapes_that_do_not_fit_are_refused(ops):
    made, final_norm, caches, cos_sin = gemma4_arguments(ops)
    rest = cos_sin, HEADS, KV_HEADS, 1e-5, 0.2
    stack = ops.stack_layers(made, final_norm, caches, *rest)
    arguments = step() | {"rows": torch.tensor([0])}
    residual = random(len(arguments["positions"]), HIDDEN, dtype=ops.dtype)
    with pytest.raises(ValueError, match="layer_inputs is missing"):
        ops.decoder_layers(residual, stack, **arguments)
    with pytest.raises(ValueError, match="layer_inputs has shape"):
        ops.decoder_layers(residual, stack, **arguments, layer_inputs=residual)
    with pytest.raises(ValueError, match="q_norm of layer 0"):
        ops.stack_layers(made, final_norm, [caches[1], *caches[1:]], cos_sin, HEADS, 1, 1e-5, 0.2)
    smaller = ops.alloc_kv_cache(3, *caches[1][0].shape[1:])
    with pytest.raises(ValueError, match="the caches of layer 1 do not have the blocks"):
        ops.stack_layers(made, final_norm, [caches[0], smaller, *caches[2:]], *rest)
    made[1].moe = None
    with pytest.raises(ValueError, match="layer 1 has norms of experts, and no experts"):
        ops.stack_layers(made, final_norm, caches, *rest)
    made[0].shares_kv = True
    with pytest.raises(ValueError, match="layer 0 has no earlier layer"):
        ops.stack_layers(made, final_norm, caches, *rest)
