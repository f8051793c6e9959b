"""The metadata of a call: with it and the output of the requests any gateway can render the answer.

Each request of the call carries this metadata as one msgpack array, which gateways read strictly.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any

import msgpack

from quire.gateway.stream.output_spec import MAX_SPEC_LENGTH, OutputSpec, read_spec
from quire.shared.config.validators import Flag, Integer, InvalidValue, OneOf, Text, Texts, checked, fixed_array
from quire.shared.model.naming import MAX_ADAPTER_NAME
from quire.shared.protocol.logprobs import MAX_TOP_LOGPROBS
from quire.shared.protocol.messages import MAX_PROMPT_TOKENS, MessageError, decode
from quire.shared.protocol.sampling_params import MAX_CHOICES, MAX_STOP_LENGTH, MAX_STOP_STRINGS

VERSION = 2
DIALECTS = ("chat", "completion", "response", "message", "embeddings", "rerank", "score")
# OpenAI's service tiers, in the order of `labels.CLASSES`.
TIERS = ("default", "flex", "priority")
MAX_METADATA_PAIRS = 16
MAX_METADATA_KEY = 64
MAX_METADATA_VALUE = 512
MAX_CACHE_KEY_LENGTH = 512
# The largest size of a message; a character has at most four bytes.
MAX_LABEL_CHARACTERS = MAX_METADATA_PAIRS * (MAX_METADATA_KEY + MAX_METADATA_VALUE) + MAX_CACHE_KEY_LENGTH
MAX_ECHO_LENGTH = 1024 * 1024
MAX_TEXT_LENGTH = MAX_STOP_STRINGS * MAX_STOP_LENGTH + MAX_LABEL_CHARACTERS + MAX_SPEC_LENGTH + MAX_ECHO_LENGTH
MAX_BYTES = 4 * MAX_TEXT_LENGTH + 4096
MAX_REQUESTS = 2048
MAX_FINGERPRINT = 64


def request_id(call_id: str, index: int) -> str:
    """Return the id of a call's request for the prompt `index`; the first request has the id of the call."""
    return f"{call_id}-{index}" if index else call_id


def metadata_pairs(name: str, value: Any) -> tuple[tuple[str, str], ...]:
    """Return the pairs of `metadata` as a message carries them: arrays of two strings. Raises InvalidValue."""
    if type(value) is not list or len(value) > MAX_METADATA_PAIRS:
        raise InvalidValue(name, f"must have at most {MAX_METADATA_PAIRS} pairs")
    key, text = Text(1, MAX_METADATA_KEY), Text(0, MAX_METADATA_VALUE)
    for pair in value:
        if type(pair) is not list or len(pair) != 2:
            raise InvalidValue(name, "must have pairs of a key and a string")
        try:
            key(name, pair[0])
        except InvalidValue:
            raise InvalidValue(name, f"must have keys of 1 to {MAX_METADATA_KEY} characters") from None
        text(f"{name}.{pair[0]}", pair[1])
    return tuple((pair[0], pair[1]) for pair in value)


