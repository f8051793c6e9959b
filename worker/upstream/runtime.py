"""The runtime of a worker that answers with servers of other engines (`worker/service.py`, docs/upstream.md)."""

from __future__ import annotations

import asyncio
import logging
import socket
import urllib.parse
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from quire.shared.model.config import longest_context, read_model_config
from quire.shared.model.files import read_json
from quire.shared.model.hub import HubError, find_folder
from quire.shared.process.errors import StartError
from quire.shared.protocol.broker import Broker
from quire.shared.protocol.messages import WorkerCard
from quire.shared.protocol.messages.requests import MAX_PROMPT_TOKENS
from quire.shared.telemetry.internal_server import InternalServer
from quire.shared.text.tokenizer import eos_token_id, load_tokenizer, read_special_tokens
from quire.worker.progress import progress
from quire.worker.queue.executor import Emit
from quire.worker.queue.metrics import QueueMetrics
from quire.worker.settings import WorkerSettings
from quire.worker.upstream.client import UpstreamClient
from quire.worker.upstream.executor import UpstreamExecutor
from quire.worker.upstream.metrics import UpstreamAdminServer
from quire.worker.upstream.pool import UpstreamPool

log = logging.getLogger(__name__)

# Default of --max-num-seqs.
NUM_SEQS = 64
MAX_UPSTREAMS = 64
MAX_KEY_BYTES = 4096
# Files of a model on the Hugging Face Hub: all but the weights.
_DOWNLOADED = ("*.json", "*.jinja", "tokenizer.model", "*.tiktoken")
_NOT_DOWNLOADED = ("*.safetensors.index.json", "*.bin.index.json", "onnx/*", "original/*")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the folder of the model says."""

    tokenizer: Tokenizer
    vocab_size: int
    eos_token_ids: frozenset[int]
    max_model_len: int
    takes_images: bool = False


class UpstreamRuntime:
    """Upstreams, as a service runs them. A row of `max_num_seqs` is shown as a block of the worker's card."""

    def __init__(self, pool: UpstreamPool, model: ModelFacts, max_num_seqs: int) -> None:
        self._pool = pool
        self._model = model
        self._max_num_seqs = max_num_seqs
        self._executor: UpstreamExecutor

    def executor(self, emit: Emit, ended: Callable[[], None]) -> UpstreamExecutor:
        model = self._model
        self._executor = UpstreamExecutor(
            self._pool, model.tokenizer, model.vocab_size, model.eos_token_ids, self._max_num_seqs, emit, ended
        )
        return self._executor

    def adapters(self, broker: Broker, poll_s: float) -> None:
        """Return None: no adapters are served."""

    def admin_server(self, listener: socket.socket, queue: QueueMetrics, model: str) -> InternalServer:
        return UpstreamAdminServer(self._pool, listener, queue, model).server

    def tasks(self, broker: Broker, worker_id: str, ended: asyncio.Event) -> Mapping[str, Coroutine[Any, Any, object]]:
        return {}

    def card(self, worker_id: str, incarnation: str, model: str) -> WorkerCard:
        status, facts = self._executor.status, self._model
        max_model_len = min(facts.max_model_len, self._pool.max_model_len or facts.max_model_len)
        return WorkerCard(
            worker_id=worker_id,
            incarnation=incarnation,
            model=model,
            max_model_len=max_model_len,
            max_num_seqs=self._max_num_seqs,
            vocab_size=facts.vocab_size,
            eos_token_ids=tuple(sorted(facts.eos_token_ids)),
            block_size=min(max_model_len, 65536),
            total_blocks=self._max_num_seqs,
            free_blocks=status.free_blocks,
            running=status.running,
            waiting=status.waiting,
            steps=status.steps,
            no_images="it sends calls to servers of other engines, as text" if facts.takes_images else "",
        )

    def close(self) -> None: ...


def build_upstream_runtime(settings: WorkerSettings, name: str) -> tuple[UpstreamRuntime, Path]:
    """Read the model's folder, and ask the upstreams once; those that do not answer are asked again later.

    Returns the runtime, and the folder. Raises StartError.
    """
    urls = [_checked_url(url) for url in settings.upstream.split(",") if url.strip()]
    if not urls or len(urls) > MAX_UPSTREAMS or len(set(urls)) < len(urls):
        raise StartError(f"--upstream {settings.upstream}: give 1 to {MAX_UPSTREAMS} different URLs")
    for flag, given in (("--lora", settings.lora), ("--lora-dir", settings.lora_dir)):
        if given:
            raise StartError(f"{flag} {given}: adapters are not served through --upstream; leave one of the two out")
    key = _read_key(settings.upstream_key_file)
    progress.phase("reading the tokenizer")
    try:
        folder = find_folder(settings.model, _DOWNLOADED, _NOT_DOWNLOADED)
    except HubError as error:
        raise StartError(f"model: {error}") from error
    model = _read_model(folder, settings.max_model_len)
    clients = [UpstreamClient(url, key, settings.upstream_idle_s, settings.upstream_total_s) for url in urls]
    pool = UpstreamPool(clients, model.tokenizer, name, settings.upstream_model)
    progress.phase("asking the upstreams")
    asyncio.run(_ask_once(pool))
    return UpstreamRuntime(pool, model, settings.max_num_seqs or NUM_SEQS), folder


async def _ask_once(pool: UpstreamPool) -> None:
    await pool.ask_all()
    await pool.close()


def _checked_url(text: str) -> str:
    url = text.strip()
    try:
        parts = urllib.parse.urlsplit(url)
        is_right = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_right = False
    if not is_right or parts.query or parts.fragment:
        raise StartError(f"--upstream {url}: it is no URL of a server; give one such as http://127.0.0.1:8080")
    if parts.username or parts.password:
        raise StartError("--upstream: a URL has a user or a password; give a key with --upstream-key-file instead")
    return url


def _read_key(file: str) -> str:
    if not file:
        return ""
    try:
        with open(file, "rb") as opened:
            data = opened.read(MAX_KEY_BYTES + 1)
    except OSError as error:
        raise StartError(f"--upstream-key-file {file}: {error.strerror}; give a file with a key") from error
    key = data.decode(errors="replace").strip()
    if not key or len(data) > MAX_KEY_BYTES or not key.isascii() or not key.isprintable():
        raise StartError(f"--upstream-key-file {file}: it is not one line of ASCII; write the key into it alone")
    return key


def _read_model(folder: Path, max_model_len: int) -> ModelFacts:
    """Read tokenizer, vocabulary, end tokens and context, as a gateway does. Raises ModelError."""
    config = read_model_config(folder)
    text_config = config.get("text_config")
    fields = text_config if isinstance(text_config, dict) else config
    special_tokens = read_special_tokens(folder, read_json(folder / "tokenizer_config.json"))
    tokenizer = load_tokenizer(folder, special_tokens)
    eos: list[int] = []
    for source in (read_json(folder / "generation_config.json"), config, fields):
        value = source.get("eos_token_id")
        eos = [token for token in (value if isinstance(value, list) else [value]) if type(token) is int]
        if eos:
            break
    own = eos_token_id(tokenizer, special_tokens)
    declared = fields.get("vocab_size")
    longest = longest_context(fields) or MAX_PROMPT_TOKENS
    return ModelFacts(
        tokenizer,
        declared if type(declared) is int else tokenizer.get_vocab_size(with_added_tokens=True),
        frozenset(eos if own is None else [*eos, own]),
        min(max_model_len or longest, longest),
        config.get("vision_config") is not None,
    )
