"""Images are fetched from listed hosts with public addresses, and nothing else is reached.

The checks are those of the program. Only sockets differ: a connection to a public address ends at a server of the test.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from quire.gateway.features.images import image_fetch
from quire.gateway.features.images.image_fetch import ImageFetcher, ImageHosts, is_public, public_socket
from quire.shared.images.picture_error import PictureError
from quire.shared.process.errors import StartError
from tests.gateway.conftest import Start
from tests.support.gateway.fake_worker import emit
from tests.support.gateway.seeing import (
    chat,
    chat_part,
    message,
    message_part,
    response,
    response_part,
    write_seeing_model,
)
from tests.support.pictures import noise, saved

PUBLIC = "93.184.215.14"
PICTURE = saved(noise("RGB", 30, 20), "PNG")
NAME = "images.example.com"
HOSTS = f"{NAME},*.cdn.example.com,odd.example.com:8080,private.example.com"


class Site:
    """A server, and a fetcher for which it has every public address. `addresses`: of hosts; by default PUBLIC."""

    def __init__(self) -> None:
        self.addresses: dict[str, list[str]] = {"private.example.com": ["10.0.0.7"]}
        self.resolved: list[str] = []
        self.reached: list[tuple[str, int]] = []
        self.requests: list[web.BaseRequest] = []
        self.answers: dict[str, Any] = {}
        self.fetcher = ImageFetcher(ImageHosts.parse(HOSTS), self._resolve, self._socket)
        self.most = 100_000

    async def start(self) -> None:
        self._runner = web.ServerRunner(web.Server(self._answer))
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]

    async def close(self) -> None:
        await self._runner.cleanup()

    async def _resolve(self, host: str, port: int) -> list[str]:
        self.resolved.append(host)
        return self.addresses.get(host, [PUBLIC])

    def _socket(self, address: tuple[Any, ...]) -> socket.socket:
        public_socket(address).close()
        reached, port = self.reached, self.port

        class Redirected(socket.socket):
            def connect(self, place: Any) -> None:
                reached.append(place[:2])
                super().connect(("127.0.0.1", port))

        return Redirected(socket.AF_INET, socket.SOCK_STREAM)

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        self.requests.append(request)
        answer = self.answers.get(request.path_qs, PICTURE)
        if isinstance(answer, bytes):
            return web.Response(body=answer)
        if isinstance(answer, str):
            return web.Response(status=302, headers={"Location": answer, "Set-Cookie": "a=b; Path=/"})
        found: web.StreamResponse = await answer(request)
        return found

    def gated(self, path: str) -> tuple[asyncio.Event, asyncio.Event]:
        """Answer a path after the second event; the first tells that it was asked for."""
        began, gate = asyncio.Event(), asyncio.Event()

        async def answer(request: web.BaseRequest) -> web.StreamResponse:
            began.set()
            await gate.wait()
            return web.Response(body=PICTURE)

        self.answers[path] = answer
        return began, gate

    async def fetch(self, url: str) -> bytes | None:
        return await self.fetcher.fetch(url, self.most)

    async def refusal(self, url: str) -> str:
        with pytest.raises(PictureError) as caught:
            await self.fetch(url)
        return str(caught.value)


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    site = Site()
    await site.start()
    yield site
    await site.close()


@pytest.mark.parametrize(
    "url",
    [
        f"http://{NAME}/a.png",
        f"HTTP://{NAME.upper()}./a.png#part",
        f"http://{NAME}:80?size=1&name=@b",
        "http://a.b.cdn.example.com/a.png",
        "http://odd.example.com:8080/a@b%2fc.png",
    ],
)
async def test_an_image_of_a_listed_host_is_fetched_from_the_address_that_was_checked(site: Site, url: str) -> None:
    assert await site.fetch(url) == PICTURE
    assert len(site.resolved) == 1
    assert site.reached == [(PUBLIC, 8080 if "odd" in url else 80)]
    [request] = site.requests
    assert request.headers["Host"] == site.resolved[0] + (":8080" if "odd" in url else "")
    assert {"Cookie", "Authorization", "Referer", "Proxy-Authorization"}.isdisjoint(request.headers)


@pytest.mark.parametrize(
    "url",
    [
        "http://evil.com/a.png",
        f"http://{NAME}@evil.com/a.png",
        f"http://user:password@{NAME}/a.png",
        f"http://@{NAME}/a.png",
        f"http://evil.com\\@{NAME}/a.png",
        f"http://{NAME}\\@evil.com/a.png",
        f"http:\\\\{NAME}/a.png",
        f"http:/{NAME}/a.png",
        f"http:///{NAME}/a.png",
        f"http:{NAME}/a.png",
        f"http://{NAME}.evil.com/a.png",
        f"http://evil{NAME}/a.png",
        f"http://sub.{NAME}/a.png",
        f"http://{NAME}../a.png",
        "http://cdn.example.com/a.png",
        "http://evilcdn.example.com/a.png",
        f"http://{NAME}:8080/a.png",
        f"http://{NAME}:443/a.png",
        "http://odd.example.com/a.png",
        f"http://{NAME}:80a/a.png",
        f"http://{NAME}:99999999/a.png",
        f"http://{NAME} /a.png",
        f"http://{NAME}/a b.png",
        f"http://{NAME}/a\r\nX-Header: 1",
        f"http://{NAME}\t.evil.com/",
        f"\nhttp://{NAME}/",
        f"http://{NAME}%00.evil.com/",
        f"http://{NAME}%2eevil.com/",
        "http://\uff49mages.example.com/a.png",
        "http://images\u3002example.com/a.png",
        "http://127.0.0.1/a.png",
        "http://2130706433/a.png",
        "http://0x7f.1/a.png",
        "http://017700000001/a.png",
        "http://[::1]/a.png",
        f"http://[::ffff:{PUBLIC}]/a.png",
        f"http://[{NAME}]/a.png",
        "http://localhost/a.png",
        "file:///etc/passwd",
        f"ftp://{NAME}/a.png",
        f"https:{'/' * 3}{NAME}/a.png",
        f"http://{NAME}/" + "a" * 5000,
        "http://",
        "",
    ],
)
async def test_no_other_url_is_even_resolved(site: Site, url: str) -> None:
    says = await site.refusal(url)
    assert "an address must be http(s)" in says or "--image-hosts" in says
    assert site.resolved == site.reached == []


# Addresses of special networks and of tunnels to them, and texts that are no addresses.
BAD = (
    "0.0.0.0 0.1.2.3 10.0.0.1 100.64.0.1 100.127.255.254 127.0.0.1 127.8.8.8 169.254.169.254 172.16.0.1 "
    "172.31.255.255 192.0.0.8 192.0.2.1 192.88.99.1 192.168.1.1 198.18.0.1 198.51.100.1 203.0.113.1 224.0.0.1 "
    "239.255.255.250 240.0.0.1 255.255.255.255 :: ::1 ::7f00:1 ::ffff:127.0.0.1 ::ffff:8.8.8.8 ::ffff:0:8.8.8.8 "
    "64:ff9b::7f00:1 64:ff9b::808:808 64:ff9b:1::1 100::1 2001::1 2001:db8::1 2002:7f00:1:: 2002:808:808::1 fc00::1 "
    "fd12:3456::1 fe80::1 fe80::1%lo fec0::1 ff02::1 ff0e::1 2130706433 0177.0.0.1 localhost "
)


@pytest.mark.parametrize("address", BAD.split())
async def test_an_address_that_is_not_public_is_not_reached(site: Site, address: str) -> None:
    """The resolver refuses it alone and with a public one, and the socket refuses it too."""
    assert not is_public(address)
    for addresses in ([address], [PUBLIC, address]):
        site.addresses[NAME] = addresses
        assert "not public" in await site.refusal(f"http://{NAME}/a.png")
    with pytest.raises(PictureError, match="not public"):
        public_socket((socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 80)))
    assert site.reached == []


@pytest.mark.parametrize("address", [PUBLIC, "1.1.1.1", "2606:4700:4700::1111"])
def test_public_addresses(address: str) -> None:
    assert is_public(address)


async def test_names_of_this_machine_are_resolved_and_refused() -> None:
    fetcher = ImageFetcher(ImageHosts.parse("localhost"))
    with pytest.raises(PictureError, match="not public"):
        await fetcher.fetch("http://localhost/a.png", 1000)


async def test_a_host_without_an_address_is_named(site: Site) -> None:
    async def resolve(host: str, port: int) -> list[str]:
        raise socket.gaierror(-2, "Name or service not known")

    site.fetcher = ImageFetcher(ImageHosts.parse(HOSTS), resolve)
    assert NAME in await site.refusal(f"http://{NAME}/a.png")


async def test_each_redirect_is_checked_like_the_first_url(site: Site) -> None:
    site.answers = {"/1": "/2", "/2": "//a.cdn.example.com/3?x=1", "/3?x=1": f"http://{NAME}/4", "/0": "/1"}
    assert await site.fetch(f"http://{NAME}/1") == PICTURE
    assert site.resolved == [NAME, NAME, "a.cdn.example.com", NAME]
    assert all("Cookie" not in request.headers for request in site.requests)
    assert "more than 3 times" in await site.refusal(f"http://{NAME}/0")
    for target, says in (
        ("http://evil.com/", "no images from evil.com"),
        (f"http://{NAME}@evil.com/", "an address must be"),
        ("http://169.254.169.254/latest", "an address must be http(s)"),
        ("http://private.example.com/", "not public"),
        ("file:///etc/passwd", "an address must be"),
        ("data:image/png;base64,AAAA", "an address must be"),
    ):
        site.answers = {"/1": target}
        found = await site.refusal(f"http://{NAME}/1")
        assert says in found or "--image-hosts" in found
    assert {host for host, _ in site.reached} == {PUBLIC}


async def test_a_redirect_does_not_leave_tls(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first request is answered as if over TLS: the server of the test has none."""
    checked = ImageFetcher._checked

    def without_tls(self: ImageFetcher, url: str) -> Any:
        return checked(self, url).with_scheme("http").with_port(80)

    monkeypatch.setattr(ImageFetcher, "_checked", without_tls)
    site.answers = {"/1": f"http://{NAME}/2"}
    assert "without TLS" in await site.refusal(f"https://{NAME}/1")


