"""A worker that cannot start says what, where and the remedy in one line, and exits with 1."""

from __future__ import annotations

import shutil
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from quire.shared.process.errors import StartError
from quire.worker.build import build_engine
from quire.worker.settings import WorkerSettings
from tests.conftest import QuireProcess, StartQuire
from tests.support.quantized import edit_config
from tests.support.redis_server import running_redis


@pytest.fixture
def broken_model(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model that a test may damage."""
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def refusal(start_quire: StartQuire, *arguments: str, **environ: str) -> str:
    """The one line that a worker ends with."""
    process = start_quire("worker", *arguments, environ=environ)
    assert process.wait(60) == 1
    assert "Traceback" not in process.stderr
    return process.stderr.splitlines()[-1]


def test_a_missing_folder(start_quire: StartQuire, redis_url: str) -> None:
    line = refusal(start_quire, "/no/such/folder", "--redis-url", redis_url)
    assert "/no/such/folder" in line


@pytest.mark.slow
def test_settings_that_do_not_fit_each_other_are_told_with_their_sources(
    start_quire: StartQuire, redis_url: str, tiny_model: Path
) -> None:
    line = refusal(start_quire, str(tiny_model), "--redis-url", redis_url, "--lease-s", "3", QUIRE_BEAT_S="2")
    assert "--beat-s 2 is more than half of --lease-s 3" in line
    assert line.endswith("(--beat-s came as QUIRE_BEAT_S from the environment)")


PREFIX = f"[[prefix]]\nname = 'long'\ntoken_ids = {[1] * 300}\n"


@pytest.mark.usefixtures("thread_counts")
@pytest.mark.parametrize(
    ("config", "settings", "words"),
    [
        ({"num_hidden_layers": 7}, {}, ["model.layers.3"]),
        ({"intermediate_size": 128}, {}, ["mlp", "128"]),
        ({"architectures": ["GPT2LMHeadModel"]}, {}, ["GPT2LMHeadModel", "LlamaForCausalLM"]),
        ({}, {"num_blocks": 3}, ["256 tokens", "raise --num-blocks, or lower --max-model-len to 48"]),
        ({}, {"kv_cache_gb": 50000.0}, ["--kv-cache-gb 50000: that takes 50000.00 GiB, and ", "lower it"]),
        ({}, {"device": "cuda"}, ["--device"]),
        (
            {},
            {"pinned_prefixes": PREFIX},
            ["pinned prefix 'long': 300 prompt tokens", "exceed the context of 256 tokens; shorten it, or raise"],
        ),
    ],
    ids=["tensor", "shape", "architecture", "small cache", "large cache", "device", "pinned prefix"],
)
def test_a_model_or_a_size_that_does_not_fit_is_refused_in_one_line(
    config: dict[str, Any], settings: dict[str, Any], words: list[str], broken_model: Path, tmp_path: Path
) -> None:
    edit_config(broken_model, **config)
    if text := settings.get("pinned_prefixes"):
        (tmp_path / "prefixes.toml").write_text(text)
        settings = {"pinned_prefixes": str(tmp_path / "prefixes.toml")}
    with pytest.raises(StartError) as refused:
        build_engine(WorkerSettings(**({"model": str(broken_model), "device": "cpu"} | settings)), "m")
    said = str(refused.value)
    assert "\n" not in said
    assert [word for word in words if word not in said] == []


@pytest.mark.slow
def test_no_tokenizer(start_quire: StartQuire, redis_url: str, broken_model: Path) -> None:
    (broken_model / "tokenizer.json").unlink()
    assert "tokenizer.json" in refusal(start_quire, str(broken_model), "--redis-url", redis_url)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--maxmemory", "1"), "command not allowed when used memory > 'maxmemory'"),
        pytest.param(("--replicaof", "127.0.0.1", "1"), "read only replica", marks=pytest.mark.soak),
    ],
)
def test_a_redis_that_refuses(start_quire: StartQuire, tiny_model: Path, options: tuple[str, ...], why: str) -> None:
    with running_redis(*options) as server:
        line = refusal(start_quire, str(tiny_model), "--redis-url", server.url)
    assert why in line
    assert "unexpected failure" not in line
    assert server.url in line
    assert "--redis-url (QUIRE_REDIS_URL)" in line


@pytest.fixture
def worker(start_quire: StartQuire, tiny_model: Path, redis_url: str, tmp_path: Path) -> QuireProcess:
    """A worker with every setting of its memory, pacing and pinned prefixes."""
    path = tmp_path / "prefixes.toml"
    path.write_text(f"[[prefix]]\nname = 'p'\ntoken_ids = {list(range(3, 25))}\n")
    flags = ["--pinned-prefixes", str(path), "--swap-gb", "0.01", "--itl-target-ms", "50", "--no-prefix-caching"]
    return start_quire("worker", str(tiny_model), "--redis-url", redis_url, *flags)


def test_it_says_what_it_has_and_answers_its_operator(worker: QuireProcess) -> None:
    url = worker.wait_for(r"for operators: (http://127.0.0.1:\d+)/metrics")[1]
    assert worker.wait_for(r"host memory for (\d+) blocks")[1] != "0"
    worker.wait_for("pinned prefix p: 22 tokens in 2 blocks")
    for path, said in (
        ("/health", '"status":"ok"'),
        ("/metrics", 'quire_kv_blocks{state="pinned"} 2.0'),
        ("/debug/blocks", '"pinned":true'),
    ):
        with urllib.request.urlopen(url + path, timeout=60) as response:
            assert said in response.read().decode()
    assert worker.stop() == 0
