"""A reader of engine views holds the newest one, and a view is one event."""

from __future__ import annotations

from quire.gateway.pages.engine_viewer import EngineViewer, render
from quire.shared.views import View
from tests.shared.test_views import VIEW


async def test_a_viewer_holds_one_view_at_the_most() -> None:
    viewer = EngineViewer()
    for number in range(1000):
        viewer.show(b"%d" % number)
    assert await viewer.next() == b"999"
    assert viewer.skipped == 999
    viewer.end()
    assert await viewer.next() is None


def test_a_view_in_an_event_is_one_line() -> None:
    event = render(View.decode(VIEW.encode()), {})
    assert event.startswith(b"data: {")
    assert event.endswith(b"}\n\n")
    assert event.count(b"\n") == 2
