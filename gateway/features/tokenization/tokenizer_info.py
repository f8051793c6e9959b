"""The configuration of a model's tokenizer, as `GET /tokenizer_info` shows it: that of vLLM's endpoint of this name."""

from __future__ import annotations

from typing import Any

from quire.gateway.model.served_model import ServedModel

# Fields that may hold a path of the machine where the file was written.
_PATHS = ("name_or_path", "vocab_file", "merges_file", "tokenizer_file")
# The class of Transformers that reads any tokenizer.json.
_ANY_CLASS = "PreTrainedTokenizerFast"


def tokenizer_info(model: ServedModel) -> dict[str, Any]:
    """Return the fields of tokenizer_config.json without paths, with the class of the tokenizer.

    `chat_template` is the template that chats are rendered with; a model without one has no such field.
    """
    info = {name: value for name, value in model.tokenizer_config.items() if name not in _PATHS}
    info["tokenizer_class"] = info.get("tokenizer_class") or _ANY_CLASS
    info.pop("chat_template", None)
    return info if model.template is None else {**info, "chat_template": model.template.source}
