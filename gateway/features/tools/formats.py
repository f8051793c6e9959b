"""The formats of tool calls and reasoning by name, and which of them a model uses."""

from __future__ import annotations

import re
from collections.abc import Collection

from quire.gateway.features.tools.gemma4 import START, Gemma4
from quire.gateway.features.tools.harmony import CHANNEL, Harmony
from quire.gateway.features.tools.hermes import Hermes
from quire.gateway.features.tools.json_format import Json
from quire.gateway.features.tools.json_lists import ACTION, CALLS, GRANITE, Cohere, Granite
from quire.gateway.features.tools.llama_json import LlamaJson
from quire.gateway.features.tools.mistral import ARGS, MistralList, MistralNames
from quire.gateway.features.tools.pythonic import Pythonic
from quire.gateway.features.tools.reasoning import ReasoningFormat
from quire.gateway.features.tools.sections import DEEPSEEK, KIMI, DeepSeekV3, DeepSeekV31, KimiK2
from quire.gateway.features.tools.tagged import GLM, MINIMAX, Glm, MiniMax, QwenCoder
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
        KimiK2(),
        Glm(),
        MiniMax(),
        Gemma4(),
        Cohere(),
        Granite(),
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
    ((DEEPSEEK.section, "```json"), "deepseek"),
    ((DEEPSEEK.section,), "deepseek_v31"),
    ((re.escape(KIMI.section),), "kimi_k2"),
    ((GLM.key[0], GLM.value[0]), "glm"),
    ((MINIMAX.start,), "minimax_m2"),
    ((re.escape(START),), "gemma4"),
    ((re.escape(ACTION),), "cohere"),
    (("<tool_call>", "<function=", "<parameter="), "qwen3_coder"),
    (("<tool_call>", _key("name"), _key("arguments")), "hermes"),
    ((re.escape(GRANITE), re.escape("<|start_of_role|>")), "granite"),
    ((r"func(tion)?_name1?\(", "tools"), "pythonic"),
    (("tools", r"<\|(start_header_id|header_start|python_tag)\|>", _key("name"), _key("parameters")), "llama3_json"),
)


def detect(template: str, added_tokens: Collection[str] = ()) -> ToolFormat | None:
    """Return the format in which the model of a chat template writes tool calls, or None if the template tells none.

    template: the source of the template. added_tokens: the special and added tokens of the tokenizer; they tell the two
    forms of Mistral apart where the template does not, and Kimi's form, which some of its templates lack.
    """
    for signs, name in _SIGNS:
        if all(re.search(sign, template) for sign in signs):
            return FORMATS[name or ("mistral_args" if ARGS in added_tokens else "mistral")]
    return FORMATS["kimi_k2"] if KIMI.section in added_tokens else None


def detect_reasoning(template: str, added_tokens: Collection[str] = ()) -> ReasoningFormat | None:
    """Return the markers of the reasoning of a model, or None if its chat template and tokenizer have none."""
    for form in REASONING_FORMATS.values():
        if form.end in template or (form.start in added_tokens and form.end in added_tokens):
            return form
    return None
