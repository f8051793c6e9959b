"""A server to measure: its models, the parameters that it accepts, and its token counts."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from quire.ops.cli.server_url import ServerUrl, parse_url, with_remedy
from quire.ops.loadgen.client import RequestRecord, encode, refusal, stream
from quire.ops.loadgen.prompts import WORDS, IdPrompts, Prompts, WordPrompts
from quire.ops.loadgen.settings import BenchSettings
from quire.shared.config.command_line import CommandError
from quire.shared.config.settings import SettingError

CONNECT_TIMEOUT_S = 30.0
# Vocabulary sizes to try, largest first. All token ids below an accepted size are valid.
VOCAB_SIZES = (32_768, 16_384, 8192, 4096, 2048, 1024, 512, 256, 128)


@dataclass
class MeasuredServer:
    """One server under load.

    context: its longest context; None if unknown. usage: whether its streams end with token counts. label: its name in
    results.
    """

    flag: str
    url: ServerUrl
    model: str
    software: str
    context: int | None
    endpoint: str
    options: dict[str, Any]
    label: str
    usage: bool = True

    @property
    def name(self) -> str:
        return self.url.shown

    @property
    def address(self) -> str:
        return f"{self.url.base}/{'chat/completions' if self.endpoint == 'chat' else 'completions'}"

    def body(self, prompt: str | list[int], max_tokens: int) -> bytes:
        """Return a streaming request for `max_tokens` tokens."""
        body: dict[str, Any] = {"model": self.model, "max_tokens": max_tokens, "stream": True, **self.options}
        if self.endpoint == "chat":
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        if self.usage:
            body["stream_options"] = {"include_usage": True}
        return encode(body)

    async def ask(self, session: aiohttp.ClientSession, prompt: str | list[int], max_tokens: int = 1) -> RequestRecord:
        record = RequestRecord(0, 0, max_tokens)
        await stream(session, self.address, self.body(prompt, max_tokens), record)
        return record


async def connect(
    session: aiohttp.ClientSession, settings: BenchSettings, flag: str, wanted: str, required: bool = True
) -> MeasuredServer:
    """Connect to the server whose URL was given with `flag`, and send one request to its model.

    wanted: name of the model; empty for the server's first. required: refuse a server without that model, instead of
    using its first. Raise CommandError with the remedy.
    """
    url = parse_url(getattr(settings, flag[2:]), flag)
    headers, models = await _models(session, url, flag)
    names = [str(model["id"]) for model in models]
    if wanted and wanted not in names and required:
        raise CommandError(f"{url.shown} has no model {wanted!r}; give --model with one of {', '.join(names)}")
    name = wanted if wanted in names else names[0]
    said = models[names.index(name)].get("max_model_len")
    software = headers.get("Server", "")
    if version := await _version(session, url):
        software = f"{software} {version}".strip()
    options: dict[str, Any] = {"temperature": settings.temperature}
    if settings.ignore_eos:
        options["ignore_eos"] = True
    server = MeasuredServer(
        flag, url, name, software, said if isinstance(said, int) else None, settings.endpoint, options, url.shown
    )
    record = await server.ask(session, WORDS[0])
    if record.error.startswith("status 4") and "stream_options" in record.message:
        server.usage = False
        record = await server.ask(session, WORDS[0])
    if record.error and record.error != "empty answer":
        remedy = ""
        if "ignore_eos" in record.message:
            remedy = "give --no-ignore-eos"
        elif record.error in ("status 401", "status 403"):
            remedy = "set QUIRE_BENCH_API_KEY"
        message = with_remedy(record.message, remedy)
        raise CommandError(f"{server.address} refused a first request ({record.error}): {message}")
    server.usage = record.completion_tokens is not None
    return server


async def make_prompts(
    session: aiohttp.ClientSession,
    servers: list[MeasuredServer],
    settings: BenchSettings,
    shared: int,
    count: Callable[[str], int] | None,
) -> Prompts:
    """Make prompts that all `servers` accept, and whose first `shared` tokens are equal.

    count: counts the tokens of a text; None without a tokenizer. Raise CommandError.
    """
    ids_wanted = settings.prompts == "ids" or (settings.prompts == "auto" and count is None)
    if ids_wanted and settings.endpoint == "completions":
        sizes = [await _accepted_ids(session, server) for server in servers]
        if all(sizes):
            return IdPrompts(min(sizes), shared, settings.seed)
        if settings.prompts == "ids":
            refused = servers[sizes.index(0)]
            raise CommandError(f"{refused.name} takes no token ids as prompts; give --prompts text")
    first = servers[0]
    if count is not None:
        words = " ".join(WORDS)
        counted = count(words)
        record = await first.ask(session, words)
        fixed: float = max(0, record.prompt_tokens - counted) if record.prompt_tokens is not None else 0
        how = f"random words, counted with {Path(settings.tokenizer).name} (the server adds {fixed:g})"
        return WordPrompts(shared, settings.seed, how, fixed, counted / len(WORDS), count)
    once, twice = [await _count(session, first, WORDS * times) for times in (1, 2)]
    per_word = (twice - once) / len(WORDS)
    if per_word <= 0:
        raise CommandError(f"{first.name} counts as many tokens in twice as many words; give --tokenizer PATH")
    fixed = max(0.0, once - per_word * len(WORDS))
    how = f"random words, calibrated with the server's count ({per_word:.2f} tokens per word, {fixed:.0f} besides)"
    return WordPrompts(shared, settings.seed, how, fixed, per_word)


def load_tokenizer(path: str) -> Callable[[str], int]:
    """Load a tokenizer. Return a function that counts tokens, without special tokens. Raise SettingError."""
    file = Path(path).expanduser()
    file = file / "tokenizer.json" if file.is_dir() else file
    if not file.is_file():
        raise SettingError(f"--tokenizer: there is no {str(file)!r}; give the model's folder or its tokenizer.json")
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise SettingError(f"--tokenizer: {str(file)!r} is not one ({error}); give a tokenizer.json") from error
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)


async def _models(session: aiohttp.ClientSession, url: ServerUrl, flag: str) -> tuple[Any, list[dict[str, Any]]]:
    try:
        async with session.get(
            f"{url.base}/models", timeout=aiohttp.ClientTimeout(total=CONNECT_TIMEOUT_S)
        ) as response:
            text = (await response.content.read(1 << 20)).decode(errors="replace")
            if response.status in (401, 403):
                raise CommandError(
                    f"{url.shown} refused with {response.status}: {refusal(text)}; set QUIRE_BENCH_API_KEY"
                )
            if response.status != 200:
                raise CommandError(f"{url.base}/models answers with {response.status}: {refusal(text)}; check {flag}")
            headers = response.headers
    except (TimeoutError, aiohttp.ClientError, OSError) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise CommandError(
            f"no server at {url.shown} ({reason}); start one with `quire serve`, or pass {flag}"
        ) from error
    try:
        models = [model for model in json.loads(text)["data"] if isinstance(model["id"], str)]
    except (ValueError, KeyError, TypeError) as error:
        raise CommandError(f"{url.base}/models is no list of models; is it an OpenAI API?") from error
    if not models:
        raise CommandError(f"the server at {url.shown} has no model yet; wait until a worker has started")
    return headers, models


async def _version(session: aiohttp.ClientSession, url: ServerUrl) -> str:
    """Return the version from `/version`, which vLLM has; empty if the server has no such page."""
    try:
        timeout = aiohttp.ClientTimeout(total=CONNECT_TIMEOUT_S)
        async with session.get(url.base.removesuffix("/v1") + "/version", timeout=timeout) as response:
            if response.status == 200:
                return str(json.loads(await response.content.read(4096))["version"])[:100]
    except (TimeoutError, aiohttp.ClientError, OSError, ValueError, KeyError, TypeError):
        pass  # most servers have no such page
    return ""


async def _accepted_ids(session: aiohttp.ClientSession, server: MeasuredServer) -> int:
    """Return the largest of VOCAB_SIZES whose ids the server accepts; 0 if it accepts no token ids."""
    for size in VOCAB_SIZES:
        record = await server.ask(session, [size - 1, size - 2])
        counted = record.prompt_tokens
        if record.error in ("", "empty answer") and (counted is None or counted in (2, 3)):
            return size
    return 0


async def _count(session: aiohttp.ClientSession, server: MeasuredServer, words: list[str]) -> int:
    record = await server.ask(session, " ".join(words))
    if record.prompt_tokens is None:
        what = f"{record.error}: {record.message}" if record.error else "it does not say"
        raise CommandError(
            f"{server.name} does not count the tokens of a prompt of {len(words)} words ({what}); give --tokenizer "
            "PATH, or --prompts ids"
        )
    return record.prompt_tokens
