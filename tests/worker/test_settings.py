"""The settings of a worker: flags, environment variables and bounds."""

from __future__ import annotations

import pytest

from quire.shared.settings import SettingError, load
from quire.worker.settings import WorkerSettings


def settings(*arguments: str, **environ: str) -> WorkerSettings:
    return load(WorkerSettings, arguments, environ, prog="quire worker")


def test_a_flag_wins_over_its_environment_variable() -> None:
    assert settings(QUIRE_BLOCK_SIZE="32").block_size == 32
    assert settings("--block-size", "64", QUIRE_BLOCK_SIZE="32").block_size == 64


def test_the_defaults_leave_sizes_to_the_worker() -> None:
    defaults = settings()
    assert (defaults.kv_cache_gb, defaults.num_blocks, defaults.max_model_len) == (0.0, 0, 0)
    assert (defaults.device, defaults.dtype, defaults.model_impl) == ("auto", "auto", "auto")


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--block-size", "24"),
        ("--gpu-memory-utilization", "1.5"),
        ("--tensor-parallel-size", "-1"),
        ("--swap-gb", "-1"),
    ],
)
def test_a_value_out_of_bounds_is_refused_with_its_name(flag: str, value: str) -> None:
    with pytest.raises(SettingError, match=flag.removeprefix("--").replace("-", "[-_]")):
        settings(flag, value)
