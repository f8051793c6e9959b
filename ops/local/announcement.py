"""The output of `quire serve` once it serves: the URLs, how to chat, how to stop, and a request to paste."""

from __future__ import annotations

import http.client
import json
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path


def announcement(url: str, models: Sequence[str], logs: Path, is_default_port: bool, needs_key: bool) -> str:
    """Return the lines of the announcement. The first is `ready: URL`, for programs that start `quire serve`.

    needs_key: the commands get the word KEY in place of an API key.
    """
    request = {
        "model": models[0],
        "messages": [{"role": "user", "content": "Tell me a story about a fox."}],
        "stream": True,
    }
    authorization = " -H 'Authorization: Bearer KEY'" if needs_key else ""
    body = json.dumps(request).replace("'", "'\\''")
    lines = [f"ready: {url}", ""]
    if answers(url, "/"):
        lines.append(f"  page   {url}/")
    chat = f"{quire_command()} chat" + ("" if is_default_port else f" --url {url}") + (" --api-key KEY" * needs_key)
    lines += [
        f"  API    {url}/v1",
        f"  model  {', '.join(models)}",
        f"  logs   {logs}",
        f"  chat   {chat}",
        "  stop   Ctrl-C",
        "",
        f"curl -N {url}/v1/chat/completions -H 'Content-Type: application/json'{authorization} -d '{body}'",
    ]
    return "\n".join(lines)


def answers(url: str, path: str) -> bool:
    """Return whether a GET of `path` returns status 200."""
    return _get(url, path) is not None


def listed_models(url: str) -> set[str]:
    """Return the names of the models that have a live worker; none if the server does not answer."""
    try:
        return {card["id"] for card in json.loads(_get(url, "/v1/models") or b"")["data"]}
    except (ValueError, KeyError, TypeError):
        return set()


def _get(url: str, path: str) -> bytes | None:
    """Return the body of an answer with status 200, else None."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    connection = http.client.HTTPConnection(host.strip("[]"), int(port), timeout=2)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.read() if response.status == 200 else None
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def local_url(host: str, port: int) -> str:
    """Return the URL at which this machine reaches a server that listens on `host` and `port`."""
    if host in ("", "0.0.0.0"):
        host = "127.0.0.1"
    elif host == "::":
        host = "::1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def quire_command() -> str:
    """Return the command as the user can type it: by name, or in a checkout by its path in the virtual environment."""
    script = Path(sys.executable).with_name("quire")
    if shutil.which("quire") or not script.is_file():
        return "quire"
    return shlex.quote(str(script.relative_to(Path.cwd()) if script.is_relative_to(Path.cwd()) else script))
