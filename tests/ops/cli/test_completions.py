"""The client of `quire chat`: figures of an answer, and errors of servers."""

from __future__ import annotations

import pytest

from quire.ops.cli.completions import ChatAnswer, ChatClient
from quire.shared.command_line import CommandError


def test_the_rate_counts_the_wait_for_the_first_token() -> None:
    assert ChatAnswer(tokens=20, first_token_s=1.0, total_s=2.0).tokens_per_s == 10
    assert ChatAnswer(total_s=2.0).tokens_per_s is None


def test_a_server_that_is_not_there_is_named_in_the_error() -> None:
    with pytest.raises(CommandError, match=r"127\.0\.0\.1:9"):
        ChatClient("http://127.0.0.1:9").first_model()
