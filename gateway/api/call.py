"""A call: its parameters in their final form, its prompts, and one request to the queue for each of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from aiohttp import web

from quire.gateway.api.labels import AUTO, CLASSES, NO_EFFECT, TIER_OF_CLASS, user_hash
from quire.gateway.api.parameters import StreamOptions
from quire.gateway.api.prompt_parameters import check_prompt_size
from quire.gateway.api.request_limits import RequestLimits
from quire.gateway.errors.api_errors import NO_EFFECT_NAMES, USER_HASH, refused
from quire.gateway.output.given_grammar import GivenGrammar
from quire.gateway.stream.call_metadata import CallMetadata, request_id
from quire.shared.config.validators import shown
from quire.shared.protocol.keys import DEFAULT_CLASS
from quire.shared.protocol.messages import CacheBreakpoint, GenerationRequest, ImageRef, SamplingParams
from quire.shared.protocol.sampling_params import GRAMMAR_PARAMETERS, MAX_OUTPUT_TOKENS, PARAMETERS

# The default of `beam_width`, unless `n` is more.
DEFAULT_BEAM_WIDTH = 4

C = TypeVar("C", bound="Call")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call. It begins without prompts; `with_prompts` completes it.

    about: what a gateway must know to render the answer; complete with the prompts, but for dialect and time.
    common: the sampling parameters that all prompts share, without the final values of `max_tokens` and `seed`.
    max_tokens, seed: the values of the call; None if it has none. timeout_s: None for the default of the server.
    user: in clear; only its hash leaves the process. no_effect: names of the given parameters that have no effect.
    cache_scope: the tenant within which cached prefixes are shared, besides `cache_salt`.
    grammar_parameter: the name of the parameter that `common.grammar` comes from, for errors.
    add_special_tokens: the tokenizer adds its special tokens to the prompts of a completion.
    truncate_prompt_tokens: the longest prompt; longer ones lose tokens on the side `truncation_side`; -1: what fits
    into the context with the answer; None: no prompt is truncated.

    prompts: token ids of each prompt. sampling: the sampling parameters of each prompt. prediction: token ids of a text
    that the answer may repeat.
    retention_s: life of the answer in Redis after its end; 0 for the default. conversation: stored with the request.
    loosened: indices of the tools whose schemas the grammar follows only in part.
    adapter_digest: of the LoRA adapter that the call names as its model; empty for the model itself.
    joins: the conversation of the API that the answer continues, and its version; empty for none.
    beginnings: hashes of its conversation, see `beginnings_of`. chain: what the responses of a conversation have in
    common; empty for other calls.
    forked_from, num_kept, first_choice: of a fork, as in `GenerationRequest`. images: of the only prompt; files: of
    these, by digest. breakpoints: places in the only prompt up to which it is pinned, for the API key `pinned_for`.
    """

    model: str
    common: SamplingParams
    about: CallMetadata
    stream: bool = False
    priority: str = DEFAULT_CLASS
    timeout_s: float | None = None
    max_tokens: int | None = None
    seed: int | None = None
    user: str = ""
    no_effect: tuple[str, ...] = ()
    cache_salt: str = ""
    cache_scope: str = ""
    grammar_parameter: str = ""
    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    truncation_side: str = "left"
    prompts: tuple[tuple[int, ...], ...] = ()
    sampling: tuple[SamplingParams, ...] = ()
    prediction: tuple[int, ...] = ()
    retention_s: int = 0
    conversation: bytes = b""
    joins: tuple[str, ...] = ()
    loosened: tuple[int, ...] = ()
    adapter_digest: str = ""
    beginnings: tuple[bytes, ...] = ()
    chain: str = ""
    forked_from: str = ""
    num_kept: int = 0
    first_choice: int = 0
    images: tuple[ImageRef, ...] = ()
    files: Mapping[str, bytes] = field(default_factory=dict)
    breakpoints: tuple[CacheBreakpoint, ...] = ()
    pinned_for: str = ""

    @classmethod
    def of(cls, given: Mapping[str, Any], defaults: Mapping[str, float]) -> Call:
        """Return the call without prompts from parameters that were read (`parameters.read`). Raises InvalidRequest.

        defaults: the model's, for sampling parameters that the call leaves out.
        """
        # 1) Who asks, and for which class.
        priority = _priority_class(given)
        # 2) What the answer shows.
        stream = given.get("stream_options") or StreamOptions()
        logprobs = given.get("logprobs")
        if type(logprobs) is bool:  # a chat
            logprobs = given.get("top_logprobs", 0) if logprobs else None
        about = CallMetadata(
            dialect="",
            created=0,
            n=given.get("n", 1),
            include_usage=stream.include_usage,
            stop=given.get("stop", ()),
            prompt_tokens=0,
            requests=0,
            is_background=given.get("background", False),
            include_stop_str_in_output=given.get("include_stop_str_in_output", False),
            metadata=given.get("metadata", ()),
            service_tier=TIER_OF_CLASS[priority] if "service_tier" in given else "",
            prompt_cache_key=given.get("prompt_cache_key", ""),
            echoes_prompt=given.get("echo", False),
            logprobs=-1 if logprobs is None else logprobs,
            prompt_logprobs=given.get("prompt_logprobs", -1),
            return_token_ids=given.get("return_token_ids", False),
            return_tokens_as_token_ids=given.get("return_tokens_as_token_ids", False),
            skip_special_tokens=given.get("skip_special_tokens", True),
            continues_message=given.get("continue_final_message", False),
            continuous_usage=stream.continuous_usage_stats,
        )
        # 3) How tokens are drawn.
        max_tokens = _max_tokens(given)
        grammar = next((given[name] for name in GRAMMAR_PARAMETERS if given.get(name)), None)
        common = _sampling(given, defaults, grammar, max_tokens, about)
        _check_no_tokens(given, common, about)
        _check_counts(common, given.get("stream", False))
        return cls(
            model=given["model"],
            common=common,
            about=about,
            stream=given.get("stream", False),
            priority=priority,
            timeout_s=given.get("timeout"),
            max_tokens=max_tokens,
            seed=given.get("seed"),
            user=given.get("safety_identifier") or given.get("user", ""),
            no_effect=tuple(
                name for name, parameter in NO_EFFECT.items() if name in given and given[name] not in parameter.neutral
            ),
            cache_salt=given.get("cache_salt", ""),
            grammar_parameter=grammar.name if grammar else "",
            add_special_tokens=given.get("add_special_tokens", True),
            truncate_prompt_tokens=given.get("truncate_prompt_tokens"),
            truncation_side=given.get("truncation_side", "left"),
        )

    def check(self, limits: RequestLimits, prompts: int = 1) -> None:
        """Check what does not depend on the texts of the prompts. Raises ModelNotFound or InvalidRequest."""
        limits.check_model(self.model)
        limits.check_generates()
        limits.check_choices(prompts, self.counts)
        limits.check_answer(self.common.grammar, self.grammar_parameter)

    def with_prompts(
        self,
        prompts: Sequence[tuple[str, list[int]]],
        limits: RequestLimits,
        default_max_tokens: int | None,
        output_spec: str = "",
        echo: str = "",
    ) -> Call:
        """Return the complete call with these prompts, each with its name for errors. Raises InvalidRequest.

        default_max_tokens: for calls without max_tokens; None: the rest of the context. output_spec: the JSON of the
        `OutputSpec`; empty for an answer of plain text. echo: JSON that the dialect repeats in its answer.
        """
        token_ids = tuple(tuple(ids) for _, ids in prompts)
        check_prompt_size(self.about, token_ids, self.stream)
        digest = limits.adapters.get(self.model, "")
        about = replace(
            self.about,
            prompt_tokens=sum(map(len, token_ids)),
            requests=len(token_ids),
            system_fingerprint=limits.system_fingerprint,
            output_spec=output_spec,
            echo=echo,
            adapter=self.model if digest else "",
        )
        sampling = limits.sampling(
            self.common,
            prompts,
            max_tokens=self.max_tokens,
            default_max_tokens=default_max_tokens,
            seed=self.seed,
        )
        return replace(self, about=about, prompts=token_ids, sampling=sampling, adapter_digest=digest)

    @property
    def counts(self) -> dict[str, int]:
        """The parameters that say how many choices are returned or, if more, how many sequences run."""
        counts = {name: getattr(self.common, name) for name in ("n", "best_of", "beam_width")}
        return {name: count for name, count in counts.items() if count}

    def truncated(self, token_ids: list[int], room: int) -> list[int]:
        """Return the tokens of a prompt that remain. room: the longest prompt that fits with the answer."""
        length = self.truncate_prompt_tokens
        if length is None:
            return token_ids
        length = max(0, room) if length < 0 else length
        if len(token_ids) <= length:
            return token_ids
        return token_ids[-length:] if self.truncation_side == "left" and length else token_ids[:length]

    def without_effect(self: C, names: Sequence[str]) -> C:
        """Return the call with further names of parameters that have no effect."""
        return replace(self, no_effect=(*self.no_effect, *names))

    def note(self, request: web.Request, key: bytes) -> None:
        """Keep what the access log and the headers of the answer say about the call. key: of the user hash."""
        request[USER_HASH] = user_hash(self.user, key)
        # Headers without effect are there already.
        names = (request.get(NO_EFFECT_NAMES, ""), *self.no_effect)
        request[NO_EFFECT_NAMES] = ", ".join(filter(None, names))

    def metadata(self, dialect: str, created: int) -> CallMetadata:
        """Return the facts that another gateway needs to render the answer."""
        return replace(self.about, dialect=dialect, created=created)

    def requests(self, call_id: str) -> list[GenerationRequest]:
        """Return a request per prompt; the first has the id of the call."""
        return [
            GenerationRequest(
                id=request_id(call_id, index),
                model=self.model,
                prompt=prompt,
                sampling=sampling,
                cache_salt=self.cache_salt,
                cache_scope=self.cache_scope,
                adapter=self.about.adapter,
                adapter_digest=self.adapter_digest,
                forked_from=self.forked_from,
                num_kept=self.num_kept,
                first_choice=self.first_choice,
                prediction=self.prediction,
                images=self.images,
                breakpoints=self.breakpoints,
                pinned_for=self.pinned_for if self.breakpoints else "",
            )
            for index, (prompt, sampling) in enumerate(zip(self.prompts, self.sampling, strict=True))
        ]


