"""The key of the admin API: where it comes from, and its check. Without a key the admin API is off."""

from __future__ import annotations

import hmac
from pathlib import Path

from aiohttp import web

from quire.gateway.errors.api_errors import AdminKeyWrong
from quire.shared.process.errors import StartError

MIN_LENGTH = 16
MAX_LENGTH = 1024


def read_admin_key(key: str, path: str) -> str:
    """Return the key of the admin API; empty without both arguments. Raises StartError.

    key, path: the settings --admin-key and --admin-key-file.
    """
    if key and path:
        raise StartError("--admin-key and --admin-key-file are both given; give one of them")
    if path:
        try:
            with Path(path).open("rb") as file:
                key = file.read(MAX_LENGTH + 2).decode("ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise StartError(f"--admin-key-file {path} cannot be read as text: {error}; correct the file") from None
    elif not key:
        return ""
    if not MIN_LENGTH <= len(key) <= MAX_LENGTH or not key.isascii() or not key.isprintable() or " " in key:
        where = f"--admin-key-file {path}" if path else "--admin-key"
        raise StartError(
            f"{where}: the key must have {MIN_LENGTH} to {MAX_LENGTH} ASCII characters without spaces; make one with "
            "openssl rand -hex 32"
        )
    return key


def check_admin_key(request: web.Request, key: str) -> None:
    """Raise ApiError unless the request has the key as its bearer token. The time does not depend on the token."""
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    is_right = hmac.compare_digest(token.strip().encode(errors="replace"), key.encode())
    if scheme.lower() != "bearer" or not is_right:
        raise AdminKeyWrong(
            "The admin API needs the header Authorization: Bearer KEY, with the key of --admin-key-file.",
            headers={"WWW-Authenticate": "Bearer"},
        )
