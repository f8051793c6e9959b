"""`openai-agents` with the default class of models (Responses) and over chat completions.

Agents with a tool, whole and streamed, with an output type, with both, and with a handoff.
"""

from contextlib import suppress
from functools import partial
from typing import Literal

from agents import Agent, MaxTurnsExceeded, ModelSettings, OpenAIProvider, RunConfig, Runner, function_tool
from cases import run
from forecast import QUESTION, Forecast
from openai import AsyncOpenAI

INSTRUCTIONS = "Answer in a sentence."


def settings(seed=1, **options):
    return ModelSettings(extra_body={"seed": seed}, max_tokens=300, **options)


def forced(seed=1):
    return settings(seed, tool_choice="required", parallel_tool_calls=False)


def agent_of(called=None, **options):
    @function_tool
    def get_weather(city: Literal["Paris", "Rome"]) -> str:
        """The weather of a city."""
        called.append(city)
        return "Sunny."

    tools = {"tools": [get_weather]} if called is not None else {}
    return Agent(name="Assistant", instructions=INSTRUCTIONS, model="demo", **tools, **options)


async def tools(config):
    called = []
    agent = agent_of(called, model_settings=forced())
    result = await Runner.run(agent, QUESTION, max_turns=8, run_config=config)
    return {"called": called, "output": result.final_output}


async def tools_streamed(config):
    called = []
    agent = agent_of(called, model_settings=forced())
    result = Runner.run_streamed(agent, QUESTION, max_turns=8, run_config=config)
    kinds = [event.type async for event in result.stream_events()]
    return {"called": called, "output": result.final_output, "events": len(kinds)}


async def output_type(config):
    agent = agent_of(output_type=Forecast, model_settings=settings())
    return (await Runner.run(agent, QUESTION, run_config=config)).final_output.model_dump()


async def output_type_with_tools(config):
    """The first turn must call the tool; then the model chooses between the tool and the output."""
    for seed in range(20):
        called = []
        agent = agent_of(called, output_type=Forecast, model_settings=forced(seed))
        with suppress(MaxTurnsExceeded):
            result = await Runner.run(agent, QUESTION, max_turns=6, run_config=config)
            return {"called": called, "output": result.final_output.model_dump()}
    return None


async def handoff(config):
    expert = Agent(name="Expert", instructions=INSTRUCTIONS, model="demo", model_settings=settings())
    agent = agent_of(handoffs=[expert], model_settings=forced())
    result = await Runner.run(agent, QUESTION, run_config=config)
    return {"last_agent": result.last_agent.name, "output": result.final_output}


async def kept_conversation(config):
    """With all items in each request, and after the response that the server keeps."""
    whole, kept = agent_of([], model_settings=forced()), agent_of([], model_settings=forced())
    results = [
        await Runner.run(whole, QUESTION, run_config=config),
        await Runner.run(kept, QUESTION, run_config=config, auto_previous_response_id=True),
    ]
    return [result.final_output for result in results]


async def default_model(config):
    return type(config.model_provider.get_model("demo")).__name__


async def with_client(case, is_responses, url):
    """Run a case with a configuration that sends all models to the server; is_responses: None for the default API."""
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        return await case(RunConfig(model_provider=OpenAIProvider(openai_client=client, use_responses=is_responses)))


run(
    default_model=partial(with_client, default_model, None),
    kept_conversation=partial(with_client, kept_conversation, None),
    **{
        f"{api}_{case.__name__}": partial(with_client, case, is_responses)
        for api, is_responses in (("responses", None), ("chat", False))
        for case in (tools, tools_streamed, output_type, output_type_with_tools, handoff)
    },
)
