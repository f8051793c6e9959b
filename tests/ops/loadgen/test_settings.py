"""The settings of `quire bench`: defaults and bounds."""

from __future__ import annotations

import pytest

from quire.ops.loadgen.settings import BenchSettings
from quire.shared.settings import SettingError, load


def test_without_flags_a_run_asks_the_local_server_for_its_own_defaults() -> None:
    settings = load(BenchSettings, (), {}, prog="quire bench")
    assert (settings.url, settings.shape, settings.endpoint) == ("http://127.0.0.1:8000", "sharegpt", "completions")
    assert (settings.requests, settings.concurrency, settings.rate) == (None, None, "")


@pytest.mark.parametrize(
    ("flag", "value"), [("--shape", "long"), ("--rounds", "0"), ("--burstiness", "0"), ("--timeout-s", "none")]
)
def test_a_value_out_of_bounds_is_refused_with_its_name(flag: str, value: str) -> None:
    with pytest.raises(SettingError, match=flag.removeprefix("--").replace("-", "[-_]")):
        load(BenchSettings, (flag, value), {}, prog="quire bench")
