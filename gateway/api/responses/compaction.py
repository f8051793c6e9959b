"""The compaction item: a summary in place of the items before it.

`encrypted_content` is a name and the base64 of JSON. It is the client's own data: it says no more than the items that
it replaces, and a client that changes it changes what it tells the model, as with any message. So it is not encrypted.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quire.gateway.api.parsing import parse_object
from quire.gateway.errors.api_errors import InvalidRequest, refused

COMPACTION = "compaction"
# The last item of an input whose answer is a compaction of the items before it.
TRIGGER = "compaction_trigger"
# What `joined_echo` has for such an answer: the items before it stay, or are replaced.
KEEPS, REPLACES = "keeps", "replaces"
# The beginning of the content that this server writes; other servers have other ones.
_NAME = "quire-1."
# Values in the JSON of a content: this many, and one for each of these bytes.
_LEAST_VALUES, _BYTES_PER_VALUE = 256, 8
# The parameters of a call that its request for a summary has too, besides `input`.
CARRIED = (
    "model",
    "instructions",
    "reasoning",
    "user",
    "safety_identifier",
    "service_tier",
    "prompt_cache_key",
    "chat_template_kwargs",
    "cache_salt",
    "priority",
    "timeout",
    "truncation",
)
# Largest number of tokens of a summary, with the reasoning before it.
SUMMARY_TOKENS = 4096
# What the model is asked after the items.
ASK = (
    "Write a summary of this conversation, for somebody who will continue it and has read none of it. Say what the "
    "user wants, what was decided and found out, which tools gave which results, and what is left to do. Keep names, "
    "numbers and paths exactly as they are. Write nothing but the summary."
)
# What comes before the summary when the model reads it.
SUMMARY = "Summary of the conversation so far:\n"


@dataclass(frozen=True, slots=True)
class Compaction:
    """The content of a compaction. kept: items after the summary; None if the items before the compaction stay."""

    summary: str
    kept: Sequence[dict[str, Any]] | None = None

    def encode(self) -> str:
        """Return the content as the item has it."""
        fields = {"summary": self.summary} | ({} if self.kept is None else {"kept": self.kept})
        return _NAME + base64.b64encode(json.dumps(fields, ensure_ascii=False).encode()).decode()

    @classmethod
    def read(cls, name: str, content: str) -> Compaction:
        """Read the content of an item. The items that it keeps are not checked. Raises InvalidRequest with `name`."""
        try:
            data = base64.b64decode(content.removeprefix(_NAME), validate=True)
            fields = parse_object(data, len(data) // _BYTES_PER_VALUE + _LEAST_VALUES)
        except (binascii.Error, ValueError, InvalidRequest):
            raise broken_compaction(name) from None
        summary, kept = fields.pop("summary", None), fields.pop("kept", None)
        if type(summary) is not str or (kept is not None and type(kept) is not list) or fields:
            raise broken_compaction(name)
        return cls(summary, kept)


def broken_compaction(name: str) -> InvalidRequest:
    """Return the error for a content that this server has not written so."""
    return refused(name, f"{name} is broken; send the compaction item as this server returned it.")


def is_foreign(content: Any) -> bool:
    """Return True for the content of a compaction that another server has made."""
    return type(content) is str and not content.startswith(_NAME)
