"""A call that was read and tokenized: one request to the queue for each of its prompts."""

from __future__ import annotations

from dataclasses import dataclass

from quire.gateway.api.call_metadata import CallMetadata
from quire.gateway.api.options import Options
from quire.shared.messages import GenerationRequest, SamplingParams


def request_id(call_id: str, index: int) -> str:
    """The id of a call's request for the prompt `index`; the first request has the id of the call."""
    return f"{call_id}-{index}" if index else call_id


@dataclass(frozen=True, slots=True)
class Call:
    """The options of a call, and token ids and sampling parameters of each prompt."""

    options: Options
    prompts: tuple[tuple[int, ...], ...]
    sampling: tuple[SamplingParams, ...]

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
