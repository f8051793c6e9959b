"""What `quire serve` checks and says before and while it starts."""

from __future__ import annotations

import io
import re
import shlex
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from quire.gateway.settings import GatewaySettings
from quire.ops.cli.settings import ServeSettings
from quire.ops.local.announcement import local_url
from quire.ops.local.first_key import first_key
from quire.ops.local.gpus import VARIABLE, of_worker
from quire.ops.local.ports import free_port
from quire.ops.local.preconditions import EMBEDDED, find_redis, held_port, read_holder
from quire.ops.local.progress import Progress
from quire.ops.local.served_models import LocalModel, read_models, resolve_models, split_models
from quire.ops.local.services import Services
from quire.shared.config.command_line import CommandError
from quire.shared.process.kill_pipe import KILL_PIPE, WorkerKiller
from tests.conftest import QuireProcess, StartQuire, clean_environ
from tests.support.gateway.running import write_model

# --- preconditions ----------------------------------------------------------------------------------------------------
# The checks before `quire serve` starts: its state folder and its port must be free.


def test_the_redis_is_unknown_if_no_process_holds_the_folder(tmp_path: Path) -> None:
    assert find_redis(tmp_path) is None
    (tmp_path / "lock").write_text(f"{2**22 + 1} http://127.0.0.1:81 {EMBEDDED}")
    assert find_redis(tmp_path) is None


def test_a_holder_may_have_written_only_a_part() -> None:
    assert read_holder("") == ("", "", "", "")
    assert read_holder("7 http://x") == ("7", "http://x", "", "")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux shares a port until somebody listens")
def test_no_other_program_gets_the_port_that_a_gateway_will_listen_on() -> None:
    with held_port("127.0.0.1", 0) as port:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        for _ in range(2):  # the gateway may be started again
            with socket.create_server(("127.0.0.1", port)), socket.create_connection(("127.0.0.1", port)):
                pass


# --- ports ------------------------------------------------------------------------------------------------------------
# A free port can be listened on, on the address and family that the caller names.


