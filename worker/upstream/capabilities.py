"""What an upstream can do, as found by asking it for one token.

prompt of token ids -> count of the prompt's tokens is right      it takes token ids
                    -> refused, or another count                  it gets text
`return_token_ids`  -> the choice has `token_ids`                 it returns token ids (vLLM, Quire)
/completion         -> `tokens` (`return_tokens`)                 it returns token ids (llama.cpp)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from tokenizers import Tokenizer

from quire.worker.upstream.client import StreamBroken, UpstreamClient, UpstreamDown, UpstreamRefused

# Of a few tokens in any tokenizer.
TRIAL_TEXT = "The quick brown fox jumps over the lazy dog."


class ServerFamily(StrEnum):
    """Whose server an upstream is, as far as its parameters differ. VLLM includes Quire and servers like them."""

    VLLM = "vllm"
    SGLANG = "sglang"
    LLAMA_CPP = "llama.cpp"
    OTHER = "another server"


# By `owned_by` of the list of models.
_OWNERS = {
    "vllm": ServerFamily.VLLM,
    "quire": ServerFamily.VLLM,
    "sglang": ServerFamily.SGLANG,
    "llamacpp": ServerFamily.LLAMA_CPP,
}


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What one upstream can do.

    model: its name for the model. max_model_len: None if it does not say. adds_bos: it puts a first token before a
    prompt that it gets as text.
    """

    family: ServerFamily
    model: str
    takes_ids: bool
    returns_ids: bool
    adds_bos: bool = False
    max_model_len: int | None = None

    @property
    def is_native(self) -> bool:
        """True if llama.cpp's own endpoint is used, since only that one returns token ids."""
        return self.family is ServerFamily.LLAMA_CPP and self.returns_ids

    def __str__(self) -> str:
        kinds = {True: "token ids", False: "text"}
        return (
            f"{self.family}, model {self.model}; prompts go as {kinds[self.takes_ids]}, answers come as "
            f"{kinds[self.returns_ids]}"
        )


async def find_capabilities(
    client: UpstreamClient, tokenizer: Tokenizer, served_name: str, wanted: str
) -> Capabilities:
    """Ask an upstream. wanted: the model of --upstream-model, or empty.

    Raises UpstreamDown with the reason if it does not answer, or cannot be used.
    """
    try:
        entry = _choose_model(await client.get("/v1/models"), served_name, wanted)
        return await _try_prompts(client, tokenizer, entry)
    except (UpstreamRefused, StreamBroken) as error:
        raise UpstreamDown(str(error)) from error


def _choose_model(listed: Any, served_name: str, wanted: str) -> Mapping[str, Any]:
    entries = listed.get("data") if isinstance(listed, dict) else None
    known = {entry["id"]: entry for entry in entries or () if isinstance(entry, dict) and type(entry.get("id")) is str}
    if wanted or served_name in known:
        if (name := wanted or served_name) in known:
            return dict(known[name])
    elif len(known) == 1:
        return dict(next(iter(known.values())))
    names = ", ".join(sorted(known))[:200]
    raise UpstreamDown(f"it serves {names or 'no model'}, not {wanted or served_name}; name one by --upstream-model")


async def _try_prompts(client: UpstreamClient, tokenizer: Tokenizer, entry: Mapping[str, Any]) -> Capabilities:
    model, family = str(entry["id"]), _OWNERS.get(str(entry.get("owned_by")), ServerFamily.OTHER)
    length = entry.get("max_model_len")
    max_model_len = length if type(length) is int and length > 0 else None
    ids = tokenizer.encode(TRIAL_TEXT, add_special_tokens=False).ids
    trial = {"model": model, "max_tokens": 1, "temperature": 0, "stream": False}
    try:
        answer = await client.post("/v1/completions", {**trial, "prompt": ids, "return_token_ids": True})
        choices = answer.get("choices") if isinstance(answer, dict) else None
        takes_ids = isinstance(choices, list) and len(choices) == 1 and _prompt_tokens(answer) == len(ids)
    except UpstreamRefused:
        takes_ids, choices = False, None
    if takes_ids and choices and _are_ids(choices[0].get("token_ids")):
        return Capabilities(ServerFamily.VLLM, model, True, True, max_model_len=max_model_len)
    if takes_ids and family in (ServerFamily.LLAMA_CPP, ServerFamily.OTHER):
        native = {"prompt": ids, "n_predict": 1, "temperature": 0, "return_tokens": True, "stream": False}
        try:
            answer = await client.post("/completion", native)
            if isinstance(answer, dict) and _are_ids(answer.get("tokens")):
                length = await _context_of_slot(client)
                return Capabilities(ServerFamily.LLAMA_CPP, model, True, True, max_model_len=max_model_len or length)
        except (UpstreamRefused, UpstreamDown, StreamBroken):
            pass  # there is no such endpoint
    if takes_ids:
        return Capabilities(family, model, True, False, max_model_len=max_model_len)
    answer = await client.post("/v1/completions", {**trial, "prompt": TRIAL_TEXT})
    count = _prompt_tokens(answer)
    if count not in (len(ids), len(ids) + 1):
        raise UpstreamDown(
            f"it counts {count} tokens in a text of {len(ids)}: it has another tokenizer than --model, or puts prompts "
            "into a template"
        )
    return Capabilities(family, model, False, False, count > len(ids), max_model_len)


async def _context_of_slot(client: UpstreamClient) -> int | None:
    """Return the longest context of one request of a llama.cpp server; None if it does not say."""
    try:
        settings = (await client.get("/props")).get("default_generation_settings") or {}
        length = settings.get("n_ctx")
    except (AttributeError, UpstreamRefused, UpstreamDown, StreamBroken):
        return None
    return length if type(length) is int and length > 0 else None


def _prompt_tokens(answer: Any) -> int:
    usage = answer.get("usage") if isinstance(answer, dict) else None
    count = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    return count if type(count) is int else -1


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)
