"""A call that was read and tokenized: its options, and one request to the queue for each of its prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from quire.gateway.api.labels import Labels
from quire.gateway.api.prompt_parameters import check_prompt_size
from quire.gateway.api.request_limits import RequestLimits
from quire.gateway.model.prompt_form import PromptForm
from quire.gateway.stream.answer_options import AnswerOptions
from quire.gateway.stream.call_metadata import CallMetadata, request_id
from quire.gateway.stream.output_spec import OutputSpec
from quire.shared.protocol.messages import GenerationRequest, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of one call.

    sampling: complete, except for `max_tokens` and `seed`, whose final values depend on the prompt. answer: what the
    answer shows besides its text. form: how prompts become tokens.
    max_tokens, seed: the values of the call; None if it has none. timeout_s: None for the default of the server.
    cache_scope: the tenant within which cached prefixes are shared, besides `cache_salt`.
    grammar_parameter: the name of the parameter that `sampling.grammar` comes from, for errors.
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
    answer: AnswerOptions
    form: PromptForm
    labels: Labels
    grammar_parameter: str = ""
    cache_scope: str = ""

    @property
    def counts(self) -> dict[str, int]:
        """The parameters that say how many choices are returned or, if more, how many sequences run."""
        counts = {name: getattr(self.sampling, name) for name in ("n", "best_of", "beam_width")}
        return {name: count for name, count in counts.items() if count}


@dataclass(frozen=True, slots=True)
class Call:
    """The options of a call, and token ids and sampling parameters of each prompt.

    output: how the answer is read; None if it is plain text. echo: JSON that the dialect repeats in its answer.
    retention_s: life of the answer in Redis after its end; 0 for the default. conversation: stored with the request.
    loosened: indices of the tools whose schemas the grammar follows only in part.
    adapter, adapter_digest: the LoRA adapter that the call names as its model; empty for the model itself.
    """

    options: Options
    prompts: tuple[tuple[int, ...], ...]
    sampling: tuple[SamplingParams, ...]
    output: OutputSpec | None = None
    echo: str = ""
    retention_s: int = 0
    conversation: bytes = b""
    loosened: tuple[int, ...] = ()
    adapter: str = ""
    adapter_digest: str = ""

    @classmethod
    def of(
        cls,
        options: Options,
        prompts: Sequence[tuple[str, list[int]]],
        limits: RequestLimits,
        default_max_tokens: int | None,
        output: OutputSpec | None = None,
        echo: str = "",
    ) -> Call:
        """The call for these prompts, each with its name for errors. Raises InvalidRequest.

        default_max_tokens: for calls without max_tokens; None: the rest of the context.
        """
        answer = options.answer._replace(system_fingerprint=limits.system_fingerprint)
        check_prompt_size(answer, options.sampling.n, [token_ids for _, token_ids in prompts], options.stream)
        sampling = limits.sampling(
            options.sampling,
            prompts,
            max_tokens=options.max_tokens,
            default_max_tokens=default_max_tokens,
            seed=options.seed,
        )
        token_ids_of_prompts = tuple(tuple(token_ids) for _, token_ids in prompts)
        digest = limits.adapters.get(options.model, "")
        return cls(
            replace(options, answer=answer),
            token_ids_of_prompts,
            sampling,
            output,
            echo,
            adapter=options.model if digest else "",
            adapter_digest=digest,
        )

    def without_effect(self, names: Sequence[str]) -> Call:
        """The call with further names of parameters that have no effect."""
        labels = self.options.labels
        labels = replace(labels, no_effect=(*labels.no_effect, *names))
        return replace(self, options=replace(self.options, labels=labels))

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
            output_spec=self.output.encode() if self.output is not None else "",
            echo=self.echo,
            answer=options.answer,
            metadata=options.labels.metadata,
            service_tier=options.labels.service_tier,
            prompt_cache_key=options.labels.prompt_cache_key,
            adapter=self.adapter,
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
                cache_scope=self.options.cache_scope,
                adapter=self.adapter,
                adapter_digest=self.adapter_digest,
            )
            for index, (prompt, sampling) in enumerate(zip(self.prompts, self.sampling, strict=True))
        ]