@dataclass(frozen=True, slots=True)
class CallMetadata:
    """One call, with a request for each prompt.

    created: unix seconds. n: choices per prompt. prompt_tokens: of all prompts together.
    is_background: the call runs on without a client. metadata, service_tier: returned in the answer; empty if the call
    did not ask for them. prompt_cache_key: of the call. output_spec: the JSON of `OutputSpec`; empty for an answer of
    plain text. echo: JSON that the dialect repeats in its answer. adapter: the LoRA adapter that the call named as its
    model; empty for the model itself.

    echoes_prompt: the prompt is the beginning of the text. logprobs: number of alternatives per token; -1: no
    log-probabilities. prompt_logprobs: the same for the field `prompt_logprobs`. return_token_ids: token ids of prompt
    and answer. return_tokens_as_token_ids: log-probabilities name tokens by their ids. skip_special_tokens: special
    tokens have no text. continues_message: the answer continues the last message of a chat. continuous_usage: events of
    the stream have the usage so far. system_fingerprint: of the server when the call was accepted.
    """

    dialect: str = checked(OneOf(DIALECTS))
    created: int = checked(Integer(0, 2**40))
    n: int = checked(Integer(1, MAX_CHOICES))
    include_usage: bool = checked(Flag())
    stop: tuple[str, ...] = checked(Texts(MAX_STOP_STRINGS, 1, MAX_STOP_LENGTH))
    prompt_tokens: int = checked(Integer(0, MAX_REQUESTS * MAX_PROMPT_TOKENS))
    requests: int = checked(Integer(1, MAX_REQUESTS))
    is_background: bool = checked(Flag())
    include_stop_str_in_output: bool = checked(Flag(), default=False)
    metadata: tuple[tuple[str, str], ...] = checked(metadata_pairs, default=())
    service_tier: str = checked(OneOf(("", *TIERS)), default="")
    prompt_cache_key: str = checked(Text(0, MAX_CACHE_KEY_LENGTH), default="")
    echoes_prompt: bool = checked(Flag(), default=False)
    logprobs: int = checked(Integer(-1, MAX_TOP_LOGPROBS), default=-1)
    prompt_logprobs: int = checked(Integer(-1, MAX_TOP_LOGPROBS), default=-1)
    return_token_ids: bool = checked(Flag(), default=False)
    return_tokens_as_token_ids: bool = checked(Flag(), default=False)
    skip_special_tokens: bool = checked(Flag(), default=True)
    continues_message: bool = checked(Flag(), default=False)
    continuous_usage: bool = checked(Flag(), default=False)
    system_fingerprint: str = checked(Text(0, MAX_FINGERPRINT), default="")
    output_spec: str = checked(Text(0, MAX_SPEC_LENGTH), default="")
    echo: str = checked(Text(0, MAX_ECHO_LENGTH), default="")
    adapter: str = checked(Text(0, MAX_ADAPTER_NAME), default="")

    def output(self) -> OutputSpec | None:
        """Return the formats with which the answer is read; None if it is plain text. Raises MessageError."""
        try:
            return read_spec("output_spec", self.output_spec) if self.output_spec else None
        except InvalidValue as error:
            raise MessageError(str(error)) from error

    def model_name(self, model: str) -> str:
        """Return the name of the model in the answer. model: the name of the served model."""
        return self.adapter or model

    @property
    def needs_prompt(self) -> bool:
        """True if the answer has the prompt's text, token ids or log-probabilities."""
        return self.echoes_prompt or self.return_token_ids or self.prompt_logprobs >= 0

    @property
    def choices(self) -> int:
        """Choices of all prompts together."""
        return self.requests * self.n

    @property
    def label_fields(self) -> tuple[str, str]:
        """The fields of the answer that labels add, as JSON: the tier with a comma after it, the metadata with one
        before. A field is empty if the call did not ask for it."""
        tier = f'"service_tier":{json.dumps(self.service_tier)},' if self.service_tier else ""
        pairs = json.dumps(dict(self.metadata), separators=(",", ":"))
        return tier, f',"metadata":{pairs}' if self.metadata else ""

    def encode(self) -> bytes:
        """Return the metadata as a message: an array of the version and the fields, some of which are an array."""
        values = _values(self)
        written = (VERSION, *values[:_FIRST], values[_FIRST:_LAST], *values[_LAST:])
        return bytes(msgpack.packb(written, use_bin_type=True))

    @classmethod
    def decode(cls, data: bytes) -> CallMetadata:
        """Read a message. Raises MessageError."""
        return decode(data, MAX_BYTES, cls._read)

    @classmethod
    def _read(cls, value: Any) -> CallMetadata:
        version, *values = fixed_array("call metadata", value, 2 + len(_FIELDS) - (_LAST - _FIRST))
        _version("version", version)
        values[_FIRST : _FIRST + 1] = fixed_array("answer", values[_FIRST], _LAST - _FIRST)
        given = zip(_FIELDS, values, strict=True)
        return cls(*(field.metadata["check"](field.name, value) for field, value in given))


_FIELDS = fields(CallMetadata)
_NAMES = [field.name for field in _FIELDS]
# The fields that are an array of their own in the message.
_FIRST, _LAST = _NAMES.index("echoes_prompt"), _NAMES.index("output_spec")
_values = attrgetter(*_NAMES)
_version = Integer(VERSION, VERSION)
