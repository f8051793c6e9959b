"""Requests and worker cards: maps with a version, read strictly.

Decoding accepts exactly the known keys, the right types and bounded sizes. The bounds are generous: the gateway
enforces the limits for users.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, NamedTuple

from quire.shared.config.validators import (
    Integer,
    InvalidValue,
    OneOf,
    Text,
    Texts,
    TokenIds,
    checked,
    fixed_array,
    read_map,
    short_array,
)
from quire.shared.protocol.keys import image_name
from quire.shared.protocol.messages.codec import VERSION, as_map, decode, pack, pack_token_ids, unpack_token_ids
from quire.shared.protocol.pace import UNKNOWN_PACE, Pace
from quire.shared.protocol.sampling_params import SamplingParams

MAX_PROMPT_TOKENS = 2_000_000
MAX_SALT_LENGTH = 256
MAX_SCOPE_LENGTH = 256
MAX_ID_LENGTH = 128
MAX_MODEL_LENGTH = 512
MAX_BODY_BYTES = 16 * 1024 * 1024
MAX_CARD_BYTES = 512 * 1024
# Adapters of a worker, the characters of a name with its digest, and the faults that a card has at most.
MAX_ADAPTERS = 1024
MAX_ADAPTER_LENGTH = 256
MAX_ADAPTER_FAULTS = 16
MAX_FAULT_LENGTH = 1000
# Images of a request.
MAX_IMAGES = 4096

# Cache breakpoints of a request, and their times: the shorter one and the longest, in seconds.
MAX_BREAKPOINTS = 4
SHORT_TTL_S = 300
MAX_TTL_S = 3600

# Ways to make an embedding of the hidden states of a prompt: that of the last token, or the mean of all tokens.
POOLINGS = ("last", "mean")
# The pooling of a request that wants logits after its prompt, and the most tokens whose logits it may ask for.
SCORE = "score"
MAX_SCORE_TOKENS = 64


# The fields that a message leaves out if they are empty, as it has them.
_OPTIONAL = {
    "prediction": b"",
    "forked_from": "",
    "num_kept": 0,
    "first_choice": 0,
    "images": (),
    "score_tokens": [],
    "breakpoints": [],
    "pinned_for": "",
}
# The sampling parameters that a message leaves out if they have their defaults, as messages have these.
_OPTIONAL_SAMPLING = {"thinking_token_budget": -1, "thinking_start": [], "thinking_end": [], "repetition_detection": []}


# The same of a worker card.
_OPTIONAL_CARD = {"no_images": "", "pace": UNKNOWN_PACE}


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    if type(value) is not bytes or len(value) % 4 or len(value) > 4 * MAX_PROMPT_TOKENS:
        raise InvalidValue(name, f"must be packed 32-bit token ids, at most {MAX_PROMPT_TOKENS}")
    return unpack_token_ids(value)


def _sampling(name: str, value: Any) -> SamplingParams:
    return read_map(SamplingParams, name, {**_OPTIONAL_SAMPLING, **value} if type(value) is dict else value)


class ImageRef(NamedTuple):
    """An image in a prompt.

    digest: SHA-256 of the bytes of its file, in hexadecimal. start, length: its tokens in the prompt, with those that
    separate its rows or parts; the embeddings of the image take the places of its image tokens among these.
    """

    digest: str
    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length


_DIGEST = re.compile("[0-9a-f]{64}")


def _images(name: str, value: Any) -> tuple[ImageRef, ...]:
    if type(value) not in (list, tuple) or len(value) > MAX_IMAGES:
        raise InvalidValue(name, f"must be an array of at most {MAX_IMAGES} images")
    found: list[ImageRef] = []
    for entry in value:
        digest, start, length = fixed_array(name, entry, 3)
        if type(digest) is not str or not _DIGEST.fullmatch(digest):
            raise InvalidValue(name, "must have digests of 64 hexadecimal characters")
        after = found[-1].end if found else 0
        found.append(
            ImageRef(
                digest, Integer(after, MAX_PROMPT_TOKENS)(name, start), Integer(1, MAX_PROMPT_TOKENS)(name, length)
            )
        )
    return tuple(found)


class CacheBreakpoint(NamedTuple):
    """A place in a prompt: its blocks of the first `position` tokens are pinned for `ttl_s` after their last use."""

    position: int
    ttl_s: int


def _breakpoints(name: str, value: Any) -> tuple[CacheBreakpoint, ...]:
    position, ttl = Integer(1, MAX_PROMPT_TOKENS), Integer(1, MAX_TTL_S)
    pairs = [fixed_array(name, entry, 2) for entry in short_array(name, value, MAX_BREAKPOINTS)]
    return tuple(CacheBreakpoint(position(name, pair[0]), ttl(name, pair[1])) for pair in pairs)


def _pace(name: str, value: Any) -> Pace:
    numbers = fixed_array(name, list(value) if isinstance(value, tuple) else value, len(Pace._fields))
    return Pace(*(Integer(0, 2**31)(name, number) for number in numbers))


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """An accepted request as the worker gets it. A request holds no text except stop strings, bad words and a grammar.

    Requests share cached prefixes only with requests of the same `cache_salt` and `cache_scope`. Pinned prefixes are
    shared by all scopes. A request with a `pooling`, one of POOLINGS, wants the embedding of its prompt, and generates
    no token. With the pooling SCORE it wants the logits of `score_tokens` after its prompt instead. adapter: name of
    the LoRA adapter, whose files have this digest; both empty without one. prediction: tokens that the caller expects
    as the answer, no part of the prompt. They change no token of the answer.

    forked_from: the request whose answer this one continues; empty for any other. num_kept: the last tokens of the
    prompt that are output of that answer: penalties, grammar, bad words and stop strings count them as output.
    first_choice: the choice of that answer; random numbers count the choices from it.

    images: those of the prompt, in its order; they do not overlap. Redis has their files.
    breakpoints: up to which the prompt is pinned in the prefix cache. pinned_for: the API key whose pins these are;
    empty without one.
    """

    id: str = checked(Text(0, MAX_ID_LENGTH))
    model: str = checked(Text(0, MAX_MODEL_LENGTH))
    prompt: tuple[int, ...] = checked(_token_ids)
    sampling: SamplingParams = checked(_sampling)
    cache_salt: str = checked(Text(0, MAX_SALT_LENGTH), default="")
    cache_scope: str = checked(Text(0, MAX_SCOPE_LENGTH), default="")
    pooling: str = checked(OneOf(("", *POOLINGS, SCORE)), default="")
    adapter: str = checked(Text(0, MAX_MODEL_LENGTH), default="")
    adapter_digest: str = checked(Text(0, 64), default="")
    prediction: tuple[int, ...] = checked(_token_ids, default=())
    forked_from: str = checked(Text(0, MAX_ID_LENGTH), default="")
    num_kept: int = checked(Integer(0, MAX_PROMPT_TOKENS), default=0)
    first_choice: int = checked(Integer(0, 2**31), default=0)
    images: tuple[ImageRef, ...] = checked(_images, default=())
    breakpoints: tuple[CacheBreakpoint, ...] = checked(_breakpoints, default=())
    pinned_for: str = checked(Text(0, MAX_SCOPE_LENGTH), default="")
    score_tokens: tuple[int, ...] = checked(TokenIds(MAX_SCORE_TOKENS), default=())
    version: int = checked(Integer(VERSION, VERSION), default=VERSION)

    @property
    def digests(self) -> tuple[str, ...]:
        """The digests of its images, each once."""
        return tuple(dict.fromkeys(image.digest for image in self.images))

    @property
    def image_names(self) -> tuple[str, ...]:
        """The names under which Redis has the files of `digests`."""
        return tuple(image_name(self.cache_scope, digest) for digest in self.digests)

    @property
    def cost(self) -> int:
        """The number of tokens that the request may occupy; admission and placement count this number."""
        generated = 0 if self.pooling else self.sampling.num_sequences * self.sampling.max_tokens
        return len(self.prompt) + generated

    @property
    def rows(self) -> int:
        """The number of sequences that run at once. A worker reads requests for as many rows as it has free."""
        return 1 if self.pooling or not self.sampling.max_tokens else self.sampling.num_sequences

    def encode(self) -> bytes:
        """Return the request as a message, without the optional fields that it does not use."""
        sampling = as_map(self.sampling)
        for name in _OPTIONAL_SAMPLING:
            if sampling[name] in (-1, ()):
                del sampling[name]
        values = as_map(self) | {"prompt": pack_token_ids(self.prompt), "sampling": sampling}
        values["prediction"] = pack_token_ids(self.prediction)
        return pack({name: value for name, value in values.items() if value or name not in _OPTIONAL})

    @classmethod
    def decode(cls, data: bytes) -> GenerationRequest:
        """Read a message. Raise MessageError."""
        return decode(data, MAX_BODY_BYTES, cls._read)

    @classmethod
    def _read(cls, value: Any) -> GenerationRequest:
        return read_map(cls, "request", {**_OPTIONAL, **value} if type(value) is dict else value)


@dataclass(frozen=True, slots=True)
class WorkerCard:
    """The description of a worker for gateways, sent with every heartbeat."""

    worker_id: str = checked(Text(0, 256))
    incarnation: str = checked(Text(0, 64))
    model: str = checked(Text(0, MAX_MODEL_LENGTH))
    max_model_len: int = checked(Integer(1, MAX_PROMPT_TOKENS))
    max_num_seqs: int = checked(Integer(1, 65536))
    vocab_size: int = checked(Integer(1, 2**31 - 1))
    eos_token_ids: tuple[int, ...] = checked(TokenIds(64))
    block_size: int = checked(Integer(1, 65536))
    total_blocks: int = checked(Integer(1, 2**40))
    free_blocks: int = checked(Integer(0, 2**40))
    running: int = checked(Integer(0, 2**31))
    waiting: int = checked(Integer(0, 2**31))
    steps: int = checked(Integer(0, 2**62))
    # Digest of the weights; empty if the worker has none.
    weights_digest: str = checked(Text(0, 64), default="")
    # The LoRA adapters that the worker holds, as `name@digest`, and faults of those that it could not load.
    adapters: tuple[str, ...] = checked(Texts(MAX_ADAPTERS, 1, MAX_ADAPTER_LENGTH), default=())
    adapter_faults: tuple[str, ...] = checked(Texts(MAX_ADAPTER_FAULTS, 1, MAX_FAULT_LENGTH), default=())
    # Why it computes no images; empty if it does, and of a model without images.
    no_images: str = checked(Text(0, MAX_FAULT_LENGTH), default="")
    # What requests cost it in time.
    pace: Pace = checked(_pace, default=UNKNOWN_PACE)
    version: int = checked(Integer(VERSION, VERSION), default=VERSION)

    def encode(self) -> bytes:
        """Return the card as a message, without optional fields that say nothing."""
        return pack({name: value for name, value in as_map(self).items() if value != _OPTIONAL_CARD.get(name)})

    @classmethod
    def decode(cls, data: bytes) -> WorkerCard:
        """Read a message. Raise MessageError."""
        return decode(data, MAX_CARD_BYTES, cls._read)

    @classmethod
    def _read(cls, value: Any) -> WorkerCard:
        return read_map(cls, "worker card", {**_OPTIONAL_CARD, **value} if type(value) is dict else value)
