"""Pages, probes and model cards."""

from __future__ import annotations

import gzip
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.gateway.features.admin.model_cards import capabilities
from quire.gateway.features.admin.status import summary
from quire.gateway.features.pages import static_files
from quire.gateway.model.served_model import load_model
from quire.shared.images.layouts.layout import Layout
from quire.shared.process.version import installed_version
from quire.shared.protocol.broker import LastBeat
from tests.gateway.conftest import Start
from tests.gateway.features.pages.test_engine_page import worker
from tests.support.gateway.agents import TEMPLATE as AGENTS
from tests.support.gateway.running import CONTEXT, MODEL, RunningGateway, raw_request, until, write_model
from tests.support.gateway.running import TEMPLATE as PLAIN
from tests.support.redis_server import running_redis

# --- The pages' files: what their headers allow, how large they are, and whether their colours can be read ------------


STATIC = Path(static_files.__file__).parent / "static"
FILES = sorted(path for path in STATIC.iterdir() if path.suffix in (".html", ".css", ".js", ".svg"))
VENDORED = sorted(name for name in static_files.names() if name.startswith(static_files.VENDOR))
PAGES = [path for path in FILES if path.suffix == ".html"]
SCRIPTS = [path for path in FILES if path.suffix == ".js"]
BYTES = {path: static_files.content(path.name) for path in FILES}
# What a browser loads before the first message: the page, its styles and its modules.
MAX_BYTES = 250_000
# The files of the engine page alone, and its recording.
MAX_ENGINE_BYTES = 140_000


async def test_a_page_may_load_from_its_own_server_only(gateway: RunningGateway) -> None:
    for path in PAGES:
        reply = await gateway.get(static_files.path_of(path.name))
        assert reply.status == 200
        assert reply.headers["content-type"] == "text/html; charset=utf-8"
        policy = dict(part.strip().split(" ", 1) for part in reply.headers["content-security-policy"].split(";"))
        assert policy == {
            "default-src": "'none'",
            "script-src": "'self'",
            "style-src": "'self'",
            "connect-src": "'self'",
            "img-src": "'self' blob:",
            "base-uri": "'none'",
            "form-action": "'none'",
            "frame-ancestors": "'none'",
            "require-trusted-types-for": "'script'",
            "trusted-types": "'none'",
        }
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert reply.headers["referrer-policy"] == "no-referrer"
        assert "camera=()" in reply.headers["permissions-policy"]


async def test_a_file_is_sent_once(gateway: RunningGateway) -> None:
    """A browser asks for the pages' own files each time, and for those of the libraries never again."""
    for name in static_files.names():
        where = static_files.path_of(name)
        plain = await gateway.get(where)
        assert plain.body == static_files.content(name)
        assert "script-src 'self'" in plain.headers["content-security-policy"]
        packed = await gateway.send(raw_request("GET", where, headers={"Accept-Encoding": "br, gzip"}))
        assert packed.headers["content-encoding"] == "gzip"
        assert gzip.decompress(packed.body) == plain.body
        assert packed.headers["etag"] != plain.headers["etag"]
        for known in (plain, packed):
            encoding = "gzip" if known is packed else ""
            headers = {"If-None-Match": known.headers["etag"], "Accept-Encoding": encoding}
            again = await gateway.send(raw_request("GET", where, headers=headers))
            assert (again.status, again.body) == (304, b"")
            wanted = "public, max-age=31536000, immutable" if name in VENDORED else "no-cache"
            assert plain.headers["cache-control"] == again.headers["cache-control"] == wanted
        changed = await gateway.send(raw_request("GET", where, headers={"If-None-Match": '"older"'}))
        assert changed.status == 200


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_only_comments_of_scripts_are_not_served(path: Path) -> None:
    source, served = path.read_text().splitlines(), BYTES[path].decode().splitlines()
    assert len(served) == len(source)
    left_out = [line.strip() for line, kept in zip(source, served, strict=True) if line != kept]
    assert all(line.startswith(("//", "/**", "* ", "*/")) for line in left_out)
    assert bool(left_out) == (path.suffix == ".js")


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_what_a_page_loads_at_first_is_small(page: Path) -> None:
    loaded = {page.name, *re.findall(r'(?:src|href)="/([^"]+\.\w+)"', page.read_text())} - {"openapi.json"}
    sizes = {name: len(static_files.content(name)) for name in loaded}
    print(f"{page.name}: {sum(sizes.values())} bytes")
    assert sum(sizes.values()) < MAX_BYTES
    assert not loaded & set(VENDORED)


