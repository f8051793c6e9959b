from __future__ import annotations

import pytest
from redis.exceptions import ClusterDownError, MovedError, ReadOnlyError, ResponseError

from quire.shared.redis.clients import pubsub_client
from quire.shared.redis.connections import NotTheServer, is_elsewhere


@pytest.mark.parametrize(
    ("error", "elsewhere"),
    [
        (ReadOnlyError("You can't write against a read only replica."), True),
        (ClusterDownError("CLUSTERDOWN Hash slot not served"), True),
        (MovedError("1234 127.0.0.1:7000"), True),
        (ResponseError("NOREPLICAS Not enough good replicas to write."), True),
        (ResponseError("UNBLOCKED force unblock from blocking operation"), True),
        (ResponseError("ERR Error running script: READONLY You can't write"), True),
        (ResponseError("WRONGTYPE Operation against a key"), False),
        (ResponseError("OOM command not allowed"), False),
    ],
)
def test_errors_by_which_a_server_does_not_serve_the_lane(error: ResponseError, elsewhere: bool) -> None:
    assert is_elsewhere(error) == elsewhere


async def test_such_an_error_breaks_the_connection_and_the_next_command_has_a_new_one(redis_url: str) -> None:
    client = pubsub_client(redis_url)
    pipe = client.pipeline(transaction=False)  # takes a connection from the pool
    pipe.eval("return redis.error_reply('READONLY You can not write')", 0)
    with pytest.raises(NotTheServer, match="ReadOnlyError"):
        await pipe.execute()
    assert await client.ping()  # over a new connection
    await client.aclose()
