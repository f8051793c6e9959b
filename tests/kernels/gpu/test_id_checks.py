"""Ids, slots, positions and blocks out of range raise IndexError and are named."""

import pytest
import torch

from quire.kernels.gpu import id_checks

TABLES, LENGTHS, STARTS = torch.tensor([[0, 1], [2, 9]]), torch.tensor([20, 16]), torch.tensor([0, 1, 3])


def integers(*values: int) -> torch.Tensor:
    return torch.tensor(values)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: id_checks.token_ids(integers(0, 5), torch.zeros(5, 2)), r"token_ids\[1\] is 5, outside 0..4"),
        (lambda: id_checks.slots(integers(0, 9), 9, integers(0, 1), 8), "token 1: position 9 of 9"),
        (lambda: id_checks.slots(integers(0, 0), 9, integers(0, 8), 8), "slot 8 of 8"),
        (lambda: id_checks.slots(integers(0, 0), 9, integers(-2, 0), 8), "token 0"),
        (lambda: id_checks.vocabulary_ids(integers(3, -1), 4), r"ids\[1\] is -1"),
        (lambda: id_checks.rows(integers(0, 3), 3), r"rows\[1\] is 3, not one of 3 tokens"),
        (lambda: id_checks.blocks(TABLES, LENGTHS, STARTS, 3, 8, 9, 0), "sequence 0"),  # 20 keys in two blocks of 8
        (lambda: id_checks.blocks(TABLES, integers(16, 17), STARTS, 3, 16, 9, 0), "sequence 1"),  # block 9 of 9
        (lambda: id_checks.blocks(TABLES, LENGTHS, STARTS, 4, 16, 10, 0), "sequence 0"),  # not all tokens
    ],
)
def test_a_value_out_of_range_is_named(call, message):
    with pytest.raises(IndexError, match=message):
        call()


def test_values_in_range_pass():
    id_checks.token_ids(integers(0, 4), torch.zeros(5, 2))
    id_checks.slots(integers(0, 8), 9, integers(-1, 7), 8)
    id_checks.rows(integers(2, 0, 2), 3)
    id_checks.blocks(TABLES, LENGTHS, STARTS, 3, 16, 9, 0)  # the second sequence has one block only


def test_a_block_before_every_window_may_be_out_of_range():
    tables = torch.tensor([[2**31 - 1, 1]])
    id_checks.blocks(tables, integers(20), integers(0, 1), 1, 16, 9, 4)
    with pytest.raises(IndexError, match="sequence 0"):
        id_checks.blocks(tables, integers(20), integers(0, 1), 1, 16, 9, 5)
