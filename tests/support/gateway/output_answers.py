"""Help for the tests of formats: merged parts, tokenizers with added tokens, and texts under a grammar."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable, Iterable

from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from quire.gateway.output.parts import AnswerPart, OutputParser, PartKind
from quire.gateway.output.tools import Tool

END = "<|im_end|>"
WEATHER = Tool(
    "get_weather",
    "The weather of a city.",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "detailed": {"type": "boolean"},
        },
        "required": ["city"],
        "additionalProperties": False,
    },
)
CLOCK = Tool("clock", "The time.", {"type": "object", "properties": {}, "additionalProperties": False})
ANYTHING = Tool("any-thing.v2", "Anything.", {"type": "object"})
TOOLS = [WEATHER, CLOCK, ANYTHING]


def merged(parts: Iterable[AnswerPart]) -> list[AnswerPart]:
    """The parts with neighbours of one kind and call joined."""
    result: list[AnswerPart] = []
    for part in parts:
        if result and result[-1].kind == part.kind != PartKind.CALL and result[-1].call == part.call:
            result[-1] = result[-1]._replace(text=result[-1].text + part.text)
        else:
            result.append(part)
    return result


def parse(parser: OutputParser, *pieces: str) -> list[AnswerPart]:
    """The merged parts of an answer that comes in these pieces."""
    parts = [part for piece in pieces for part in parser.push(piece)]
    return merged([*parts, *parser.finish()])


def content(text: str) -> AnswerPart:
    return AnswerPart(PartKind.CONTENT, text)


def call(name: str, arguments: str, number: int = 0) -> list[AnswerPart]:
    return [AnswerPart(PartKind.CALL, name, number), AnswerPart(PartKind.ARGUMENTS, arguments, number)]


def assert_parts_are_sound(parts: list[AnswerPart], tools: Iterable[Tool] = TOOLS) -> None:
    """Calls have numbers in order, known names, and arguments that are JSON objects."""
    calls = [part for part in parts if part.kind == PartKind.CALL]
    assert [part.call for part in calls] == list(range(len(calls)))
    assert {part.text for part in calls} <= {tool.name for tool in tools}
    for number in range(len(calls)):
        text = "".join(part.text for part in parts if part.kind == PartKind.ARGUMENTS and part.call == number)
        assert isinstance(json.loads(text), dict)


def every_split(make: Callable[[], OutputParser], text: str) -> None:
    """Check that the merged parts are the same for the whole text, for its characters, and for any two pieces."""
    whole = parse(make(), text)
    assert parse(make(), *text) == whole
    for index in range(len(text) + 1):
        assert parse(make(), text[:index], text[index:]) == whole, text[:index]


@functools.cache
def byte_tokenizer(special: tuple[str, ...] = (), added: tuple[str, ...] = ()) -> Tokenizer:
    """A tokenizer of single bytes, with special tokens and with added tokens that are not special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={text: index for index, text in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in (END, *special)])
    tokenizer.add_tokens([AddedToken(text, special=False) for text in added])
    return tokenizer


class Answers:
    """Checks texts against a grammar, token by token, as a worker does."""

    def __init__(self, tokenizer: Tokenizer, grammar: str) -> None:
        self._tokenizer = tokenizer
        size = tokenizer.get_vocab_size()
        made = LLTokenizer(tokenizer.to_str(), n_vocab=size, eos_token=[tokenizer.token_to_id(END)])
        self._matcher = LLMatcher(made, grammar, log_level=0)
        assert not self._matcher.is_error(), self._matcher.get_error()

    def accepted(self, text: str) -> str:
        """The beginning of the text that the grammar allows."""
        token_ids = self._tokenizer.encode(text).ids
        count = self._matcher.deep_copy().try_consume_tokens(token_ids)
        decoded: str = self._tokenizer.decode(token_ids[:count], skip_special_tokens=False)
        return decoded

    def may_end(self, text: str) -> bool:
        """True if the text is a whole answer."""
        matcher = self._matcher.deep_copy()
        token_ids = self._tokenizer.encode(text).ids
        return bool(matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting())

    def walk(self, choose: random.Random, begin: str, most: int = 600) -> str | None:
        """A random answer that the grammar allows, after `begin`; None if it does not end within `most` characters.

        Endings of strings, objects and tags are more likely than other text, so that answers end.
        """
        matcher, text = self._matcher.deep_copy(), begin
        token_ids = self._tokenizer.encode(begin).ids
        assert matcher.try_consume_tokens(token_ids) == len(token_ids)
        while len(text) < most:
            if matcher.is_accepting() and (matcher.is_stopped() or choose.random() < 0.3):
                return text
            options = [*choose.sample(_ENDINGS, 14), choose.choice(_LETTERS)] if choose.random() < 0.9 else []
            options += choose.sample(_LETTERS, len(_LETTERS))
            for option in options:
                token_ids = self._tokenizer.encode(option).ids
                if matcher.deep_copy().try_consume_tokens(token_ids) == len(token_ids):
                    matcher.consume_tokens(token_ids)
                    text += option
                    break
            else:
                token_ids = matcher.compute_ff_tokens()[:1] or self._allowed(matcher)
                text += self._tokenizer.decode(token_ids, skip_special_tokens=False)
                matcher.consume_tokens(token_ids)
        return None

    def _allowed(self, matcher: LLMatcher) -> list[int]:
        mask = matcher.compute_bitmask()
        return [next(index for index in range(8 * len(mask)) if mask[index // 8] >> index % 8 & 1)]


_ENDINGS = [
    '"',
    "}",
    "]",
    ")",
    ", ",
    "=",
    ": ",
    "{}",
    "\n",
    "</parameter>\n",
    "</function>",
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<|end|><|start|>assistant",
    "; ",
    "</arg_value>",
    "</invoke>\n",
    "</minimax:tool_call>",
    '<|"|>',
    "<tool_call|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
    "\n]",
    "<|END_ACTION|>",
    "<|END_RESPONSE|>",
]
_LETTERS = ["a", "é", "😀", " ", "<", "{", "[", "\\", "1", "-", "n", "t", '"', "'", "/", "T", "F", ".", "e", "f"]
