"""What a gateway reads of a model folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from quire.gateway.features.tokenization.tokenizer_info import tokenizer_info
from quire.gateway.model import model_trial
from quire.gateway.model.pooling import read_pooling
from quire.gateway.model.served_model import load_model
from quire.gateway.model.token_texts import TokenTexts
from quire.shared.model.files import ModelError
from quire.shared.model.naming import served_name
from tests.gateway.conftest import Start
from tests.support.gateway.fake_worker import emit
from tests.support.gateway.running import MODEL, TEMPLATE, RunningGateway, chat_body, tokens, write_model
from tests.support.tokenizers import byte_fallback, byte_level

# --- Loads a model: tokenizer, special tokens, and sampling defaults from generation_config.json ----------------------


def write_folder(folder: Path, tokenizer: Tokenizer, template: str | None = None) -> Path:
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text("{}")
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


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


# --- The default pooling comes from the sentence-transformers files of the model --------------------------------------


OLD_MODES = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")


def old(*on: str) -> dict[str, Any]:
    flags = {f"pooling_mode_{mode}": mode in on for mode in OLD_MODES}
    return {"word_embedding_dimension": 64, **flags, "include_prompt": True}


def write_pooling(
    folder: Path, pooling: Any = None, kinds: tuple[str, ...] | None = None, place: str = "1_Pooling"
) -> Path:
    """Write the configuration of the pooling module and, if `kinds` are given, the list of modules."""
    if pooling is not None:
        (folder / place).mkdir()
        (folder / place / "config.json").write_text(json.dumps(pooling))
    if kinds is not None:
        modules = [
            {"idx": index, "name": str(index), "path": place if kind == "Pooling" else "", "type": f"library.{kind}"}
            for index, kind in enumerate(kinds)
        ]
        (folder / "modules.json").write_text(json.dumps(modules))
    return folder


def test_a_plain_decoder_takes_the_last_token(tmp_path: Path) -> None:
    assert read_pooling(tmp_path) == "last"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (old("lasttoken"), "last"),
        (old("mean_tokens"), "mean"),
        (old("cls_token"), ""),
        (old("mean_tokens", "max_tokens"), ""),
        (old(), ""),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode": "mean"}, "mean"),
        ({"pooling_mode": "weightedmean"}, ""),
        ({"pooling_mode": ["mean", "lasttoken"]}, ""),
    ],
)
@pytest.mark.parametrize("kinds", [None, ("Transformer", "Pooling", "Normalize")], ids=["alone", "listed"])
def test_the_mode_is_that_of_the_file(
    config: dict[str, Any], expected: str, kinds: tuple[str, ...] | None, tmp_path: Path
) -> None:
    assert read_pooling(write_pooling(tmp_path, config, kinds)) == expected


def test_the_list_of_modules_names_the_folder(tmp_path: Path) -> None:
    assert read_pooling(write_pooling(tmp_path, old("mean_tokens"), ("Transformer", "Pooling"), "pooling")) == "mean"


@pytest.mark.parametrize(
    "kinds", [("Transformer",), ("Transformer", "Pooling", "Dense"), ("Transformer", "Pooling", "Pooling")]
)
def test_other_modules_leave_the_choice_to_the_call(kinds: tuple[str, ...], tmp_path: Path) -> None:
    assert read_pooling(write_pooling(tmp_path, old("mean_tokens"), kinds)) == ""


def test_a_list_without_the_file_it_names_leaves_the_choice_to_the_call(tmp_path: Path) -> None:
    assert read_pooling(write_pooling(tmp_path, None, ("Transformer", "Pooling"))) == ""


def test_a_file_outside_the_model_is_not_read(tmp_path: Path) -> None:
    write_pooling(tmp_path, old("mean_tokens"), None, "outside")
    folder = tmp_path / "model"
    folder.mkdir()
    modules = [{"type": "library.Pooling", "path": "../outside"}]
    (folder / "modules.json").write_text(json.dumps(modules))
    assert read_pooling(folder) == ""


@pytest.mark.parametrize("content", ["{", "{}", "[1]", '[{"type": "library.Pooling"}]'])
def test_a_broken_list_names_the_file(content: str, tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text(content)
    with pytest.raises(ModelError, match=r"modules\.json"):
        read_pooling(tmp_path)


# --- A prompt that is too long loses tokens on one side ---------------------------------------------------------------


# --- The text and the bytes of single tokens --------------------------------------------------------------------------


TOKENIZERS = {"byte level": byte_level, "byte fallback": byte_fallback}


@pytest.mark.parametrize("name", TOKENIZERS)
@given(st.text(st.characters(codec="utf-8"), max_size=20))
def test_the_bytes_of_tokens_are_those_of_their_text(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]()
    texts = TokenTexts(tokenizer)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    found = b"".join(bytes(json.loads(texts[token_id].bytes)) for token_id in ids)
    # A literal "▁" in the text becomes a space too. The first token begins with a space that is not in the text.
    expected = text if name == "byte level" else " " + text.replace("▁", " ")
    assert found == (expected.encode() if ids else b"")


def test_tokens_that_the_tokenizer_lacks_and_special_ones_have_a_text() -> None:
    texts = TokenTexts(byte_level())
    assert texts[10**6] == ('""', '""', "[]")
    special = byte_level().token_to_id("<|im_end|>")
    assert json.loads(texts[special].text) == json.loads(texts[special].name) == "<|im_end|>"


# --- The trial of model files in a process with limits ----------------------------------------------------------------


def test_good_files_have_no_fault(tmp_path: Path) -> None:
    assert model_trial.try_out(write_model(tmp_path / "m")) == ""


def test_a_fault_is_named(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    (folder / "tokenizer.json").write_text("[" * 100_000)
    assert "not a tokenizer" in model_trial.try_out(folder) or "fails" in model_trial.try_out(folder)
    (folder / "config.json").unlink()
    assert "config.json is missing" in model_trial.try_out(folder)


def test_a_trial_that_takes_too_long_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_trial, "TIMEOUT_S", 0.01)
    assert "more than 0.01 s" in model_trial.try_out(write_model(tmp_path / "m"))


# --- tokenizer info ---------------------------------------------------------------------------------------------------
# `/tokenizer_info` shows the tokenizer's configuration with the template in use, and no path of the machine.


def info(folder: Path, **config: Any) -> dict[str, Any]:
    return tokenizer_info(load_model(str(write_model(folder, **config)), "model"))


def test_the_fields_of_the_file_without_paths(tmp_path: Path) -> None:
    paths = dict.fromkeys(("name_or_path", "vocab_file", "merges_file", "tokenizer_file"), "/home/someone/model")
    end = {"__type": "AddedToken", "content": "<|im_end|>", "special": True}
    found = info(tmp_path / "a", **paths, eos_token=end, model_max_length=512, tokenizer_class="Qwen2Tokenizer")
    assert found == {
        "bos_token": "<s>",
        "eos_token": "<|im_end|>",
        "model_max_length": 512,
        "tokenizer_class": "Qwen2Tokenizer",
        "chat_template": TEMPLATE,
    }
    assert info(tmp_path / "b")["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_the_template_is_the_one_in_use(tmp_path: Path) -> None:
    """That of a file of its own, or the default of several; a model without a template has no such field."""
    several = [{"name": "default", "template": "{{ messages }}"}, {"name": "rag", "template": "x"}]
    assert info(tmp_path / "several", chat_template=several)["chat_template"] == "{{ messages }}"
    assert "chat_template" not in info(tmp_path / "none", chat_template=None)
    folder = write_model(tmp_path / "file")
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert tokenizer_info(load_model(str(folder), "model"))["chat_template"] == "{{ messages[0].content }}"
