"""From settings to an engine: what it takes from which file of a model folder."""

from __future__ import annotations

import json
from pathlib import Path

from gateway.model import load_model
from tests.worker.checkpoints import BOS_TOKEN_ID, EOS_TOKEN_ID, make_checkpoint
from worker.build import build_engine
from worker.settings import WorkerSettings


def test_the_end_token_is_that_of_the_tokenizer_where_the_configuration_names_none(tmp_path: Path) -> None:
    def end_tokens() -> frozenset[int]:
        settings = WorkerSettings(model=str(tmp_path), device="cpu", num_blocks=32)
        engine = build_engine(settings, "test")
        assert engine.eos_token_ids == load_model(str(tmp_path), "test").eos_token_ids
        return engine.eos_token_ids

    # What training from scratch leaves behind: Qwen's configuration class has no end token.
    make_checkpoint(tmp_path, "qwen3", eos_token_id=None)
    assert end_tokens() == {EOS_TOKEN_ID}
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "eos_token_id": BOS_TOKEN_ID}))
    assert end_tokens() == {BOS_TOKEN_ID}
