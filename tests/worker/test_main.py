"""A worker that cannot start says what, where and the remedy in one line, and exits with 1."""

from __future__ import annotations

import json
import shutil
import urllib.request
from pathlib import Path

import pytest
import torch

from quire.worker import build
from quire.worker.build import GIB, check, choose_num_host_blocks
from quire.worker.errors import WorkerStartError
from quire.worker.settings import WorkerSettings
from tests.conftest import QuireProcess, StartQuire
from tests.support.redis_server import running_redis

CPU = torch.device("cpu")


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


@pytest.mark.slow
def test_a_missing_tensor(start_quire: StartQuire, redis_url: str, broken_model: Path) -> None:
    config = json.loads((broken_model / "config.json").read_text())
    (broken_model / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 7}))
    line = refusal(start_quire, str(broken_model), "--redis-url", redis_url)
    assert "model.layers.3" in line


@pytest.mark.slow
def test_a_misshapen_tensor(start_quire: StartQuire, redis_url: str, broken_model: Path) -> None:
    config = json.loads((broken_model / "config.json").read_text())
    (broken_model / "config.json").write_text(json.dumps(config | {"intermediate_size": 128}))
    line = refusal(start_quire, str(broken_model), "--redis-url", redis_url)
    assert "mlp" in line
    assert "128" in line


@pytest.mark.slow
def test_an_unsupported_architecture(start_quire: StartQuire, redis_url: str, broken_model: Path) -> None:
    config = json.loads((broken_model / "config.json").read_text())
    (broken_model / "config.json").write_text(json.dumps(config | {"architectures": ["GPT2LMHeadModel"]}))
    line = refusal(start_quire, str(broken_model), "--redis-url", redis_url)
    assert "GPT2LMHeadModel" in line
    assert "LlamaForCausalLM" in line


@pytest.mark.slow
def test_no_tokenizer(start_quire: StartQuire, redis_url: str, broken_model: Path) -> None:
    (broken_model / "tokenizer.json").unlink()
    assert "tokenizer.json" in refusal(start_quire, str(broken_model), "--redis-url", redis_url)


@pytest.mark.slow
def test_no_redis(start_quire: StartQuire, tiny_model: Path, tmp_path: Path) -> None:
    line = refusal(start_quire, str(tiny_model), "--redis-url", f"unix://{tmp_path}/none.sock")
    assert "no Redis at" in line
    assert "--redis-url" in line


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--maxmemory", "1"), "command not allowed when used memory > 'maxmemory'"),
        (("--replicaof", "127.0.0.1", "1"), "read only replica"),
    ],
)
def test_a_redis_that_refuses(start_quire: StartQuire, tiny_model: Path, options: tuple[str, ...], why: str) -> None:
    with running_redis(*options) as server:
        line = refusal(start_quire, str(tiny_model), "--redis-url", server.url)
    assert why in line
    assert "unexpected failure" not in line
    assert server.url in line
    assert "--redis-url (QUIRE_REDIS_URL)" in line


@pytest.mark.slow
def test_a_cache_that_cannot_hold_one_sequence(start_quire: StartQuire, tiny_model: Path, redis_url: str) -> None:
    line = refusal(start_quire, str(tiny_model), "--redis-url", redis_url, "--num-blocks", "3")
    assert "256 tokens" in line
    assert "raise --num-blocks, or lower --max-model-len to 48" in line


@pytest.mark.slow
def test_a_cache_that_is_larger_than_the_memory(start_quire: StartQuire, tiny_model: Path, redis_url: str) -> None:
    line = refusal(start_quire, str(tiny_model), "--redis-url", redis_url, "--kv-cache-gb", "50000")
    assert "--kv-cache-gb 50000: that takes 50000.00 GiB, and " in line
    assert "lower it" in line


@pytest.mark.slow
def test_a_token_budget_below_the_number_of_sequences(
    start_quire: StartQuire, tiny_model: Path, redis_url: str
) -> None:
    arguments = ("--max-num-batched-tokens", "8", "--max-num-seqs", "16")
    line = refusal(start_quire, str(tiny_model), "--redis-url", redis_url, *arguments)
    assert "--max-num-batched-tokens 8" in line


@pytest.mark.slow
def test_a_device_that_is_not_there(start_quire: StartQuire, tiny_model: Path, redis_url: str) -> None:
    assert "--device" in refusal(start_quire, str(tiny_model), "--redis-url", redis_url, "--device", "cuda")


@pytest.mark.slow
def test_a_pinned_prefix_that_does_not_fit(
    start_quire: StartQuire, tiny_model: Path, redis_url: str, tmp_path: Path
) -> None:
    path = tmp_path / "prefixes.toml"
    path.write_text(f"[[prefix]]\nname = 'long'\ntoken_ids = {[1] * 300}\n")
    line = refusal(start_quire, str(tiny_model), "--redis-url", redis_url, "--pinned-prefixes", str(path))
    assert "pinned prefix 'long': 300 prompt tokens" in line
    assert "exceed the context of 256 tokens; shorten it, or raise" in line


def test_swapping_without_memory_for_it() -> None:
    with pytest.raises(WorkerStartError, match="--preemption swap needs host memory, and --swap-gb is 0: raise it, or"):
        check(WorkerSettings(preemption="swap", swap_gb=0), CPU)
    check(WorkerSettings(preemption="auto", swap_gb=0), CPU)


def test_host_blocks_are_what_is_asked_for_what_is_free_and_what_is_needed_at_most(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def blocks(free: int, **settings: object) -> int:
        monkeypatch.setattr(build, "available_memory", lambda: free)
        chosen = WorkerSettings(**settings)  # type: ignore[arg-type]
        return choose_num_host_blocks(chosen, GIB // 1024, taken=GIB, sequences=10, max_model_len=1600)

    assert blocks(100 * GIB, swap_gb=0.5) == 512
    assert blocks(100 * GIB, swap_gb=4) == 1000, "ten sequences of a hundred blocks"
    assert not caplog.records
    assert blocks(2 * GIB, swap_gb=4) == 204, "a fifth of what the cache leaves"
    assert "--swap-gb 4 is more than memory allows: 0.20 GiB" in caplog.text
    assert blocks(0, swap_gb=4) == 0
    assert blocks(100 * GIB, swap_gb=0) == 0
    assert blocks(100 * GIB, preemption="recompute") == 0


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
        with urllib.request.urlopen(url + path, timeout=10) as response:
            assert said in response.read().decode()
    assert worker.stop() == 0