def test_the_libraries_of_others_are_served_as_they_are_with_their_licences() -> None:
    folders = {name.split("/")[1] for name in VENDORED}
    assert len(folders) >= 4
    for folder in folders:
        assert f"vendor/{folder}/LICENSE.txt" in VENDORED
    for name in VENDORED:
        assert static_files.content(name) == (STATIC / name).read_bytes()


def test_the_engine_page_is_small() -> None:
    files = [path for path in STATIC.iterdir() if path.name.startswith(("engine", "tour"))]
    assert sum(len(static_files.content(path.name)) for path in files) < MAX_ENGINE_BYTES


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_a_page_has_nothing_inline_and_nothing_from_elsewhere(path: Path) -> None:
    html = path.read_text()
    assert not re.search(r"<script(?![^>]* src=)|<style|\sstyle=|\son[a-z]+=|https?://|javascript:", html)
    for reference in re.findall(r'(?:src|href)="([^"]+)"', html):
        assert (
            reference.startswith("#")
            or reference in ("/", "/engine", "/docs", "/openapi.json")
            or (STATIC / reference[1:]).is_file()
        ), reference


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_script_makes_no_markup_and_is_one_noun_long(path: Path) -> None:
    text = path.read_text()
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser", text
    )
    assert len(text.splitlines()) <= 300


def test_a_page_preloads_exactly_the_modules_that_it_needs() -> None:
    """With preloads the browser loads all modules at once, instead of each after the module that imports it."""
    for path in PAGES:
        html = path.read_text()
        for entry in re.findall(r'<script src="/([^"]+)" type="module">', html):
            needed: set[str] = set()
            waiting = [entry]
            while waiting:
                found = re.findall(
                    r'^(?:import|export) .*? from "/([^"]+)";', (STATIC / waiting.pop()).read_text(), re.M
                )
                waiting += [name for name in found if name not in needed]
                needed.update(found)
            assert set(re.findall(r'<link rel="modulepreload" href="/([^"]+)">', html)) == needed - {entry}


# --- `/status`: which workers respond, by the age of their heartbeats -------------------------------------------------


async def status(gateway: RunningGateway) -> Any:
    reply = await gateway.get("/status")
    assert reply.status == 200
    return reply.json


async def test_without_a_worker_none_responds(gateway: RunningGateway) -> None:
    assert await status(gateway) == {"redis": True, "workers": 0, "responding": 0, "silent_s": None}
    wrong = await gateway.get("/status?worker=w1")
    assert (wrong.status, wrong.error["message"]) == (400, "'worker' is no parameter of /status; it has none.")


async def test_a_worker_whose_heartbeat_is_overdue_is_registered_and_does_not_respond(gateway: RunningGateway) -> None:
    async with worker(gateway) as fake, worker(gateway, "w2"):
        found = await status(gateway)
        assert (found["workers"], found["responding"]) == (2, 2)
        assert 0 <= found["silent_s"] < 2
        key = fake.broker.keys.worker("w1")
        beat = int(await fake.broker.client.hget(key, "beat"))
        await fake.broker.client.hset(key, "beat", beat - 4000)

        async def overdue() -> bool:  # the gateway looks five times per second at the most
            found = await status(gateway)
            return bool((found["workers"], found["responding"]) == (2, 1))

        await until(overdue)


async def test_a_worker_that_starts_has_no_card_and_is_not_counted(gateway: RunningGateway) -> None:
    async with worker(gateway) as fake:
        await fake.broker.client.hdel(fake.broker.keys.worker("w1"), "card")
        assert await status(gateway) == {"redis": True, "workers": 0, "responding": 0, "silent_s": None}


def test_a_heartbeat_is_overdue_after_two_of_them() -> None:
    beats = [LastBeat(1.9, 1.0), LastBeat(2.1, 1.0), LastBeat(9.0, 5.0)]
    assert summary(beats) == {"redis": True, "workers": 3, "responding": 2, "silent_s": 1.9}


