from __future__ import annotations

from quire.shared.text.grammar_error import one_line


def test_an_error_is_one_line_without_markup() -> None:
    assert one_line("<non-verbose/>a\n  b") == "a b"
    assert len(one_line("x" * 1000)) == 300


def test_a_remedy_is_one_that_a_client_can_apply() -> None:
    error = one_line("oneOf constraints are not supported. Enable 'coerce_one_of' to approximate")
    assert "coerce_one_of" not in error
    assert "use anyOf" in error
