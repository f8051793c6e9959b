"""How a model scores a pair of texts: the tokens whose logits count, the prompt, and the function of the score.

A causal model scores with the logits of one or two tokens after its prompt, such as "no" and "yes". The files of
sentence-transformers name them (LogitScore), or `classifier_from_token` of config.json, or the chat template, or the
setting --score-tokens. A model for sequence classification has a head of its own; its labels stand for the first
tokens of the vocabulary.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from quire.gateway.model.pooling import MODULES, read_modules
from quire.shared.model.files import ModelError, read_json
from quire.shared.model.labels import is_classifier, num_labels
from quire.shared.text.chat_template import ChatTemplate, TemplateFailure
from quire.shared.text.control_tokens import ControlTokens

SENTENCE_TRANSFORMERS, CROSS_ENCODER = "config_sentence_transformers.json", "CrossEncoder"
BERT = "sentence_bert_config.json"  # of any model
QUERY, DOCUMENT = "query", "document"
# A sentence of the prompt with which Qwen3-Reranker was trained, and that prompt (its model card).
_JUDGE = "Judge whether the Document meets the requirements based on the Query and the Instruct provided."
_QWEN3_RERANKER = (
    f'<|im_start|>system\n{_JUDGE} Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: {{ instruction or 'Given a web search query, retrieve relevant passages that answer the query' }}\n"
    "<Query>: {{ messages[-2].content }}\n<Document>: {{ messages[-1].content }}<|im_end|>\n<|im_start|>assistant\n"
    "<think>\n\n</think>\n\n\n"  # Jinja drops the last line end
)
# Values of the setting --score-template besides files.
QWEN3_RERANKER, PAIR = "qwen3-reranker", "pair"
_QWEN3_TOKENS = ("no", "yes")
_CHATML = "<|im_start|>"


def _sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value)) if value >= 0 else math.exp(value) / (1 + math.exp(value))


# By the last part of the names of torch's classes.
ACTIVATIONS: dict[str, Callable[[float], float]] = {"Sigmoid": _sigmoid, "Identity": lambda value: value}
DEFAULT_ACTIVATION = "Sigmoid"


@dataclass(frozen=True, slots=True)
class Scoring:
    """How a model scores pairs.

    token_ids: of one token, whose logit is the score; or of two: the logit of the second minus that of the first.
    template: of the prompt; None: the tokenizer's own form of a pair. activation: a name of ACTIVATIONS. instruction:
    the default of calls; empty: that of the template. control_tokens: those that texts may not forge. adds_generation:
    the template writes the beginning of an answer.
    """

    token_ids: tuple[int, ...]
    template: ChatTemplate | None
    activation: str = DEFAULT_ACTIVATION
    instruction: str = ""
    control_tokens: ControlTokens | None = None
    adds_generation: bool = False

    @property
    def takes_instruction(self) -> bool:
        """Return whether an instruction reaches the prompt."""
        return self.template is not None and self.prompt("query", "text", "\0") != self.prompt("query", "text", "\1")

    def score(self, logits: Sequence[float], uses_activation: bool) -> float:
        """Return the score of a pair from the logits of `token_ids`."""
        value = logits[0] if len(self.token_ids) == 1 else logits[1] - logits[0]
        return ACTIVATIONS[self.activation](value) if uses_activation else value

    def prompt(self, query: str, document: str, instruction: str = "") -> str:
        """Return the prompt of a pair. Raises TemplateFailure."""
        assert self.template is not None
        return _rendered(self.template, query, document, instruction or self.instruction, self.adds_generation)


@dataclass(frozen=True, slots=True)
class ScoreSettings:
    """What an operator says about scores.

    tokens: texts, one or two; template: a file, QWEN3_RERANKER or PAIR. Empty: as the files of the model say.
    """

    tokens: tuple[str, ...] = ()
    template: str = ""


def read_scoring(
    folder: Path,
    config: Mapping[str, Any],
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    special_tokens: Mapping[str, str],
    settings: ScoreSettings,
) -> Scoring | str:
    """Return how a model scores, or why it does not: a clause for the errors of calls.

    template: the model's own. special_tokens: of `read_special_tokens`. Raises ModelError for a setting that does not
    suit the model, and for files that cannot be read.
    """
    own = read_json(folder / SENTENCE_TRANSFORMERS)
    found = _tokens(folder, config, tokenizer, template, settings)
    if isinstance(found, str):
        return found
    token_ids, is_qwen3 = found
    activation = _activation(config, own)
    if activation not in ACTIVATIONS:
        return f"its files name {activation} as the function of its scores, which this server does not compute"
    if settings.template not in ("", QWEN3_RERANKER, PAIR):
        chosen: ChatTemplate | None = _template_of(Path(settings.template), special_tokens)
    elif settings.template == PAIR:
        chosen = None
    elif (
        not settings.template
        and template is not None
        and _takes_pairs(template, own.get("model_type") == CROSS_ENCODER)
    ):
        chosen = template
    elif is_qwen3 or settings.template:
        chosen = ChatTemplate(_QWEN3_RERANKER, special_tokens)
    else:
        chosen = None
    control_tokens = None if chosen is None else ControlTokens.of(tokenizer, chosen.source, ())
    return Scoring(token_ids, chosen, activation, _default_prompt(own), control_tokens, _adds_generation(folder))


def _takes_pairs(template: ChatTemplate, is_written_for_pairs: bool) -> bool:
    """Return whether a chat template writes messages of the roles `query` and `document`.

    is_written_for_pairs: also a template that writes any role, as sentence-transformers does; else it must name them.
    """
    if not is_written_for_pairs and not all(
        re.search(f"['\"]{role}['\"]", template.source) for role in (QUERY, DOCUMENT)
    ):
        return False
    try:
        text = _rendered(template, "(first)", "(second)")
    except TemplateFailure:
        return False
    return "(first)" in text and "(second)" in text


def _rendered(
    template: ChatTemplate, query: str, document: str, instruction: str = "", adds_generation: bool = False
) -> str:
    texts = ([("system", instruction)] if instruction else []) + [(QUERY, query), (DOCUMENT, document)]
    messages = [{"role": role, "content": text} for role, text in texts]
    return template.render(messages, adds_generation, variables={"instruction": instruction or None})


def _template_of(path: Path, special_tokens: Mapping[str, str]) -> ChatTemplate:
    remedy = "give --score-template a Jinja template that writes messages of the roles query and document"
    try:
        template = ChatTemplate(path.read_text(encoding="utf-8"), special_tokens)
        text = _rendered(template, "(first)", "(second)")
    except (OSError, ValueError, TemplateFailure) as error:
        raise ModelError(f"--score-template {path}: {error}; {remedy}.") from error
    if "(first)" not in text or "(second)" not in text:
        raise ModelError(f"--score-template {path} leaves out the query or the document; {remedy}.")
    return template


def _tokens(
    folder: Path,
    config: Mapping[str, Any],
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    settings: ScoreSettings,
) -> tuple[tuple[int, ...], bool] | str:
    """Return the tokens, and whether the prompt is that of Qwen3-Reranker unless the model has another; or why none."""
    is_qwen3 = template is not None and _JUDGE in template.source
    if is_classifier(config):
        if settings.tokens:
            raise ModelError("--score-tokens is for models without a head for scores, and this one has one; omit it.")
        count = num_labels(config)
        if count != 1:
            return f"its head has {count} labels, and a score needs a head with one"
        return (0,), is_qwen3
    if settings.tokens:
        ids = tuple(_token_id(tokenizer, text, "--score-tokens") for text in settings.tokens)
        return ids, is_qwen3 or (settings.tokens == _QWEN3_TOKENS and tokenizer.token_to_id(_CHATML) is not None)
    if ids := _of_logit_score(folder):
        return ids, is_qwen3
    texts = config.get("classifier_from_token")
    if isinstance(texts, list) and 0 < len(texts) <= 2 and all(type(text) is str for text in texts):
        ids = tuple(_token_id(tokenizer, text, "classifier_from_token of config.json") for text in texts)
        return ids, is_qwen3 or config.get("is_original_qwen3_reranker") is True
    if is_qwen3:
        return tuple(_token_id(tokenizer, text, "the chat template of Qwen3-Reranker") for text in _QWEN3_TOKENS), True
    return "no file of it names the tokens of a score; a gateway takes them from its setting --score-tokens"


def _token_id(tokenizer: Tokenizer, text: str, source: str) -> int:
    token_id = tokenizer.token_to_id(text)
    ids = [token_id] if token_id is not None else tokenizer.encode(text, add_special_tokens=False).ids
    if len(ids) != 1:
        raise ModelError(f"{source}: {text[:80]!r} is no token of this model; give texts that are one token each.")
    return int(ids[0])


def _of_logit_score(folder: Path) -> tuple[int, ...]:
    """Return the tokens that the module LogitScore of sentence-transformers names; none without it."""
    modules = read_modules(folder / MODULES) if (folder / MODULES).exists() else []
    places = [place for kind, place in modules if kind == "LogitScore"]
    if len(places) != 1:
        return ()
    file = folder / places[0] / "config.json"
    if not file.resolve().is_relative_to(folder.resolve()):
        return ()
    values = read_json(file)
    ids = [values[name] for name in ("false_token_id", "true_token_id") if values.get(name) is not None]
    if not ids or not all(type(token_id) is int and token_id >= 0 for token_id in ids):
        raise ModelError(f"{file} names no token ids; fetch the model again.")
    return tuple(ids)


def _activation(config: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    """Return the last part of the name of the class that the files of sentence-transformers name."""
    older = config.get("sentence_transformers")
    places = (own, older if isinstance(older, dict) else {})
    names = [place.get("activation_fn") for place in places] + [config.get("sbert_ce_default_activation_function")]
    name = next((name for name in names if type(name) is str), DEFAULT_ACTIVATION)
    return name.rpartition(".")[2][:80]


def _adds_generation(folder: Path) -> bool:
    """Return whether the files of sentence-transformers have the template write the beginning of an answer."""
    place: Any = read_json(folder / BERT)
    for name in ("processing_kwargs", "chat_template"):
        place = place.get(name) if isinstance(place, dict) else None
    return isinstance(place, dict) and place.get("add_generation_prompt") is True


def _default_prompt(own: Mapping[str, Any]) -> str:
    prompts, name = own.get("prompts"), own.get("default_prompt_name")
    prompt = prompts.get(name) if isinstance(prompts, dict) and type(name) is str else None
    return prompt if type(prompt) is str else ""
