from __future__ import annotations

from pathlib import Path

import pytest

from quire.shared.errors import StartError
from quire.shared.model.naming import served_name
from quire.shared.redis.url import parse_redis_url
from quire.shared.telemetry import tracing
from quire.shared.telemetry.internal_server import bind
from quire.shared.text.tokenizer import load_tokenizer


def test_each_refusal_to_start_is_a_start_error_of_one_line(tmp_path: Path) -> None:
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        for refused in (
            lambda: served_name("model", "a{b}"),
            lambda: parse_redis_url("http://host"),
            lambda: load_tokenizer(tmp_path, {}),
            lambda: bind("127.0.0.1", taken.getsockname()[1]),
            lambda: tracing.start("gateway", "g", "collector:4318", {}),
        ):
            with pytest.raises(StartError) as error:
                refused()
            assert "\n" not in str(error.value)


def test_a_redis_that_is_away_is_also_a_connection_error() -> None:
    """Code that retries network errors retries this one too."""
    with pytest.raises(ConnectionError):
        parse_redis_url("http://host")
