"""`make bench` with peers, against processes that stand in for llama-server and vLLM."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.ops.benchmarks.peers import command
from quire.ops.benchmarks.peers import programs as known
from quire.ops.benchmarks.peers.rounds import Side
from quire.ops.benchmarks.stack import __main__ as stack
from quire.ops.benchmarks.stack.load import CASES, LoadCase
from quire.ops.local.ports import free_port
from tests.ops.benchmarks.peers.conftest import Programs

Make = Callable[..., Programs]


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["bench", *arguments])
    return stack.main()


@pytest.fixture
def arguments(tmp_path: Path, model: Path) -> list[str]:
    given = ["--model", str(model), "--gguf", str(model / "model.gguf"), "--json", str(tmp_path / "out" / "r.json")]
    return [*given, "--no-quire", "--cases", "c1", "--rounds", "3"]


def written(tmp_path: Path) -> list[dict[str, Any]]:
    content = json.loads((tmp_path / "out" / "r.json").read_text())
    assert content["schema"] == "quire-peers/1"
    return list(content["measurements"])


def test_the_result_has_every_run_and_what_it_depends_on(
    programs: Make, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    made = programs("llama-server", "vllm")
    monkeypatch.setenv("PATH", f"{made.folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setitem(known.LLAMACPP_FLAGS, "c1", "--best 1")
    assert run(monkeypatch, *arguments, "--peer", "llamacpp", "--peer", "vllm", "--label", "Stand-ins") == 0
    [one] = written(tmp_path)
    assert (one["label"], one["model"], one["rounds"]) == ("Stand-ins", "model", 3)
    assert one["machine"]["cores"] == len(os.sched_getaffinity(0))
    [case] = one["cases"]
    llamacpp, vllm = case["servers"]
    assert llamacpp["version"] == vllm["version"] == "7.1 (abc)"
    assert llamacpp["format"] == "F16, AVX2 F16C"
    assert llamacpp["flags"].startswith("llama-server -m model.gguf ")
    assert llamacpp["flags"].endswith(" -np 1 -c 768 --best 1")
    assert "--max-num-seqs 64" in vllm["flags"]
    assert str(tmp_path) not in json.dumps(one), "no paths of this machine"
    assert all(server["memory_mib"] > 1 and server["ready_s"] > 0 for server in case["servers"])
    order = [(entry["round"], entry["server"]) for entry in case["runs"]]
    assert order == [(0, "llamacpp"), (0, "vllm"), (1, "vllm"), (1, "llamacpp"), (2, "vllm"), (2, "llamacpp")]
    assert all(entry["output_tokens"] == 8 * 64 for entry in case["runs"])
    out = capsys.readouterr().out
    assert "| case | rounds | measure | llama.cpp | vLLM |" in out


def test_both_servers_get_the_same_prompts_and_each_round_others(
    programs: Make, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = programs("llama-server", "vllm")
    peers = ["--peer", "llamacpp", "--llamacpp", str(made.folder / "llama-server")]
    peers += ["--peer", "vllm", "--vllm", str(made.folder / "vllm")]
    assert run(monkeypatch, *arguments, *peers) == 0
    long = [(name, tuple(prompt)) for name, prompt, length in made.requests() if length == 64]
    first, second = ([prompt for who, prompt in long if who == name] for name in ("llama-server", "vllm"))
    assert sorted(first) == sorted(second)
    assert len(set(first)) == 3 * CASES["c1"].requests
    warm = {tuple(prompt) for _, prompt, length in made.requests() if length < 64}
    assert warm.isdisjoint(first)


def test_measurements_can_be_added_to_a_file(
    programs: Make, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = programs("llama-server")
    peer = ["--peer", "llamacpp", "--llamacpp", str(made.folder / "llama-server")]
    for seed in ("1", "2"):
        assert run(monkeypatch, *arguments, *peer, "--append", "--seed", seed, "--rounds", "1") == 0
    assert [one["cases"][0]["seed"] for one in written(tmp_path)] == [1, 2]


def test_flags_of_llamacpp_are_compared_with_each_other(
    programs: Make, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = programs("llama-server")
    peer = ["--peer", "llamacpp", "--llamacpp", str(made.folder / "llama-server")]
    flags = ["--llamacpp-args=-fa off", "--llamacpp-args=-np 2"]
    assert run(monkeypatch, *arguments, *peer, *flags) == 0
    [one] = written(tmp_path)
    assert [server["name"] for server in one["cases"][0]["servers"]] == ["llamacpp -fa off", "llamacpp -np 2"]


def test_settings_of_quire_are_compared_with_each_other(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Side] = []

    def measured(sides: list[Side], *_: object) -> list[dict[str, Any]]:
        seen.extend(sides)
        return []

    monkeypatch.setattr(command, "measure", measured)
    given = [
        "--model",
        str(model),
        "--json",
        str(tmp_path / "out" / "r.json"),
        "--peer",
        "vllm=http://a",
        "--rounds",
        "1",
    ]
    given += [
        "--dtype",
        "float32",
        "--quire-args=narrow:--quantization int8 --kv-cache-dtype int8",
        "--quire-args=wide:",
    ]
    assert run(monkeypatch, *given, "--quire-args=--threads 1") == 0
    assert [side.name for side in seen] == ["quire narrow", "quire wide", "quire --threads 1", "vllm"]
    own = [side.program for side in seen if isinstance(side.program, known.Quire)]
    assert [one.arguments[2:] for one in own] == [
        ["--quantization", "int8", "--kv-cache-dtype", "int8"], [], ["--threads", "1"],
    ]  # fmt: skip
    assert all(one.arguments[:2] == ["--dtype", "float32"] for one in own)
    assert len({one.state for one in own}) == 3, "Redis and logs of one side are not those of another"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--quire-args=a:--threads 1", "--quire-args=a:--threads 2"], "--quire-args names a server twice: 'quire a'"),
        (["--quire-args="], "--quire-args is '': it must have flags, or a label before a colon"),
        (["--quire-args=a:", "--no-quire"], "--quire-args needs Quire: leave --no-quire out"),
    ],
)
def test_settings_of_quire_that_cannot_be_told_apart_give_one_line(
    given: list[str], message: str, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    assert run(monkeypatch, "--model", str(model), "--peer", "vllm=http://a", *given) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"bench: {message}")
    assert err.count("\n") == 1


@pytest.mark.slow
def test_quire_is_measured_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setitem(CASES, "c1", LoadCase("c1", 8, 4, requests=2, concurrency=1))
    given = ["--shape", "tiny", "--json", str(tmp_path / "out" / "r.json"), "--cases", "c1", "--rounds", "1"]
    assert run(monkeypatch, *given) == 0
    [one] = written(tmp_path)
    [quire] = one["cases"][0]["servers"]
    assert quire["ready_s"] > 0
    assert "| case | rounds | measure | Quire |\n| --- | --- | --- | --- |\n| `c1` | 1 |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "code", "message"),
    [
        (["--peer", "llamacpp"], 1, "--peer llamacpp: there is no 'llama-server'; pass --llamacpp PATH, set LLAMA"),
        (["--peer", "vllm"], 1, "--peer vllm: there is no 'vllm'; pass --vllm PATH, set VLLM, or name a running"),
        (["--peer", "other"], 2, "--peer is 'other': it must be one of llamacpp, vllm"),
        (["--peer", "llamacpp=ftp://x"], 1, "is not the URL of a server"),
        (["--peer", "vllm=http://a", "--peer", "vllm=http://b"], 2, "--peer names a server twice"),
        ([], 2, "--no-quire needs another server: give --peer NAME"),
        (["--peer", "vllm=http://a", "--rounds", "0"], 2, "--rounds is 0: it must be at least 1"),
    ],
)
def test_a_peer_that_is_missing_or_wrong_gives_one_line(
    given: list[str], code: int, message: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    for variable in ("LLAMA_SERVER", "VLLM"):
        monkeypatch.delenv(variable, raising=False)
    assert run(monkeypatch, *arguments, *given) == code
    err = capsys.readouterr().err
    assert message in err
    assert err.startswith("bench: ")
    assert err.count("\n") == 1


@pytest.mark.slow
def test_a_peer_without_a_model_that_it_can_read_gives_one_line(
    programs: Make, arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    made = programs("llama-server")
    monkeypatch.setenv("LLAMA_SERVER", str(made.folder / "llama-server"))
    assert run(monkeypatch, *arguments, "--peer", "llamacpp", "--gguf", "none.gguf") == 2
    assert capsys.readouterr().err == "bench: --gguf: there is no 'none.gguf'; give the model as a GGUF file\n"
    assert run(monkeypatch, "--peer", "llamacpp", "--shape", "tiny") == 2
    assert "--peer llamacpp needs --model" in capsys.readouterr().err


def test_a_peer_that_does_not_start_gives_its_last_line(
    programs: Make, arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    made = programs("llama-server")
    monkeypatch.setenv("LLAMA_SERVER", str(made.folder / "llama-server"))
    assert run(monkeypatch, *arguments, "--peer", "llamacpp", "--llamacpp-args=--dies") == 1
    assert capsys.readouterr().err == "bench: llamacpp ended before it was ready: cannot read the model\n"


@pytest.mark.slow
def test_quire_is_measured_next_to_a_server_that_runs_already(
    programs: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    from quire.ops.benchmarks.peers.processes import ServerProcess

    port = free_port()
    path = programs("llama-server").folder / "llama-server"
    monkeypatch.setitem(CASES, "c1", LoadCase("c1", 8, 4, requests=2, concurrency=1))
    other = ServerProcess("other", [str(path), "--port", str(port)], os.environ, tmp_path / "log")
    try:
        other.wait_ready(f"http://127.0.0.1:{port}/health")
        output = ["--json", str(tmp_path / "out" / "r.json"), "--cases", "c1", "--rounds", "2"]
        peer = f"llamacpp=http://127.0.0.1:{port}/v1"
        assert run(monkeypatch, "--shape", "tiny", *output, "--dtype", "float32", "--peer", peer) == 0
    finally:
        other.stop()
    [one] = written(tmp_path)
    quire, llamacpp = one["cases"][0]["servers"]
    assert llamacpp == {"name": "llamacpp", "url": f"http://127.0.0.1:{port}", "memory_mib": None}
    assert quire["format"].startswith("float32, ")
    assert "--dtype float32" in quire["flags"]
    assert quire["memory_mib"] > 50
    assert "Quire / llama.cpp" in capsys.readouterr().out
