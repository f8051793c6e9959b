"""The proxies of docs/how-to/proxy.md: the real programs, with TLS and API keys, in front of a real gateway."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import aiohttp
import pytest
from playwright.sync_api import expect, sync_playwright

from quire.ops.local.ports import free_port
from quire.ops.paths import PROJECT_ROOT
from quire.shared.process.processes import dying_with_parent
from tests.conftest import QuireProcess
from tests.page.conftest import CHROMIUM
from tests.support.checkpoints import make_checkpoint
from tests.support.faults.stack import KEYS, MODEL, FaultStack

# The tests start a whole stack, and need two installed programs.
pytestmark = pytest.mark.slow

FOLDER = PROJECT_ROOT / "ops" / "deploy" / "proxy"
ALICE, BOB = {"Authorization": "Bearer sk-example-alice"}, {"Authorization": "Bearer sk-example-bob"}
TIMEOUT_S = 20
COMPLETIONS = "/v1/completions"


class Event(NamedTuple):
    """One server-sent event."""

    id: str
    data: str


class Gateway(NamedTuple):
    stack: FaultStack
    worker: QuireProcess
    address: str


class Proxy(NamedTuple):
    gateway: Gateway
    port: int
    trust: ssl.SSLContext


def changed(text: str, replacements: dict[str, str]) -> str:
    """Return `text` with each replacement applied. `text` must contain every replaced part."""
    for old, new in replacements.items():
        assert old in text, f"the configuration has no {old!r}"
        text = text.replace(old, new)
    return text


def caddy(folder: Path, address: str, port: int) -> list[str]:
    text = (FOLDER / "Caddyfile").read_text()
    own_certificate = "# tls /etc/ssl/quire/cert.pem /etc/ssl/quire/key.pem"
    changes = {
        "quire.example.com {": f"https://127.0.0.1:{port} {{",
        own_certificate: f"tls {folder}/cert.pem {folder}/key.pem",
        "admin off": "admin off\n\tauto_https disable_redirects",
        "127.0.0.1:8000": address,
    }
    (folder / "Caddyfile").write_text(changed(text, changes))
    shutil.copy(FOLDER / "api-keys.caddy", folder)
    return ["run", "--config", f"{folder}/Caddyfile", "--adapter", "caddyfile"]


def nginx(folder: Path, address: str, port: int) -> list[str]:
    changes = {
        "listen 443 ssl": f"listen 127.0.0.1:{port} ssl",
        "/etc/ssl/quire": str(folder),
        "/etc/nginx/quire-api-keys.conf": str(FOLDER / "api-keys.nginx.conf"),
        "127.0.0.1:8000": address,
    }
    (folder / "quire.conf").write_text(changed((FOLDER / "nginx.conf").read_text(), changes))
    temporary = "".join(
        f"{name}_temp_path {folder}/{name};\n" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (folder / "nginx.conf").write_text(
        f"daemon off;\nworker_processes 1;\npid {folder}/pid;\nerror_log stderr warn;\nevents {{}}\n"
        f"http {{\naccess_log off;\n{temporary}include {folder}/quire.conf;\n}}\n"
    )
    # Without this option, nginx as root starts its workers as another user, who may not read these files.
    user = ["-g", "user root;"] if os.geteuid() == 0 else []
    return ["-p", str(folder), "-c", f"{folder}/nginx.conf", *user]


PROXIES: dict[str, Callable[[Path, str, int], list[str]]] = {"caddy": caddy, "nginx": nginx}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    model = make_checkpoint(tmp_path_factory.mktemp("models") / "long", "llama", max_position_embeddings=2048)
    stack = FaultStack(tmp_path_factory.mktemp("redis"), model)
    try:
        worker = stack.worker("w1")
        _, url = stack.gateway()
        yield Gateway(stack, worker, url.removeprefix("http://"))
    finally:
        stack.close()


@pytest.fixture(scope="module", params=PROXIES)
def proxy(
    request: pytest.FixtureRequest, gateway: Gateway, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Proxy]:
    name = request.param
    program = shutil.which(name, path=os.environ["PATH"] + ":/usr/sbin")
    if program is None:
        pytest.skip(f"{name} is not installed (Debian's package {name})")
    folder = tmp_path_factory.mktemp(name)
    subprocess.run(
        f"openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -subj /CN=127.0.0.1 "
        f"-addext subjectAltName=IP:127.0.0.1 -keyout {folder}/key.pem -out {folder}/cert.pem".split(),
        check=True,
        capture_output=True,
    )
    port = free_port()
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            dying_with_parent([program, *PROXIES[name](folder, gateway.address, port)]),
            env={**os.environ, "HOME": str(folder), "XDG_DATA_HOME": str(folder), "XDG_CONFIG_HOME": str(folder)},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        made = Proxy(gateway, port, ssl.create_default_context(cafile=f"{folder}/cert.pem"))
        gateway.stack.wait(lambda: is_listening(port) or process.poll() is not None)
        assert process.poll() is None, log.read_text()
        # Caddy checks the health of the gateways before it sends requests to them.
        gateway.stack.wait(lambda: ask(made, "/v1/models", headers=ALICE)[0] == 200)
        yield made
    finally:
        process.terminate()
        process.wait(TIMEOUT_S)


def is_listening(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


def connect(proxy: Proxy) -> http.client.HTTPSConnection:
    return http.client.HTTPSConnection("127.0.0.1", proxy.port, timeout=TIMEOUT_S, context=proxy.trust)


def send(
    connection: http.client.HTTPConnection, path: str, body: dict[str, object] | None, headers: dict[str, str]
) -> http.client.HTTPResponse:
    """POST the body, or GET without one."""
    if body is None:
        connection.request("GET", path, headers=headers)
    else:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json", **headers})
    return connection.getresponse()


def ask(
    proxy: Proxy, path: str, body: dict[str, object] | None = None, headers: dict[str, str] | None = None
) -> tuple[int, str]:
    """Return the status and the body of a complete answer."""
    with closing(connect(proxy)) as connection:
        response = send(connection, path, body, headers or {})
        return response.status, response.read().decode()


def events(
    connection: http.client.HTTPConnection, path: str, body: dict[str, object] | None, headers: dict[str, str]
) -> Iterator[Event]:
    """Yield the events of a stream as they arrive."""
    response = send(connection, path, body, headers)
    assert response.status == 200, response.read()
    event_id = ""
    while line := response.readline().decode():
        if line.startswith("id: "):
            event_id = line[4:].strip()
        elif line.startswith("data: "):
            yield Event(event_id, line[6:].strip())


def asks(**parameters: object) -> dict[str, object]:
    return {"model": MODEL, "prompt": "once upon a time", "temperature": 0, "ignore_eos": True, **parameters}


def num_tokens(event: Event) -> int:
    return int(event.id.split(".")[0])


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer sk-wrong"}, {"Authorization": "sk-example-alice"}])
def test_without_a_known_key_the_answer_is_401(proxy: Proxy, headers: dict[str, str]) -> None:
    accepted = proxy.gateway.stack.totals().get("accepted", 0)
    status, body = ask(proxy, COMPLETIONS, asks(max_tokens=4), headers)
    assert status == 401
    assert json.loads(body)["error"]["code"] == "invalid_api_key"
    assert proxy.gateway.stack.totals().get("accepted", 0) == accepted


def test_with_a_known_key_the_answer_is_the_gateways(proxy: Proxy) -> None:
    status, body = ask(proxy, COMPLETIONS, asks(max_tokens=4), ALICE)
    assert status == 200
    assert json.loads(body)["usage"]["completion_tokens"] == 4
    status, body = ask(proxy, COMPLETIONS, asks(max_tokens=0), ALICE)
    assert (status, json.loads(body)["error"]["param"]) == (400, "max_tokens")


@pytest.mark.parametrize("path", ["/engine", "/engine/workers", "/readyz", "/metrics", "/admin/keys", "/v2/chat.js"])
def test_what_is_for_the_operator_cannot_be_reached(proxy: Proxy, path: str) -> None:
    assert ask(proxy, path, headers=ALICE)[0] == 404


def test_the_pages_need_no_key(proxy: Proxy) -> None:
    for path in ("/", "/chat.js", "/base.css", "/icon.svg", "/docs", "/openapi.json"):
        assert ask(proxy, path)[0] == 200, path


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (apt-get install chromium)")
def test_the_chat_page_asks_for_the_key_and_answers(proxy: Proxy) -> None:
    with sync_playwright() as playwright:
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        page = browser.new_page(ignore_https_errors=True)
        page.goto(f"https://127.0.0.1:{proxy.port}/")
        expect(page.locator(".key-panel")).to_contain_text("This server needs an API key.")
        page.fill("#key", "sk-wrong")
        page.press("#key", "Enter")
        expect(page.locator("#key-note")).to_contain_text("Incorrect API key provided.")
        page.fill("#key", "sk-example-alice")
        page.press("#key", "Enter")
        expect(page.locator("#model-name")).to_have_text(MODEL)
        page.click("#settings-button")
        page.fill("#max_tokens", "20")
        page.click("#settings .close")
        page.fill("#input", "Hello")
        page.press("#input", "Enter")
        expect(page.locator(".numbers")).to_contain_text("in the prompt", timeout=1000 * TIMEOUT_S)
        assert page.evaluate("fetch('/status').then((reply) => reply.status)") == 401
        browser.close()


def test_each_token_reaches_the_client_at_once_and_a_stream_is_resumed(proxy: Proxy) -> None:
    stack, worker, _ = proxy.gateway
    with closing(connect(proxy)) as connection:
        # Every token is text of its own: part of a character would wait for the next token.
        letters = {"ignore_eos": False, "structured_outputs": {"regex": "[a-z]{900}"}}
        stream = events(connection, COMPLETIONS, asks(max_tokens=150, stream=True, **letters), ALICE)
        seen = [next(stream) for _ in range(4)]
        request_id = json.loads(seen[0].data)["id"]
        # A stopped worker sends no later tokens, which could push earlier tokens out of a proxy's buffer.
        worker.process.send_signal(signal.SIGSTOP)
        try:
            emitted = int(stack.redis.hget(KEYS.request(request_id.removeprefix("cmpl-")), "emitted"))  # type: ignore[arg-type]
            assert emitted < 150
            while num_tokens(seen[-1]) < emitted:
                seen.append(next(stream))
        finally:
            worker.process.send_signal(signal.SIGCONT)
        seen += stream
    assert seen[-1].data == "[DONE]"
    with closing(connect(proxy)) as connection:
        headers = {**ALICE, "Last-Event-ID": seen[5].id}
        assert list(events(connection, f"{COMPLETIONS}/{request_id}/stream", None, headers)) == seen[6:]


def test_a_client_that_leaves_is_cancelled(proxy: Proxy) -> None:
    stack = proxy.gateway.stack
    cancelled = stack.totals().get("cancelled", 0)
    with closing(connect(proxy)) as connection:
        next(events(connection, COMPLETIONS, asks(max_tokens=1500, stream=True), ALICE))
    stack.wait(lambda: stack.totals().get("cancelled", 0) == cancelled + 1)


async def test_a_websocket_passes_with_a_known_key(proxy: Proxy) -> None:
    url = f"https://127.0.0.1:{proxy.port}/v1/responses"
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=proxy.trust)) as session:
        with pytest.raises(aiohttp.WSServerHandshakeError) as refusal:
            await session.ws_connect(url)
        assert refusal.value.status == 401
        async with session.ws_connect(url, headers=ALICE) as connection:
            for _ in range(2):
                await connection.send_json(
                    {"type": "response.create", "model": MODEL, "input": "Hello", "max_output_tokens": 4}
                )
                event = await connection.receive_json(timeout=TIMEOUT_S)
                while event["type"] not in ("response.completed", "response.incomplete"):
                    assert event["type"].startswith("response."), event
                    event = await connection.receive_json(timeout=TIMEOUT_S)


def test_an_idempotency_key_belongs_to_one_user(proxy: Proxy) -> None:
    def id_for(user: dict[str, str]) -> str:
        key = {"Idempotency-Key": f"key-{proxy.port}"}
        status, body = ask(proxy, COMPLETIONS, asks(max_tokens=4), {**user, **key})
        assert status == 200
        found: str = json.loads(body)["id"]
        return found

    first = id_for(ALICE)
    assert id_for(ALICE) == first
    assert id_for(BOB) != first