async def test_an_address_that_changes_is_checked_again(site: Site) -> None:
    """DNS rebinding: the second request of a fetch gets another address."""
    site.answers = {"/1": "/2"}
    resolve = site.fetcher._resolve

    async def rebound(host: str, port: int) -> Any:
        found = await resolve(host, port)
        site.addresses[host] = ["127.0.0.1"]
        return found

    site.fetcher = ImageFetcher(ImageHosts.parse(HOSTS), rebound, site._socket)
    assert "not public" in await site.refusal(f"http://{NAME}/1")
    assert site.reached == [(PUBLIC, 80)]


async def test_the_environment_gives_no_proxy_and_no_credentials(
    site: Site, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "netrc").write_text(f"machine {NAME} login me password secret")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert await site.fetch(f"http://{NAME}/a.png") == PICTURE
    assert "Authorization" not in site.requests[0].headers


async def test_a_file_that_is_too_large_is_not_read_to_its_end(site: Site) -> None:
    ended = asyncio.Event()

    async def endless(request: web.BaseRequest) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        try:
            while True:
                await answer.write(bytes(65536))
        finally:
            ended.set()

    site.answers["/a"] = endless
    assert await site.fetch(f"http://{NAME}/a") is None
    await ended.wait()
    site.answers["/b"] = bytes(site.most)
    assert await site.fetch(f"http://{NAME}/b") == bytes(site.most)


