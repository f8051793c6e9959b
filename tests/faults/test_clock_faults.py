"""Gateways whose clocks are days off: what belongs to tenants lives and ends by the clock of Redis."""

from __future__ import annotations

import time
from pathlib import Path

import openai
import pytest

from quire.shared.protocol.keys import BatchKeys
from tests.support.faults import batches
from tests.support.faults.calls import make_key
from tests.support.faults.stack import FaultStack

DAY_S = 86_400
LINES = [batches.line(number, max_tokens=5) for number in range(300)]


def models(url: str, key: str) -> str:
    """Return what a gateway answers to a key."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
        try:
            return "valid" if client.models.list().data else "no models"
        except openai.AuthenticationError as error:
            return str(error.code)


@pytest.mark.faults
@pytest.mark.timeout(300)
@pytest.mark.promise
def test_gateways_with_wrong_clocks_delete_no_file_and_expire_no_batch_and_no_key(
    stack: FaultStack, tmp_path: Path
) -> None:
    files = ("--files-dir", str(tmp_path / "files"))
    first, url = stack.gateway(*files)
    stack.worker("a", "--max-num-seqs", "64")
    kept = batches.create(url, LINES[:1])
    assert batches.ended(url, kept).status == "completed"
    valid, expired = make_key(stack.redis_server.url), make_key(stack.redis_server.url, life_s=-60)
    # The only gateways from now on are 40 days ahead, two days ahead, and two days behind.
    batch_id = batches.create(url, LINES)
    first.kill()
    wrong = [stack.gateway(*files, TEST_CLOCK_S=str(days * DAY_S))[1] for days in (40, 2, -2)]
    batch = batches.ended(wrong[0], batch_id)
    assert (batch.status, batch.request_counts.completed) == ("completed", len(LINES))
    for gateway in wrong:
        output = batches.show(gateway, kept).output_file_id
        assert [one["custom_id"] for one in batches.read(gateway, output)] == ["line-0"]
        assert models(gateway, valid) == "valid"
        assert models(gateway, expired) == "invalid_api_key"
    # A new file lives for its 30 days, whichever gateway stores it.
    for gateway in wrong:
        with openai.OpenAI(base_url=f"{gateway}/v1", api_key="none", max_retries=0) as client:
            file = client.files.create(file=("a.jsonl", b"x"), purpose="batch")
        assert file.expires_at == pytest.approx(time.time() + 30 * DAY_S, abs=20)
    assert stack.redis.zcard(BatchKeys().expiring) == 7
    stack.assert_invariants()
