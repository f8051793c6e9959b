"""The signatures of thinking blocks.

Clients send the blocks of an answer back with the conversation. If a client asks for thinking without its text
(`display` `omitted`), the signature carries the text, so that the next prompt has it. The gateway keeps no state.
"""

from __future__ import annotations

import base64
import hashlib

_DIGEST, _TEXT = "sha256-", "base64-"


def sign(text: str, is_hidden: bool) -> str:
    """Return the signature of a thinking block: a hash of its text, or the text if the block hides it."""
    if is_hidden:
        return _TEXT + base64.b64encode(text.encode()).decode()
    return _DIGEST + hashlib.sha256(text.encode()).hexdigest()


def hidden_text(signature: str) -> str:
    """Return the text that a signature carries; empty for any other signature. Raises ValueError for damaged text."""
    if not signature.startswith(_TEXT):
        return ""
    return base64.b64decode(signature.removeprefix(_TEXT), validate=True).decode()
