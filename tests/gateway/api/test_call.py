"""A call becomes one request per prompt, and metadata from which another gateway can render the answer."""

from __future__ import annotations

from quire.gateway.api.call import Call, Options
from quire.gateway.api.labels import Labels
from quire.gateway.model.prompt_form import PromptForm
from quire.gateway.stream.answer_options import AnswerOptions
from quire.shared.messages import SamplingParams


def call(**sampling: object) -> Call:
    params = SamplingParams(max_tokens=8, **sampling)  # type: ignore[arg-type]
    options = Options(
        model="m",
        stream=True,
        include_usage=True,
        cache_salt="salt",
        background=False,
        priority="standard",
        timeout_s=None,
        max_tokens=8,
        seed=None,
        sampling=params,
        answer=AnswerOptions(echo=True),
        form=PromptForm(),
        labels=Labels(metadata=(("a", "b"),), service_tier="flex", prompt_cache_key="k"),
    )
    return Call(options, ((1, 2, 3), (4,)), (params, params))


def test_each_prompt_is_one_request_and_the_first_has_the_id_of_the_call() -> None:
    first, second = call().requests("abc")
    assert (first.id, first.prompt, first.cache_salt) == ("abc", (1, 2, 3), "salt")
    assert second.id != "abc"
    assert second.prompt == (4,)


def test_metadata_says_what_another_gateway_needs() -> None:
    metadata = call(stop=("x",), include_stop_str_in_output=True).metadata("chat", 7)
    assert (metadata.dialect, metadata.created, metadata.requests, metadata.prompt_tokens) == ("chat", 7, 2, 4)
    assert metadata.answer == AnswerOptions(echo=True)
    assert (metadata.include_usage, metadata.stop, metadata.include_stop_str_in_output) == (True, ("x",), True)
    labels = (metadata.metadata, metadata.service_tier, metadata.prompt_cache_key)
    assert labels == ((("a", "b"),), "flex", "k")


def test_counts_name_the_parameters_that_choose_a_number_of_sequences() -> None:
    assert call(n=2).options.counts == {"n": 2}
    assert call(n=2, best_of=4).options.counts == {"n": 2, "best_of": 4}
