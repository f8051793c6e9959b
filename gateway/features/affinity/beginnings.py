"""Hashes of the beginnings of a conversation: its calls are likely to have prompts that begin alike."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from quire.shared.text.chat_template import Message

# Bytes of a hash: too many for a tenant to find texts that have the hash of another one's.
HASH_BYTES = 12
# Roles of the messages that many conversations have in common.
INSTRUCTORS = ("system", "developer")
# Instructions of fewer characters are computed in less time than it takes to choose a worker.
MIN_INSTRUCTIONS = 256
# Characters of a text that stand for the whole.
MAX_CHARACTERS = 16_384


def beginnings_of(messages: Sequence[Message], tools: Sequence[str]) -> tuple[bytes, ...]:
    """Return a hash of a conversation up to its first message after the instructions, then one of long instructions.

    tools: names of the tools that the model may call; they count as instructions.
    """
    count = next((at for at, message in enumerate(messages) if message["role"] not in INSTRUCTORS), len(messages))
    instructions = [*tools, *map(_text, messages[:count])]
    first = "" if count == len(messages) else _text(messages[count])
    beginning = hashed("first", *instructions, first)
    if sum(map(len, instructions)) < MIN_INSTRUCTIONS:
        return (beginning,)
    return beginning, hashed("instructions", *instructions)


def hashed(*parts: str | bytes) -> bytes:
    """Return the hash of parts. Different parts have different hashes."""
    digest = hashlib.blake2b(digest_size=HASH_BYTES)
    for part in parts:
        data = part.encode(errors="surrogatepass") if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()


def _text(message: Message) -> str:
    content = message["content"] or ""
    text = content if isinstance(content, str) else "\n".join(map(_part_text, content))
    return text[:MAX_CHARACTERS]


def _part_text(part: Mapping[str, Any]) -> str:
    """Return the text of a part, or what names its image. An image that was read has its digest in any call."""
    if (image := part.get("image")) is not None:
        return str(image.digest)
    return str(part.get("text") or part.get("url") or part.get("file_id", ""))
