"""Mistral's own tokenizer files, as published: folders with nothing else give the ids of Mistral's libraries."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest

from quire.ops.paths import PROJECT_ROOT
from quire.shared.protocol.registered_files import read_files
from quire.shared.text.tokenizer import load_tokenizer, read_special_tokens
from tests.outside.environments import Environments

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]

REQUIREMENTS = ["mistral-common==1.13.1", "sentencepiece==0.2.3", "tiktoken==0.14.0"]


def texts() -> list[str]:
    draw = random.Random(5)
    source = (PROJECT_ROOT / "docs/architecture.md").read_text()
    found = ["def f():\n    return 1", "日本語 🙂 العربية", "", " ", "\t\ttab\r\n", "naïve café — “quotes”", "\x00\x01"]
    found += [repeated * count for repeated in (" ", "=", "ha") for count in range(1, 70)]
    for _ in range(300):
        start = draw.randrange(len(source))
        found.append(source[start : start + draw.randrange(1, 200)])
        found.append("".join(draw.choices("ab cdé漢字🙂 \n\t.,1234[]{}\"'ABCﬁ̈", k=draw.randrange(1, 60))))
    return found


def test_mistrals_own_files_give_the_ids_of_mistrals_libraries(environments: Environments, tmp_path: Path) -> None:
    (tmp_path / "texts.json").write_text(json.dumps(texts()))
    cases = environments.run_python("mistral_tokenizers_program.py", str(tmp_path / "texts.json"), REQUIREMENTS)
    assert len(cases) >= 7
    for name, case in cases.items():
        found = case.value()
        folder = tmp_path / name.replace(".", "_")
        folder.mkdir()
        shutil.copy(found["path"], folder / ("tekken.json" if name.endswith(".json") else "tokenizer.model"))
        (folder / "config.json").write_text("{}")
        special_tokens = read_special_tokens(folder, {})
        assert special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
        tokenizer = load_tokenizer(folder, special_tokens)
        is_tekken = name.endswith(".json")
        for text, ids in zip(texts(), found["ids"], strict=True):
            assert tokenizer.encode(text, add_special_tokens=is_tekken).ids == ids, (name, text)
        # A gateway without the folder gets the same tokenizer from a worker's registration.
        assert {"tokenizer.json", "tokenizer_config.json"} <= read_files(folder).keys()
