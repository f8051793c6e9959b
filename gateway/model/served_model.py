"""The parts of a model that a gateway needs: tokenizer, chat template, limits, end tokens and sampling defaults.

The sampling defaults are the values that generation_config.json gives for parameters that a call leaves out: the same
five fields as in vLLM (`--generation-config auto`). `do_sample` and `max_new_tokens` are not among them: they belong to
`generate()` of Transformers.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from quire.gateway.features.tools.formats import (
    FALLBACK,
    FORMATS,
    REASONING_FORMATS,
    ReasoningFormat,
    ToolFormat,
    detect,
    detect_reasoning,
)
from quire.gateway.model.pooling import read_pooling
from quire.gateway.model.scoring import ScoreSettings, Scoring, read_scoring
from quire.gateway.model.token_texts import TokenTexts
from quire.shared.config.validators import InvalidValue
from quire.shared.images.layouts.layout import Layout, NoLayout
from quire.shared.model.config import HIDDEN_KEYS, longest_context, read_model_config
from quire.shared.model.files import ModelError, read_json
from quire.shared.model.hub import HubError, find_folder
from quire.shared.model.labels import is_classifier
from quire.shared.protocol.sampling_params import MODEL_DEFAULTS, PARAMETERS
from quire.shared.text.chat_template import ChatTemplate, load_chat_template
from quire.shared.text.detokenizer import context_of, drops_first_space
from quire.shared.text.tokenizer import eos_token_id, load_tokenizer, read_special_tokens

log = logging.getLogger("gateway")

GENERATION_CONFIG = "generation_config.json"
# Values of the settings of formats besides the names of formats.
AUTO, NO_FORMAT = "auto", "none"

__all__ = ["ModelError", "ServedModel", "load_model"]

# Everything but the weights.
HUB_PATTERNS = ["*.json", "*.jinja", "tokenizer.model"]
HUB_IGNORED = ["*.safetensors.index.json", "*.bin.index.json", "onnx/*", "original/*"]


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The parts of a model that the gateway works with.

    context: tokens placed before a completion, so that it decodes as a continuation.
    drops_first_space: whether a text of its own loses its leading space.
    max_model_len: None if the configuration does not say.
    special_tokens: token ids by text.
    sampling_defaults: by name of the sampling parameter.
    tool_format: how the model writes tool calls, a name of `FORMATS`. reasoning_format: how it marks its reasoning, a
    name of `REASONING_FORMATS`; empty if it does not.
    hidden_size: numbers in an embedding; None if the configuration does not say.
    pooling: the default of embedding calls (`quire.gateway.model.pooling`); empty if they must name one.
    scoring: how the model scores pairs of texts, or why it does not. is_classifier: it scores, and generates no text.
    aliases: other names by which calls may name the model.
    tokenizer_config: the content of tokenizer_config.json, with the special tokens as texts.
    layout: of images in prompts; None if the model takes text alone.
    """

    name: str
    tokenizer: Tokenizer
    context: tuple[int, ...]
    drops_first_space: bool
    token_texts: TokenTexts
    template: ChatTemplate | None
    max_model_len: int | None
    vocab_size: int
    eos_token_ids: frozenset[int]
    special_tokens: dict[str, int]
    sampling_defaults: Mapping[str, float]
    hidden_size: int | None = None
    pooling: str = ""
    scoring: Scoring | str = ""
    is_classifier: bool = False
    tool_format: str = ""
    reasoning_format: str = ""
    aliases: tuple[str, ...] = ()
    tokenizer_config: Mapping[str, Any] = field(default_factory=dict)
    layout: Layout | None = None

    @property
    def calls(self) -> ToolFormat | None:
        """The format of tool calls; None without one."""
        return FORMATS[self.tool_format] if self.tool_format else None

    @property
    def reasoning(self) -> ReasoningFormat | None:
        """The format of reasoning besides one that the format of tool calls has; None without one."""
        return REASONING_FORMATS[self.reasoning_format] if self.reasoning_format else None

    def thinking_markers(self, prompt: str, is_free: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the tokens that begin the reasoning of an answer, and those that end it where it must end.

        is_free: no grammar restricts the answer, and it has no tools. No tokens begin the reasoning if the prompt ends
        inside of it. No tokens end it if the model marks none, not with a token of its own, or can only end it for an
        answer that is free.
        """
        if self.reasoning is not None:
            start, end, after = self.reasoning.start, self.reasoning.end, ""
            start = "" if self.reasoning.begins_in(prompt) else start
        elif self.calls is not None and self.calls.has_reasoning and is_free:
            start, end, after = self.calls.reasoning_markers
        else:
            return (), ()
        if self.tokenizer.token_to_id(end) is None:
            return (), ()
        begin, finish = (self.tokenizer.encode(text, add_special_tokens=False).ids for text in (start, end + after))
        return tuple(begin), tuple(finish)

    @property
    def shown_reasoning_format(self) -> str:
        """The format in which the model marks its reasoning; empty if it does not.

        A format of tool calls may have reasoning of its own.
        """
        has_own = self.calls is not None and self.calls.has_reasoning
        return self.reasoning_format or (self.tool_format if has_own else "")


def load_model(
    model: str,
    name: str,
    uses_generation_config: bool = True,
    tool_call_format: str = AUTO,
    reasoning_format: str = AUTO,
    aliases: tuple[str, ...] = (),
    scores: ScoreSettings | None = None,
) -> ServedModel:
    """Read a model folder, or fetch one from the Hugging Face Hub. Raises ModelError.

    Without `uses_generation_config` the sampling defaults are those of the API, not those of the model.
    tool_call_format, reasoning_format: a format's name, or `auto` for the one that the chat template has.
    scores: what the operator says about scores.
    """
    folder = _folder(model)
    config = read_model_config(folder)
    generation = read_json(folder / GENERATION_CONFIG)
    tokenizer_config = read_json(folder / "tokenizer_config.json")
    special_tokens = read_special_tokens(folder, tokenizer_config)
    tokenizer = load_tokenizer(folder, special_tokens)
    text_config = config.get("text_config") or config
    if not isinstance(text_config, dict):
        raise ModelError(f"{folder / 'config.json'}: text_config is not a JSON object; fetch the model again.")
    vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)
    declared = text_config.get("vocab_size")
    template = load_chat_template(folder, tokenizer_config, special_tokens)
    added_tokens = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    return ServedModel(
        name=name,
        tokenizer=tokenizer,
        context=context_of(tokenizer),
        drops_first_space=drops_first_space(tokenizer),
        token_texts=TokenTexts(tokenizer),
        template=template,
        max_model_len=longest_context(text_config),
        vocab_size=declared if type(declared) is int else vocab_size,
        eos_token_ids=_eos_token_ids(generation, text_config, config, tokenizer, special_tokens),
        special_tokens={
            token.content: number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special
        },
        sampling_defaults=(
            read_sampling_defaults(folder / GENERATION_CONFIG, generation) if uses_generation_config else MODEL_DEFAULTS
        ),
        hidden_size=next((text_config[key] for key in HIDDEN_KEYS if type(text_config.get(key)) is int), None),
        pooling=read_pooling(folder),
        scoring=read_scoring(folder, config, tokenizer, template, special_tokens, scores or ScoreSettings()),
        is_classifier=is_classifier(config),
        tool_format=_tool_format(tool_call_format, template, added_tokens),
        reasoning_format=_reasoning_format(reasoning_format, template, added_tokens),
        aliases=aliases,
        tokenizer_config={**tokenizer_config, **special_tokens},
        layout=_layout(folder, name, config.get("model_type"), tokenizer) if config.get("vision_config") else None,
    )


def _layout(folder: Path, name: str, model_type: object, tokenizer: Tokenizer) -> Layout | None:
    from quire.shared.images.layouts.families import ONE_AXIS, THREE_AXES, read_layout

    try:
        layout = read_layout(folder)
        if layout is not None and model_type not in ONE_AXIS + THREE_AXES:
            raise NoLayout(f"workers do not compute images of the model type {str(model_type)[:100]} yet")
        if layout is not None and tokenizer.token_to_id(layout.image_token) != layout.image_token_id:
            raise NoLayout(f"the token {layout.image_token} has another number in the tokenizer than in config.json")
        return layout
    except NoLayout as error:
        log.warning("%s serves text alone: %s", name, error)
    return None


def _tool_format(name: str, template: ChatTemplate | None, added_tokens: set[str]) -> str:
    """Return the name of the format of tool calls: the one that is set, or the one that the chat template tells."""
    if name != AUTO or template is None:
        return "" if name == AUTO else name
    template = template.with_tools
    detected = detect(template.source, added_tokens) if "tools" in template.variables else None
    return (detected or FALLBACK).name


def _reasoning_format(name: str, template: ChatTemplate | None, added_tokens: set[str]) -> str:
    """Return the name of the format of reasoning: the set one, or the one that the chat template tells; or empty."""
    if name != AUTO:
        return "" if name == NO_FORMAT else name
    sources = [] if template is None else [template.source, template.with_tools.source]
    detected = next(filter(None, (detect_reasoning(source, added_tokens) for source in sources)), None)
    return detected.name if detected is not None else ""


def read_sampling_defaults(path: Path, generation: Mapping[str, Any]) -> dict[str, float]:
    """Return the defaults in `generation`, the content of the file `path`.

    An absent or null field has the default of the API. Raises ModelError if a value is outside the range that
    the API allows for the parameter.
    """
    defaults = dict(MODEL_DEFAULTS)
    for name in defaults:
        if (value := generation.get(name)) is not None:
            try:
                defaults[name] = PARAMETERS[name].read(name, value)
            except InvalidValue as error:
                raise ModelError(
                    f"{path}: {error}; correct the file, or ignore its sampling defaults with --generation-config none "
                    "(QUIRE_GENERATION_CONFIG)."
                ) from None
    return defaults


def _folder(model: str) -> Path:
    try:
        return find_folder(model, HUB_PATTERNS, HUB_IGNORED)
    except HubError as error:
        raise ModelError(f"model: {error}") from error


def _eos_token_ids(
    generation: Mapping[str, Any],
    text_config: Mapping[str, Any],
    config: Mapping[str, Any],
    tokenizer: Tokenizer,
    special_tokens: Mapping[str, str],
) -> frozenset[int]:
    """Return the end tokens of the first file that names some, and the one that the tokenizer names, as in vLLM."""
    ids: list[int] = []
    for source in (generation, config, text_config):
        value = source.get("eos_token_id")
        ids = [item for item in (value if isinstance(value, list) else [value]) if type(item) is int]
        if ids:
            break
    eos = eos_token_id(tokenizer, special_tokens)
    return frozenset(ids if eos is None else [*ids, eos])
