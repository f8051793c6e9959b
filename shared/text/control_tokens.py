"""Control tokens in the texts of messages: a text that looks like a control token stays a text.

A chat template writes control tokens around the messages, such as `<|user|>`. The tokenizer cannot tell these from the
same characters in a message, so a document or the result of a tool could forge messages of other roles. Before the
template renders them, a mark is put inside each such text of a message; the rendered text is divided at the marks, and
the tokenizer reads the pieces one by one.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

from tokenizers import Tokenizer

from quire.shared.text.chat_template import Message

T = TypeVar("T")
# Characters that Unicode reserves for the internal use of a program.
_MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]
_IN_BRACKETS = re.compile(r"<\S+>|\[\S+\]")


class ControlTokens:
    """The control tokens of a model. A token of a single character cannot be divided, and is left out.

    of_assistant: those that remain tokens in messages of the assistant, because templates divide the text there.
    """

    def __init__(self, texts: Collection[str], of_assistant: Collection[str] = ()) -> None:
        self._texts = frozenset(text for text in texts if len(text) > 1)
        self._of_assistant = frozenset(of_assistant)
        lengths: dict[str, set[int]] = defaultdict(set)
        for text in self._texts:
            lengths[text[:2]].add(len(text))
        # By the first two characters.
        self._lengths = {begin: tuple(sizes) for begin, sizes in lengths.items()}
        begins = "|".join(re.escape(begin) for begin in self._lengths)
        self._begins = re.compile(f"(?={begins})" if begins else "(?!)")

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, template: str, of_assistant: Collection[str], others: Collection[str] = ()
    ) -> ControlTokens:
        """Return the special tokens of a tokenizer, the other added tokens in brackets that a template writes, and
        others.
        """
        added = tokenizer.get_added_tokens_decoder().values()
        return cls(
            {
                token.content
                for token in added
                if token.special or (token.content in template and _IN_BRACKETS.fullmatch(token.content))
            }.union(others),
            of_assistant,
        )

    def mark(self, messages: Sequence[Message], others: T) -> tuple[Sequence[Message], T, str]:
        """Return both with a mark inside each text that is a control token, and the mark; it is empty without any.

        others: further texts for the template. Raise ValueError if no character is left for the mark, and for values
        that are nested too deeply.
        """
        try:
            marked = self._all_marked(messages, others, _MARKS[0])
            if marked == (list(messages), others):
                return messages, others, ""
            written = json.dumps([messages, others], ensure_ascii=False)
            free = (mark for mark in _MARKS if mark not in written and _escaped(mark) not in written)
            mark = next(free, "")
            if not mark:
                raise ValueError("have all characters from U+FDD0 to U+FDEF, which are no characters of a text")
            return *(marked if mark == _MARKS[0] else self._all_marked(messages, others, mark)), mark
        except RecursionError:
            raise ValueError("are nested too deeply") from None

    def _all_marked(self, messages: Sequence[Message], others: T, mark: str) -> tuple[list[Message], T]:
        marked = [self._marked(message, mark, message["role"] == "assistant") for message in messages]
        return marked, self._marked(others, mark)

    def _marked(self, value: Any, mark: str, is_of_assistant: bool = False) -> Any:
        """Return a value, such as a message, with marks in its texts."""
        if isinstance(value, str):
            return self._marked_texts([value], mark, is_of_assistant)[0]
        if isinstance(value, Mapping):
            pairs = ([self._marked(part, mark, is_of_assistant) for part in pair] for pair in value.items())
            return dict(pairs)
        if not isinstance(value, list | tuple):
            return value
        marked = [self._marked(item, mark, is_of_assistant) for item in value]
        # A template may join the parts of a content.
        if all(isinstance(item, Mapping) and isinstance(item.get("text"), str) for item in value):
            texts = self._marked_texts([item["text"] for item in value], mark, is_of_assistant)
            marked = [{**item, "text": text} for item, text in zip(marked, texts, strict=True)]
        if isinstance(value, list):
            return marked
        return type(value)(*marked) if hasattr(value, "_fields") else tuple(marked)

    def _marked_texts(self, texts: list[str], mark: str, is_of_assistant: bool) -> list[str]:
        """Return texts that may follow each other, with marks."""
        places = self._places("".join(texts), self._of_assistant if is_of_assistant else frozenset())
        marked, begin = [], 0
        for text in texts:
            inside = [place - begin for place in places if begin < place <= begin + len(text)]
            ends = [0, *inside, len(text)]
            marked.append(mark.join(text[start:end] for start, end in itertools.pairwise(ends)))
            begin += len(text)
        return marked

    def _places(self, text: str, kept: frozenset[str]) -> list[int]:
        """Return the places after the first character of each control token, those of `kept` excepted."""
        places = []
        for match in self._begins.finditer(text):
            at = match.start()
            for length in self._lengths[text[at : at + 2]]:
                token = text[at : at + length]
                if token in self._texts and token not in kept:
                    places.append(at + 1)
                    break
        return places


def pieces(text: str, mark: str) -> list[str]:
    """Return the pieces of a rendered text, between its marks."""
    # A template may write the mark as JSON does, as an escape.
    return re.split(f"{mark}|{re.escape(_escaped(mark))}", text) if mark else [text]


def _escaped(mark: str) -> str:
    return f"\\u{ord(mark):04x}"
