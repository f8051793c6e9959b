"""The secret of an API key: how it is made, and the digest that Redis stores instead of it."""

from __future__ import annotations

import hashlib
import re
import secrets

# Other bearer tokens are no keys of Quire: a gateway without authentication ignores them.
PREFIX = "sk-quire-"
ID_BYTES, SECRET_BYTES = 8, 32

_SECRET = re.compile(PREFIX + r"([0-9a-f]{16})-[A-Za-z0-9_-]{43}", re.ASCII)


def new_secret(key_id: str = "") -> tuple[str, str]:
    """Return the id of a key, and a new secret for it with 256 random bits. key_id: of an existing key."""
    key_id = key_id or secrets.token_hex(ID_BYTES)
    return key_id, f"{PREFIX}{key_id}-{secrets.token_urlsafe(SECRET_BYTES)}"


def key_id_of(secret: str) -> str:
    """Return the id of the key in a secret; empty if the text is not one."""
    match = _SECRET.fullmatch(secret)
    return match[1] if match else ""


def digest_of(secret: str) -> str:
    """Return the SHA-256 of a secret in hexadecimal. Secrets are random, so a slow hash would add no safety."""
    return hashlib.sha256(secret.encode()).hexdigest()
