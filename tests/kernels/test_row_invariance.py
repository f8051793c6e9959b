"""A row's result is the same bit for bit in any batch, at any place, with any threads, as prefill or as decode."""

import pytest
import torch

from tests.support.kernels.paged import Paged


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


@pytest.mark.parametrize("method", ["linear", "linear_silu_mul", "linear_logits"])
@pytest.mark.parametrize(("k", "n"), [(576, 200), (1531, 64)])
def test_linear_rows(cpu_ops, method, k, n):
    weight = random(n, k, dtype=cpu_ops.dtype)
    packed = cpu_ops.pack_gate_up(weight) if method == "linear_silu_mul" else cpu_ops.pack_linear(weight)
    x = random(90, k, dtype=cpu_ops.dtype)
    product = getattr(cpu_ops, method)
    alone = torch.cat([product(row[None], packed) for row in x])
    for begin, end in [(0, 90), (0, 2), (3, 20), (1, 13), (7, 32), (17, 66), (40, 90)]:
        assert torch.equal(product(x[begin:end], packed), alone[begin:end])


def test_any_number_of_rows(cpu_ops):
    packed = cpu_ops.pack_linear(random(40, 70, dtype=cpu_ops.dtype))
    x = random(70, 70, dtype=cpu_ops.dtype)
    together = cpu_ops.linear(x, packed)
    for count in range(1, 70):
        assert torch.equal(cpu_ops.linear(x[:count], packed), together[:count])


def test_other_rows(cpu_ops):
    x, residual, weight = (random(*s, dtype=cpu_ops.dtype) for s in [(90, 300), (90, 300), (300,)])
    together, added = cpu_ops.add_rms_norm(x, (summed := residual.clone()), weight, 1e-6), summed
    for i in range(0, 90, 13):
        row = residual[i : i + 1].clone()
        assert torch.equal(cpu_ops.add_rms_norm(x[i : i + 1], row, weight, 1e-6), together[i : i + 1])
        assert torch.equal(row, added[i : i + 1])


@pytest.mark.parametrize(("heads", "kv_heads", "d"), [(9, 3, 64), (8, 1, 48), (2, 2, 128)])
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (50, 0.0), (50, 3.0)])
def test_attention_rows_in_any_chunking(cpu_ops, threads, heads, kv_heads, d, window, softcap):
    lengths = [300, 131, 17]
    paged = Paged(cpu_ops, list(lengths), lengths, heads, kv_heads, d, window=window)
    if softcap:
        paged.sinks, paged.softcap = torch.randn(heads), softcap
    whole = paged.attend()
    threads(3)
    # Each position once more, as the last row of a shorter sequence: as decode, and as the end of a chunk.
    for length in [1, 2, 16, 17, 100, 128, 129, 256, 257, 300]:
        for queries in (1, 2, 7, 40):
            for s, full in enumerate(lengths):
                paged.lengths[s] = min(length, full)
            counts = [min(queries, n) for n in paged.lengths]
            for s, rows in zip([2, 0, 1], paged.attend([2, 0, 1], counts), strict=True):
                assert torch.equal(rows, whole[s][paged.lengths[s] - counts[s] : paged.lengths[s]])


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_any_number_of_threads(cpu_ops, threads, count):
    packed = cpu_ops.pack_linear(random(500, 96, dtype=cpu_ops.dtype))
    x = random(130, 96, dtype=cpu_ops.dtype)
    paged = Paged(cpu_ops, [2000, 40, 300], [1, 1, 60], 6, 2, 32)
    logits = torch.randn(9, 3000)
    settings = [torch.full((9,), v) for v in (0.7, 0.9, 0.01)]
    top_k, uniform = torch.full((9,), 50, dtype=torch.int32), torch.rand(9, dtype=torch.float64)

    def results() -> list[torch.Tensor]:
        drawn = cpu_ops.sample(logits, settings[0], top_k, settings[1], settings[2], uniform)
        return [cpu_ops.linear(x, packed), *paged.attend(), drawn, cpu_ops.argmax(logits)]

    threads(1)
    expected = results()
    threads(count)
    for _ in range(5):
        for actual, wanted in zip(results(), expected, strict=True):
            assert torch.equal(actual, wanted)


def test_any_split_covers_every_row_and_no_other(cpu_ops, threads):
    width = 6200  # wide enough that a single row is worth a thread
    rows = random(24, width, dtype=cpu_ops.dtype)
    weight = torch.ones(width, dtype=cpu_ops.dtype)
    for threads_now in (2, 3, 5, 7):
        threads(threads_now)
        for count in range(1, 23):
            residual = rows.clone()
            cpu_ops.add_rms_norm(rows[:count], residual[:count], weight, 1e-6)
            assert torch.equal(residual[:count], rows[:count] + rows[:count])
            assert torch.equal(residual[count:], rows[count:])
