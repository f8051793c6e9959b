"""The longest context of a model, as gateway and worker read it, and what makes it longer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.gateway.model.served_model import load_model
from quire.shared.model.config import context_length, longer_context, longest_context
from quire.worker.models.choice import choose_model
from tests.support.transformers_checkpoints import make_kind

QWEN = {"max_position_embeddings": 32768, "rope_theta": 1000000.0}


def rope(kind: str, **fields: Any) -> dict[str, Any]:
    return {"rope_scaling": {"rope_type": kind, **fields}}


@pytest.mark.parametrize(
    ("config", "length"),
    [
        (QWEN, 32768),
        ({"n_positions": 1024}, 1024),
        ({}, None),
        ({"max_position_embeddings": "many"}, None),
        # The card of Qwen2.5 tells users to add the field, and leaves the length as it is.
        (QWEN | rope("yarn", factor=4.0, original_max_position_embeddings=32768), 131072),
        (QWEN | {"rope_scaling": {"type": "yarn", "factor": 2.0}}, 65536),
        (QWEN | {"rope_parameters": {"rope_type": "yarn", "factor": 2}}, 65536),
        (QWEN | {"rope_parameters": {"rope_type": "default"}}, 32768),
        # DeepSeek-V3 and Qwen3 declare the length that YaRN gives, or more than the original one.
        ({"max_position_embeddings": 163840} | rope("yarn", factor=40, original_max_position_embeddings=4096), 163840),
        ({"max_position_embeddings": 40960} | rope("yarn", factor=4.0, original_max_position_embeddings=32768), 131072),
        ({"max_position_embeddings": 40960} | rope("yarn", factor=1.0, original_max_position_embeddings=32768), 40960),
        (QWEN | rope("yarn", factor=None, original_max_position_embeddings=8192), 32768),
        (QWEN | rope("yarn", factor="4", original_max_position_embeddings=8192), 32768),
        (QWEN | rope("linear", factor=4.0), 32768),
        (QWEN | rope("llama3", factor=8.0, original_max_position_embeddings=8192), 32768),
        (QWEN | rope("dynamic", factor=4.0), 32768),
        ({"max_position_embeddings": 131072, "original_max_position_embeddings": 4096} | rope("longrope"), 4096),
        ({"max_position_embeddings": 131072} | rope("longrope", original_max_position_embeddings=4096), 4096),
        (
            {
                "max_position_embeddings": 8192,
                "rope_parameters": {
                    "full_attention": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192},
                    "sliding_attention": {"rope_type": "default"},
                },
            },
            65536,
        ),
    ],
)
def test_the_longest_context(config: dict[str, Any], length: int | None) -> None:
    assert context_length(config) == length
    if "longrope" not in str(config):
        assert longest_context(config) == length


def test_longrope_has_a_longer_context_for_workers_that_are_asked_for_it() -> None:
    config = {"max_position_embeddings": 131072, "original_max_position_embeddings": 4096} | rope("longrope")
    assert (context_length(config), longest_context(config)) == (4096, 131072)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (QWEN, "set max_position_embeddings of config.json to 100000, or rope_scaling to "),
        (QWEN, '{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}'),
        ({"n_positions": 1024}, "set n_positions of config.json to 100000"),
        (QWEN | rope("linear", factor=2.0), "set max_position_embeddings of config.json to 100000, if"),
        (QWEN | rope("yarn", factor=2.0), "set factor in rope_scaling of config.json to 4"),
        (QWEN | {"rope_parameters": rope("yarn")["rope_scaling"]}, "set factor in rope_parameters of config.json to 4"),
    ],
)
def test_the_field_that_makes_room_for_a_longer_context(config: dict[str, Any], said: str) -> None:
    assert said in longer_context(config, 100_000)


@pytest.mark.parametrize("config", [{}, QWEN | rope("longrope"), QWEN | rope("dynamic", factor=2.0)])
def test_no_field_makes_room_where_frequencies_depend_on_the_context(config: dict[str, Any]) -> None:
    assert longer_context(config, 100_000) == ""


@pytest.mark.parametrize("kind", ["llama-yarn-beyond", "llama-yarn", "gpt2", "phi3"])
def test_gateway_and_worker_read_the_same_context(kind: str, tmp_path: Path) -> None:
    folder = make_kind(tmp_path / kind, kind)
    assert load_model(str(folder), kind).max_model_len == choose_model(folder).max_position_embeddings == 256


def test_gateway_and_worker_read_the_same_context_where_a_model_card_adds_yarn(tmp_path: Path) -> None:
    folder = make_kind(tmp_path / "llama", "llama-gelu")
    config = json.loads((folder / "config.json").read_text())
    config["rope_scaling"] = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    (folder / "config.json").write_text(json.dumps(config))
    assert load_model(str(folder), "llama").max_model_len == choose_model(folder).max_position_embeddings == 1024
