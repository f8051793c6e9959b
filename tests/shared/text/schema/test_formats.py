from __future__ import annotations

from typing import Any

import pytest

from quire.shared.text.schema.formats import FORMATS, replace_format

DATE = FORMATS["date"]


@pytest.mark.parametrize(
    ("schema", "replaced"),
    [
        ({"format": "date"}, {"pattern": DATE}),
        ({"format": "date", "pattern": "^2"}, {"pattern": "^2", "allOf": [{"pattern": DATE}]}),
        ({"format": "uuid"}, {"format": "uuid"}),
        ({"format": "my-own"}, {}),
    ],
)
def test_a_format_becomes_a_pattern_or_stays_or_vanishes(schema: dict[str, Any], replaced: dict[str, Any]) -> None:
    replace_format(schema)
    assert schema == replaced
