"""A call that was read and tokenized: its options, and one request to the queue for each of its prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.gateway.api.call_metadata import CallMetadata, request_id
from quire.gateway.api.request_limits import RequestLimits
from quire.shared.messages import GenerationRequest, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of one call.

    sampling: complete, except for `max_tokens` and `seed`, whose final values depend on the prompt.
    max_tokens, seed: the values of the call; None if it has none. timeout_s: None for the default of the server.
    """

    model: str
    stream: bool
    include_usage: bool
    cache_salt: str
    background: bool
    priority: str
    timeout_s: float | None
    max_tokens: int | None
    seed: int | None
    sampling: SamplingParams

    @property
    def counts(self) -> dict[str, int]:
        """The parameters that say how many choices are returned or, if more, how many sequences run."""
        counts = {name: getattr(self.sampling, name) for name in ("n", "best_of", "beam_width")}
        return {name: count for name, count in counts.items() if count}


@dataclass(frozen=True, slots=True)
class Call:
    """The options of a call, and token ids and sampling parameters of each prompt."""

    options: Options
    prompts: tuple[tuple[int, ...], ...]
    sampling: tuple[SamplingParams, ...]

    @classmethod
    def of(
        cls,
        options: Options,
        prompts: Sequence[tuple[str, list[int]]],
        limits: RequestLimits,
        default_max_tokens: int | None,
    ) -> Call:
        """The call for these prompts, each with its name for errors. Raises InvalidRequest.

        default_max_tokens: for calls without max_tokens; None: the rest of the context.
        """
        sampling = limits.sampling(
            options.sampling,
            prompts,
            max_tokens=options.max_tokens,
            default_max_tokens=default_max_tokens,
            seed=options.seed,
        )
        return cls(options, tuple(tuple(token_ids) for _, token_ids in prompts), sampling)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts together."""
        return sum(map(len, self.prompts))

    def metadata(self, dialect: str, created: int) -> CallMetadata:
        """The facts that another gateway needs to render the answer."""
        options = self.options
        return CallMetadata(
            dialect=dialect,
            created=created,
            n=options.sampling.n,
            include_usage=options.include_usage,
            stop=options.sampling.stop,
            prompt_tokens=self.prompt_tokens,
            requests=len(self.prompts),
            is_background=options.background,
            include_stop_str_in_output=options.sampling.include_stop_str_in_output,
        )

    def requests(self, call_id: str) -> list[GenerationRequest]:
        """One request per prompt; the first has the id of the call."""
        return [
            GenerationRequest(
                id=request_id(call_id, index),
                model=self.options.model,
                prompt=prompt,
                sampling=sampling,
                cache_salt=self.options.cache_salt,
            )
            for index, (prompt, sampling) in enumerate(zip(self.prompts, self.sampling, strict=True))
        ]