async def test_compressed_and_failed_answers_are_refused(site: Site) -> None:
    async def compressed(request: web.BaseRequest) -> web.StreamResponse:
        assert request.headers["Accept-Encoding"] == "identity"
        return web.Response(body=gzip.compress(bytes(10**6)), headers={"Content-Encoding": "gzip"})

    async def missing(request: web.BaseRequest) -> web.StreamResponse:
        return web.Response(status=404)

    async def broken(request: web.BaseRequest) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.write(b"no HTTP\r\n\r\n")
        request.transport.close()
        return web.Response()

    site.answers = {"/a": compressed, "/b": missing, "/c": broken}
    assert "compresses it" in await site.refusal(f"http://{NAME}/a")
    assert "the status 404" in await site.refusal(f"http://{NAME}/b")
    assert "fetching it fails" in await site.refusal(f"http://{NAME}/c")


async def test_a_slow_host_costs_its_own_call(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_fetch, "FETCH_S", 0.2)
    monkeypatch.setattr(image_fetch, "MAX_FETCHES", 1)
    site.fetcher = ImageFetcher(ImageHosts.parse(HOSTS), site._resolve, site._socket)

    released = asyncio.Event()

    async def silent(request: web.BaseRequest) -> web.StreamResponse:
        await released.wait()
        return web.Response()

    site.answers["/a"] = silent
    assert "takes more than 0.2 s" in await site.refusal(f"http://{NAME}/a")
    released.set()
    monkeypatch.setattr(image_fetch, "FETCH_S", 60)
    assert await site.fetch(f"http://{NAME}/b") == PICTURE


