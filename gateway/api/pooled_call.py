"""Calls that want what the model computes of their prompts, and no text: embeddings and scores."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from quire.gateway.api.call import Call
from quire.gateway.api.request_limits import RequestLimits
from quire.gateway.errors.api_errors import refused
from quire.gateway.stream.call_metadata import CallMetadata
from quire.shared.protocol.keys import DEFAULT_CLASS
from quire.shared.protocol.messages import GenerationRequest, SamplingParams

# A request must have sampling parameters; one with a pooling does not use them.
NO_SAMPLING = SamplingParams(max_tokens=1)


class PooledForm(Protocol):
    """The form of the answer. Metadata do not have it: all calls with one idempotency key send equal bodies."""

    def finish(self, data: bytes) -> Any:
        """Return the value of a prompt from what the worker sent. Raises ApiError."""

    def answer(self, call_id: str, model: str, metadata: CallMetadata, values: Sequence[Any]) -> Iterable[str]:
        """Yield the answer to a call: pieces of one JSON object. values: in the order of the prompts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledCall(Call):
    """A call whose prompts are its inputs. pooling, score_tokens: of its requests."""

    pooling: str
    form: PooledForm
    score_tokens: tuple[int, ...] = ()

    @classmethod
    def with_inputs(
        cls,
        given: dict[str, Any],
        limits: RequestLimits,
        inputs: Sequence[tuple[int, ...]],
        form: PooledForm,
        pooling: str,
        score_tokens: tuple[int, ...] = (),
    ) -> PooledCall:
        """Return the call with these parameters and the token ids of each input."""
        digest = limits.adapters.get(given["model"], "")
        return cls(
            model=given["model"],
            common=NO_SAMPLING,
            about=CallMetadata(
                dialect="",
                created=0,
                n=1,
                include_usage=False,
                stop=(),
                prompt_tokens=sum(map(len, inputs)),
                requests=len(inputs),
                is_background=False,
                adapter=given["model"] if digest else "",
            ),
            priority=given.get("priority", DEFAULT_CLASS),
            timeout_s=given.get("timeout"),
            user=given.get("safety_identifier") or given.get("user", ""),
            cache_salt=given.get("cache_salt", ""),
            prompts=tuple(inputs),
            sampling=(NO_SAMPLING,) * len(inputs),
            adapter_digest=digest,
            pooling=pooling,
            form=form,
            score_tokens=score_tokens,
        )

    def requests(self, call_id: str) -> list[GenerationRequest]:
        """Return a request per input; the first has the id of the call."""
        made = Call.requests(self, call_id)
        return [replace(request, pooling=self.pooling, score_tokens=self.score_tokens) for request in made]


def kept_tokens(truncate_prompt_tokens: int | None, max_model_len: int) -> int:
    """Return the number of tokens of an input that are kept; 0 for all. Raises InvalidRequest."""
    if truncate_prompt_tokens == 0:
        raise refused("truncate_prompt_tokens", "truncate_prompt_tokens must be -1 or at least 1, not 0.")
    if truncate_prompt_tokens is None:
        return 0
    if truncate_prompt_tokens > max_model_len:
        raise refused(
            "truncate_prompt_tokens",
            f"truncate_prompt_tokens is {truncate_prompt_tokens}, which is more than the maximum context length of "
            f"{max_model_len} tokens; -1 stands for it.",
        )
    return max_model_len if truncate_prompt_tokens < 0 else truncate_prompt_tokens


def usage_of(metadata: CallMetadata) -> dict[str, int]:
    """Return the usage of a call, which generates no tokens."""
    return {"prompt_tokens": metadata.prompt_tokens, "total_tokens": metadata.prompt_tokens}
