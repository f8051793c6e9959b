"""Names of objects can be part of a path."""

from __future__ import annotations

import pytest

from quire.gateway.batches.batch_store import LinePlace, Window
from quire.gateway.files.file_store import new_file_id
from quire.gateway.files.storage import WHOLE, check_names
from quire.shared.broker import new_id


def test_names_that_gateways_make() -> None:
    check_names(new_file_id(), WHOLE)
    window = Window("b", 4_999_999, new_id(), LinePlace(0, 1), LinePlace(1, 2))
    check_names(f"{window.index}-{window.token}")


@pytest.mark.parametrize("name", ["", "..", ".", "a/b", "a\\b", "A", "a\n", "a\0", "é", "x" * 65, "~"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="is no name"):
        check_names("a", name)
