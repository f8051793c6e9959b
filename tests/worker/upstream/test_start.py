"""The start of a worker with `--upstream`: its settings, and what it reads of the model's folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.shared.process.errors import StartError
from quire.worker.settings import WorkerSettings
from quire.worker.upstream.client import UpstreamClient
from quire.worker.upstream.runtime import build_upstream_runtime

NOBODY = "http://127.0.0.1:9"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"upstream": "127.0.0.1:8000"}, "no URL of a server"),
        ({"upstream": "ftp://host"}, "no URL of a server"),
        ({"upstream": "http://host:port"}, "no URL of a server"),
        ({"upstream": f"{NOBODY}?key=1"}, "no URL of a server"),
        ({"upstream": "http://user:secret@host"}, "--upstream-key-file"),
        ({"upstream": f"{NOBODY},{NOBODY}"}, "different URLs"),
        ({"upstream": NOBODY, "lora": "a=folder"}, "--lora a=folder"),
        ({"upstream": NOBODY, "upstream_key_file": "none-here"}, "No such file"),
    ],
)
def test_wrong_settings_are_refused(tiny_model: Path, given: dict[str, str], told: str) -> None:
    with pytest.raises(StartError) as refusal:
        build_upstream_runtime(WorkerSettings(model=str(tiny_model), **given), "tiny")  # type: ignore[arg-type]
    assert told in str(refusal.value)
    assert "secret" not in str(refusal.value)


@pytest.mark.parametrize("content", [b"", b"\n", b"two\nlines", "schlüssel".encode(), b"x" * 5000])
def test_a_file_that_is_no_key_is_refused(tiny_model: Path, tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "key"
    file.write_bytes(content)
    settings = WorkerSettings(model=str(tiny_model), upstream=NOBODY, upstream_key_file=str(file))
    with pytest.raises(StartError, match="not one line of ASCII"):
        build_upstream_runtime(settings, "tiny")


def test_a_folder_without_weights_is_enough(tiny_model: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((tiny_model / name).read_bytes())
    settings = WorkerSettings(model=str(tmp_path), upstream=NOBODY, max_model_len=100)
    runtime, folder = build_upstream_runtime(settings, "tiny")
    assert folder == tmp_path
    runtime.executor(lambda commits, computed: None, lambda: None)
    card = runtime.card("w1", "1", "tiny")
    assert (card.max_model_len, card.vocab_size, card.eos_token_ids) == (100, 269, (268,))
    assert (card.total_blocks, card.free_blocks) == (64, 0), "the upstream does not answer"


@pytest.mark.parametrize(
    "url", ["http://host:8000", "http://host:8000/", "http://host:8000/v1", "http://host:8000/v1/"]
)
def test_a_url_may_end_like_those_of_clients(url: str) -> None:
    assert UpstreamClient(url, "", 1, 1).url == "http://host:8000"