@pytest.mark.parametrize(("host", "family"), [("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)])
def test_a_free_port_can_be_listened_on(host: str, family: int) -> None:
    port = free_port(host, family)
    assert 1024 <= port <= 65535
    with socket.create_server((host, port), family=family) as server:
        assert server.getsockname()[1] == port


# --- kill pipe --------------------------------------------------------------------------------------------------------
# The gateways can have workers killed only if nobody but this machine's users reaches them, and without keys.


def kill_pipe(tmp_path: Path, environ: dict[str, str], **settings: Any) -> Any:
    """Return the pipe of a `quire serve`, and what a gateway that it starts finds in its environment."""
    model = write_model(tmp_path / "model")
    services = Services(ServeSettings(model=str(model), workers=2, **settings), environ, tmp_path)
    kills = services.kill_requests()
    return kills, WorkerKiller.of(services.gateway(0, "redis://localhost", kills)._environ)


def test_the_gateways_of_this_machine_alone_can_have_its_workers_killed(tmp_path: Path) -> None:
    kills, killer = kill_pipe(tmp_path, {})
    assert kills is not None
    assert killer is not None
    assert killer.workers == {"worker-1", "worker-2"}
    assert killer.kill("worker-2")
    assert kills.read() == ["worker-2"]


@pytest.mark.parametrize(
    ("settings", "environ"),
    [
        ({}, {"QUIRE_REQUIRE_KEYS": "true"}),
        ({"host": "0.0.0.0"}, {}),
        ({"host": "0.0.0.0"}, {"QUIRE_ALLOW_ANONYMOUS": "true"}),
        ({"host": "::"}, {"QUIRE_ALLOW_ANONYMOUS": "true"}),
    ],
)
def test_other_gateways_cannot(tmp_path: Path, settings: dict[str, Any], environ: dict[str, str]) -> None:
    given = {KILL_PIPE: '{"descriptor": 1, "workers": ["worker-1"]}'}  # of another program
    assert kill_pipe(tmp_path, {**given, **environ}, **settings) == (None, None)


# --- gpus -------------------------------------------------------------------------------------------------------------
# Workers that `quire serve` starts on one machine do not share a GPU where each can have its own.


@pytest.fixture
def four(tmp_path: Path) -> Path:
    """The folder of the driver with four GPUs."""
    for bus in ("0000:17:00.0", "0000:65:00.0", "0000:ca:00.0", "0000:e3:00.0"):
        (tmp_path / bus).mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("workers", "each", "given", "found"),
    [
        (4, 1, {}, ["0", "1", "2", "3"]),
        (3, 1, {}, ["0", "1", "2"]),
        (2, 2, {}, ["0,1", "2,3"]),
        (2, 1, {VARIABLE: "3, GPU-5f2a"}, ["3", "GPU-5f2a"]),
        (1, 4, {}, [None]),  # it finds them itself
        (2, 4, {}, [None, None]),
        (8, 1, {}, [None] * 8),
        (2, 1, {VARIABLE: ""}, [None, None]),  # hidden on purpose
    ],
)
def test_each_worker_has_gpus_of_its_own_where_there_are_enough(
    workers: int, each: int, given: dict[str, str], found: list[str | None], four: Path
) -> None:
    assert [of_worker(index, workers, each, given, four).get(VARIABLE) for index in range(workers)] == found


def test_without_a_driver_nothing_is_said_of_gpus(tmp_path: Path) -> None:
    assert of_worker(0, 2, 1, {}, tmp_path / "none") == {}


# --- served models ----------------------------------------------------------------------------------------------------
# The models of a `quire serve`: places and names.


def test_models_are_separated_by_commas_unless_a_path_has_one(tmp_path: Path) -> None:
    assert split_models("a/b, c/d") == ["a/b", "c/d"]
    assert split_models("a/b") == ["a/b"]
    (tmp_path / "x,y").mkdir()
    assert split_models(f"{tmp_path}/x,y") == [f"{tmp_path}/x,y"]


def test_each_model_has_a_name_of_its_own(tmp_path: Path) -> None:
    one, two = write_model(tmp_path / "one"), write_model(tmp_path / "two")
    places = resolve_models(f"{one},{two}")
    assert read_models(places, "") == [LocalModel(str(one), "one"), LocalModel(str(two), "two")]
    assert [model.name for model in read_models(places, "x, y")] == ["x", "y"]
    assert [model.name for model in read_models(str(one), "x")] == ["x"]
    with pytest.raises(CommandError, match="has 1 names for 2 models"):
        read_models(places, "x")
    with pytest.raises(CommandError, match="two models have the name 'one'"):
        read_models(f"{one},{one}", "")
    with pytest.raises(CommandError, match="'a b' cannot be a served model name"):
        read_models(str(one), "a b")
    with pytest.raises(CommandError, match="there is none at"):
        resolve_models(f"{one},{tmp_path}/three")


# --- progress ---------------------------------------------------------------------------------------------------------
# The progress of a command: one line that is redrawn on a terminal, one line per phase elsewhere.


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_has_one_line_that_is_cleared_before_the_next() -> None:
    stream = Terminal()
    progress = Progress(stream)
    progress.update("loading 1 %", "loading")
    progress.update("loading 2 %", "loading")
    progress.say("done")
    assert stream.getvalue().count("\r\x1b[2K") == 3
    assert stream.getvalue().endswith("\r\x1b[2Kdone\n")


def test_elsewhere_each_phase_is_printed_once() -> None:
    stream = io.StringIO()
    progress = Progress(stream)
    for text, phase in (("loading 1 %", "loading"), ("loading 2 %", "loading"), ("warming up", "warming up")):
        progress.update(text, phase)
    progress.say("done")
    lines = stream.getvalue().splitlines()
    assert [line.partition("  ")[2] for line in lines[:2]] == ["loading 1 %", "warming up"]
    assert lines[2:] == ["done"]


def test_a_closed_stream_is_no_error() -> None:
    stream = io.StringIO()
    progress = Progress(stream)
    stream.close()
    progress.say("done")


# --- announcement -----------------------------------------------------------------------------------------------------
# The lines that `quire serve` prints once it serves.


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:81"),
        ("0.0.0.0", "http://127.0.0.1:81"),
        ("", "http://127.0.0.1:81"),
        ("::", "http://[::1]:81"),
        ("fe80::1", "http://[fe80::1]:81"),
        ("name", "http://name:81"),
    ],
)
def test_the_url_is_one_that_this_machine_reaches(host: str, url: str) -> None:
    assert local_url(host, 81) == url


