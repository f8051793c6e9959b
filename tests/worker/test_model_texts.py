"""The tokenizer of a model folder, its end token, and the prefixes to pin."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.shared.errors import StartError
from quire.worker.model_texts import read_texts
from quire.worker.settings import WorkerSettings
from tests.support.checkpoints import EOS_TOKEN_ID, make_checkpoint


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "llama")


def test_the_end_token_is_that_of_the_tokenizer(model: Path) -> None:
    texts = read_texts(WorkerSettings(), model)
    assert (texts.eos_token_id, texts.prefixes) == (EOS_TOKEN_ID, [])
    assert texts.tokenizer.encode("a").ids


def test_prefixes_are_read_with_the_tokenizer(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "prefixes.toml"
    file.write_text('[[prefix]]\nname = "house"\ntext = "once"\n')
    texts = read_texts(WorkerSettings(pinned_prefixes=str(file)), model)
    [prefix] = texts.prefixes
    assert prefix.name == "house"
    assert list(prefix.token_ids) == texts.tokenizer.encode("once").ids


def test_a_wrong_file_of_prefixes_keeps_the_worker_from_starting(model: Path, tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"--pinned-prefixes .*none.toml: No such file"):
        read_texts(WorkerSettings(pinned_prefixes=str(tmp_path / "none.toml")), model)
