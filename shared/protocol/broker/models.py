"""The model registry: workers register what they serve, and gateways find models and fetch their files.

The content of a file is stored under its SHA-256 digest, so equal files of several models are stored once, and a
gateway notices content that is not what the manifest names. A file is written and read in pieces, so that a large file
does not delay commands of other clients.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from typing import cast

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from quire.shared.protocol.broker.lane import text
from quire.shared.protocol.keys import MODEL_TTL_S, RegistryKeys
from quire.shared.protocol.messages.codec import MessageError
from quire.shared.protocol.messages.manifest import MAX_MANIFEST_BYTES, MIB, FileEntry, ModelManifest

# Bytes per command.
PIECE = MIB
# Life of a file that is being written.
WRITING_S = 60
# Names that are read at most; a hostile set must not fill the memory of gateways.
MAX_REGISTERED = 1024


class ModelRegistry:
    """The registry over one command client of the lane REGISTRY_LANE. Raises RedisError when Redis fails."""

    def __init__(self, client: Redis) -> None:
        self.client = client
        self.keys = RegistryKeys()

    async def register(self, manifest: ModelManifest, files: Mapping[str, bytes], *, replaces: bool) -> bool:
        """Register a model, or renew its registration. Contents that Redis lacks are written.

        replaces: take the place of another manifest of this model. Return False, and does nothing, if there is another
        manifest and `replaces` is false.
        """
        own = manifest.encode()
        key = self.keys.manifest(manifest.model)
        if not replaces and await self.client.get(key) not in (None, own):
            return False
        for entry in manifest.files:
            if await self._size(self.keys.file(entry.digest)) != entry.size or not entry.size:
                await self._write(entry, files[entry.name])
        seconds, micros = await self.client.time()
        now_ms = 1000 * seconds + micros // 1000
        pipe = self.client.pipeline(transaction=True)
        for entry in manifest.files:
            pipe.expire(self.keys.file(entry.digest), MODEL_TTL_S)
        pipe.set(key, own, ex=MODEL_TTL_S)
        pipe.zadd(self.keys.models, {manifest.model: now_ms})
        pipe.zremrangebyscore(self.keys.models, 0, now_ms - 1000 * MODEL_TTL_S)
        await pipe.execute()
        return True

    async def forget(self, manifest: ModelManifest) -> None:
        """Remove the registration of a model, unless another manifest has taken its place."""
        key = self.keys.manifest(manifest.model)
        if await self.client.get(key) == manifest.encode():
            await self.client.delete(key)
            await self.client.zrem(self.keys.models, manifest.model)

    async def _size(self, key: str) -> int:
        """Return the bytes of a file, 0 if it does not exist, -1 if the key has another type."""
        try:
            return await self.client.strlen(key)
        except ResponseError:
            return -1

    async def _write(self, entry: FileEntry, content: bytes) -> None:
        """Write a file under a name of its own, and rename it when it is complete."""
        draft = f"{self.keys.file(entry.digest)}:{secrets.token_hex(8)}"
        await self.client.set(draft, content[:PIECE], ex=WRITING_S)
        for at in range(PIECE, len(content), PIECE):
            await self.client.append(draft, content[at : at + PIECE])
            await self.client.expire(draft, WRITING_S)
        await self.client.rename(draft, self.keys.file(entry.digest))

    async def registered(self) -> dict[str, bytes]:
        """Return the manifests as messages, by the name under which they are registered, the newest first.

        A manifest above MAX_MANIFEST_BYTES is cut, so that its decoding fails.
        """
        listed = await self.client.zrevrange(self.keys.models, 0, MAX_REGISTERED - 1)
        names = [text(name) for name in listed if len(name) <= 256]
        if not names:
            return {}
        pipe = self.client.pipeline(transaction=False)
        for name in names:
            pipe.getrange(self.keys.manifest(name), 0, MAX_MANIFEST_BYTES)
        replies = await pipe.execute(raise_on_error=False)
        return {name: data for name, data in zip(names, replies, strict=True) if isinstance(data, bytes) and data}

    async def read(self, entry: FileEntry) -> bytes:
        """Return the content of a file. Raise MessageError if Redis has another content, or none."""
        key = self.keys.file(entry.digest)
        if (size := await self._size(key)) != entry.size:
            raise MessageError(f"{entry.name} is registered with {entry.size} bytes, and Redis has {size}")
        content = bytearray()
        for at in range(0, entry.size, PIECE):
            content += cast(bytes, await self.client.getrange(key, at, at + PIECE - 1))
        if hashlib.sha256(content).hexdigest() != entry.digest:
            raise MessageError(f"the content of {entry.name} does not have the registered digest")
        return bytes(content)
