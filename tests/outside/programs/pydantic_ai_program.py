"""`pydantic-ai` over chat completions and Responses.

Outputs of agents by tool calls and by a JSON schema, both with tools, and streams.
"""

from contextlib import suppress
from functools import partial

from cases import run
from forecast import QUESTION, Forecast
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.exceptions import UsageLimitExceeded
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.usage import UsageLimits


def settings(seed=1, **more):
    return {"extra_body": {"seed": seed}, "parallel_tool_calls": False, "max_tokens": 100, **more}


def agent_of(model_class, url, output_type, **options):
    model = model_class("demo", provider=OpenAIProvider(base_url=url, api_key="none"))
    return Agent(model, output_type=output_type, model_settings=settings(), **options)


def default_output(model_class, url):
    return agent_of(model_class, url, Forecast).run_sync(QUESTION).output.model_dump()


def native_output(model_class, url):
    return agent_of(model_class, url, NativeOutput(Forecast)).run_sync(QUESTION).output.model_dump()


def text(model_class, url):
    return agent_of(model_class, url, str).run_sync(QUESTION).output


def tools(model_class, url):
    return called_and_output(model_class, url, Forecast)


def native_output_with_tools(model_class, url):
    return called_and_output(model_class, url, NativeOutput(Forecast))


def called_and_output(model_class, url, output_type):
    """The model chooses between the tool and the output until it chooses the output.

    The demo model nearly always chooses the output; a high temperature has it choose the tool in some of the runs.
    """
    called = []

    def get_weather(days: bool) -> str:
        """The weather of today, or of the next days."""
        called.append(days)
        return "Sunny."

    for seed in range(60):
        called.clear()
        agent = agent_of(model_class, url, output_type, tools=[get_weather], retries=0)
        limits = UsageLimits(request_limit=8)
        with suppress(UsageLimitExceeded):
            result = agent.run_sync(QUESTION, model_settings=settings(seed, temperature=2.0), usage_limits=limits)
            if called:
                return {"called": called, "output": result.output.model_dump()}
    return None


async def streamed_output(model_class, url):
    async with agent_of(model_class, url, Forecast).run_stream(QUESTION) as stream:
        return (await stream.get_output()).model_dump()


async def streamed_native_output(model_class, url):
    async with agent_of(model_class, url, NativeOutput(Forecast)).run_stream(QUESTION) as stream:
        return (await stream.get_output()).model_dump()


CASES = (
    default_output,
    native_output,
    text,
    tools,
    native_output_with_tools,
    streamed_output,
    streamed_native_output,
)
run(
    **{
        f"{api}_{case.__name__}": partial(case, model_class)
        for api, model_class in (("chat", OpenAIChatModel), ("responses", OpenAIResponsesModel))
        for case in CASES
    }
)
