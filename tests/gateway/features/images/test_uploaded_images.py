"""Uploaded files that calls name as their images: whose they are, what is refused, and that calls keep their copies."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from quire.shared.protocol.messages import GenerationRequest
from tests.gateway.conftest import Start
from tests.support.gateway.batch_calls import BatchClient, with_key
from tests.support.gateway.fake_worker import emit
from tests.support.gateway.running import RunningGateway
from tests.support.gateway.seeing import (
    TOKENS,
    message,
    message_part,
    response,
    response_part,
    write_seeing_model,
)
from tests.support.pictures import noise, saved

PICTURE = saved(noise("RGB", 30, 20), "PNG")
BYTES, CALL_BYTES = 10_000, 15_000
SCRIPT = emit([5, 6])


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_seeing_model(tmp_path_factory.mktemp("models") / "test-model")


@pytest.fixture
async def gateway(start_gateway: Start, tmp_path: Path, seeing: Path) -> RunningGateway:
    settings = {"files_dir": str(tmp_path), "max_image_bytes": BYTES, "max_body_bytes": CALL_BYTES}
    return await start_gateway(model=str(seeing), **settings)


async def upload(client: BatchClient, content: bytes, purpose: str = "vision") -> str:
    file = await client.upload(content, "a.png", purpose=purpose)
    assert file["purpose"] == purpose
    return str(file["id"])


def of_file(api: Any, *ids: str) -> tuple[str, dict[str, Any]]:
    """Return a call of an API that names files."""
    if api is message:
        return message(*(message_part(type="file", file_id=id_) for id_ in ids))
    return response(*(response_part(file_id=id_) for id_ in ids), store=False)


async def refusal(client: BatchClient, call: tuple[str, dict[str, Any]]) -> str:
    path, body = call
    status, answer = await client.call("POST", path, json=body)
    assert status == 400, answer
    return json.dumps(json.loads(answer)["error"])


@pytest.mark.parametrize("purpose", ["vision", "user_data"])
@pytest.mark.parametrize("api", [response, message])
async def test_an_accepted_call_keeps_its_copy_of_an_uploaded_file(
    gateway: RunningGateway, api: Any, purpose: str
) -> None:
    client = BatchClient(gateway)
    file_id = await upload(client, PICTURE, purpose)
    async with gateway.worker(SCRIPT) as worker:
        path, body = of_file(api, file_id)
        await client.json("POST", path, json=body)
        [request] = worker.claimed
        assert isinstance(request, GenerationRequest)
        [image] = request.images
        assert image.length == TOKENS
        assert image.digest == hashlib.sha256(PICTURE).hexdigest()
        await client.json("DELETE", f"/v1/files/{file_id}")
        assert await worker.broker.images(request) == {image.digest: PICTURE}
    assert "No such File object" in await refusal(client, of_file(api, file_id))


@pytest.mark.parametrize("api", [response, message])
async def test_another_key_cannot_tell_a_file_from_none(gateway: RunningGateway, api: Any) -> None:
    (one, _), (other, _) = await with_key(gateway), await with_key(gateway)
    file_id = await upload(one, PICTURE)
    found = await refusal(other, of_file(api, file_id))
    assert found.replace(file_id, "file-" + "0" * 32) == await refusal(other, of_file(api, "file-" + "0" * 32))
    where = "messages[0].content[0].source.file_id" if api is message else "input[0].content[0].file_id"
    assert where in found


async def test_a_file_without_a_picture_is_refused_at_upload_or_at_use(gateway: RunningGateway) -> None:
    client = BatchClient(gateway)
    narrow = saved(noise("RGB", 1000, 1), "PNG")
    for content, says in (
        (b"{}", "not a PNG"),
        (PICTURE + bytes(BYTES), "--max-image-bytes"),
        (narrow, "over 200 times the other"),
    ):
        with pytest.raises(AssertionError, match=f"file is no image.*{says}"):
            await upload(client, content)
    assert (await client.json("GET", "/v1/files"))["data"] == []
    text = await upload(client, b"{}", "user_data")
    assert "not a PNG" in await refusal(client, of_file(message, text))
    batch = await upload(client, PICTURE, "batch")
    assert "the purpose of the file is batch" in await refusal(client, of_file(message, batch))


async def test_the_files_of_a_call_are_bounded_together(gateway: RunningGateway) -> None:
    client = BatchClient(gateway)
    large = await upload(client, PICTURE + bytes(BYTES), "user_data")
    assert "more than 10,000 bytes; this server allows no more (--max-image-bytes)" in (
        await refusal(client, of_file(message, large))
    )
    half = await upload(client, PICTURE + bytes(CALL_BYTES // 2 - len(PICTURE)))
    assert "--max-body-bytes, with the other images" in await refusal(client, of_file(message, half, half, half))


async def test_without_a_storage_the_remedy_is_named(start_gateway: Start, seeing: Path) -> None:
    gateway = await start_gateway(model=str(seeing))
    assert "stores no files; send the image as a data URL" in (
        await refusal(BatchClient(gateway), of_file(message, "file-" + "0" * 32))
    )
