"""A server under load: the bodies of its requests, and the tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.ops.cli.server_url import parse_url
from quire.ops.loadgen.server import MeasuredServer, load_tokenizer
from quire.ops.paths import PROJECT_ROOT
from quire.shared.settings import SettingError


def server(endpoint: str) -> MeasuredServer:
    options = {"temperature": 0.5, "ignore_eos": True}
    return MeasuredServer("--url", parse_url("http://host:81"), "m", "quire", 100, endpoint, options, "a")


def test_a_completion_and_a_chat_have_their_own_address_and_body() -> None:
    common = {
        "model": "m",
        "max_tokens": 7,
        "stream": True,
        "temperature": 0.5,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }
    one = server("completions")
    assert one.address == "http://host:81/v1/completions"
    assert json.loads(one.body([1, 2], 7)) == common | {"prompt": [1, 2]}
    other = server("chat")
    assert other.address == "http://host:81/v1/chat/completions"
    assert json.loads(other.body("hi", 7)) == common | {"messages": [{"role": "user", "content": "hi"}]}
    other.usage = False
    assert "stream_options" not in json.loads(other.body("hi", 7))


def test_a_tokenizer_is_found_in_a_folder_and_counts_no_special_tokens() -> None:
    count = load_tokenizer(str(PROJECT_ROOT / "models/demo"))
    assert count("") == 0
    assert count("Once upon a time") > 1


@pytest.mark.parametrize(("text", "said"), [(None, "there is no"), ("{}", "is not one")])
def test_a_wrong_tokenizer_is_refused(text: str | None, said: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(SettingError, match=rf"^--tokenizer: .*{said}.*; give "):
        load_tokenizer(str(tmp_path))
