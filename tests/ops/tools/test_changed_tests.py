"""The tests of a change, as `make check` chooses them."""

from __future__ import annotations

import pytest

from quire.ops.paths import PROJECT_ROOT
from quire.ops.tools.changed_tests import ELSEWHERE, chosen


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        (["gateway/batches/slots.py", "gateway/batches/line.py"], ["tests/gateway/batches"]),
        (["gateway/batches/slots.py", "tests/gateway/batches/test_slots.py"], ["tests/gateway/batches"]),
        (["tests/gateway/test_parking.py"], ["tests/gateway/test_parking.py"]),
        (["gateway/settings.py", "gateway/batches/slots.py"], ["tests/gateway"]),
        (["gateway/pages/static/run.js"], ["tests/gateway/pages"]),
        (["tests/page/conftest.py"], ["tests/page"]),
        (["shared/scripts/submit.lua"], ["tests/shared/broker"]),
        (["docs/how-to/keys.md", "docker-compose.yml"], ["tests/outside/deploy", "tests/test_docs.py"]),
        (["tests/support/redis_server.py", "tests/conftest.py", "README.md", "LICENSE"], []),
        (["gateway/batches/gone.py", "tests/gateway/batches/test_gone.py"], ["tests/gateway/batches"]),
    ],
)
def test_files_have_the_tests_of_their_rooms(paths: list[str], expected: list[str]) -> None:
    assert chosen(paths) == expected


def test_the_tests_of_places_without_a_room_exist() -> None:
    assert all((PROJECT_ROOT / tests).exists() for tests in ELSEWHERE.values())