async def test_few_fetches_run_at_a_time(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_fetch, "MAX_FETCHES", 2)
    site.fetcher = ImageFetcher(ImageHosts.parse(HOSTS), site._resolve, site._socket)
    gate, running, most = asyncio.Event(), 0, 0

    async def counted(request: web.BaseRequest) -> web.StreamResponse:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if running == 2:
            gate.set()
        await gate.wait()
        running -= 1
        return web.Response(body=PICTURE)

    site.answers["/a"] = counted
    assert await asyncio.gather(*(site.fetch(f"http://{NAME}/a") for _ in range(6))) == [PICTURE] * 6
    assert most == 2


async def test_a_fetch_waits_for_others_outside_of_its_time(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait has a bound of its own, after which the call gets a 503."""
    monkeypatch.setattr(image_fetch, "MAX_FETCHES", 1)
    site.fetcher = ImageFetcher(ImageHosts.parse(HOSTS), site._resolve, site._socket)
    began, gate = site.gated("/a")
    first = asyncio.create_task(site.fetch(f"http://{NAME}/a"))
    await began.wait()
    with monkeypatch.context() as patch:
        patch.setattr(image_fetch, "FETCH_S", 0)
        second = asyncio.create_task(site.fetch(f"http://{NAME}/b"))
        await asyncio.sleep(0.05)
    site.fetcher._wait_s = 0.01
    with pytest.raises(image_fetch.FetchesFull):
        await site.fetch(f"http://{NAME}/c")
    gate.set()
    assert await asyncio.gather(first, second) == [PICTURE] * 2


async def test_the_fetches_of_an_owner_leave_room_for_others(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_fetch, "MAX_FETCHES", 2)
    monkeypatch.setattr(image_fetch, "MAX_OWN_FETCHES", 1)
    site.fetcher = ImageFetcher(ImageHosts.parse(HOSTS), site._resolve, site._socket)
    began, gate = site.gated("/a")
    many = [asyncio.create_task(site.fetcher.fetch(f"http://{NAME}/a", site.most, "one")) for _ in range(4)]
    await began.wait()
    assert await site.fetcher.fetch(f"http://{NAME}/b", site.most, "other") == PICTURE
    assert not any(task.done() for task in many)
    gate.set()
    assert await asyncio.gather(*many) == [PICTURE] * 4
    assert not site.fetcher._own_slots


@pytest.mark.parametrize(
    "hosts", ["http://a.com", "a.com/b", "*", "*.*.com", "127.0.0.1", "a b", "a..com", "a.com:x", "-a.b"]
)
def test_a_setting_that_is_no_host_is_refused(hosts: str) -> None:
    with pytest.raises(StartError, match="--image-hosts"):
        ImageHosts.parse(f"{NAME}, {hosts}")


async def test_a_call_fetches_its_image_once_and_keeps_it(
    site: Site, start_gateway: Start, tmp_path_factory: pytest.TempPathFactory
) -> None:
    model = write_seeing_model(tmp_path_factory.mktemp("models") / "test-model")
    gateway = await start_gateway(model=str(model), image_hosts=HOSTS)
    gateway.gateway.process.images.fetcher = site.fetcher
    url, digest = f"http://{NAME}/a.png", hashlib.sha256(PICTURE).hexdigest()
    calls = [
        chat(chat_part(url)),
        response(response_part(image_url=url)),
        message(message_part(type="url", url=url)),
    ]
    async with gateway.worker(emit([5, 6])) as worker:
        answers = [(await gateway.post(path, body)).json for path, body in calls]
        assert [image.digest for request in worker.claimed for image in request.images] == [digest] * 3
        assert len(site.requests) == 3
        # The conversation of a response has the image.
        follows = {"model": "test-model", "input": "And now?", "previous_response_id": answers[1]["id"]}
        assert (await gateway.post("/v1/responses", follows)).status == 200
        assert [image.digest for image in worker.claimed[3].images] == [digest]
        assert len(site.requests) == 3
    refused = await gateway.post(*chat(chat_part("http://evil.com/a.png")))
    assert (refused.status, refused.error["param"]) == (400, "messages[0].content[0].image_url.url")
    assert "--image-hosts" in refused.error["message"]


async def test_without_hosts_nothing_is_fetched(start_gateway: Start, tmp_path_factory: pytest.TempPathFactory) -> None:
    model = write_seeing_model(tmp_path_factory.mktemp("models") / "test-model")
    gateway = await start_gateway(model=str(model))
    refused = await gateway.post(*message(message_part(type="url", url="https://example.com/a.png")))
    assert refused.status == 400
    assert "does not fetch; give a data URL" in refused.json["error"]["message"]
    assert "--image-hosts" in refused.json["error"]["message"]
