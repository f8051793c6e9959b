"""The benchmark of long contexts runs on a small shape and reports every type of the cache."""

import pytest
import torch

from quire import kernels
from quire.kernels.cpu import library
from quire.ops.benchmarks.kernels import attention

SMALL = ["--context", "40", "--layers", "2", "--heads", "4", "--kv-heads", "2", "--head-dim", "32", "--rounds", "1"]


@pytest.fixture(autouse=True)
def needs_kernels() -> None:
    try:
        kernels.CpuOps(torch.float32)
    except kernels.KernelsUnavailable as missing:
        pytest.skip(str(missing))


def test_every_type_of_the_cache_is_reported(capsys):
    assert attention.main([*SMALL, "--queries", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines[1:]] == ["float32", "bfloat16", "int8", "fp8"]


def test_each_sequence_has_its_own_blocks(capsys):
    def megabytes(sequences: int) -> float:
        options = [*SMALL, "--context", "1600", "--sequences", str(sequences), "--kv-dtype", "float32"]
        assert attention.main(options) == 0
        return float(capsys.readouterr().out.splitlines()[1].split()[2])

    assert megabytes(3) == pytest.approx(3 * megabytes(1), abs=0.1)


def test_more_queries_than_tokens_are_refused(capsys):
    with pytest.raises(SystemExit):
        attention.main([*SMALL, "--queries", "41"])
    assert "--queries 41" in capsys.readouterr().err


def test_the_floor_reads_every_byte():
    memory = torch.randint(-(2**62), 2**62, (400_000,))
    expected = 0
    for word in memory.view(-1, 8).tolist():
        for value in word:
            expected ^= value % 2**64
    assert library.load().common.read_memory(memory.data_ptr(), memory.nbytes) == expected
