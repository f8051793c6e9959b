"""A TCP proxy with fault injection, in its own thread, between any two processes.

Every control may be called from the test's thread while traffic flows. Data that is held back is not lost, as with TCP:
it arrives when the connection is open again, even if its sender has closed the connection since.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any
from urllib.parse import unquote, urlsplit

READ_BYTES = 65536


class Proxy:
    """Listens on a loopback port and forwards to `target`, the URL of a Redis (TCP or unix socket) or HTTP server.

    delay_s: delay of all data in seconds. slice_bytes: the size of each write; 0 writes everything at once.
    drop_message: returns whether to drop a pub/sub message with this payload.
    lose_reply: returns whether to withhold the reply of this command: Redis executes it, then its connection
        is cut.
    """

    def __init__(self, target: str) -> None:
        parts = urlsplit(target)
        self._is_redis = parts.scheme in ("redis", "unix")
        self._socket = unquote(parts.path) if parts.scheme == "unix" else None
        self._address = (parts.hostname, parts.port)
        self._scheme = "http" if parts.scheme == "http" else "redis"
        self._credentials = f"{parts.netloc.rpartition('@')[0]}@" if "@" in parts.netloc else ""
        self.delay_s = 0.0
        self.slice_bytes = 0
        self.drop_message: Callable[[bytes], bool] | None = None
        self.lose_reply: Callable[[list[bytes]], bool] | None = None
        self.dropped = 0
        self.lost = 0
        self.port = 0
        self._links: set[_Link] = set()
        self._server: asyncio.Server | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()
        self._gates = {"to_server": asyncio.Event(), "to_client": asyncio.Event()}
        self.black_hole(to_server=False, to_client=False)
        self._call(self._listen())

    # All processes that use the proxy run on this host.
    prefix: tuple[str, ...] = ()

    @property
    def url(self) -> str:
        """The URL to which the client connects instead of the target."""
        return f"{self._scheme}://{self._credentials}127.0.0.1:{self.port}" + "/0" * self._is_redis

    # --- controls -----------------------------------------------------------------------------------------------------

    def cut(self) -> None:
        """Reset all connections."""

        async def cut() -> None:
            for link in list(self._links):
                link.abort()

        self._call(cut())

    def refuse(self) -> None:
        """Accept no more connections until `admit`."""
        self._call(self._unlisten())

    def admit(self) -> None:
        self._call(self._listen())

    def black_hole(self, *, to_server: bool = True, to_client: bool = True) -> None:
        """Hold back all data in these directions, and forward all data in the other directions."""
        for name, is_closed in (("to_server", to_server), ("to_client", to_client)):
            gate = self._gates[name]
            self._loop.call_soon_threadsafe(gate.clear if is_closed else gate.set)

    def heal(self) -> None:
        """End all faults: forward everything without delay."""
        self.delay_s, self.slice_bytes, self.drop_message, self.lose_reply = 0.0, 0, None, None
        self.black_hole(to_server=False, to_client=False)
        if self._server is None:
            self.admit()

    def close(self) -> None:
        self._call(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # --- in the thread ------------------------------------------------------------------------------------------------

    def _call(self, coroutine: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _unlisten(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    async def _end(self) -> None:
        await self._unlisten()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # transports close with the next turn of the loop

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if self._socket is not None:
                server_reader, server_writer = await asyncio.open_unix_connection(self._socket)
            else:
                server_reader, server_writer = await asyncio.open_connection(*self._address)
        except (OSError, asyncio.CancelledError):
            writer.transport.abort()
            return
        link = _Link(self, writer, server_writer)
        self._links.add(link)
        pumps = {
            asyncio.create_task(link.pump(reader, server_writer, "to_server")),
            asyncio.create_task(link.pump(server_reader, writer, "to_client")),
        }
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            link.close()
        except asyncio.CancelledError:  # the proxy ends, and has cancelled the pumps as well
            link.abort()
        finally:
            self._links.discard(link)

    async def pass_on(self, writer: asyncio.StreamWriter, data: bytes, direction: str) -> None:
        await self._gates[direction].wait()
        size = self.slice_bytes or len(data) or 1
        for start in range(0, len(data), size):
            writer.write(data[start : start + size])
            await writer.drain()
            if self.slice_bytes:
                await asyncio.sleep(0)

    async def wait_open(self, direction: str) -> None:
        await self._gates[direction].wait()

    def frames(self, buffer: bytearray) -> Iterator[bytes]:
        """Take complete frames off the buffer: commands and replies of Redis; for other protocols, all bytes."""
        start = 0
        while start < len(buffer):
            end = frame_end(buffer, start) if self._is_redis else len(buffer)
            if end < 0:
                break
            yield bytes(buffer[start:end])
            start = end
        del buffer[:start]


class _Link:
    """One client connection and the proxy's own connection to the target."""

    def __init__(self, proxy: Proxy, client: asyncio.StreamWriter, server: asyncio.StreamWriter) -> None:
        self._proxy = proxy
        self._writers = (client, server)
        self._loses_reply = False

    def abort(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    def close(self) -> None:
        for writer in self._writers:
            writer.close()

    async def pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: str) -> None:
        buffer = bytearray()
        with contextlib.suppress(OSError):
            while data := await reader.read(READ_BYTES):
                buffer += data
                if self._proxy.delay_s:
                    await asyncio.sleep(self._proxy.delay_s)
                for frame in self._proxy.frames(buffer):
                    if direction == "to_server":
                        self._look_at_command(frame)
                    elif self._loses_reply:
                        self._proxy.lost += 1
                        self.abort()
                        return
                    elif self._is_dropped(frame):
                        continue
                    await self._proxy.pass_on(writer, frame, direction)
            await self._proxy.wait_open(direction)

    def _look_at_command(self, frame: bytes) -> None:
        lose = self._proxy.lose_reply
        if lose is not None and lose(words(frame)):
            self._loses_reply = True

    def _is_dropped(self, frame: bytes) -> bool:
        drop = self._proxy.drop_message
        if drop is None or not frame.startswith(b"*3\r\n$7\r\nmessage\r\n") or not drop(words(frame)[2]):
            return False
        self._proxy.dropped += 1
        return True


def frame_end(data: bytes | bytearray, start: int = 0) -> int:
    """Return the end of the RESP value that begins at `start`; -1 if the value is not complete."""
    line = data.find(b"\r\n", start)
    if line < 0:
        return -1
    kind, end = data[start : start + 1], line + 2
    if kind in (b"+", b"-", b":"):
        return end
    count = int(data[start + 1 : line])
    if kind == b"$":
        end += count + 2 if count >= 0 else 0
        return end if end <= len(data) else -1
    if kind != b"*":
        raise ValueError(f"not RESP: {bytes(data[start:line])!r}")
    for _ in range(count):
        end = frame_end(data, end)
        if end < 0:
            return -1
    return end


def words(frame: bytes) -> list[bytes]:
    """Return the strings of a flat array, such as a command."""
    found = []
    at = frame.index(b"\r\n") + 2
    while at < len(frame):
        line = frame.index(b"\r\n", at)
        end = frame_end(frame, at)
        found.append(frame[line + 2 : end - 2] if frame[at : at + 1] == b"$" else frame[at + 1 : line])
        at = end
    return found
