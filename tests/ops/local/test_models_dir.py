"""`quire serve --models-dir`: one command serves a folder, one model at a time, and ends cleanly."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import pytest

from quire.ops.cli.settings import ServeSettings
from quire.ops.local.services import Services
from quire.ops.tools.gguf_writer import write_gguf
from quire.shared.config.command_line import CommandError
from tests.conftest import StartQuire, children_of, has_ended
from tests.support.checkpoints import make_checkpoint


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_one_command_serves_a_folder_one_model_at_a_time(start_quire: StartQuire, tmp_path: Path) -> None:
    folder = tmp_path / "models"
    make_checkpoint(folder / "one", "llama")
    (folder / "two").mkdir()
    write_gguf(make_checkpoint(tmp_path / "other", "llama", seed=1), folder / "two" / "model.gguf")
    (folder / "three").mkdir()  # is being copied
    flags = ("--models-dir", str(folder), "--port", "0", "--state-dir", str(tmp_path / "state"), "--device", "cpu")
    server = start_quire("serve", *flags, environ={"QUIRE_DTYPE": "float32"})
    url = server.wait_ready()
    answers = {}
    for index, name in enumerate(("one", "two", "one")):
        (folder / "three" / "model.safetensors").write_bytes(b"0" * index)
        body = {"model": name, "prompt": "Once", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            text = json.load(response)["choices"][0]["text"]
        assert answers.setdefault(name, text) == text
    assert answers["one"] != answers["two"]
    log = (tmp_path / "state" / "logs" / "worker-1.log").read_text()
    assert log.count("model three is not served: three/config.json is missing") == 1
    with urllib.request.urlopen(f"{url}/v1/models", timeout=60) as response:
        assert [card["id"] for card in json.load(response)["data"]] == ["one", "two"]
    children = children_of(server.pid)
    workers = [pid for child in children for pid in children_of(child)]
    assert len(workers) == 1
    assert server.stop() == 0
    assert all(has_ended(pid) for pid in (*children, *workers))


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"model": "./llama"}, "give one of them"),
        ({"workers": 2}, "--models-max"),
        ({"served_model_name": "x"}, "--served-model-name"),
    ],
)
def test_settings_of_one_model_are_refused(tmp_path: Path, settings: dict[str, str], why: str) -> None:
    environ = {"QUIRE_MODELS_DIR": str(tmp_path)}
    with pytest.raises(CommandError, match=why):
        Services(ServeSettings(**settings), environ, tmp_path)  # type: ignore[arg-type]


def test_a_folder_that_does_not_exist_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="there is no such folder"):
        Services(ServeSettings(), {"QUIRE_MODELS_DIR": str(tmp_path / "nowhere")}, tmp_path)
