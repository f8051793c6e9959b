"""Refusals: an error in the shape of the OpenAI API that names the field, for little work."""

from __future__ import annotations

import time
from typing import Any

from tests.support.gateway.running import RunningGateway

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
USER = {"role": "user", "content": "Hello"}


async def check(gateway: RunningGateway, path: str, body: Any, status: int, param: str | None, says: str = "") -> None:
    # The gateway is in this process. Other processes change how long it takes, and not how much it computes.
    before = time.process_time()
    reply = await gateway.post(path, body)
    assert time.process_time() - before < 1.0, body
    assert (reply.status, reply.error["param"]) == (status, param), (body, reply.error)
    assert says in reply.error["message"], body
    assert reply.headers["content-type"].startswith("application/json")
    assert len(reply.headers["x-request-id"]) == 32
