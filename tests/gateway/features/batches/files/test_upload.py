"""The form of an upload is read strictly, and its content is never held in memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.gateway.features.batches.files.reservation import STEP
from quire.shared.protocol.keys import BATCHES_TAG, UPLOAD_LEASE_S, BatchKeys
from quire.shared.redis.clients import command_client
from tests.gateway.conftest import Start
from tests.support.gateway.batch_calls import with_key
from tests.support.gateway.running import Reply, RunningGateway, until

BOUNDARY = "xyz"
LIMIT = 100_000


@pytest.fixture
async def gateway(start_gateway: Start, tmp_path: Path) -> RunningGateway:
    return await start_gateway(files_dir=str(tmp_path / "files"), max_file_bytes=LIMIT, body_timeout_s=0.5)


def part(name: str, value: bytes, disposition: str = "", **headers: str) -> bytes:
    lines = [f'Content-Disposition: form-data; name="{name}"{disposition}']
    lines += [f"{key.replace('_', '-')}: {text}" for key, text in headers.items()]
    return f"--{BOUNDARY}\r\n".encode() + "\r\n".join(lines).encode() + b"\r\n\r\n" + value + b"\r\n"


END = f"--{BOUNDARY}--\r\n".encode()
PURPOSE = part("purpose", b"batch")
ANCHOR = part("expires_after[anchor]", b"created_at")


def file(content: bytes = b"{}\n", filename: str = "a.jsonl", **headers: str) -> bytes:
    return part("file", content, f'; filename="{filename}"', **headers)


FORM = f"multipart/form-data; boundary={BOUNDARY}"


async def upload(gateway: RunningGateway, body: bytes, kind: str = FORM) -> Reply:
    return await gateway.post("/v1/files", body, Content_Type=kind)


async def assert_nothing_is_stored(gateway: RunningGateway, tmp_path: Path) -> None:
    client = command_client(gateway.settings.redis_url, BATCHES_TAG, connections=1)
    keys = BatchKeys()
    assert await client.hgetall(keys.used) in ({}, {b"all": b"0"})
    assert await client.exists(keys.file("*"), keys.expiring, keys.doomed) == 0
    await client.aclose()
    assert list((tmp_path / "files").rglob("*")) == []


async def test_the_parts_come_in_any_order(gateway: RunningGateway) -> None:
    for body in [PURPOSE + file() + END, file() + PURPOSE + END]:
        reply = await upload(gateway, body)
        assert reply.status == 200, reply.body
        found = reply.json
        assert (found["filename"], found["bytes"], found["purpose"]) == ("a.jsonl", 3, "batch")
        assert found["expires_at"] - found["created_at"] == pytest.approx(gateway.settings.file_retention_s, abs=2)
        content = await gateway.get(f"/v1/files/{found['id']}/content")
        assert content.body == b"{}\n"
        assert content.headers["content-disposition"] == "attachment; filename*=UTF-8''a.jsonl"
        assert content.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (PURPOSE + END, "file"),
        (file() + END, "purpose"),
        (part("purpose", b"fine-tune") + file() + END, "purpose"),
        (part("purpose", b"x" * 300) + file() + END, "purpose"),
        (part("purpose", b"\xff") + file() + END, "purpose"),
        (PURPOSE + PURPOSE + file() + END, "purpose"),
        (PURPOSE + file() + file() + END, "file"),
        (PURPOSE + file(b"") + END, "file"),
        (PURPOSE + part("file", b"{}") + END, "file"),
        (PURPOSE + file(filename="") + END, "file"),
        (PURPOSE + file(filename="x" * 256) + END, "file"),
        (PURPOSE + file(filename="a%0Ab\u2028") + END, "file"),
        (PURPOSE + part("more", b"x") + file() + END, "more"),
        (PURPOSE + part("expires_after[anchor]", b"now") + file() + END, "expires_after[anchor]"),
        (PURPOSE + part("expires_after[seconds]", b"3600") + file() + END, "expires_after[anchor]"),
        (PURPOSE + ANCHOR + part("expires_after[seconds]", b"1e9") + file() + END, "expires_after[seconds]"),
        (PURPOSE + ANCHOR + part("expires_after[seconds]", b"5") + file() + END, "expires_after[seconds]"),
    ],
    ids=range(17),
)
async def test_a_wrong_field_is_named_and_nothing_is_kept(
    gateway: RunningGateway, tmp_path: Path, body: bytes, param: str
) -> None:
    reply = await upload(gateway, body)
    assert (reply.status, reply.error["param"]) == (400, param)
    await assert_nothing_is_stored(gateway, tmp_path)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"no form at all",
        PURPOSE + file()[:-10],
        PURPOSE + file(),
        PURPOSE + file(Content_Encoding="gzip") + END,
        PURPOSE + file(Content_Transfer_Encoding="base64") + END,
        PURPOSE + b"--xyz\r\n\r\nno name\r\n" + file() + END,
        PURPOSE + b"--xyz\r\nContent-Type: multipart/mixed; boundary=b\r\n\r\n--b--\r\n" + END,
        part("_charset_", b"utf-16") + PURPOSE + file() + END,
        PURPOSE + b"--xyz\r\n" + b"a: b\r\n" * 1000 + b"\r\n" + END,
        PURPOSE + b"--xyz\r\nContent-Disposition: " + b"x" * 20_000 + b"\r\n\r\n" + END,
    ],
    ids=range(11),
)
@pytest.mark.filterwarnings("ignore::aiohttp.BadContentDispositionHeader")
async def test_a_broken_form_is_refused_and_nothing_is_kept(
    gateway: RunningGateway, tmp_path: Path, body: bytes
) -> None:
    reply = await upload(gateway, body)
    assert 400 <= reply.status < 500, reply.body
    assert reply.error["type"] == "invalid_request_error"
    await assert_nothing_is_stored(gateway, tmp_path)


@pytest.mark.parametrize("kind", ["application/json", "multipart/mixed; boundary=xyz", "text/plain", ""])
async def test_another_type_is_refused(gateway: RunningGateway, tmp_path: Path, kind: str) -> None:
    assert (await upload(gateway, PURPOSE + file() + END, kind)).status == 415
    await assert_nothing_is_stored(gateway, tmp_path)


async def test_a_file_has_a_largest_size(gateway: RunningGateway, tmp_path: Path) -> None:
    assert (await upload(gateway, PURPOSE + file(b"x" * LIMIT) + END)).status == 200
    for size in (LIMIT + 1, LIMIT + 200_000):
        reply = await upload(gateway, PURPOSE + file(b"x" * size) + END)
        assert (reply.status, reply.error["code"]) == (413, "file_too_large")
        assert "--max-file-bytes" in reply.error["message"]
    assert len(list((tmp_path / "files").iterdir())) == 1


async def test_a_client_that_stops_sending_is_refused(gateway: RunningGateway, tmp_path: Path) -> None:
    head = f"POST /v1/files HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary={BOUNDARY}\r\n"
    body = PURPOSE + file(b"x" * 1000)[:500]
    reply = await gateway.send(f"{head}Content-Length: 2000\r\n\r\n".encode() + body)
    assert (reply.status, reply.error["code"]) == (408, "body_timeout")
    await assert_nothing_is_stored(gateway, tmp_path)


async def test_a_client_that_leaves_leaves_nothing(gateway: RunningGateway, tmp_path: Path) -> None:
    head = f"POST /v1/files HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary={BOUNDARY}\r\n"
    _, writer = await gateway.connect(f"{head}Content-Length: 2000\r\n\r\n".encode() + PURPOSE + file()[:50])

    async def is_written() -> bool:
        return bool(list((tmp_path / "files").rglob("*")))

    async def is_gone() -> bool:
        return not await is_written()

    await until(is_written)
    writer.close()
    await until(is_gone)
    redis, keys = gateway.gateway.process.keys.client, BatchKeys()

    async def is_forgotten() -> bool:
        return not await redis.exists(keys.expiring, keys.doomed)

    await until(is_forgotten)
    await assert_nothing_is_stored(gateway, tmp_path)


async def test_an_upload_whose_record_redis_has_lost_is_refused(gateway: RunningGateway, tmp_path: Path) -> None:
    head = f"POST /v1/files HTTP/1.1\r\nHost: x\r\nContent-Type: {FORM}\r\nConnection: close\r\n"
    body = PURPOSE + file(b"x" * 1000) + END
    reader, writer = await gateway.connect(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body[:500])
    redis = gateway.gateway.process.keys.client

    async def has_begun() -> bool:
        return bool(await redis.zcard(BatchKeys().expiring))

    await until(has_begun)
    await redis.flushall()
    writer.write(body[500:])
    answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b"The record of the upload was lost; send the file again." in answer
    await assert_nothing_is_stored(gateway, tmp_path)


async def test_a_key_has_a_bound_of_its_own(start_gateway: Start, tmp_path: Path) -> None:
    gateway = await start_gateway(files_dir=str(tmp_path), max_key_file_bytes=1500, max_stored_file_bytes=5000)
    assert (await upload(gateway, PURPOSE + file(b"x" * 900) + END)).status == 200
    reply = await upload(gateway, PURPOSE + file(b"x" * 900) + END)
    assert (reply.status, reply.error["code"]) == (413, "storage_full")
    assert "--max-key-file-bytes" in reply.error["message"]
    found = (await gateway.get("/v1/files")).json["data"]
    assert [one["bytes"] for one in found] == [900]
    assert (await gateway.send(f"DELETE /v1/files/{found[0]['id']} HTTP/1.1\r\nHost: x\r\n\r\n".encode())).status == 200
    assert (await upload(gateway, PURPOSE + file(b"x" * 900) + END)).status == 200


async def test_a_key_may_take_a_quarter_of_the_storage_by_default(start_gateway: Start, tmp_path: Path) -> None:
    gateway = await start_gateway(files_dir=str(tmp_path), max_stored_file_bytes=40_000)
    reply = await upload(gateway, PURPOSE + file(b"x" * 11_000) + END)
    assert (reply.status, reply.error["code"]) == (413, "storage_full")
    assert "--max-key-file-bytes" in reply.error["message"]
    client, _ = await with_key(gateway)
    other, _ = await with_key(gateway)
    for one in (client, other):
        assert (await one.upload(b"x" * 9000))["bytes"] == 9000


async def test_uploads_that_are_only_announced_take_nothing_from_others(start_gateway: Start, tmp_path: Path) -> None:
    gateway = await start_gateway(
        files_dir=str(tmp_path), max_file_bytes=2**30, max_stored_file_bytes=2**30 + 2**28, max_key_file_bytes=0
    )
    head = f"Content-Type: multipart/form-data; boundary={BOUNDARY}\r\nContent-Length: {2**30}\r\n"
    begin = f"POST /v1/files HTTP/1.1\r\nHost: x\r\n{head}\r\n".encode() + PURPOSE + file(b"x")[:-2]
    writers = [(await gateway.connect(begin))[1] for _ in range(20)]
    redis, used = gateway.gateway.process.keys.client, BatchKeys().used

    async def all_have_begun() -> bool:
        return int(await redis.hget(used, "all") or 0) >= 20 * STEP

    await until(all_have_begun)
    assert (await upload(gateway, PURPOSE + file(b"x" * 900) + END)).status == 200
    for writer in writers:
        writer.close()

    async def are_free() -> bool:
        return int(await redis.hget(used, "all")) == 900

    await until(are_free)


async def test_what_a_dead_gateway_has_reserved_is_free_soon(start_gateway: Start, tmp_path: Path) -> None:
    """The gateway renews a lease of a minute while it lives."""
    gateway = await start_gateway(files_dir=str(tmp_path))
    head = f"Content-Type: multipart/form-data; boundary={BOUNDARY}\r\nContent-Length: 5000000\r\n"
    begin = f"POST /v1/files HTTP/1.1\r\nHost: x\r\n{head}\r\n".encode() + PURPOSE + file(b"x")[:-2]
    _, writer = await gateway.connect(begin)
    redis, keys = gateway.gateway.process.keys.client, BatchKeys()

    async def has_begun() -> bool:
        return bool(await redis.zcard(keys.expiring))

    await until(has_begun)
    (_, expires), *_ = await redis.zrange(keys.expiring, 0, -1, withscores=True)
    seconds, _ = await redis.time()
    assert expires - seconds <= UPLOAD_LEASE_S
    writer.close()
