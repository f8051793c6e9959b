"""`.env.example` is what the program makes."""

from __future__ import annotations

from quire.ops.paths import PROJECT_ROOT
from quire.ops.tools.env_example import render


def test_the_example_file_has_every_setting() -> None:
    assert (PROJECT_ROOT / ".env.example").read_text() == render(), (
        "python -m quire.ops.tools.env_example > .env.example"
    )
