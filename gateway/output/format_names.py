"""The names of the formats of tool calls and of reasoning, for the settings: `formats.py` has the formats themselves.

Settings are read by every command of Quire. The formats import grammars, which take a tenth of a second.
"""

TOOL_CALL_FORMATS = (
    "hermes", "qwen3_coder", "llama3_json", "pythonic", "mistral", "mistral_args", "deepseek", "deepseek_v31",
    "harmony", "json",
)  # fmt: skip
REASONING_FORMATS = ("think", "mistral", "seed", "cohere", "gemma")
