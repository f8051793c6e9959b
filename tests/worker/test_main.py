"""A worker that cannot start says what, where and the remedy in one line, and exits with 1."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.conftest import StartQuire


@pytest.fixture
def broken_model(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model that a test may damage."""
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def refusal(start_quire: StartQuire, *arguments: str) -> str:
    """The one line that a worker ends with."""
    process = start_quire("worker", *arguments)
    assert process.wait(60) == 1
    assert "Traceback" not in process.stderr
    return process.stderr.splitlines()[-1]


def test_a_missing_folder(start_quire: StartQuire, redis_url: str) -> None:
    line = refusal(start_quire, "/no/such/folder", "--redis-url", redis_url)
    assert "/no/such/folder" in line


def test_a_missing_tensor(start_quire: StartQuire, redis_url: str, broken_model: Path) -> None:
    config = json.loads((broken_model / "config.json").read_text())
    (broken_model / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 7}))
    line = refusal(start_quire, str(broken_model), "--redis-url", redis_url)
    assert "model.layers.3" in line


def test_a_misshapen_tensor(start_quire: StartQuire, redis_url: str, broken_model: Path) -> None:
    config = json.loads((broken_model / "config.json").read_text())
    (broken_model / "config.json").write_text(json.dumps(config | {"intermediate_size": 128}))
    line = refusal(start_quire, str(broken_model), "--redis-url", redis_url)
    assert "mlp" in line
    assert "128" in line


def test_an_unsupported_architecture(start_quire: StartQuire, redis_url: str, broken_model: Path) -> None:
    config = json.loads((broken_model / "config.json").read_text())
    (broken_model / "config.json").write_text(json.dumps(config | {"architectures": ["GPT2LMHeadModel"]}))
    line = refusal(start_quire, str(broken_model), "--redis-url", redis_url)
    assert "GPT2LMHeadModel" in line
    assert "LlamaForCausalLM" in line


def test_no_tokenizer(start_quire: StartQuire, redis_url: str, broken_model: Path) -> None:
    (broken_model / "tokenizer.json").unlink()
    assert "tokenizer.json" in refusal(start_quire, str(broken_model), "--redis-url", redis_url)


def test_no_redis(start_quire: StartQuire, tiny_model: Path, tmp_path: Path) -> None:
    line = refusal(start_quire, str(tiny_model), "--redis-url", f"unix://{tmp_path}/none.sock")
    assert "no Redis at" in line
    assert "--redis-url" in line


def test_a_cache_that_cannot_hold_one_sequence(start_quire: StartQuire, tiny_model: Path, redis_url: str) -> None:
    line = refusal(start_quire, str(tiny_model), "--redis-url", redis_url, "--num-blocks", "3")
    assert "256 tokens" in line
    assert "--max-model-len to 48" in line


def test_a_token_budget_below_the_number_of_sequences(
    start_quire: StartQuire, tiny_model: Path, redis_url: str
) -> None:
    arguments = ("--max-num-batched-tokens", "8", "--max-num-seqs", "16")
    line = refusal(start_quire, str(tiny_model), "--redis-url", redis_url, *arguments)
    assert "--max-num-batched-tokens 8" in line


def test_a_device_that_is_not_there(start_quire: StartQuire, tiny_model: Path, redis_url: str) -> None:
    assert "--device" in refusal(start_quire, str(tiny_model), "--redis-url", redis_url, "--device", "cuda")
