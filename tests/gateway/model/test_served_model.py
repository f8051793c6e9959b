"""Loads a model: tokenizer, special tokens, and sampling defaults from generation_config.json."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from quire.gateway.model.served_model import load_model
from quire.shared.model.files import ModelError
from quire.shared.model.naming import served_name
from tests.gateway.conftest import Start
from tests.support.chat_templates import TOKENS
from tests.support.gateway.fake_worker import emit
from tests.support.gateway.running import MODEL, RunningGateway, chat_body, tokens
from tests.support.tokenizers import byte_fallback, byte_level


def write_folder(folder: Path, tokenizer: Tokenizer, template: str | None = None) -> Path:
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text("{}")
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.mark.parametrize("backend", [byte_level(), byte_fallback()], ids=["byte-level", "byte-fallback"])
@pytest.mark.parametrize("config", [{}, {"add_bos_token": True}, {"add_bos_token": False}, {"add_eos_token": True}])
def test_plain_prompts_get_the_special_tokens_that_transformers_gives_them(
    tmp_path: Path, backend: Tokenizer, config: dict[str, Any]
) -> None:
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(tokenizer_object=backend, **TOKENS).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "tokenizer_config.json").read_text())
    saved = {key: value for key, value in saved.items() if key not in ("add_bos_token", "add_eos_token")}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**saved, **config}))
    (tmp_path / "config.json").write_text("{}")
    expected = PreTrainedTokenizerFast.from_pretrained(tmp_path)("Hello world").input_ids
    assert load_model(str(tmp_path), "test").tokenizer.encode("Hello world").ids == expected


@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("backend", [byte_level(), byte_fallback()], ids=["byte-level", "byte-fallback"])
@pytest.mark.parametrize(
    "extra",
    [
        {"additional_special_tokens": ["the", "<|new|>"]},
        {"additional_special_tokens": [{"__type": "AddedToken", "content": "the", "special": True}]},
        {"extra_special_tokens": ["the"]},
        {"extra_special_tokens": {"image_token": "the"}},
    ],
    ids=["old name", "in full", "new name", "by role"],
)
def test_what_the_configuration_names_as_special_is_no_text(
    tmp_path: Path, backend: Tokenizer, extra: dict[str, Any], file: str
) -> None:
    from transformers import PreTrainedTokenizerFast

    write_folder(tmp_path, backend)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(TOKENS))
    (tmp_path / file).write_text(json.dumps({**TOKENS, **extra}))
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    ours = load_model(str(tmp_path), "test").tokenizer
    ids = theirs("on the<|new|> way").input_ids
    assert ours.encode("on the<|new|> way").ids == ids
    assert "the" not in ours.decode(ids)
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("config.json", None, "config.json is missing"),
        ("config.json", "{", "config.json cannot be read"),
        ("config.json", "[]", "not a JSON object"),
        ("config.json", '{"text_config": "x"}', "text_config is not a JSON object"),
        ("tokenizer_config.json", "[" * 100_000, "tokenizer_config.json cannot be read"),
        ("tokenizer.json", None, "tokenizer.json is missing"),
        ("tokenizer.json", "{}", "not a tokenizer"),
        ("chat_template.jinja", "{% for %}", "chat template"),
    ],
)
def test_a_broken_model_folder_is_named(tmp_path: Path, name: str, content: str | None, says: str) -> None:
    write_folder(tmp_path, byte_level())
    (tmp_path / name).unlink(missing_ok=True)
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ModelError, match=says):
        load_model(str(tmp_path), "test")


def test_what_is_no_folder_at_all(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="there is no folder"):
        load_model(str(tmp_path / "nothing"), "test")
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="is a file"):
        load_model(str(tmp_path / "file"), "test")


def test_a_folder_may_be_given_by_the_home_it_is_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # An environment file may have `~`, which no shell expands there. The worker and `quire serve` expand `~` too.
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "models").mkdir()
    write_folder(tmp_path / "models", byte_level())
    assert load_model("~/models", "test").vocab_size == byte_level().get_vocab_size()
    assert served_name("~/models") == "models"


CONFIG = {"temperature": 0.7, "top_p": 0.95, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1}
WITHOUT_FILE = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
BEAMS = {"use_beam_search": True, "n": 2}
NOT_DRAWN = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.1}


@pytest.fixture
def folder(model_folder: Path, tmp_path: Path) -> Path:
    """A model folder of the same name as the shared one, with a generation_config.json."""
    copy = Path(shutil.copytree(model_folder, tmp_path / model_folder.name))
    write(copy, CONFIG)
    return copy


def write(folder: Path, config: dict[str, Any]) -> None:
    (folder / "generation_config.json").write_text(json.dumps(config))


async def sampled_with(gateway: RunningGateway, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return the five sampling values that the worker receives for a call."""
    async with gateway.worker(emit(tokens("an answer"), "stop")) as worker:
        reply = await gateway.post(path, body)
    assert reply.status == 200, reply.body
    sampling = worker.claimed[0].sampling
    return {name: getattr(sampling, name) for name in WITHOUT_FILE}


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        pytest.param({}, CONFIG, id="nothing"),
        pytest.param(dict.fromkeys(CONFIG), CONFIG, id="null"),
        pytest.param({"temperature": 0}, {**CONFIG, "temperature": 0.0}, id="greedy"),
        pytest.param(
            {"top_p": 1, "top_k": -1, "min_p": 0}, {**CONFIG, "top_p": 1.0, "top_k": 0, "min_p": 0.0}, id="off"
        ),
        pytest.param({"repetition_penalty": 1}, {**CONFIG, "repetition_penalty": 1.0}, id="no penalty"),
    ],
)
async def test_a_call_gets_the_models_values_for_what_it_leaves_out(
    start_gateway: Start, folder: Path, asked: dict[str, Any], expected: dict[str, Any]
) -> None:
    gateway = await start_gateway(model=str(folder))
    assert await sampled_with(gateway, "/v1/chat/completions", chat_body(**asked)) == expected
    body = {"model": MODEL, "prompt": "Hello", **asked}
    assert await sampled_with(gateway, "/v1/completions", body) == expected


