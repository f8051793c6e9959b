from __future__ import annotations

from quire.shared.gguf.errors import AGAIN, GGUFError


def test_an_error_is_one_line_with_place_fault_and_remedy() -> None:
    error = GGUFError("a.gguf", "the text\nis wrong")
    assert str(error) == f"a.gguf: the text is wrong; {AGAIN}"
    assert (error.where, error.what, error.remedy) == ("a.gguf", "the text\nis wrong", AGAIN)
