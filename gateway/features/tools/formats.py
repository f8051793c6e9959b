"""The formats of tool calls and reasoning by name, and which of them a model uses."""

from __future__ import annotations

import re
from collections.abc import Collection

from quire.gateway.features.tools.deepseek import CALLS_BEGIN, DeepSeekV3, DeepSeekV31
from quire.gateway.features.tools.harmony import CHANNEL, Harmony
from quire.gateway.features.tools.hermes import Hermes
from quire.gateway.features.tools.json_format import Json
from quire.gateway.features.tools.llama_json import LlamaJson
from quire.gateway.features.tools.mistral import ARGS, CALLS, MistralList, MistralNames
from quire.gateway.features.tools.pythonic import Pythonic
from quire.gateway.features.tools.qwen_coder import QwenCoder
from quire.gateway.features.tools.reasoning import ReasoningFormat
from quire.gateway.features.tools.tool_format import ToolFormat

__all__ = ["FALLBACK", "FORMATS", "REASONING_FORMATS", "ReasoningFormat", "ToolFormat", "detect", "detect_reasoning"]

# By the value of the setting `--tool-call-format`.
FORMATS: dict[str, ToolFormat] = {
    form.name: form
    for form in (
        Hermes(),
        QwenCoder(),
        LlamaJson(),
        Pythonic(),
        MistralList(),
        MistralNames(),
        DeepSeekV3(),
        DeepSeekV31(),
        Harmony(),
        Json(),
    )
}
# The format for models whose chat template knows no tools; its `prompt` describes them.
FALLBACK: ToolFormat = FORMATS["json"]

# By the value of the setting `--reasoning-format`. Harmony has its own reasoning.
REASONING_FORMATS: dict[str, ReasoningFormat] = {
    form.name: form
    for form in (
        ReasoningFormat("think", "<think>", "</think>"),
        ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
        ReasoningFormat("seed", "<seed:think>", "</seed:think>"),
        ReasoningFormat("cohere", "<|START_THINKING|>", "<|END_THINKING|>"),
        ReasoningFormat("gemma", "<|channel>thought", "<channel|>"),
    )
}


def _key(name: str) -> str:
    """Return the pattern of a JSON key in a template, where quotes may be escaped."""
    return f"[\"']{name}\\\\*[\"']: "


# Either form of Mistral.
_BY_TOKENS = ""
# In this order: what a chat template contains, all of it, and the format that this tells.
_SIGNS: tuple[tuple[tuple[str, ...], str], ...] = (
    ((re.escape(CHANNEL), re.escape("<|message|>")), "harmony"),
    ((re.escape(CALLS), re.escape(ARGS)), "mistral_args"),
    ((re.escape(CALLS) + r"\s*\[",), "mistral"),
    ((re.escape(CALLS),), _BY_TOKENS),
    ((CALLS_BEGIN, "```json"), "deepseek"),
    ((CALLS_BEGIN,), "deepseek_v31"),
    (("<tool_call>", "<function=", "<parameter="), "qwen3_coder"),
    (("<tool_call>", _key("name"), _key("arguments")), "hermes"),
    ((r"func(tion)?_name1?\(", "tools"), "pythonic"),
    (("tools", r"<\|(start_header_id|header_start|python_tag)\|>", _key("name"), _key("parameters")), "llama3_json"),
)


def detect(template: str, added_tokens: Collection[str] = ()) -> ToolFormat | None:
    """Return the format in which the model of a chat template writes tool calls, or None if the template tells none.

    template: the source of the template. added_tokens: the special and added tokens of the tokenizer; they tell the two
    forms of Mistral apart where the template does not.
    """
    for signs, name in _SIGNS:
        if all(re.search(sign, template) for sign in signs):
            return FORMATS[name or ("mistral_args" if ARGS in added_tokens else "mistral")]
    return None


def detect_reasoning(template: str, added_tokens: Collection[str] = ()) -> ReasoningFormat | None:
    """Return the markers of the reasoning of a model, or None if its chat template and tokenizer have none."""
    for form in REASONING_FORMATS.values():
        if form.end in template or (form.start in added_tokens and form.end in added_tokens):
            return form
    return None
