"""The application: its log, its models, its files."""

from __future__ import annotations

import tomllib

import pytest

from quire.ops.paths import PROJECT_ROOT
from tests.gateway.fake_worker import emit
from tests.gateway.running import MODEL, RunningGateway, tokens


async def test_the_log_has_one_line_per_request_and_no_prompt(
    gateway: RunningGateway, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with gateway.worker(emit(tokens("an answer"), "stop")):
        reply = await gateway.chat(messages=[{"role": "user", "content": "a secret question"}])
    lines = [record.getMessage() for record in caplog.records if record.name == "gateway.access"]
    [line] = [line for line in lines if "/v1/chat/completions" in line]
    assert line.startswith(f"POST /v1/chat/completions 200 request={reply.headers['x-request-id']} ms=")
    assert "ttft_ms" not in line  # the answer left in one piece
    assert line.endswith(
        f"outcome=stop prompt_tokens={reply.json['usage']['prompt_tokens']} tokens={len(tokens('an answer'))}"
    )
    assert "secret" not in caplog.text
    assert "an answer" not in caplog.text


async def test_models_are_listed(gateway: RunningGateway) -> None:
    [card] = (await gateway.get("/v1/models")).json["data"]
    assert (card["id"], card["object"], card["owned_by"], card["max_model_len"]) == (MODEL, "model", "quire", 512)
    assert (await gateway.get(f"/v1/models/{MODEL}")).json == card


def test_every_static_file_is_packaged() -> None:
    with (PROJECT_ROOT / "pyproject.toml").open("rb") as file:
        patterns = tomllib.load(file)["tool"]["setuptools"]["package-data"]["*"]
    endings = {pattern.rsplit(".", 1)[1] for pattern in patterns}
    assert {path.suffix[1:] for path in (PROJECT_ROOT / "gateway" / "pages" / "static").iterdir()} <= endings