async def test_a_beam_search_takes_only_the_penalty(start_gateway: Start, folder: Path) -> None:
    gateway = await start_gateway(model=str(folder))
    assert await sampled_with(gateway, "/v1/chat/completions", chat_body(**BEAMS)) == NOT_DRAWN


async def test_generation_config_none_ignores_the_file(start_gateway: Start, folder: Path) -> None:
    gateway = await start_gateway(model=str(folder), generation_config="none")
    assert await sampled_with(gateway, "/v1/chat/completions", chat_body()) == WITHOUT_FILE
    assert (await gateway.get("/v1/models")).json["data"][0]["sampling_defaults"] == WITHOUT_FILE


async def test_a_model_without_the_file_has_the_defaults_of_the_api(gateway: RunningGateway) -> None:
    assert await sampled_with(gateway, "/v1/chat/completions", chat_body()) == WITHOUT_FILE


async def test_the_list_of_models_shows_them(start_gateway: Start, folder: Path) -> None:
    gateway = await start_gateway(model=str(folder))
    assert (await gateway.get("/v1/models")).json["data"][0]["sampling_defaults"] == CONFIG


async def test_a_file_with_some_fields_leaves_the_others(start_gateway: Start, folder: Path) -> None:
    write(folder, {"temperature": 0, "top_p": None, "top_k": 50, "do_sample": False, "max_new_tokens": 8})
    gateway = await start_gateway(model=str(folder))
    expected = {**WITHOUT_FILE, "temperature": 0.0, "top_k": 50}
    assert await sampled_with(gateway, "/v1/chat/completions", chat_body()) == expected


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("temperature", "hot", "a number from 0 to 2, not 'hot'"),
        ("temperature", -1, "a number from 0 to 2, not -1"),
        ("top_p", 95, "a number from 0 to 1, not 95"),
        ("top_k", 2.5, "an integer from -1"),
        ("repetition_penalty", 0, "a number from 0.01 to 100, not 0"),
    ],
)
def test_a_value_out_of_range_stops_the_start(folder: Path, field: str, value: object, expected: str) -> None:
    write(folder, CONFIG | {field: value})
    with pytest.raises(ModelError) as refused:
        load_model(str(folder), MODEL)
    message = str(refused.value)
    assert message.startswith(f"{folder / 'generation_config.json'}: {field} must be {expected}")
    assert message.endswith("ignore its sampling defaults with --generation-config none (QUIRE_GENERATION_CONFIG).")
    assert load_model(str(folder), MODEL, uses_generation_config=False).sampling_defaults == WITHOUT_FILE


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"hidden_size": 64}, 64),
        ({"n_embd": 32}, 32),
        ({"d_model": 16}, 16),
        ({"text_config": {"hidden_size": 8}, "hidden_size": 64}, 8),
        ({"hidden_size": "64"}, None),
        ({}, None),
    ],
)
def test_the_hidden_size_is_that_of_the_text_model(tmp_path: Path, config: dict[str, Any], expected: int) -> None:
    write_folder(tmp_path, byte_level())
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = load_model(str(tmp_path), MODEL)
    assert (model.hidden_size, model.pooling) == (expected, "last")