@pytest.mark.slow
async def test_a_redis_that_does_not_answer_is_told_in_time(
    start_gateway: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not when a command gives up, which would be after this test."""
    monkeypatch.setattr("quire.shared.redis.clients.COMMAND_TIMEOUT_S", 3600)
    with running_redis() as server:
        gateway = await start_gateway(redis_url=server.url)
        assert (await status(gateway))["redis"] is True

        async def is_silent() -> bool:
            return (await status(gateway))["redis"] is False

        with server.stopped():
            await until(is_silent)

        async def answers() -> bool:
            return bool((await status(gateway))["redis"])

        await until(answers)


@pytest.mark.parametrize("path", ["/healthz", "/health", "/ping"])
async def test_a_gateway_is_alive_while_redis_is_away(start_gateway: Start, path: str) -> None:
    with running_redis() as server:
        gateway = await start_gateway(redis_url=server.url)
        with server.stopped():
            reply = await gateway.get(path)
            assert (reply.status, reply.json) == (200, {"status": "ok"})


async def test_the_version_is_that_of_the_installed_package(gateway: RunningGateway) -> None:
    assert (await gateway.get("/version")).json == {"version": installed_version("0 (not installed)")}


# --- `/v1/models`: the limits and capabilities of the model, in the shapes of OpenAI and vLLM -------------------------


async def test_the_card_has_limits_and_capabilities(gateway: RunningGateway) -> None:
    reply = await gateway.get("/v1/models")
    assert reply.json["object"] == "list"
    [card] = reply.json["data"]
    assert (await gateway.get(f"/v1/models/{MODEL}")).json == card
    assert (card["id"], card["object"], card["root"], card["parent"]) == (MODEL, "model", MODEL, None)
    assert card["max_model_len"] == CONTEXT
    assert card["vocab_size"] == gateway.gateway.model.vocab_size
    assert card["max_num_seqs"] == gateway.gateway.worker_registry.max_num_seqs
    assert (card["max_n"], card["max_prompts"], card["max_choices"]) == (16, 64, 128)
    assert {"chat", "completions", "json_schema"} < set(card["capabilities"])
    assert "images" not in card["capabilities"]
    assert card["max_images"] is card["max_image_bytes"] is card["max_image_pixels"] is None
    assert card["permission"][0]["allow_logprobs"] is True
    assert set(card["sampling_defaults"]) == {"temperature", "top_p", "top_k", "min_p", "repetition_penalty"}


async def test_the_card_of_a_model_that_takes_images_has_their_limits(start_gateway: Start) -> None:
    gateway = await start_gateway(max_images=7, max_image_bytes=2048, max_image_pixels=4096)
    layout = Layout("<image>", "<image>", 5, lambda width, height: "<image>")
    gateway.gateway.model = replace(gateway.gateway.model, layout=layout)
    [card] = (await gateway.get("/v1/models")).json["data"]
    assert "images" in card["capabilities"]
    assert (card["max_images"], card["max_image_bytes"], card["max_image_pixels"]) == (7, 2048, 4096)


async def test_the_folder_of_the_model_is_not_told(gateway: RunningGateway, model_folder: Path) -> None:
    assert str(model_folder) not in (await gateway.get("/v1/models")).body.decode()


async def test_the_limits_are_those_of_the_settings(start_gateway: Start) -> None:
    gateway = await start_gateway(max_n=3, max_model_len=100)
    [card] = (await gateway.get("/v1/models")).json["data"]
    assert (card["max_n"], card["max_model_len"]) == (3, 100)


def test_a_model_without_a_template_has_no_chat(tmp_path: Path) -> None:
    model = load_model(str(write_model(tmp_path / "plain", chat_template=None)), "plain")
    assert {"chat", "messages", "tools", "reasoning"}.isdisjoint(capabilities(model))
    assert {"completions", "scoring", "structured_outputs"} < set(capabilities(model))
    assert capabilities(model) == sorted(capabilities(model))
    assert (model.tool_format, model.shown_reasoning_format) == ("", "")


def test_a_model_without_an_end_token_follows_no_grammar(tmp_path: Path) -> None:
    model = replace(load_model(str(write_model(tmp_path / "plain")), "plain"), eos_token_ids=frozenset())
    assert {"json_object", "json_schema", "structured_outputs", "tools"}.isdisjoint(capabilities(model))
    assert {"chat", "messages"} < set(capabilities(model))


@pytest.mark.parametrize(
    ("template", "formats", "reasons"),
    [
        (PLAIN, ("json", None), False),
        (AGENTS, ("hermes", "think"), True),
        # The format of harmony has reasoning of its own.
        ("{{ tools }}<|channel|>final<|message|>", ("harmony", "harmony"), True),
    ],
)
async def test_the_card_has_the_formats_of_tool_calls_and_reasoning(
    start_gateway: Start, tmp_path: Path, template: str, formats: tuple[str, str | None], reasons: bool
) -> None:
    gateway = await start_gateway(model=str(write_model(tmp_path / MODEL, chat_template=template)))
    [card] = (await gateway.get("/v1/models")).json["data"]
    assert (card["tool_call_format"], card["reasoning_format"]) == formats
    assert "tools" in card["capabilities"]
    assert ("reasoning" in card["capabilities"]) == reasons
