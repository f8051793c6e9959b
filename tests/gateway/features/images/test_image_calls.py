"""Images of calls through HTTP: sizes, media types, `detail`, and workers that compute none."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image as Pillow

from tests.gateway.conftest import Start
from tests.support.gateway.fake_worker import FakeWorker, emit
from tests.support.gateway.running import Reply, RunningGateway
from tests.support.gateway.seeing import (
    chat,
    chat_part,
    data_url,
    message,
    message_part,
    response,
    response_part,
    write_seeing_model,
)
from tests.support.pictures import noise, saved

PICTURE = saved(noise("RGB", 30, 20), "PNG")
LARGE = saved(noise("RGB", 1030, 515), "JPEG")
SCRIPT = emit([5, 6])


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_seeing_model(tmp_path_factory.mktemp("models") / "test-model")


@pytest.fixture
async def gateway(start_gateway: Start, seeing: Path) -> RunningGateway:
    return await start_gateway(model=str(seeing))


def base64_part(file: bytes, media_type: str) -> dict[str, Any]:
    return message_part(type="base64", media_type=media_type, data=data_url(file).partition(",")[2])


def calls(file: bytes) -> list[tuple[str, dict[str, Any]]]:
    """Return a call with this file for each API."""
    url = data_url(file)
    return [chat(chat_part(url)), response(response_part(image_url=url)), message(base64_part(file, "image/png"))]


def refusal(reply: Reply) -> tuple[str, str]:
    """Return the parameter and the message of an error."""
    assert reply.status == 400, reply.body
    error = reply.json["error"]
    return error.get("param") or error["details"]["param"], error["message"]


@pytest.mark.parametrize("stated", ["image/png", "image/gif", "image/webp"])
async def test_a_message_states_the_type_of_its_file(gateway: RunningGateway, stated: str) -> None:
    """As in Anthropic's API. In the others a data URL with a wrong type is accepted."""
    param, says = refusal(await gateway.post(*message(base64_part(LARGE, stated))))
    assert param == "messages[0].content[0].source.data"
    assert f"of the type image/jpeg, but media_type is {stated}" in says
    param, says = refusal(await gateway.post(*message(base64_part(LARGE, "image/bmp"))))
    assert param == "messages[0].content[0].source.media_type"
    async with gateway.worker(SCRIPT):
        for path, body in (
            message(base64_part(LARGE, "image/jpeg")),
            chat(chat_part(data_url(LARGE, stated))),
            response(response_part(image_url=data_url(LARGE, stated))),
        ):
            assert (await gateway.post(path, body)).status == 200


async def test_an_image_of_low_detail_is_made_small(gateway: RunningGateway) -> None:
    url = data_url(LARGE, "image/jpeg")
    async with gateway.worker(SCRIPT) as worker:
        for path, body in (
            chat(chat_part(url, detail="low")),
            response(response_part(image_url=url, detail="low")),
            chat(chat_part(url, detail="high")),
            chat(chat_part(data_url(PICTURE), detail="low")),
        ):
            assert (await gateway.post(path, body)).status == 200
        files = [list((await worker.broker.images(request) or {}).values()) for request in worker.claimed]
    [small], [of_response], [whole], [unchanged] = files
    assert small == of_response
    picture = Pillow.open(io.BytesIO(small))
    assert (picture.format, picture.size) == ("PNG", (512, 256))
    assert (whole, unchanged) == (LARGE, PICTURE)


@pytest.mark.parametrize("given", ["original", "medium", "", 5])
async def test_another_detail_is_refused_by_name(gateway: RunningGateway, given: Any) -> None:
    url = data_url(PICTURE)
    param, says = refusal(await gateway.post(*chat(chat_part(url, detail=given))))
    assert (param, "auto, low" in says) == ("messages[0].content[0].image_url.detail", True)
    param, says = refusal(await gateway.post(*response(response_part(image_url=url, detail=given))))
    assert (param, "auto, low" in says) == ("input[0].content[0].detail", True)


async def test_a_worker_without_images_has_them_refused_with_its_reason(gateway: RunningGateway) -> None:
    """Any worker may get any call, so one is enough."""
    registry = gateway.gateway.worker_registry
    reason = "images of this model need a --max-num-batched-tokens of at most 100"
    blind = FakeWorker(gateway.settings.redis_url, "test-model", SCRIPT, no_images=reason)
    async with gateway.worker(SCRIPT):
        for path, body in calls(PICTURE):
            assert (await gateway.post(path, body)).status == 200
        async with blind.running():
            await registry.refresh()
            for path, body in calls(PICTURE):
                _, says = refusal(await gateway.post(path, body))
                assert f"is an image, and {reason} (worker {blind.worker_id})" in says
            assert (await gateway.chat()).status == 200
            await blind.broker.retire(blind.worker_id, blind.worker_id)
        await registry.refresh()
        for path, body in calls(PICTURE):
            assert (await gateway.post(path, body)).status == 200


async def test_a_body_has_room_for_the_largest_image(start_gateway: Start, seeing: Path) -> None:
    limit = 100_000
    large = PICTURE + bytes(limit - len(PICTURE))
    gateway = await start_gateway(model=str(seeing), max_image_bytes=limit)
    async with gateway.worker(SCRIPT) as worker:
        for path, body in calls(large):
            assert (await gateway.post(path, body)).status == 200
        assert worker.claimed[0].images[0].digest == hashlib.sha256(large).hexdigest()
    assert gateway.gateway.settings.max_body_bytes == 2**22 + 4 * ((limit + 2) // 3)
    reply = await gateway.post(*chat(chat_part("data:" + "a" * (2**22 + 140_000))))
    assert (reply.status, "--max-body-bytes" in reply.error["message"]) == (413, True)


async def test_a_gateway_of_text_has_the_smaller_body(start_gateway: Start, model_folder: Path) -> None:
    gateway = await start_gateway(model=str(model_folder))
    assert gateway.gateway.settings.max_body_bytes == gateway.gateway.process.settings.max_body_bytes == 2**22
    _, says = refusal(await gateway.post(*chat(chat_part(data_url(PICTURE)))))
    assert "takes text alone" in says
