"""Logs, metrics, the loop's lag, and the internal HTTP server."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from quire.shared.telemetry.internal_server import InternalServer, PortError, ServiceUnavailable, bind, json_response
from quire.shared.telemetry.logs import JsonFormatter, LineFormatter, setup_logging
from quire.shared.telemetry.loop_lag import INTERVAL_S, LoopLag
from quire.shared.telemetry.prometheus import Fading

# --- logs -------------------------------------------------------------------------------------------------------------
# A log line says when, how grave, who and what, and stays one line.


def test_a_record_is_one_line_with_time_level_process_and_message() -> None:
    record = logging.LogRecord("n", logging.WARNING, "f", 1, "two\nlines %d", (3,), None)
    line = LineFormatter("worker w1").format(record)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} WARNING worker w1  two\\nlines 3", line)


def test_logs_go_to_standard_error_from_the_level_on() -> None:
    program = (
        "import logging; from quire.shared.telemetry.logs import setup_logging; setup_logging('p', 'error'); "
        "setup_logging('p', 'info'); "
        "logging.debug('hidden'); logging.info('shown'); logging.getLogger('httpx').info('noise')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    assert [line.split("  ")[-1] for line in done.stderr.splitlines()] == ["shown"]


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match="debug, info, warning, error"):
        setup_logging("p", "loud")


def test_json_is_one_object_per_line_with_names_and_fields() -> None:
    record = logging.LogRecord("worker.x", logging.WARNING, "f", 1, "two\nlines %s\u2028", ("ü",), None)
    record.created = 1777890001.2345
    record.request_id, record.status, record.unknown = "r1", 200, "x"
    line = JsonFormatter({"worker": "w1"}).format(record)
    assert line.isascii()
    assert "\n" not in line
    assert json.loads(line) == {
        "ts": "2026-05-04T10:20:01.234Z",
        "level": "warning",
        "logger": "worker.x",
        "msg": "two\nlines ü\u2028",
        "worker": "w1",
        "request_id": "r1",
        "status": 200,
    }


@pytest.mark.parametrize("formatter", [LineFormatter("p", hides_errors=True), JsonFormatter({}, hides_errors=True)])
def test_a_traceback_does_not_quote(formatter: LineFormatter) -> None:
    said = "hu" + "sh"  # a traceback has the lines of the source
    try:
        try:
            {}[said]
        except KeyError as error:
            raise ValueError(said) from error
    except ValueError:
        record = logging.LogRecord("n", logging.ERROR, "f", 1, "it failed", (), sys.exc_info())
    text = formatter.format(record)
    assert "builtins.KeyError" in text
    assert "builtins.ValueError" in text
    assert text.count("test_logs.py") == 2
    assert "hush" not in text


def test_an_unhidden_traceback_has_its_texts() -> None:
    try:
        raise ValueError("no room")
    except ValueError:
        record = logging.LogRecord("n", logging.ERROR, "f", 1, "it failed", (), sys.exc_info())
    assert "ValueError: no room" in LineFormatter("p").format(record)
    assert "ValueError: no room" in json.loads(JsonFormatter({}).format(record))["exception"]


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ValueError, match="text, json"):
        setup_logging("p", "info", "xml")


def test_the_last_line_is_json_where_the_log_is() -> None:
    for form in ("text", "json"):
        program = (
            "from quire.shared.telemetry.logs import give_up, setup_logging; "
            f"setup_logging('p', 'info', '{form}', gateway='g'); give_up('quire gateway', 'no\\nroom')"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        if form == "text":
            assert done.stderr == "quire gateway: no room\n"
        else:
            said = json.loads(done.stderr)
            assert (said["level"], said["msg"], said["gateway"]) == ("critical", "quire gateway: no room", "g")


# --- prometheus -------------------------------------------------------------------------------------------------------
# Numbers that a process keeps of itself.


def test_what_is_long_ago_counts_for_less() -> None:
    slowest = Fading(half_life_s=10)
    assert slowest.at(0) == 0
    slowest.see(8, now=100)
    slowest.see(3, now=100)
    assert (slowest.at(100), slowest.at(110), slowest.at(120)) == (8, 4, 2)
    slowest.see(3, now=110)
    assert slowest.at(110) == 4, "what was seen before still counts for more"
    slowest.see(3, now=120)
    assert (slowest.at(120), slowest.at(130)) == (3, 1.5)


# --- loop lag ---------------------------------------------------------------------------------------------------------


async def test_a_loop_that_is_blocked_is_late_by_that_time() -> None:
    lag = LoopLag()
    lag.start()
    await asyncio.sleep(0)  # the task sleeps
    time.sleep(INTERVAL_S + 0.2)  # noqa: ASYNC251 - blocks the loop on purpose
    for _ in range(100):
        if lag.seconds.count:
            break
        await asyncio.sleep(0.01)
    await lag.close()
    assert lag.seconds.sum >= 0.19


# --- internal server --------------------------------------------------------------------------------------------------


async def good(request: web.Request) -> web.Response:
    return json_response(200, {"fine": True})


async def late(request: web.Request) -> web.Response:
    raise ServiceUnavailable("the engine does not answer")


async def broken(request: web.Request) -> web.Response:
    raise ValueError("secret")


@pytest.fixture
async def server() -> AsyncIterator[InternalServer]:
    server = InternalServer(bind("127.0.0.1", 0), {"/good": good, "/late": late, "/broken": broken})
    await server.start()
    yield server
    await server.close()


async def fetch(url: str, method: str = "GET") -> tuple[int, dict[str, object]]:
    def call() -> tuple[int, dict[str, object]]:
        try:
            with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=60) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)

    return await asyncio.to_thread(call)


async def test_every_answer_is_json(server: InternalServer) -> None:
    assert await fetch(f"{server.url}/good") == (200, {"fine": True})
    assert await fetch(f"{server.url}/late") == (503, {"error": "the engine does not answer"})
    assert await fetch(f"{server.url}/none") == (
        404,
        {"error": "there is no /none; there are /good, /late and /broken"},
    )
    assert (await fetch(f"{server.url}/good", "POST"))[0] == 405


async def test_an_unexpected_error_is_not_quoted(server: InternalServer) -> None:
    assert await fetch(f"{server.url}/broken") == (500, {"error": "internal error; the log says more"})


def test_a_port_that_is_taken_or_forbidden_is_refused_with_the_setting() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(PortError, match=rf"--internal-port {port} .*give another one, or 0"):
            bind("127.0.0.1", port)
    with pytest.raises(PortError, match=r"--internal-host .*give an address of this machine"):
        bind("203.0.113.1", 0)
