"""Memory on large pages."""

from itertools import pairwise
from pathlib import Path

from quire.kernels.cpu.memory import Arena

take = Arena.take  # conftest.py puts another in its place for each test
LARGE_PAGE = 2 << 20


def test_tensors_are_whole_zeroed_and_aligned():
    arena, taken = Arena(), []
    for at, size in enumerate((1, 4096, 5000, 3 << 20, 1 << 20, 2 << 20, 70 << 20, 1, 33 << 20, 33 << 20)):
        tensor = take(arena, size, apart=at % 3 > 0)
        assert (len(tensor), tensor.data_ptr() % 4096) == (size, 0)
        assert tensor[0] == tensor[-1] == 0
        tensor[0] = tensor[-1] = 1
        taken.append(tensor)
    ends = sorted((tensor.data_ptr(), tensor.data_ptr() + len(tensor)) for tensor in taken)
    assert all(end <= start for (_, end), (start, _) in pairwise(ends))


def test_caches_that_fill_up_together_come_to_new_pages_one_after_the_other():
    for count, size in ((8, 50 << 20), (60, 33 << 20), (160, 20 << 20), (60, 1 << 20)):
        arena = Arena()
        tensors = [take(arena, size, apart=True) for _ in range(count)]
        places = sorted(tensor.data_ptr() % LARGE_PAGE for tensor in tensors)
        gaps = [after - before for before, after in zip(places, [*places[1:], places[0] + LARGE_PAGE], strict=True)]
        assert max(gaps) < 3 * LARGE_PAGE / count


def test_the_first_tokens_of_caches_take_small_pages():
    """60 caches in large pages would take 120 MiB with their first byte."""

    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    arena = Arena()
    tensors = [take(arena, 33 << 20, apart=True) for _ in range(60)]
    before = resident()
    for tensor in tensors:
        tensor[0] = 1
    assert resident() - before < 16 << 20