# --- first key --------------------------------------------------------------------------------------------------------
# From an empty state folder to a call with a key, by what `quire serve` itself says.


REDIS_URL = "redis://127.0.0.1:1/0"  # nothing answers there


def flags(model: Path, state_dir: Path) -> list[str]:
    return ["serve", str(model), "--port", "0", "--state-dir", str(state_dir), "--require-keys"]


def status(url: str, key: str = "") -> int:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/models", headers=headers), timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def assert_key_works(process: QuireProcess, key: str, state_dir: Path) -> None:
    """The commands that the server prints work with the key, and no file below the state folder has the key."""
    url = process.wait_ready()
    assert [status(url), status(url, key)] == [401, 200]
    curl = process.wait_for(r"^curl .*")[0].replace("KEY", key)
    answer = subprocess.run(["bash", "-c", curl], capture_output=True, text=True, check=True, timeout=60).stdout
    assert "data: [DONE]" in answer
    chat = process.wait_for(r"^  chat   (.*)")[1].replace("KEY", key)
    subprocess.run(["bash", "-c", f"{chat} --max-tokens 4 Hello"], check=True, timeout=60, env=clean_environ())
    assert process.stop() == 0
    assert key not in process.stdout
    files = [path for path in state_dir.rglob("*") if path.is_file()]
    assert {"gateway.log", "redis.log", "worker-1.log"} <= {path.name for path in files}
    assert not [path for path in files if key[26:].encode() in path.read_bytes()]


@pytest.mark.timeout(240)
@pytest.mark.slow
def test_the_refusal_names_the_command_that_makes_the_first_key(
    start_quire: StartQuire, tiny_model: Path, tmp_path: Path
) -> None:
    state_dir = tmp_path / "a state folder"
    refused = start_quire(*flags(tiny_model, state_dir))
    assert refused.wait() == 1
    command = re.search(r"--require-keys is set, and there is no key: make one with `quire ([^`]*)`", refused.stderr)
    assert command, refused.stderr
    made = start_quire(*shlex.split(command[1]))
    assert made.wait() == 0, made.stderr
    assert f"using the Redis data of the state folder {state_dir}" in made.stderr
    assert_key_works(start_quire(*flags(tiny_model, state_dir)), made.stdout.strip(), state_dir)
    listed = start_quire("keys", "--state-dir", str(state_dir))
    assert listed.wait() == 0
    assert made.stdout.strip()[9:25] in listed.stdout


@pytest.mark.timeout(240)
@pytest.mark.slow
def test_on_a_terminal_it_makes_and_shows_the_first_key(
    start_quire: StartQuire, tiny_model: Path, tmp_path: Path
) -> None:
    process = start_quire(*flags(tiny_model, tmp_path), terminal=True)
    key = process.wait_for(r"The first API key, shown only now .*: (sk-quire-\S+)")[1]
    page = process.wait_for(r"The chat page with this key: (\S+)")[1]
    assert page == f"{process.wait_ready()}/#key={key}"
    assert_key_works(process, key, tmp_path)


@pytest.mark.timeout(240)
def test_a_key_is_made_only_for_a_terminal() -> None:
    """Nothing answers at the Redis: an answer without an error shows that no key is looked for."""
    assert first_key(GatewaySettings(), ServeSettings(), REDIS_URL, io.StringIO()) == ""
    admin = GatewaySettings(host="0.0.0.0", admin_key="0123456789abcdef")
    assert first_key(admin, ServeSettings(), REDIS_URL, io.StringIO()) == ""
    with pytest.raises(CommandError, match="--redis-url"):
        first_key(GatewaySettings(host="0.0.0.0"), ServeSettings(), REDIS_URL, io.StringIO())


@pytest.mark.timeout(240)
def test_without_a_terminal_the_error_names_the_same_redis(redis_url: str) -> None:
    with pytest.raises(CommandError, match=r"make one with `quire keys create` and the same --redis-url"):
        first_key(GatewaySettings(host="0.0.0.0"), ServeSettings(redis_url=redis_url), redis_url, io.StringIO())
