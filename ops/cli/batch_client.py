"""A minimal client of OpenAI's files and batches: content is streamed from and to files, never held in memory."""

from __future__ import annotations

import http.client
import json
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote

from quire.ops.cli.server_url import parse_url, with_remedy
from quire.shared.config.command_line import CommandError

CONNECT_TIMEOUT_S = 10.0
READ_TIMEOUT_S = 300.0
PIECE = 256 * 1024


class BatchClient:
    """A client of one server. All errors are CommandErrors with the cause, the place and the remedy."""

    def __init__(self, url: str, api_key: str = "") -> None:
        server = parse_url(url)
        self._secure, self._host, self._port = server.secure, server.host, server.port
        self._path = server.path
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.url = server.shown

    def upload(self, path: Path, progress: Callable[[int, int], None]) -> str:
        """Upload a file of calls, and return its id. progress: called with the bytes sent and those in all."""
        boundary = secrets.token_hex(16)
        name = "".join(char if char.isprintable() and char not in '"\\' else "_" for char in path.name)[:255]
        head = (
            f'--{boundary}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--{boundary}\r\n'
            f'Content-Disposition: form-data; name="file"; filename="{name}"\r\n'
            "Content-Type: application/jsonl\r\n\r\n"
        ).encode()
        tail = f"\r\n--{boundary}--\r\n".encode()
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                headers = {
                    "Content-Type": f"multipart/form-data; boundary={boundary}",
                    "Content-Length": str(len(head) + size + len(tail)),
                }
                return str(self._json("POST", "/files", _form(head, file, tail, size, progress), headers)["id"])
        except FileNotFoundError as error:
            raise CommandError(f"--file {path} does not exist; give the path of a JSONL file") from error
        except (IsADirectoryError, PermissionError) as error:
            raise CommandError(f"--file {path} cannot be read: {error.strerror}; give another file") from error

    def create(self, file_id: str, endpoint: str, window: str, metadata: dict[str, str]) -> dict[str, Any]:
        """Create a batch of an uploaded file."""
        body: dict[str, Any] = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": window}
        if metadata:
            body["metadata"] = metadata
        return self._json("POST", "/batches", json.dumps(body).encode(), {"Content-Type": "application/json"})

    def show(self, batch_id: str) -> dict[str, Any]:
        """Return a batch as it is now."""
        return self._json("GET", f"/batches/{quote(batch_id, safe='')}")

    def cancel(self, batch_id: str) -> dict[str, Any]:
        """Stop a batch."""
        return self._json("POST", f"/batches/{quote(batch_id, safe='')}/cancel", b"")

    def all(self, limit: int) -> list[dict[str, Any]]:
        """Return the newest batches."""
        batches: list[dict[str, Any]] = self._json("GET", f"/batches?limit={limit}")["data"]
        return batches

    def download(self, file_id: str, to: BinaryIO) -> int:
        """Write the content of a file, and return the number of its bytes."""
        connection = self._connect()
        try:
            response = self._request(connection, "GET", f"/files/{quote(file_id, safe='')}/content", None, {})
            size = 0
            while data := response.read(PIECE):
                size += to.write(data)
            if response.length:
                raise CommandError(f"the content of {file_id} broke off after {size} bytes; fetch it again")
            return size
        except (OSError, http.client.HTTPException) as error:
            raise CommandError(f"the content of {file_id} broke off: {_reason(error)}; fetch it again") from error
        finally:
            connection.close()

    def _json(
        self, method: str, path: str, body: bytes | Iterator[bytes] | None = None, headers: dict[str, str] | None = None
    ) -> dict[str, Any]:
        connection = self._connect()
        try:
            response = self._request(connection, method, path, body, headers or {})
            answer = json.loads(response.read())
        except ValueError as error:
            raise CommandError(f"{self.url}{self._path}{path} sent no JSON; is it an OpenAI API?") from error
        finally:
            connection.close()
        if not isinstance(answer, dict):
            raise CommandError(f"{self.url}{self._path}{path} sent no object; is it an OpenAI API?")
        return answer

    def _connect(self) -> http.client.HTTPConnection:
        cls = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = cls(self._host, self._port, timeout=CONNECT_TIMEOUT_S)
        try:
            connection.connect()
        except OSError as error:
            remedy = "start one with `quire serve`, or pass --url"
            raise CommandError(f"no server at {self.url} ({error.strerror or error}); {remedy}") from error
        connection.sock.settimeout(READ_TIMEOUT_S)
        return connection

    def _request(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        body: bytes | Iterator[bytes] | None,
        headers: dict[str, str],
    ) -> http.client.HTTPResponse:
        try:
            # The server may refuse a body before its end; its answer says why.
            with suppress(BrokenPipeError, ConnectionResetError):
                connection.request(method, self._path + path, body, {**self._headers, **headers})
            response = connection.getresponse()
            if response.status == 200:
                return response
            text = response.read(65536).decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            raise CommandError(
                f"{self.url} does not answer as an HTTP server ({_reason(error)}); check --url"
            ) from error
        raise CommandError(self._refusal(response, text))

    def _refusal(self, response: http.client.HTTPResponse, text: str) -> str:
        try:
            message = str(json.loads(text)["error"]["message"])
        except (ValueError, KeyError, TypeError):
            message = text.strip()[:300] or response.reason
        remedy = "pass --api-key" if response.status in (401, 403) else ""
        return f"{self.url} refused with {response.status}: {with_remedy(message, remedy)}"


def _form(head: bytes, file: BinaryIO, tail: bytes, size: int, progress: Callable[[int, int], None]) -> Iterator[bytes]:
    """Yield the body of an upload. A file that grows meanwhile is cut at its first size."""
    yield head
    sent = 0
    while sent < size and (data := file.read(min(PIECE, size - sent))):
        yield data
        sent += len(data)
        progress(sent, size)
    yield tail


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
