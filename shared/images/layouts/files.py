"""The files of a model folder that describe its processor."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from quire.shared.images.layouts.layout import Layout, NoLayout
from quire.shared.model.fields import Fields
from quire.shared.model.files import read_json

PROCESSOR, IMAGES = "processor_config.json", "preprocessor_config.json"
TOKENIZER, LEGACY_TOKENS = "tokenizer_config.json", "special_tokens_map.json"


class ProcessorFiles:
    """The fields of a model, its processor and its image processor, and the special tokens that its tokenizer names.

    An absent field has the default of the class in Transformers. A field that would change the layout is honoured, or
    refused by an error that names it.
    """

    def __init__(self, folder: Path, config: Fields) -> None:
        """Raise ModelError and CheckpointError for files that are malformed."""
        self.config = config
        self.processor = Fields(read_json(folder / PROCESSOR), str(folder / PROCESSOR))
        # Newer folders have the fields of the image processor in the file of the processor.
        if self.processor.get("image_processor") is not None:
            self.images = self.processor.section("image_processor")
        else:
            self.images = Fields(read_json(folder / IMAGES), str(folder / IMAGES))
        self._tokenizer = Fields(read_json(folder / TOKENIZER), str(folder / TOKENIZER))
        self._tokens = _named_tokens(self._tokenizer, read_json(folder / LEGACY_TOKENS))

    def processor_class(self, by_model_type: Mapping[str, str]) -> str:
        """Return the name of the processor's class, in the order in which AutoProcessor looks for it."""
        for fields in (self.processor, self.images, self._tokenizer, self.config):
            if isinstance(name := fields.get("processor_class"), str):
                return name
        model_type = self.config.get("model_type")
        if not isinstance(model_type, str) or model_type not in by_model_type:
            raise NoLayout(f"no rule for the images of the model type {model_type!r:.100}")
        return by_model_type[model_type]

    def image_class(self, *known: str) -> str:
        """Return the class of the image processor, one of `known`; the first is the default. Raise NoLayout."""
        if not self.images.names():
            raise NoLayout(f"{self.images.where} is missing or empty")
        name = self.images.get("image_processor_type", known[0])
        base = str(name).removesuffix("Fast")
        if base not in known:
            raise NoLayout(f"no rule for the images of {name!s:.100}")
        if not self.images.flag("do_resize", True):
            raise self.images.unsupported("do_resize", "true")
        return base

    def token(self, name: str, default: str | None = None) -> str:
        """Return the text of a special token that the tokenizer names, such as `boi_token`."""
        token = self._tokens.get(name, default)
        if not token:
            raise self._tokenizer.fault(name, "the text of a token")
        return token

    def processor_token(self, name: str, default: str) -> str:
        """Return the text of a special token that the processor names."""
        token = self.processor.get(name, default)
        if not isinstance(token, str) or not token:
            raise self.processor.fault(name, "the text of a token")
        return token

    def layout(self, image_token: str, write: Callable[[int, int], str], placeholder: str | None = None) -> Layout:
        """Return the layout of a model with this image token. placeholder: if it differs from the image token."""
        name = "image_token_index" if self.config.get("image_token_id") is None else "image_token_id"
        image_token_id = self.config.integer(name, minimum=0)
        return Layout(placeholder or image_token, image_token, image_token_id, write)

    def grid_layout(self, image_token: str, grid: Callable[[int, int], tuple[int, int]]) -> Layout:
        """Return the layout of a model whose image tokens are one grid."""
        layout = self.layout(image_token, lambda width, height: image_token * math.prod(grid(width, height)))
        return replace(layout, grid=grid)


def _named_tokens(tokenizer: Fields, legacy: Mapping[str, Any]) -> dict[str, str]:
    """Return the tokens by name, such as `image_token`. Transformers reads the legacy file without newer fields."""
    values = {} if tokenizer.has("added_tokens_decoder") else dict(legacy)
    values |= {name: tokenizer.get(name) for name in tokenizer.names() if name.endswith("_token")}
    for section in ("extra_special_tokens", "model_specific_special_tokens"):
        values |= named if isinstance(named := tokenizer.get(section), dict) else {}
    contents = {name: value.get("content") if isinstance(value, dict) else value for name, value in values.items()}
    return {name: content for name, content in contents.items() if isinstance(content, str)}
