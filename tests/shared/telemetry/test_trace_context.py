from __future__ import annotations

import pytest

from quire.shared.telemetry.trace_context import TraceContext

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"00-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-01"),
        (f"00-{TRACE}-{SPAN}-00", f"00-{TRACE}-{SPAN}-00"),
        (f"00-{TRACE}-{SPAN}-03", f"00-{TRACE}-{SPAN}-03"),
        (f"01-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-01"),
        (f"cc-{TRACE}-{SPAN}-01-what-the-future-will-be-like", f"00-{TRACE}-{SPAN}-01"),
        (f"cc-{TRACE}-{SPAN}-01.what", None),
        (f"00-{TRACE}-{SPAN}-01-more", None),
        (f"00-{TRACE}-{SPAN}-01 ", None),
        (f"00-{TRACE}-{SPAN}-01\n", None),
        (f" 00-{TRACE}-{SPAN}-01", None),
        (f"ff-{TRACE}-{SPAN}-01", None),
        (f"00-{'0' * 32}-{SPAN}-01", None),
        (f"00-{TRACE}-{'0' * 16}-01", None),
        (f"00-{TRACE.upper()}-{SPAN}-01", None),
        (f"00-{TRACE}-{SPAN[:-1]}-01", None),
        (f"00-{TRACE}-{SPAN}", None),
        (f"00-{TRACE}-{SPAN}-1", None),
        (f"00-{TRACE[:-1]}٣-{SPAN}-01", None),
        ("", None),
        ("x" * 8000, None),
    ],
)
def test_a_traceparent_is_read_strictly(text: str, said: str | None) -> None:
    context = TraceContext.parse(text)
    assert (None if context is None else str(context)) == said
