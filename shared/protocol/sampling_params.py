"""The sampling parameters, each declared once: type, range, default, what it excludes and its documentation.

The codec of messages, the API of the gateway and the table in docs/api/chat.md follow from these declarations.
Definitions follow the OpenAI API and, for parameters that it lacks, Hugging Face `GenerationConfig` or vLLM.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from quire.shared.config.validators import (
    MAX_TOKEN_ID,
    Check,
    Flag,
    Integer,
    InvalidValue,
    Number,
    OneOf,
    Text,
    Texts,
    TokenIds,
    shown,
    wrong,
)
from quire.shared.protocol.logprobs import MAX_TOP_LOGPROBS
from quire.shared.protocol.repetition import OFF, RepetitionDetection, repetition_limits

MAX_CHOICES = 128
MAX_OUTPUT_TOKENS = 2_000_000
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
MAX_STOP_TOKENS = 64
# Characters of a schema, pattern or grammar of a client, and of the grammar that a worker gets, which may contain the
# schemas of many tools.
MAX_SCHEMA_LENGTH = 65_536
MAX_GRAMMAR_LENGTH = 524_288
MAX_LENGTH_PENALTY = 10
MAX_BAD_WORDS = 64
MAX_BAD_WORD_LENGTH = 256
MAX_BIASES = 1024
MAX_ALLOWED_TOKENS = 16_384
MAX_BIAS = 100
# The value of `repetition_detection` in a call that switches it off.
REPETITION_OFF = OFF
# Tokens of a marker of reasoning.
MAX_MARKER_TOKENS = 16
TOKEN_ID_KEY = re.compile("(0|[1-9][0-9]{0,9})", re.ASCII)

# When a beam search ends: Hugging Face's `early_stopping` False, True and "never".
EARLY_STOPPING = ("false", "true", "never")

MODEL_DEFAULT = "By default [the model's](#sampling-defaults)"
NO_BEAMS: Mapping[str, str] = {"use_beam_search": ""}
NO_PROMPT_STREAM: Mapping[str, str] = {"use_beam_search": "", "stream": "a stream has the answer only"}
# The parameters that give a grammar. A call has one of them at most.
GRAMMAR_PARAMETERS = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)
NO_GRAMMAR: Mapping[str, str] = dict.fromkeys(GRAMMAR_PARAMETERS, "an answer ends where its grammar does")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A parameter of the API: how clients give it, what it goes with, and what docs/api/chat.md says about it.

    read: checks the value in the JSON of a client, and returns it in its final form. Raises InvalidValue.
    default: stands for an absent parameter, and for null.
    model_default: the model's generation_config.json may give another default.
    per_prompt: without a value the gateway chooses one for each prompt.
    requires: the parameter that must be true too, unless the value is among `neutral`, which ask for nothing.
    excludes: parameters that must not be given too, with the reason, which may be empty.
    beam_value: the one value that a beam search takes, and its default there; None if a beam search takes any.
    kind: type and range for the documentation, where the text of `read` does not tell them.
    schema: the JSON schema of the value for /openapi.json, where the class of `read` does not tell it. Its parts may be
    checks.
    """

    read: Check[Any]
    help: str
    default: Any = None
    required: bool = False
    model_default: bool = False
    per_prompt: bool = False
    requires: str = ""
    neutral: tuple[Any, ...] = ()
    excludes: Mapping[str, str] = field(default_factory=dict)
    beam_value: float | None = None
    kind: str = ""
    schema: Any = None

    @property
    def documented_default(self) -> str:
        """The default as JSON. Empty if `help` tells it: it depends on the model or the prompt, or is no JSON value."""
        if self.required:
            return "required"
        if self.default in ((), ""):
            return "none"
        if self.default is None or self.model_default or self.per_prompt:
            return ""
        try:
            self.read("default", self.default)
        except InvalidValue:
            return ""
        return f"`{json.dumps(self.default)}`"


@dataclass(frozen=True, slots=True)
class Converted:
    """A check whose result is converted to the final form."""

    check: Check[Any]
    convert: Callable[[Any], Any]

    def __call__(self, name: str, value: Any) -> Any:
        return self.convert(self.check(name, value))

    def __str__(self) -> str:
        return str(self.check)


@dataclass(frozen=True, slots=True)
class OneOrMoreTexts:
    """A string, or an array of strings, as `Texts` bounds them."""

    texts: Texts

    def __call__(self, name: str, value: Any) -> tuple[str, ...]:
        if type(value) not in (str, list):
            raise wrong(name, self, value)
        return self.texts(name, [value] if type(value) is str else value)

    def __str__(self) -> str:
        return f"a string or {self.texts}"


