"""One account: an API key, a project or an organisation, as JSON in Redis.

A key belongs to a project, and a project to an organisation. The limits of all three hold for a call of the key.
"""

from __future__ import annotations

import hmac
import json
import re
from dataclasses import dataclass, field
from typing import Any, Literal

from quire.shared.accounts.limits import AccountLimits
from quire.shared.config.validators import InvalidValue

Kind = Literal["key", "project", "organisation"]
KINDS: tuple[Kind, ...] = ("key", "project", "organisation")
DEFAULT_NAME = "default"
MAX_NAME = 64
MAX_ACCOUNT_BYTES = 64 * 1024

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}", re.ASCII)
_KEY_ID = re.compile(r"[0-9a-f]{16}", re.ASCII)
_DIGEST = re.compile(r"([0-9a-f]{64})?", re.ASCII)
_FIELDS = {"name", "parent", "created", "limits", "digest", "old_digest", "old_until", "expires", "revoked"}


def check_name(parameter: str, name: Any) -> str:
    """Return a name of an organisation, a project or a key. Raise InvalidValue."""
    if type(name) is not str or not _NAME.fullmatch(name):
        raise InvalidValue(parameter, f"must have 1 to {MAX_NAME} characters of a-z, 0-9, '.', '_' and '-'")
    return name


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """An account. Times are unix seconds; 0 is never.

    id: 16 hexadecimal digits of a key, `ORGANISATION/PROJECT` of a project, the name of an organisation. parent: the id
    of the project of a key, or of the organisation of a project. digest: SHA-256 of the secret of a key. old_digest: of
    the secret before the last rotation, valid until old_until.
    """

    kind: Kind
    id: str
    name: str
    parent: str = ""
    created: int = 0
    limits: AccountLimits = field(default_factory=AccountLimits)
    digest: str = field(default="", repr=False)
    old_digest: str = field(default="", repr=False)
    old_until: int = 0
    expires: int = 0
    revoked: int = 0

    @property
    def place(self) -> str:
        """The field of the account in the hash of all accounts."""
        return f"{self.kind}:{self.id}"

    @property
    def parent_place(self) -> str:
        """The field of the account above; empty for an organisation."""
        above: dict[Kind, str] = {"key": "project:", "project": "organisation:", "organisation": ""}
        return above[self.kind] + self.parent if self.parent else ""

    def fault(self, digest: str, now: float) -> str:
        """Return why a key with this digest is not valid now; empty if it is. Compare in constant time."""
        is_current = hmac.compare_digest(digest, self.digest)
        is_old = hmac.compare_digest(digest, self.old_digest) and now < self.old_until
        if not (is_current or is_old):
            return "unknown"
        if self.revoked:
            return "revoked"
        return "expired" if self.expires and now >= self.expires else ""

    def encode(self) -> str:
        """Return the account as JSON."""
        values = {name: getattr(self, name) for name in _FIELDS - {"limits"}}
        return json.dumps(
            {name: value for name, value in values.items() if value} | {"limits": self.limits.given()}, sort_keys=True
        )

    @classmethod
    def decode(cls, place: str, data: str) -> Account:
        """Read an account from its field and its JSON. Raise InvalidValue."""
        kind, _, account_id = place.partition(":")
        if kind not in KINDS or len(data) > MAX_ACCOUNT_BYTES:
            raise InvalidValue("account", "has an unknown kind or is too long")
        try:
            values = json.loads(data)
        except (ValueError, RecursionError):
            raise InvalidValue("account", "is not JSON") from None
        if type(values) is not dict or values.keys() - _FIELDS or type(values.get("limits")) is not dict:
            raise InvalidValue("account", "has wrong fields")
        limits = AccountLimits.stored(values.pop("limits"))
        for name, value in values.items():
            is_text = name in ("name", "parent", "digest", "old_digest")
            if type(value) is not (str if is_text else int):
                raise InvalidValue(name, "has a wrong type")
        if kind == "key" and not _KEY_ID.fullmatch(account_id):
            raise InvalidValue("id", "must have 16 hexadecimal digits")
        if not all(_DIGEST.fullmatch(values.get(name, "")) for name in ("digest", "old_digest")):
            raise InvalidValue("digest", "must have 64 hexadecimal digits")
        return cls(kind=kind, id=account_id, limits=limits, **values)

    def charged_limits(self) -> list[Any]:
        """Return the name of the account and its limits, as `_limits.lua` reads them."""
        limits = self.limits
        return [
            self.place,
            limits.requests_per_minute,
            limits.tokens_per_minute,
            limits.concurrent_requests,
            limits.tokens_per_day,
            limits.tokens_per_month,
            limits.cost_per_day,
            limits.cost_per_month,
        ]

    def shown(self) -> dict[str, Any]:
        """Return the account for operators, without digests."""
        about: dict[str, Any] = {"id": self.id, "object": self.kind, "name": self.name}
        if self.kind == "key":
            organisation, _, project = self.parent.partition("/")
            about |= {"organisation": organisation, "project": project, "expires": self.expires or None}
            about |= {"revoked": self.revoked or None}
        if self.kind == "project":
            about |= {"organisation": self.parent}
        return about | {"created": self.created, "limits": self.limits.shown()}
