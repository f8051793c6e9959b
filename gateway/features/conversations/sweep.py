"""Adds the items of ended responses to conversations without a reader, before Redis forgets the responses."""

from __future__ import annotations

import asyncio
import logging

from aiohttp import web
from redis.exceptions import RedisError

from quire.gateway.errors.api_errors import ApiError
from quire.gateway.features.conversations.conversation_calls import settled
from quire.gateway.serving.model_directory import ModelDirectory
from quire.gateway.serving.service import Gateway
from quire.shared.process.tasks import end_tasks
from quire.shared.redis.cancellation import check_cancelled

log = logging.getLogger("gateway")

# Time between two looks for responses that have ended.
LOOK_S = 5.0


class ConversationSweep:
    """Looks at the conversations of all models of a process, between `start` and `close`."""

    def __init__(self, directory: ModelDirectory) -> None:
        self._directory = directory
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, app: web.Application) -> None:
        self._tasks.append(asyncio.create_task(self._sweep_forever()))

    async def close(self, app: web.Application) -> None:
        await end_tasks(*self._tasks)

    async def _sweep_forever(self) -> None:
        while True:
            for gateway in self._directory.gateways:
                try:
                    answered = await gateway.broker.answered_conversations()
                except (RedisError, OSError) as error:
                    log.debug("conversations of %s cannot be looked up now: %s", gateway.model.name, error)
                    answered = []
                check_cancelled()
                for conversation_id in answered:
                    await _settle(gateway, conversation_id)
            await asyncio.sleep(LOOK_S)


async def _settle(gateway: Gateway, conversation_id: str) -> None:
    """Add the items of an ended response. A conversation that cannot be read does not hold up the others."""
    try:
        if await settled(gateway, conversation_id) is None:
            await gateway.broker.delete_conversation(conversation_id)
    except (ApiError, RedisError, OSError) as error:
        log.debug("conversation %s cannot be looked up now: %s", conversation_id, error)
    except Exception:
        log.exception("conversation %s is corrupt; delete it", conversation_id)
    check_cancelled()
