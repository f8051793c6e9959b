"""The labels of a call: the parameters that name its user, return metadata with the answer, and choose a class.

Labels do not depend on the dialect, which adds `LABELS` and `NO_EFFECT` to its table of parameters.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Any

from quire.gateway.stream.call_metadata import (
    MAX_CACHE_KEY_LENGTH,
    MAX_METADATA_KEY,
    MAX_METADATA_PAIRS,
    MAX_METADATA_VALUE,
    TIERS,
    metadata_pairs,
)
from quire.shared.config.schema_parts import ANY_OBJECT, map_of
from quire.shared.config.validators import Flag, OneOf, Text, wrong
from quire.shared.protocol.sampling_params import Parameter

MAX_USER_LENGTH = 512
# Hexadecimal digits of a hash in logs: 64 bits tell apart millions of users.
USER_HASH_DIGITS = 16

# The priority class of each service tier. The tier `auto` leaves the class to the parameter `priority`.
AUTO = "auto"
CLASSES = dict(zip(TIERS, ("standard", "batch", "interactive"), strict=True))
TIER_OF_CLASS = {priority_class: tier for tier, priority_class in CLASSES.items()}


class Metadata:
    """An object of at most 16 pairs of strings; the final form is a tuple of pairs."""

    schema = map_of(MAX_METADATA_PAIRS, Text(1, MAX_METADATA_KEY), Text(0, MAX_METADATA_VALUE))

    def __call__(self, name: str, value: Any) -> tuple[tuple[str, str], ...]:
        if type(value) is not dict:
            raise wrong(name, "an object", value)
        return metadata_pairs(name, list(map(list, value.items())))

    def __str__(self) -> str:
        return (
            f"an object of at most {MAX_METADATA_PAIRS} strings of at most {MAX_METADATA_VALUE} characters, with keys "
            f"of 1 to {MAX_METADATA_KEY}"
        )


class JsonObject:
    """An object with any content."""

    schema = ANY_OBJECT

    def __call__(self, name: str, value: Any) -> dict[str, Any]:
        if type(value) is not dict:
            raise wrong(name, self, value)
        return value

    def __str__(self) -> str:
        return "an object"


LABELS: dict[str, Parameter] = {
    "user": Parameter(
        read=Text(0, MAX_USER_LENGTH),
        default="",
        help="the end user of the caller: a [keyed hash](#labels) of it is in the logs, never the text",
    ),
    "safety_identifier": Parameter(
        read=Text(0, MAX_USER_LENGTH), default="", help="the newer name of `user`, with precedence over it"
    ),
    "metadata": Parameter(
        read=Metadata(),
        default=(),
        help="stored with the request, and returned in the answer; in a stream, with each `finish_reason`",
    ),
    "service_tier": Parameter(
        read=OneOf((AUTO, *CLASSES)),
        help="the [class](#deadlines-and-classes): `default` is `standard`, `flex` is `batch`, `priority` is "
        "`interactive`, and `auto` leaves it to `priority`. A conflict with `priority` is refused. The answer and each "
        "event have the tier of the class as `service_tier`",
    ),
    "prompt_cache_key": Parameter(
        read=Text(0, MAX_CACHE_KEY_LENGTH),
        default="",
        help="names a conversation, or texts that begin alike: its calls go to the same worker if that one is free "
        "([prefix affinity](../prefix-affinity.md)). Prompts with the same beginning share memory without a key",
    ),
}
# Parameters that are checked and then have no effect, with the reason. A value among `neutral` asks for nothing.
NO_EFFECT: dict[str, Parameter] = {
    "store": Parameter(
        read=Flag(),
        default=False,
        neutral=(False,),
        help="every answer can be [read again](#resuming-and-cancelling) for ten minutes after its end, none longer",
    ),
    "prompt_cache_retention": Parameter(
        read=OneOf(("in_memory", "in-memory", "24h")),
        help="a cached beginning of a prompt stays until its memory is needed",
    ),
    "prompt_cache_options": Parameter(read=JsonObject(), help="the prefix cache has no options per request"),
    "prediction": Parameter(read=JsonObject(), help="completions take none; a chat [takes one](#parameters)"),
}


def user_hash(user: str, key: bytes) -> str:
    """Return the hash of a user for logs: the beginning of HMAC-SHA-256, in hexadecimal. Empty without a user."""
    if not user:
        return ""
    return hmac.new(key, user.encode(), hashlib.sha256).hexdigest()[:USER_HASH_DIGITS]
