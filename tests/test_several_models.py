"""`quire serve A B`: two models with different tokenizers behind one gateway, with real processes."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import QuireProcess, StartQuire, quire_processes
from tests.support.faults.stack import Stream

pytestmark = pytest.mark.slow

TOKENS = 120


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[QuireProcess]:
    with quire_processes() as start:
        yield launch(start, tiny_model, tmp_path_factory.mktemp("several") / "state")


def launch(start: StartQuire, tiny_model: Path, state: Path) -> QuireProcess:
    models = ("models/demo", str(tiny_model))
    names = ("--served-model-name", "demo,tiny")
    options = ("--port", "0", "--state-dir", str(state), "--device", "cpu", "--lease-s", "2", "--beat-s", "0.2")
    environ = {"OMP_NUM_THREADS": "1", "QUIRE_DTYPE": "float32", "QUIRE_KERNELS": "reference"}
    process = start("serve", *models, *names, *options, environ=environ)
    process.wait_ready()
    return process


def names(url: str) -> list[str]:
    with urllib.request.urlopen(f"{url}/v1/models", timeout=60) as response:
        return [card["id"] for card in json.load(response)["data"]]


def asks(model: str) -> dict[str, Any]:
    return {"model": model, "prompt": "Once upon a time", "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}


def complete(url: str, model: str, **parameters: object) -> str:
    """The text of a completion."""
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(asks(model) | parameters).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        text: str = json.load(response)["choices"][0]["text"]
        return text


def worker_pids(process: QuireProcess) -> dict[str, int]:
    """The pids of the worker processes by the model that they serve."""
    found = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
            environ = dict(item.split("=", 1) for item in (entry / "environ").read_text().split("\0") if "=" in item)
            if int(parent) == process.pid and (entry / "cmdline").read_text().split("\0")[-2] == "worker":
                found[environ["QUIRE_SERVED_MODEL_NAME"]] = int(entry.name)
    return found


def test_both_models_answer_at_once_and_a_death_of_one_worker_is_the_matter_of_its_model(server: QuireProcess) -> None:
    url = server.wait_ready()
    assert sorted(names(url)) == ["demo", "tiny"]
    expected = {model: complete(url, model) for model in ("demo", "tiny")}
    assert expected["demo"] != expected["tiny"]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        calls = [(model, pool.submit(complete, url, model)) for model in ("demo", "tiny") * 4]
        pid = worker_pids(server)["demo"]
        Stream(url, {**asks("demo"), "stream": True}).wait_events(1)
        os.kill(pid, signal.SIGKILL)
        # The other model answers while the worker is gone, and the calls of the dead one continue where they were.
        assert complete(url, "tiny") == expected["tiny"]
        assert [call.result() for _, call in calls] == [expected[model] for model, _ in calls]


def test_a_model_appears_and_disappears_while_the_gateway_runs(server: QuireProcess, tiny_model: Path) -> None:
    url = server.wait_ready()
    with quire_processes() as start:
        worker = start(
            "worker",
            str(tiny_model),
            "--served-model-name",
            "third",
            "--model-aliases",
            "drei",
            "--device",
            "cpu",
            environ={
                "QUIRE_REDIS_URL": redis_url(server),
                "OMP_NUM_THREADS": "1",
                "QUIRE_DTYPE": "float32",
                "QUIRE_KERNELS": "reference",
            },
        )
        worker.wait_for("ready: worker")
        wait_for_names(url, "demo", "drei", "third", "tiny")
        assert complete(url, "drei") == complete(url, "tiny")
        worker.stop()
    wait_for_names(url, "demo", "tiny")


def redis_url(server: QuireProcess) -> str:
    """The Redis of a running server, from the environment of one of its workers."""
    environ = Path(f"/proc/{worker_pids(server)['tiny']}/environ").read_text().split("\0")
    return next(item.partition("=")[2] for item in environ if item.startswith("QUIRE_REDIS_URL="))


def wait_for_names(url: str, *expected: str) -> None:
    ends = time.monotonic() + 30
    while sorted(names(url)) != list(expected):
        assert time.monotonic() < ends, names(url)
        time.sleep(0.05)
