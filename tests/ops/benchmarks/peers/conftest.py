"""Stand-ins for the programs of the peers: real processes that answer as llama-server and vLLM do."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SERVER = """#!{python}
import json, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

args = sys.argv[1:]
if "--version" in args:
    print("WARNING: no accelerator", file=sys.stderr)
    print("7.1 (abc)" if sys.argv[0].endswith("vllm") else "version: 7.1 (abc)", file=sys.stderr)
    sys.exit()
if "--dies" in args:
    print("cannot read the model", file=sys.stderr)
    sys.exit(3)
print("I system_info: n_threads = 2 | CPU : AVX2 = 1 | AVX512 = 0 | F16C = 1 |", flush=True)
print("I print_info: file type   = F16", flush=True)


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args): pass

    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with open({record!r}, "a") as file:
            file.write(json.dumps([sys.argv[0].rpartition("/")[2], body["prompt"], body["max_tokens"]]) + "\\n")
        self.send_response(200)
        self.end_headers()
        for at in range(body["max_tokens"]):
            choice = dict(index=0, text="w", finish_reason=None if at + 1 < body["max_tokens"] else "length")
            usage = dict(prompt_tokens=len(body["prompt"]), completion_tokens=body["max_tokens"])
            last = dict(usage=usage) if choice["finish_reason"] else dict()
            self.wfile.write(b"data: " + json.dumps(dict(choices=[choice], **last)).encode() + b"\\n\\n")
        self.wfile.write(b"data: [DONE]\\n\\n")


ThreadingHTTPServer(("127.0.0.1", int(args[args.index("--port") + 1])), Handler).serve_forever()
"""


class Programs:
    """The stand-ins in a folder, and the requests that they got: name of the program, prompt, length of the answer."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._record = folder / "requests"

    def add(self, name: str) -> Path:
        path = self.folder / name
        path.write_text(SERVER.replace("{python}", sys.executable).replace("{record!r}", repr(str(self._record))))
        path.chmod(0o755)
        return path

    def requests(self) -> list[tuple[str, list[int], int]]:
        return [(*json.loads(line),) for line in self._record.read_text().splitlines()]


@pytest.fixture
def programs(tmp_path: Path) -> Callable[..., Programs]:
    """Return a function that makes stand-ins with these names."""

    def make(*names: str) -> Programs:
        made = Programs(tmp_path)
        for name in names:
            made.add(name)
        return made

    return make


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The folder of a model, of which only the size of its vocabulary is read."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"vocab_size": 1000}))
    (folder / "model.gguf").write_text("weights")
    return folder
