"""A server with the part of the Hugging Face Hub's interface that downloads use, for its own client."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def hub_server(repositories: Mapping[str, Mapping[str, bytes]]) -> Iterator[tuple[str, list[str]]]:
    """Serve repositories by name, each with the contents of its files. Yields the URL and the files that were sent."""
    sent: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path).strip("/")
            if path.startswith("api/models/"):
                return self._api(path.removeprefix("api/models/"))
            name, _, rest = path.partition("/resolve/")
            file = rest.partition("/")[2]
            if file not in repositories.get(name, {}):
                return self._answer(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
            content = repositories[name][file]
            etag = hashlib.sha256(content).hexdigest()
            if self.command == "GET":
                sent.append(file)
            return self._answer(200, content, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT})

        def _api(self, path: str) -> None:
            name = "/".join(path.split("/")[:2])
            if name not in repositories:
                return self._answer(401, b"{}", {"X-Error-Code": "RepoNotFound"})
            files = repositories[name]
            if "/tree/" in path:
                value: Any = [
                    {"type": "file", "path": file, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                    for file, content in files.items()
                ]
            else:
                value = {"id": name, "sha": COMMIT, "siblings": [{"rfilename": file} for file in files]}
            return self._answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

        def _answer(self, status: int, content: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", sent
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