def _priority_class(given: Mapping[str, Any]) -> str:
    """Return the class of a call. Raises InvalidRequest if its tier is another one."""
    asked: str | None = given.get("priority")
    tier = given.get("service_tier", AUTO)
    if tier == AUTO:
        return asked or DEFAULT_CLASS
    if asked is not None and asked != CLASSES[tier]:
        raise refused(
            "service_tier",
            f"service_tier {shown(tier)} is the class {CLASSES[tier]!r}, but priority is {shown(asked)}; give one of "
            "them.",
        )
    return CLASSES[tier]


def _max_tokens(given: Mapping[str, Any]) -> int | None:
    old: int | None = given.get("max_tokens")
    new: int | None = given.get("max_completion_tokens")
    if old is not None and new is not None and old != new:
        raise refused(
            "max_completion_tokens", f"max_tokens is {old} and max_completion_tokens is {new}; give one of them."
        )
    return old if new is None else new


def _sampling(
    given: Mapping[str, Any],
    defaults: Mapping[str, float],
    grammar: GivenGrammar | None,
    max_tokens: int | None,
    about: CallMetadata,
) -> SamplingParams:
    """Return the sampling parameters that all prompts share."""
    sampling = {**defaults, **{name: value for name, value in given.items() if name in PARAMETERS}}
    if type(top_logprobs := given.get("logprobs")) is int:  # a completion
        sampling |= {"logprobs": True, "top_logprobs": top_logprobs}
    if grammar:
        sampling["grammar"] = grammar.text
    if given.get("use_beam_search"):
        # A beam search draws no tokens: the model's temperature and truncation do not apply to it.
        sampling |= {
            name: parameter.beam_value for name, parameter in PARAMETERS.items() if parameter.beam_value is not None
        }
        sampling.setdefault("beam_width", max(given.get("n", 1), DEFAULT_BEAM_WIDTH))
    # A worker reports what the answer shows of the prompt.
    echoed = about.logprobs if about.echoes_prompt else -1
    sampling |= {"prompt_logprobs": max(about.prompt_logprobs, echoed), "returns_prompt": about.needs_prompt}
    return SamplingParams(**sampling | {"max_tokens": MAX_OUTPUT_TOKENS if max_tokens is None else max_tokens})


