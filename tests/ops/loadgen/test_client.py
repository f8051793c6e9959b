"""Server-sent events as the client of `quire bench` reads them."""

from __future__ import annotations

from quire.ops.loadgen.client import EventParser


def test_events_are_cut_wherever_the_network_cuts_them() -> None:
    text = b": hello\n\nid: 1\ndata: {}\n\ndata:[DONE]\r\n\n"
    for size in range(1, len(text)):
        parser = EventParser()
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        assert [data for piece in pieces for data in parser.feed(piece)] == [b"{}", b"[DONE]"]
