"""How a model scores, as its files and the settings say: tokens, prompt, function and instruction."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from quire.gateway.features.several_models.registered_model import load_registered
from quire.gateway.model.scoring import ScoreSettings, Scoring
from quire.gateway.model.served_model import ModelError, load_model
from quire.gateway.settings import GatewaySettings
from quire.shared.process.errors import StartError
from quire.shared.protocol.registered_files import manifest_of, read_files
from tests.support.gateway.running import TEMPLATE, write_model
from tests.support.tokenizers import byte_level

# A sentence of the prompt on the model card of Qwen3-Reranker, around which the card writes the texts.
JUDGE = "Judge whether the Document meets the requirements based on the Query and the Instruct provided."
QWEN3 = (
    f'<|im_start|>system\n{JUDGE} Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: {}\n<Query>: {}\n<Document>: {}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
DEFAULT = "Given a web search query, retrieve relevant passages that answer the query"
ROLES = (
    "{{ messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first }} / "
    "{{ messages | selectattr('role', 'eq', 'document') | map(attribute='content') | first }}"
)
NEW, OLD = "config_sentence_transformers.json", "1_LogitScore/config.json"
MODULES = [{"type": "sentence_transformers.cross_encoder.modules.LogitScore", "path": "1_LogitScore"}]
CLASSIFIER = {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "LABEL_0"}}


def with_words() -> Any:
    """Return a tokenizer with the tokens "no" and "yes"."""
    tokenizer = type(byte_level()).from_str(byte_level().to_str())
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in ("no", "yes")])
    return tokenizer


def folder_with(folder: Path, config: dict[str, Any], files: dict[str, Any], template: str = TEMPLATE) -> Path:
    write_model(folder, with_words(), chat_template=template)
    files = {"config.json": json.loads((folder / "config.json").read_text()) | config} | files
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content))
    return folder


def scoring_of(folder: Path, *tokens: str, template: str = "") -> Scoring:
    scoring = load_model(str(folder), "m", scores=ScoreSettings(tokens, template)).scoring
    assert isinstance(scoring, Scoring), scoring
    return scoring


def ids(*words: str) -> tuple[int, ...]:
    return tuple(with_words().token_to_id(word) for word in words)


@pytest.mark.parametrize(
    ("config", "files", "template", "tokens"),
    [
        ({}, {"modules.json": MODULES, OLD: {"true_token_id": 7, "false_token_id": 5}}, ROLES, (5, 7)),
        ({}, {"modules.json": MODULES, OLD: {"true_token_id": 7, "false_token_id": None}}, ROLES, (7,)),
        ({"classifier_from_token": ["no", "yes"]}, {}, ROLES, ids("no", "yes")),
        (CLASSIFIER, {}, ROLES, (0,)),
        (CLASSIFIER | {"id2label": None, "num_labels": 1}, {}, ROLES, (0,)),
    ],
)
def test_the_files_name_the_tokens_and_the_template(
    config: dict[str, Any], files: dict[str, Any], template: str, tokens: tuple[int, ...], tmp_path: Path
) -> None:
    scoring = scoring_of(folder_with(tmp_path / "m", config, files, template))
    assert scoring.token_ids == tokens
    assert scoring.prompt("a", "b") == "a / b"


@pytest.mark.parametrize(
    ("config", "template", "settings"),
    [
        ({}, TEMPLATE, ScoreSettings(("no", "yes"))),
        ({}, TEMPLATE + "{# " + JUDGE + " #}", ScoreSettings()),
        ({"classifier_from_token": ["no", "yes"], "is_original_qwen3_reranker": True}, TEMPLATE, ScoreSettings()),
        (CLASSIFIER, TEMPLATE, ScoreSettings(template="qwen3-reranker")),
    ],
)
def test_qwen3_reranker_has_the_prompt_of_its_model_card(
    config: dict[str, Any], template: str, settings: ScoreSettings, tmp_path: Path
) -> None:
    scoring = scoring_of(
        folder_with(tmp_path / "m", config, {}, template), *settings.tokens, template=settings.template
    )
    assert scoring.prompt("a?", "b.") == QWEN3.format(DEFAULT, "a?", "b.")
    assert scoring.prompt("a?", "b.", "Judge") == QWEN3.format("Judge", "a?", "b.")
    assert scoring.token_ids == ((0,) if config == CLASSIFIER else ids("no", "yes"))
    assert scoring.takes_instruction


def test_a_template_for_any_role_is_for_pairs_only_if_sentence_transformers_wrote_the_files(tmp_path: Path) -> None:
    plain = scoring_of(folder_with(tmp_path / "plain", CLASSIFIER, {}))
    assert plain.template is None
    written = folder_with(tmp_path / "written", CLASSIFIER, {NEW: {"model_type": "CrossEncoder"}})
    expected = "<|im_start|>query\na<|im_end|>\n<|im_start|>document\nb<|im_end|>\n"
    assert scoring_of(written).prompt("a", "b") == expected
    begun = {"processing_kwargs": {"chat_template": {"add_generation_prompt": True}}}
    (written / "sentence_bert_config.json").write_text(json.dumps(begun))
    assert scoring_of(written).prompt("a", "b") == f"{expected}<|im_start|>assistant\n"
    assert scoring_of(written, template="pair").template is None


def test_the_default_prompt_is_the_instruction(tmp_path: Path) -> None:
    prompts = {"prompts": {"search": "Find it", "other": "No"}, "default_prompt_name": "search"}
    template = "{{ messages[0].content if messages | length == 3 }} / " + ROLES
    scoring = scoring_of(folder_with(tmp_path / "m", CLASSIFIER, {NEW: prompts}, template))
    assert scoring.prompt("a", "b") == "Find it / a / b"
    assert scoring.prompt("a", "b", "Judge") == "Judge / a / b"


@pytest.mark.parametrize(
    ("config", "files", "expected"),
    [
        ({}, {}, 1 / (1 + 2.718281828459045)),
        ({}, {NEW: {"activation_fn": "torch.nn.modules.linear.Identity"}}, -1.0),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, {}, -1.0),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, {}, -1.0),
    ],
)
def test_the_function_of_the_score_is_that_of_the_files(
    config: dict[str, Any], files: dict[str, Any], expected: float, tmp_path: Path
) -> None:
    scoring = scoring_of(folder_with(tmp_path / "m", CLASSIFIER | config, files))
    assert scoring.score([-1.0], True) == pytest.approx(expected)
    assert scoring.score([-1.0], False) == -1.0
    assert [scoring.score([value], True) for value in (-1000.0, 1000.0)] in ([0.0, 1.0], [-1000.0, 1000.0])


@pytest.mark.parametrize(
    ("config", "files", "reason"),
    [
        ({}, {}, "--score-tokens"),
        (CLASSIFIER | {"id2label": {"0": "a", "1": "b"}}, {}, "has 2 labels"),
        (CLASSIFIER | {"id2label": None}, {}, "has 2 labels"),
        (CLASSIFIER, {NEW: {"activation_fn": "my.Activation"}}, "Activation"),
    ],
)
def test_a_model_that_gives_no_scores_has_a_reason(
    config: dict[str, Any], files: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    scoring = load_model(str(folder_with(tmp_path / "m", config, files)), "m").scoring
    assert isinstance(scoring, str)
    assert reason in scoring


@pytest.mark.parametrize(
    ("settings", "config", "message"),
    [
        (ScoreSettings(("no", "maybe")), {}, "'maybe' is no token"),
        (ScoreSettings(("no", "yes")), CLASSIFIER, "omit it"),
        (ScoreSettings(("no",), "missing.jinja"), {}, r"missing\.jinja"),
        (ScoreSettings(), {"classifier_from_token": ["a b c"]}, "classifier_from_token"),
    ],
)
def test_settings_and_files_that_do_not_suit_the_model_stop_the_start(
    settings: ScoreSettings, config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = folder_with(tmp_path / "m", config, {})
    with pytest.raises(ModelError, match=message):
        load_model(str(folder), "m", scores=settings)


def test_a_template_without_one_of_the_texts_stops_the_start(tmp_path: Path) -> None:
    folder, file = folder_with(tmp_path / "m", {}, {}), tmp_path / "t.jinja"
    file.write_text("{{ messages[0].content }}")
    with pytest.raises(ModelError, match="leaves out the query or the document"):
        load_model(str(folder), "m", scores=ScoreSettings(("yes",), str(file)))


@pytest.mark.parametrize("tokens", ["a,b,c", "a,", ",", ",a"])
def test_the_setting_is_one_token_or_two(tokens: str) -> None:
    with pytest.raises(StartError, match="--score-tokens"):
        GatewaySettings(score_tokens=tokens).score_texts  # noqa: B018


async def test_a_gateway_without_the_folder_scores_alike(tmp_path: Path) -> None:
    files = {"modules.json": MODULES, OLD: {"true_token_id": 7}, NEW: {"activation_fn": "torch.nn.Identity"}}
    folder = folder_with(tmp_path / "m", {}, files, ROLES)
    stored = read_files(folder)
    manifest = manifest_of("m", (), stored)

    class Registry:
        async def read(self, entry: Any) -> bytes:
            return stored[entry.name]

    found = (await load_registered(Registry(), manifest, GatewaySettings())).scoring  # type: ignore[arg-type]
    expected = scoring_of(folder)
    assert isinstance(found, Scoring)
    assert (found.token_ids, found.activation) == (expected.token_ids, expected.activation) == ((7,), "Identity")
    assert found.prompt("a", "b") == expected.prompt("a", "b") == "a / b"
