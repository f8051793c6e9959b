"""The parts of a model that a gateway needs: tokenizer, chat template, limits, end tokens and sampling defaults.

The sampling defaults are the values that generation_config.json gives for parameters that a call leaves out: the same
five fields as in vLLM (`--generation-config auto`). `do_sample` and `max_new_tokens` are not among them: they belong to
`generate()` of Transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from quire.gateway.model.token_texts import TokenTexts
from quire.shared.model.config import context_length, read_model_config
from quire.shared.model.files import ModelError, read_json
from quire.shared.model.hub import HubError, find_folder
from quire.shared.sampling_params import MODEL_DEFAULTS, PARAMETERS
from quire.shared.text.chat_template import ChatTemplate, load_chat_template
from quire.shared.text.detokenizer import context_of, drops_first_space
from quire.shared.text.tokenizer import eos_token_id, load_tokenizer, read_special_tokens
from quire.shared.validators import InvalidValue

GENERATION_CONFIG = "generation_config.json"

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


def load_model(model: str, name: str, uses_generation_config: bool = True) -> ServedModel:
    """Read a model folder, or fetch one from the Hugging Face Hub. Raises ModelError.

    Without `uses_generation_config` the sampling defaults are those of the API, not those of the model.
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
    return ServedModel(
        name=name,
        tokenizer=tokenizer,
        context=context_of(tokenizer),
        drops_first_space=drops_first_space(tokenizer),
        token_texts=TokenTexts(tokenizer),
        template=load_chat_template(folder, tokenizer_config, special_tokens),
        max_model_len=context_length(text_config),
        vocab_size=declared if type(declared) is int else vocab_size,
        eos_token_ids=_eos_token_ids(generation, text_config, config, tokenizer, special_tokens),
        special_tokens={
            token.content: number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special
        },
        sampling_defaults=(
            read_sampling_defaults(folder / GENERATION_CONFIG, generation) if uses_generation_config else MODEL_DEFAULTS
        ),
    )


def read_sampling_defaults(path: Path, generation: Mapping[str, Any]) -> dict[str, float]:
    """The defaults in `generation`, the content of the file `path`. An absent or null field has the default of the API.

    Raises ModelError if a value is outside the range that the API allows for the parameter.
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
    for source in (generation, text_config, config):
        value = source.get("eos_token_id")
        ids = value if isinstance(value, list) else [value]
        if any(type(item) is int for item in ids):
            return frozenset(item for item in ids if type(item) is int)
    eos = eos_token_id(tokenizer, special_tokens)
    return frozenset() if eos is None else frozenset([eos])
