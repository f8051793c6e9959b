"""The parts of a model folder that turn text into tokens: tokenizer, end token, and the prefixes to pin."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from quire.shared.model.files import read_json
from quire.shared.text.tokenizer import eos_token_id, load_tokenizer, read_special_tokens
from quire.worker.engine.engine import Engine
from quire.worker.pinned_prefixes import PinnedPrompt, load_prefixes, pin_prefixes
from quire.worker.settings import WorkerSettings


@dataclass(frozen=True)
class ModelTexts:
    """The tokenizer of a model, the end token that it names, and the prefixes to pin."""

    tokenizer: Tokenizer
    eos_token_id: int | None
    prefixes: list[PinnedPrompt]

    def pin_prefixes(self, engine: Engine) -> None:
        """Compute and pin the prefixes. Raises StartError."""
        pin_prefixes(engine, self.prefixes)


def read_texts(settings: WorkerSettings, path: Path) -> ModelTexts:
    """Read the tokenizer of a model folder, and --pinned-prefixes. Raises StartError, ModelError."""
    config = read_json(path / "tokenizer_config.json")
    special_tokens = read_special_tokens(path, config)
    tokenizer = load_tokenizer(path, special_tokens)
    eos = eos_token_id(tokenizer, special_tokens)
    if not settings.pinned_prefixes:
        return ModelTexts(tokenizer, eos, [])
    # Imported here because only pinned prefixes need it: Jinja takes a tenth of a second.
    from quire.shared.text.chat_template import load_chat_template

    template = load_chat_template(path, config, special_tokens)
    declared = read_json(path / "config.json", required=True).get("vocab_size")
    vocab_size = declared if type(declared) is int else tokenizer.get_vocab_size()
    file = Path(settings.pinned_prefixes).expanduser()
    return ModelTexts(tokenizer, eos, load_prefixes(file, tokenizer, template, vocab_size))