@dataclass(frozen=True, slots=True)
class Words:
    """An array of strings, as `Texts` bounds them, each with a character besides spaces."""

    texts: Texts

    def __call__(self, name: str, value: Any) -> tuple[str, ...]:
        words = self.texts(name, value)
        if any(not word.strip() for word in words):
            raise InvalidValue(name, "must have words with a character besides spaces")
        return words

    def __str__(self) -> str:
        return str(self.texts)


class EarlyStopping:
    """Hugging Face's three values, in JSON; the final form is one of EARLY_STOPPING."""

    def __call__(self, name: str, value: Any) -> str:
        if type(value) is bool:
            return "true" if value else "false"
        if value != "never":
            raise wrong(name, self, value)
        return "never"

    def __str__(self) -> str:
        return 'true, false or "never"'


class LogitBias:
    """An object that maps token ids to biases; the final form is a tuple of pairs."""

    def __call__(self, name: str, value: Any) -> tuple[tuple[int, float], ...]:
        if type(value) is not dict:
            raise wrong(name, "an object", value)
        if len(value) > MAX_BIASES:
            raise InvalidValue(name, f"must have at most {MAX_BIASES} tokens, not {len(value)}")
        for token_id in value:
            if not TOKEN_ID_KEY.fullmatch(token_id):
                raise InvalidValue(name, f"must have token ids as its keys, and {shown(token_id)} is none")
        bias_of = Number(-MAX_BIAS, MAX_BIAS)
        return tuple((int(token_id), bias_of(f"{name}.{token_id}", bias)) for token_id, bias in value.items())

    def __str__(self) -> str:
        return f"an object with at most {MAX_BIASES} token ids as keys, and biases from {-MAX_BIAS} to {MAX_BIAS}"


def _biases(name: str, value: Any) -> tuple[tuple[int, float], ...]:
    """Return the pairs of `logit_bias` as a message carries them."""
    if type(value) is not list or len(value) > MAX_BIASES:
        raise InvalidValue(name, f"must be an array of at most {MAX_BIASES} pairs")
    if any(type(pair) is not list or len(pair) != 2 for pair in value):
        raise InvalidValue(name, "must be an array of pairs of a token id and a bias")
    token_id, bias = Integer(0, MAX_TOKEN_ID), Number(-MAX_BIAS, MAX_BIAS)
    return tuple((token_id(name, pair[0]), bias(name, pair[1])) for pair in value)