def _check_no_tokens(given: Mapping[str, Any], params: SamplingParams, about: CallMetadata) -> None:
    """Check that a call without tokens has something to answer. Raises InvalidRequest."""
    if params.max_tokens:
        return
    name = "max_tokens" if given.get("max_completion_tokens") is None else "max_completion_tokens"
    if not about.echoes_prompt and about.prompt_logprobs < 0:
        raise refused(name, f"{name} is 0, which is allowed only with echo or prompt_logprobs; give at least 1.")
    if not params.is_streamed:
        ranking = "use_beam_search" if params.beam_width else "best_of"
        raise refused(ranking, f"{ranking} is not supported with {name} 0, because there are no answers to rank.")


def _check_counts(sampling: SamplingParams, stream: bool) -> None:
    """Check how many sequences run for how many choices. Raises InvalidRequest."""
    n = sampling.n
    for name, count in (("best_of", sampling.best_of), ("beam_width", sampling.beam_width)):
        if 0 < count < n:
            raise refused(name, f"{name} is {count}, which is less than n = {n}; give at least n.")
    if stream and not sampling.is_streamed:
        raise refused(
            "best_of",
            f"best_of {sampling.best_of} with n {n} cannot be streamed: which choices are the best is known at the end "
            "only. Leave out stream, or let best_of be n.",
        )
