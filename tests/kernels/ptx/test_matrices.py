"""The places of matrix elements: every element has one, and those of 4 bytes follow from those of 2."""

import numpy as np
import pytest

from tests.kernels.ptx.matrices import left_places, operand_addresses, right_places

# A descriptor of rows that are 128 bytes apart, at address 1024, with a swizzle of 128 bytes.
WIDE = 1 << 62 | (1024 >> 4) << 32 | 1 << 16 | 1024 >> 4


@pytest.mark.parametrize("size", [2, 4])
def test_the_registers_of_a_warp_hold_every_element_once(size: int) -> None:
    depth = 32 // size
    for places, shape in ((left_places(size), (16, depth)), (right_places(size), (depth, 8))):
        found = np.zeros(shape, int)
        for place in places:
            np.add.at(found, place, 1)
        assert (found == 1).all()


def test_elements_of_4_bytes_are_a_quarter_of_a_warp_apart() -> None:
    lane = 6  # of the second group of four
    assert [(row[lane], column[lane]) for row, column in left_places(4)] == [(1, 2), (9, 2), (1, 6), (9, 6)]
    assert [(row[lane], column[lane]) for row, column in right_places(4)] == [(2, 1), (6, 1)]


def test_the_second_warp_has_the_next_16_rows() -> None:
    for (row, column), (first_row, first_column) in zip(left_places(4, 4), left_places(4), strict=True):
        assert np.array_equal(row[32:64], first_row + 16)
        assert np.array_equal(column[32:64], first_column)


@pytest.mark.parametrize("descriptor", [WIDE, WIDE + (32 >> 4)])
def test_an_element_of_4_bytes_is_where_two_of_2_bytes_are(descriptor: int) -> None:
    at = operand_addresses(descriptor, 64, False, 4)
    assert at.shape == (64, 8)
    assert np.array_equal(at, operand_addresses(descriptor, 64, False)[:, ::2])
    assert len(np.unique(at)) == at.size


def test_rows_are_swizzled_by_16_bytes() -> None:
    at = operand_addresses(WIDE, 16, False, 4)
    assert at[0].tolist() == [1024 + 4 * i for i in range(8)]
    assert at[1].tolist() == [1024 + 128 + (4 * i ^ 16) for i in range(8)]
    assert at[8, 0] == 2048
