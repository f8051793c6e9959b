"""The tokenizer of the demonstration model: byte-level BPE trained on the grammar, and the chat template.

Every UTF-8 text can be encoded: the 256 bytes are the first tokens after the special tokens. Encoding puts `<|begin|>`
first unless `add_special_tokens` is off. The chat template contains `<|begin|>` itself.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

PAD, BEGIN, END = "<|pad|>", "<|begin|>", "<|end|>"
SYSTEM, USER, ASSISTANT = "<|system|>", "<|user|>", "<|assistant|>"
SPECIAL = (PAD, BEGIN, END, SYSTEM, USER, ASSISTANT)
VOCABULARY_SIZE = 1536

# With tools, the first system message ends with a list of them. A call is the form that Hermes introduced, which the
# gateway detects in this template. Results of tools come from the user's side.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% if tools %}{{ '<|system|>' }}{% if messages[0]['role'] == 'system' %}{{ "
    "messages[0]['content'] | trim }}{{ '\n\n' }}{% endif %}{{ 'Tools:' }}{% for tool in tools %}{% set function = "
    "tool['function'] %}{{ '\n' + function['name'] + '(' + (function['parameters']['properties'] or {}) | "
    "join(', ') + '): ' + (function['description'] or '') }}{% endfor %}{{ '<|end|>' }}{% endif %}{% for message in "
    "messages %}{% if not (tools and loop.first and message['role'] == 'system') %}{% set role = message['role'] "
    "if message['role'] in ['system', 'user', 'assistant'] else 'user' %}{{ '<|' + role + '|>' }}{% if "
    "message['role'] == 'tool' %}{{ '<tool_response>' }}{% endif %}{% if message['content'] is string %}{{ "
    "message['content'] | trim }}{% elif message['content'] %}{% for part in message['content'] %}{{ "
    "(part['text'] or '') | trim }}{% endfor %}{% endif %}{% if message['role'] == 'tool' %}{{ '</tool_response>' "
    "}}{% endif %}{% for call in message['tool_calls'] or [] %}{{ '<tool_call>\n{\"name\": \"' + "
    "call['function']['name'] + '\", \"arguments\": ' + call['function']['arguments'] | tojson + "
    "'}\n</tool_call>' }}{% endfor %}{{ '<|end|>' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ "
    "'<|assistant|>' }}{% endif %}"
)


def tools_text(tools: Iterable[str], system: str = "") -> str:
    """Return the system message that declares tools, as the chat template writes it. tools: like `add(a, b): Adds.`"""
    return "\n".join([*([system, ""] if system else []), "Tools:", *tools])


def call_text(name: str, arguments: dict[str, str]) -> str:
    """Return the call of a tool, as the chat template writes it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments, ensure_ascii=False)}}}\n</tool_call>'


def result_text(result: str) -> str:
    """Return the result of a tool, as the chat template writes it in a message of the user."""
    return f"<tool_response>{result}</tool_response>"


def train_tokenizer(texts: Iterable[str], size: int = VOCABULARY_SIZE, others: tuple[str, ...] = ()) -> Tokenizer:
    """Train a byte-level BPE tokenizer with `size` tokens, the special tokens first, `others` after the usual ones."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[*SPECIAL, *others],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A $B", special_tokens=[(BEGIN, tokenizer.token_to_id(BEGIN))]
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, context: int) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`, as `transformers.AutoTokenizer` reads them."""
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": PAD,
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
