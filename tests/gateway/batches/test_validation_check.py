"""All lines of a batch mean one model, which its key may use."""

from __future__ import annotations

import pytest

from quire.gateway.batches.batch import Batch
from quire.gateway.batches.line import BatchLine
from quire.gateway.batches.validation_check import check_of
from quire.gateway.errors.api_errors import ApiError, InvalidRequest, ModelNotFound
from quire.gateway.serving.model_directory import ModelDirectory
from tests.support.gateway.batch_calls import CHAT
from tests.support.gateway.running import MODEL, RunningGateway

GOOD = {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}


def batch(lane: str = MODEL, owner: str = "") -> Batch:
    return Batch.read("0" * 32, {"lane": lane, "endpoint": CHAT, "owner": owner})


async def test_lines_of_the_model_pass(gateway: RunningGateway) -> None:
    check = await check_of(ModelDirectory.of(gateway.gateway), batch())
    for _ in range(2):
        check(BatchLine(1, "a", GOOD))


async def test_the_wrong_parameter_has_its_place_in_the_line(gateway: RunningGateway) -> None:
    check = await check_of(ModelDirectory.of(gateway.gateway), batch())
    for body, param in (
        ({**GOOD, "temperature": 5}, "body.temperature"),
        ({"model": MODEL}, "body.messages"),
        ({**GOOD, "messages": [{"role": "nobody", "content": "x"}]}, "body.messages[0].role"),
        ({**GOOD, "model": 5}, "body.model"),
    ):
        with pytest.raises(ApiError) as caught:
            check(BatchLine(1, "a", body))
        assert caught.value.param == param


async def test_an_unknown_model(gateway: RunningGateway) -> None:
    check = await check_of(ModelDirectory.of(gateway.gateway), batch())
    with pytest.raises(ModelNotFound):
        check(BatchLine(1, "a", {**GOOD, "model": "other"}))


@pytest.mark.parametrize("lane", ["another", ""])
async def test_a_second_model(gateway: RunningGateway, lane: str) -> None:
    check = await check_of(ModelDirectory.of(gateway.gateway), batch(lane))
    with pytest.raises(InvalidRequest, match="a batch has one model") as caught:
        check(BatchLine(1, "a", GOOD))
    assert caught.value.param == "body.model"


async def test_a_key_that_is_gone(gateway: RunningGateway) -> None:
    with pytest.raises(ApiError, match="expired or was revoked"):
        await check_of(ModelDirectory.of(gateway.gateway), batch(owner="0" * 16))
