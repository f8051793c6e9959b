"""A wrong argument raises the exception of the contract, and its message names the argument."""

import re

import pytest
import torch

from quire.kernels import checks

ROW = torch.zeros(4)
FLOAT = (torch.float32,)
LOGITS = torch.zeros(2, 8)


def ids(*values: int) -> torch.Tensor:
    return torch.tensor(values)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: checks.tensor("x", ROW, torch.int32, (4,)), TypeError, "x is torch.float32, not torch.int32"),
        (lambda: checks.tensor("x", ROW, torch.float32, (5,)), ValueError, "x has shape (4,), not (5,)"),
        (lambda: checks.tensor("x", LOGITS.T, torch.float32, (8, 2)), ValueError, "x is not contiguous"),
        (lambda: checks.integers("ids", ROW, (4,)), TypeError, "ids is torch.float32"),
        (
            lambda: checks.linear_weights(torch.zeros(3, 2), FLOAT, (), (), halves=True),
            ValueError,
            "[2I, K]",
        ),
        (lambda: checks.linear_weights(torch.zeros(0, 2), FLOAT, (), ()), ValueError, "[N, K]"),
        (lambda: checks.linear_bias(torch.zeros(2), FLOAT, (3, 2)), ValueError, "bias has shape (2,), not (3,)"),
        (lambda: checks.cache_shape(12, 32), ValueError, "block_size is 12"),
        (lambda: checks.cache_shape(16, 40), ValueError, "head_dim is 40"),
        (lambda: checks.block_moves(ids(0, 3), ids(0, 1), 3, 3), IndexError, "src names a block outside 0..2"),
        (lambda: checks.block_moves(ids(0), ids(-1), 3, 3), IndexError, "dst names a block outside 0..2"),
        (lambda: checks.block_moves(ids(0, 1), ids(2, 2), 3, 3), ValueError, "dst names a block twice"),
        (lambda: checks.block_copies(ids(0, 1), ids(1, 2), 3), ValueError, "dst names a block that src names too"),
        (lambda: checks.logits(ROW), ValueError, "logits has shape (4,), not [R, V]"),
        (lambda: checks.top_logprobs(LOGITS, 9), ValueError, "count is 9: it must be 1..8"),
        (lambda: checks.logprobs_of(LOGITS, ids(1)), ValueError, "ids has shape (1,), not (2,)"),
        (lambda: checks.host_blocks(torch.zeros(2, 3), (4,), torch.float32), ValueError, "host has shape"),
        (lambda: checks.address(torch.zeros(1, device="meta")), ValueError, "a tensor is on meta, not on the CPU"),
    ],
)
def test_a_wrong_argument_is_named(call, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call()


def test_a_move_between_caches_and_host_may_have_an_id_on_both_sides():
    assert checks.block_moves(ids(1, 2), ids(2, 1), 3, 3) == ([1, 2], [2, 1])


def test_an_address_is_that_of_the_values():
    assert checks.address(ROW) == ROW.data_ptr()
    assert checks.address(None) is None


def test_caches_of_any_number_of_heads_are_accepted_without_a_number():
    k, v = torch.zeros(2, 5, 3, 16, 32)
    assert checks.caches(k, v, None, torch.float32) == (5, 3, 16, 32)
    with pytest.raises(ValueError, match="k_cache has shape"):
        checks.caches(k, v, 2, torch.float32)
