"""The terms on which a request is let into the queue: what `submit.lua` reads besides the request itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import msgpack

from quire.shared.protocol.charge import ChargedAccount, Price
from quire.shared.protocol.keys import DEFAULT_CLASS, AccountKeys
from quire.shared.protocol.pace import LanePace
from quire.shared.protocol.share import ANONYMOUS_TENANT, DEFAULT_WEIGHT


@dataclass(frozen=True, slots=True)
class QueueBounds:
    """Largest number of requests and of tokens that may wait in a lane, over all classes.

    stored_bytes, key_bytes: of all requests that stay (stored, in the background, parked, or with much text), and of
    those of one API key; 0 is any number.
    """

    requests: int
    tokens: int
    stored_bytes: int = 2**28
    key_bytes: int = 0


class Admission(NamedTuple):
    """The terms of one request; those of a call are the same for its requests up to the fields of a request.

    gateway: that listens to the request. bounds: of the queue.

    Fields of a request. cost: tokens that it may use at most. prompt_tokens: of its prompt. rows: sequences that it
    runs at once. begins_call: it counts as a call; further prompts of a call do not. beside: another request, whose
    listeners become listeners of this one. images: names of the files of its images (`image_name`). pins: it has cache
    breakpoints, and the tokens that it pins are counted.

    Fields of its call. deadline_ms: from now; 0 is no deadline. metadata: `attach` returns it. is_background: the
    request runs on without a client. idempotency_key, fingerprint: a key that the client chose, and a hash of what the
    call asks for; empty for none. traceparent: of the span of the call; empty without tracing.
    retention_s: life of the request's keys after its end; 0 is RETENTION_S. conversation: kept as long; see
    `LaneKeys.conversation`. counts_stored: `bounds.stored_bytes` counts the request. prefixes: hashes of beginnings of
    the conversation, the most specific first, by which it is left to a worker for `left_ms` (docs/prefix-affinity.md).
    joins: the conversation that the response continues, and the version that the caller has read; empty for none.
    origin: the request that a fork continues, with `prefixes`: it is left to the owner of that one, if that lives.
    answer: expected tokens of the answer, by which a request that cannot end before its deadline is dropped; -1 never
    drops it. pace: of the lane, by which such a request is refused; None refuses none.

    Who the request counts for. owner: id of the API key; empty without one. accounts: key, project and organisation,
    whose limits must allow the request and which are charged for it; empty for a request that is charged to nobody.
    account_prefix: of their keys in Redis. model, price: of the tokens. park_s: the request is accepted if the
    budgets suffice for a part of its answer, and parked for at most this many seconds when they are used up; 0 refuses
    such a request. tenant, weight, user: in fair sharing; the user is a hash in hexadecimal, empty without one.
    """

    gateway: str
    bounds: QueueBounds
    cost: int = 0
    prompt_tokens: int = 0
    rows: int = 1
    begins_call: bool = True
    beside: str = ""
    priority_class: str = DEFAULT_CLASS
    deadline_ms: int = 0
    images: tuple[str, ...] = ()
    pins: bool = False
    metadata: bytes = b""
    is_background: bool = False
    idempotency_key: str = ""
    fingerprint: str = ""
    traceparent: str = ""
    retention_s: int = 0
    conversation: bytes = b""
    counts_stored: bool = True
    joins: tuple[str, ...] = ()
    prefixes: tuple[bytes, ...] = ()
    origin: str = ""
    left_ms: int = 0
    answer: int = -1
    pace: LanePace | None = None
    owner: str = ""
    accounts: tuple[ChargedAccount, ...] = ()
    account_prefix: str = AccountKeys().prefix
    model: str = ""
    price: Price = Price()
    park_s: int = 0
    tenant: str = ANONYMOUS_TENANT
    weight: int = DEFAULT_WEIGHT
    user: str = ""

    def encode(self) -> bytes:
        """The terms as a message: a map under the names that `submit.lua` uses, without what is empty or 0."""
        terms = {
            "gateway": self.gateway,
            "max_requests": self.bounds.requests,
            "max_tokens": self.bounds.tokens,
            "cost": self.cost,
            "prompt": self.prompt_tokens,
            "rows": self.rows,
            "class": self.priority_class,
            "metadata": self.metadata,
            "tenant": self.tenant,
            "weight": self.weight,
            "user": self.user,
            "fingerprint": self.fingerprint if self.idempotency_key else None,
        }
        if self.counts_stored:
            terms["max_stored"], terms["max_key_stored"] = self.bounds.stored_bytes, self.bounds.key_bytes
        terms |= {name: value for name in _OPTIONAL if (value := getattr(self, name))}
        if self.prefixes:
            terms["prefixes"], terms["left_ms"] = self.prefixes, self.left_ms
        if self.answer >= 0:
            terms["answer"] = self.answer
        if self.pace is not None:
            terms["pace"] = self.pace
        if self.accounts:
            charge = [self.account_prefix, int(self.begins_call), self.prompt_tokens, self.price.prompt]
            limits = [account.charged_limits() for account in self.accounts]
            terms["charge"] = [*charge, self.price.completion, self.model, self.park_s, *limits]
        # The msgpack of Redis reads bytes only as text.
        return bytes(msgpack.packb(terms, use_bin_type=False))


# Fields that the record leaves out if they are empty, under their own names.
_OPTIONAL = (
    "deadline_ms",
    "is_background",
    "beside",
    "traceparent",
    "retention_s",
    "conversation",
    "joins",
    "owner",
    "origin",
    "images",
    "pins",
)