def parameter(
    check: Check[Any], help: str = "", *, default: Any = MISSING, read: Check[Any] | None = None, **rest: Any
) -> Any:
    """Declare a field of `SamplingParams`. `check` is of the form in messages; `read`, of the form in JSON, is needed
    where the two differ. Parameters without `help` are not part of the API under their own name."""
    declared = Parameter(read=read or check, help=help, default=None if default is MISSING else default, **rest)
    return field(default=default, metadata={"check": check, "parameter": declared})


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The parameters of one prompt's answers. Every value is final: the gateway has filled in all defaults, and has
    chosen a seed for a call without one."""

    max_tokens: int = parameter(
        Integer(0, MAX_OUTPUT_TOKENS),
        "longest answer. By default the rest of the context, 16 in completions. Prompt and answer must fit into the "
        "context. 0 only with `echo` or `prompt_logprobs`: the [prompt is scored](#scoring-prompts)",
        per_prompt=True,
    )
    n: int = parameter(
        Integer(1, MAX_CHOICES),
        "answers per prompt; at most `--max-n` (16), and `--max-choices` (128) over all prompts",
        default=1,
    )
    # `best_of` sequences are generated, and the `n` with the highest mean log-probability are returned; 0: `n`.
    best_of: int = parameter(
        Integer(0, MAX_CHOICES),
        "in chats an extension: generates this many answers and returns the `n` with the highest mean log-probability, "
        "each with its `score`. At least `n`, by default `n`; more than `n` cannot be streamed. Limits as for `n`",
        default=0,
        read=Integer(1, MAX_CHOICES),
        excludes={"use_beam_search": "beam_width says how many sequences run"},
    )
    temperature: float = parameter(
        Number(0, 2),
        f"0 is greedy. {MODEL_DEFAULT}; 0 in a beam search",
        default=1.0,
        model_default=True,
        beam_value=0,
    )
    top_p: float = parameter(
        Number(0, 1),
        f"sample from the most likely tokens whose probabilities add up to this. {MODEL_DEFAULT}",
        default=1.0,
        model_default=True,
        beam_value=1,
    )
    # 0 is off.
    top_k: int = parameter(
        Integer(0, MAX_TOKEN_ID),
        f"extension: sample from the `top_k` most likely tokens; 0 and -1 are off. {MODEL_DEFAULT}",
        default=0,
        read=Converted(Integer(-1, MAX_TOKEN_ID), lambda top_k: max(top_k, 0)),
        model_default=True,
        beam_value=0,
    )
    min_p: float = parameter(
        Number(0, 1),
        f"extension: drop tokens below this share of the most likely token's probability. {MODEL_DEFAULT}",
        default=0.0,
        model_default=True,
        beam_value=0,
    )
    seed: int = parameter(
        Integer(0, 2**64 - 1),
        "the same seed draws the same tokens; by default random",
        default=0,
        read=Converted(Integer(-(2**63), 2**64 - 1), lambda seed: seed % 2**64),
        per_prompt=True,
    )
    stop: tuple[str, ...] = parameter(
        Texts(MAX_STOP_STRINGS, 1, MAX_STOP_LENGTH),
        "the answer ends before the first of them; a string that is a special token of the model, such as "
        r"`<\|im_end\|>`, ends it at that token, which has no text. Not with `use_beam_search`",
        default=(),
        read=OneOrMoreTexts(Texts(MAX_STOP_STRINGS, 1, MAX_STOP_LENGTH)),
        excludes=NO_BEAMS,
    )
    include_stop_str_in_output: bool = parameter(
        Flag(),
        "extension, as in vLLM: the answer ends with the stop string or stop token that ended it, instead of before "
        "it. Special tokens and the model's end token have no text. Not with `use_beam_search`",
        default=False,
        excludes=NO_BEAMS,
    )
    # A message has room for one more token for each stop string that is a special token.
    stop_token_ids: tuple[int, ...] = parameter(
        TokenIds(MAX_STOP_TOKENS + MAX_STOP_STRINGS),
        "extension: the answer ends before the first of these tokens, also with `ignore_eos` and `min_tokens`. Not "
        "with `use_beam_search`",
        default=(),
        read=TokenIds(MAX_STOP_TOKENS, high=None),
        excludes=NO_BEAMS,
    )
    bad_words: tuple[str, ...] = parameter(
        Words(Texts(MAX_BAD_WORDS, 1, MAX_BAD_WORD_LENGTH)),
        "extension, as in vLLM: words that the answer must not contain, at its beginning or after a space. The last "
        "token of a word is never chosen after its other tokens; other tokens with the same text are not banned",
        default=(),
    )
    allowed_token_ids: tuple[int, ...] = parameter(
        TokenIds(MAX_ALLOWED_TOKENS),
        "extension, as in vLLM: only these tokens are chosen; the end token is chosen only if it is among them. Not "
        "with `response_format`, `bad_words`, `min_tokens` and `use_beam_search`",
        default=(),
        read=TokenIds(MAX_ALLOWED_TOKENS, high=None),
        excludes=dict.fromkeys(("bad_words", "min_tokens", "use_beam_search", *GRAMMAR_PARAMETERS), ""),
    )
    # The text of a grammar that every choice follows (`shared/text/grammar.py`); empty: none. Clients give it as
    # one of `GRAMMAR_PARAMETERS`.
    grammar: str = parameter(Text(0, MAX_GRAMMAR_LENGTH), default="")
    logprobs: bool = parameter(
        Flag(),
        "each token with its [log-probability](#log-probabilities). Not with `use_beam_search`",
        default=False,
        excludes={"use_beam_search": "a beam's score is all it has"},
    )
    top_logprobs: int = parameter(
        Integer(0, MAX_TOP_LOGPROBS),
        "how many of the most probable tokens are listed in the place of each token; only with `logprobs`",
        default=0,
        requires="logprobs",
        neutral=(0,),
    )
    # -1: none.
    prompt_logprobs: int = parameter(
        Integer(-1, MAX_TOP_LOGPROBS),
        "extension, as in vLLM: the [log-probability of each token of the prompt](#scoring-prompts), and this many of "
        "the most probable tokens in its place. By default none. Not with `stream` and `use_beam_search`",
        default=-1,
        read=Integer(0, MAX_TOP_LOGPROBS),
        excludes=NO_PROMPT_STREAM,
    )
    # True if the report about the prompt has its token ids.
    returns_prompt: bool = parameter(Flag(), default=False)
    skip_special_tokens: bool = parameter(
        Flag(),
        "extension, as in vLLM: special tokens have no text. With false they are text, also for `stop`. The end token "
        "is text only with `include_stop_str_in_output`",
        default=True,
    )
    presence_penalty: float = parameter(Number(-2, 2), "as OpenAI defines it", default=0.0)
    frequency_penalty: float = parameter(Number(-2, 2), "as OpenAI defines it", default=0.0)
    # Pairs of a token id and the number that is added to its logit, after the penalties.
    logit_bias: tuple[tuple[int, float], ...] = parameter(
        _biases,
        "a number that is added to the logit of a token, after the penalties; -100 is as good as a ban",
        default=(),
        read=LogitBias(),
    )
    repetition_penalty: float = parameter(
        Number(0.01, 100), f"extension: as Hugging Face defines it. {MODEL_DEFAULT}", default=1.0, model_default=True
    )
    min_tokens: int = parameter(
        Integer(0, MAX_OUTPUT_TOKENS),
        "extension: no end token before this many tokens; at most `max_tokens`. A `stop` string may end the "
        "answer earlier. Not with [structured output](#structured-output)",
        default=0,
        excludes=NO_GRAMMAR,
    )
    ignore_eos: bool = parameter(
        Flag(),
        "extension: the end token does not end the answer. Not with [structured output](#structured-output)",
        default=False,
        excludes=NO_GRAMMAR,
    )
    # -1: no bound.
    thinking_token_budget: int = parameter(
        Integer(-1, MAX_OUTPUT_TOKENS),
        "extension, as in vLLM: after this many tokens of reasoning the model has to end it and to answer. By default, "
        "and at most, `--thinking-token-budget` (none). Only for models that mark their [reasoning](#reasoning); not "
        "with `use_beam_search`",
        default=-1,
        read=Integer(0, MAX_OUTPUT_TOKENS),
        excludes=NO_BEAMS,
    )
    # With a budget: the tokens that begin the reasoning, none if the prompt ends inside of it, and those that end it.
    thinking_start: tuple[int, ...] = parameter(TokenIds(MAX_MARKER_TOKENS), default=())
    thinking_end: tuple[int, ...] = parameter(TokenIds(MAX_MARKER_TOKENS), default=())
    # Shortest and longest part, and how often it follows itself; empty: the answer may repeat itself.
    repetition_detection: tuple[int, ...] = parameter(
        repetition_limits,
        "extension, as in vLLM: an answer that ends with the same part, of `min_pattern_size` (1) to "
        "`max_pattern_size` tokens, `min_count` times in a row ends with the `finish_reason` `repetition`. By default "
        "`--repetition-detection` (none). Not with `use_beam_search`",
        default=(),
        read=RepetitionDetection(),
        excludes=NO_BEAMS,
    )
    # 0: no beam search.
    beam_width: int = parameter(
        Integer(0, MAX_CHOICES),
        "beams; by default 4, or `n` if that is more. At least `n`; limits as for `n`. Only with `use_beam_search`",
        default=0,
        read=Integer(2, MAX_CHOICES),
        requires="use_beam_search",
    )
    # The score of a finished beam is the sum of its log-probabilities / length ** length_penalty.
    length_penalty: float = parameter(
        Number(-MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY),
        "of a beam search, as Hugging Face defines it. Only with `use_beam_search`",
        default=1.0,
        requires="use_beam_search",
    )
    early_stopping: str = parameter(
        OneOf(EARLY_STOPPING),
        "of a beam search, as Hugging Face defines it; by default false. Only with `use_beam_search`",
        default="false",
        read=EarlyStopping(),
        requires="use_beam_search",
    )

    @property
    def num_sequences(self) -> int:
        """The number of sequences that run at once for one prompt."""
        return self.beam_width or self.best_of or self.n

    @property
    def is_streamed(self) -> bool:
        """True if tokens leave step by step. Otherwise the choices are ranked, and come in one item at the end."""
        return not self.beam_width and self.best_of in (0, self.n)


PARAMETERS: dict[str, Parameter] = {
    declared.name: declared.metadata["parameter"] for declared in fields(SamplingParams)
}
MODEL_DEFAULTS: dict[str, float] = {
    name: declared.default for name, declared in PARAMETERS.items() if declared.model_default
}
