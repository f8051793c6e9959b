"""Adapters through HTTP, with real processes: at start, at run time, and after the death of a worker."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quire import kernels
from quire.shared.protocol.messages import SamplingParams
from quire.worker.engine.engine import Engine
from quire.worker.engine.limits import EngineLimits
from quire.worker.engine.offline import generate
from quire.worker.models.native.decoder import Decoder
from tests.conftest import quire_processes
from tests.ops.local.test_launcher import children, launch
from tests.support.adapters import change_config, merge_adapter, write_adapter
from tests.support.checkpoints import make_checkpoint

pytestmark = pytest.mark.slow

PROMPT = tuple(range(5, 40))
TOKENS = 24
KEY = "0123456789abcdef-test"


def call(url: str, method: str = "GET", key: str = KEY, **body: Any) -> tuple[int, Any]:
    """Return the status and the JSON of a call."""
    data = json.dumps(body).encode() if method == "POST" else None
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers, method=method), timeout=60) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def complete(url: str, model: str, tokens: int = TOKENS) -> list[int]:
    status, answer = call(
        f"{url}/v1/completions", "POST", model=model, prompt=list(PROMPT), max_tokens=tokens, temperature=0,
        ignore_eos=True, return_token_ids=True,
    )  # fmt: skip
    assert status == 200, answer
    assert answer["model"] == model
    return answer["choices"][0]["token_ids"]  # type: ignore[no-any-return]


def outputs(path: Path) -> list[int]:
    model = Decoder.load(path, kernels.select_ops("cpu", torch.float32), torch.float32, "cpu")
    engine = Engine(model, EngineLimits(64, 16, 4, 64, model.max_model_len), (), None)
    ((tokens,),) = generate(engine, [PROMPT], SamplingParams(TOKENS, temperature=0.0, ignore_eos=True))
    return list(tokens)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """Two workers that hold the adapters `a` and `b`; the folder of adapters has `later` and `broken`."""
    folder = tmp_path_factory.mktemp("lora")
    base = make_checkpoint(folder / "base", "llama")
    shelf = folder / "shelf"
    paths = {name: folder / name for name in "ab"} | {name: shelf / name for name in ("later", "broken")}
    fields: dict[str, dict[str, Any]] = {
        "a": {"use_dora": True, "modules_to_save": ["embed_tokens", "lm_head", "norm"]}
    }
    for seed, (name, path) in enumerate(paths.items()):
        write_adapter(path, base, seed=seed, size=1.0, **fields.get(name, {}))
    change_config(paths["broken"], r=3)
    expected = {
        name: outputs(merge_adapter(base, paths[name], folder / f"{name}-merged")) for name in ("a", "b", "later")
    }
    with quire_processes() as start:
        process = launch(
            start, base, folder / "state", "--workers", "2", "--lora", f"a={paths['a']}", "--lora", f"b={paths['b']}",
            "--lora-dir", str(shelf), "--dtype", "float32", "--num-blocks", "128", "--lease-s", "3", "--beat-s", "0.25",
            "--admin-key", KEY,
        )  # fmt: skip
        url = process.wait_ready()
        deadline = time.monotonic() + 60
        while len(call(f"{url}/admin/adapters")[1]["data"][0]["workers"]) < 2:
            assert time.monotonic() < deadline, process.stderr
            time.sleep(0.05)
        yield SimpleNamespace(url=url, expected=expected | {"base": outputs(base)}, process=process, name="base")


def test_each_model_gives_the_tokens_of_its_merged_checkpoint(server: SimpleNamespace) -> None:
    assert {name: complete(server.url, name) for name in ("base", "a", "b")} == {
        name: server.expected[name] for name in ("base", "a", "b")
    }


def test_models_lists_adapters_with_their_parent(server: SimpleNamespace) -> None:
    _, listed = call(f"{server.url}/v1/models")
    assert [(card["id"], card["parent"]) for card in listed["data"]] == [("base", None), ("a", "base"), ("b", "base")]
    assert call(f"{server.url}/v1/models/b")[1]["parent"] == "base"
    status, answer = call(f"{server.url}/v1/completions", "POST", model="c", prompt="x")
    assert (status, answer["error"]["code"]) == (404, "model_not_found")


def test_a_chat_names_its_adapter(server: SimpleNamespace) -> None:
    messages = [{"role": "user", "content": "hi"}]
    status, answer = call(f"{server.url}/v1/chat/completions", "POST", model="a", messages=messages, max_tokens=3)
    assert (status, answer["model"]) == (200, "a")


def test_an_adapter_is_loaded_used_and_unloaded_at_run_time(server: SimpleNamespace) -> None:
    admin = f"{server.url}/admin/adapters"
    status, answer = call(admin, "POST", name="new", path="later")
    assert (status, answer["ready"], len(answer["workers"])) == (201, True, 2), answer
    assert complete(server.url, "new") == server.expected["later"]
    assert call(admin, "POST", name="new", path="later")[1]["error"]["code"] == "adapter_exists"
    _, listed = call(admin)
    assert [(one["id"], one["path"]) for one in listed["data"]] == [("a", None), ("b", None), ("new", "later")]
    assert call(f"{admin}/new", "DELETE")[0] == 200
    status, answer = call(f"{server.url}/v1/completions", "POST", model="new", prompt="x")
    assert (status, answer["error"]["code"]) == (404, "model_not_found")
    assert call(f"{admin}/new", "DELETE")[0] == 404
    assert call(f"{admin}/a", "DELETE")[0] == 400


def test_an_adapter_that_fails_to_load_harms_nothing(server: SimpleNamespace) -> None:
    admin = f"{server.url}/admin/adapters"
    status, answer = call(admin, "POST", name="bad", path="broken")
    assert status == 400
    assert "broken/adapter_model.safetensors: tensor" in answer["error"]["message"]
    assert [one["id"] for one in call(admin)[1]["data"]] == ["a", "b"]
    assert complete(server.url, "a") == server.expected["a"]


def test_a_path_stays_in_the_folder(server: SimpleNamespace) -> None:
    for path in ("../base", "/etc", "a\\b", ""):
        status, answer = call(f"{server.url}/admin/adapters", "POST", name="x", path=path)
        assert (status, answer["error"]["param"]) == (400, "path")


def test_after_the_death_of_a_worker_the_other_continues_with_the_adapter(server: SimpleNamespace) -> None:
    body = {
        "model": "a", "prompt": list(PROMPT), "max_tokens": 200, "temperature": 0, "ignore_eos": True, "stream": True,
        "return_token_ids": True,
    }  # fmt: skip
    undisturbed = complete(server.url, "a", 200)
    request = urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    tokens: list[int] = []
    killed = False
    with urllib.request.urlopen(request, timeout=60) as response:
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            assert event["model"] == "a"
            tokens += [token for choice in event["choices"] for token in choice.get("token_ids") or ()]
            if not killed:
                killed = True
                for pid in children(server.process, "worker")[:1]:
                    os.kill(pid, signal.SIGKILL)
    assert tokens == undisturbed
