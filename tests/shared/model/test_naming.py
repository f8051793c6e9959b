from __future__ import annotations

from pathlib import Path

import pytest

from quire.shared.model.naming import InvalidModelName, served_name


def test_the_name_is_the_given_one_then_the_folders_then_the_hubs(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    assert served_name(str(folder), "other") == "other"
    assert served_name(str(folder)) == "my-model"
    assert served_name("owner/model") == "owner/model"
    (tmp_path / "my-model.Q4_K_M.gguf").write_text("")
    assert served_name(str(tmp_path / "my-model.Q4_K_M.gguf")) == "my-model.Q4_K_M"


@pytest.mark.parametrize("name", ["a{b}", "a b", "ä", "x" * 257, "a\n"])
def test_a_name_that_keys_cannot_hold_is_refused_with_the_setting(name: str) -> None:
    with pytest.raises(InvalidModelName, match=r"--served-model-name"):
        served_name("owner/model", name)
