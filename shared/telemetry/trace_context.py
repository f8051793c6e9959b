"""The W3C `traceparent`, in which a trace goes from the gateway through the queue to the worker. Parsed strictly.

https://www.w3.org/TR/trace-context/#traceparent-header
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# Length of a header of version 00, after which nothing may follow; headers of later versions may be longer.
MAX_TRACEPARENT = 55
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})", re.ASCII)


@dataclass(frozen=True, slots=True)
class TraceContext:
    """The identity of a span in another process."""

    trace_id: int
    span_id: int
    flags: int

    def __str__(self) -> str:
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{self.flags:02x}"

    @classmethod
    def parse(cls, text: str) -> TraceContext | None:
        """Parse a `traceparent`; None if it is invalid. Only the fields of version 00 are read of a later version."""
        match = _TRACEPARENT.match(text)
        if match is None or match[1] == "ff":
            return None
        rest = text[MAX_TRACEPARENT:]
        if rest and (match[1] == "00" or not rest.startswith("-")):
            return None
        trace_id, span_id = int(match[2], 16), int(match[3], 16)
        return cls(trace_id, span_id, int(match[4], 16)) if trace_id and span_id else None
