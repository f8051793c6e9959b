"""`instructor`: answers as models, by a tool call (over chat completions and Responses) and by a JSON schema."""

import instructor
from cases import run
from forecast import QUESTION, Forecast
from openai import OpenAI

CALL = {"model": "demo", "messages": [{"role": "user", "content": QUESTION}], "max_retries": 0, "seed": 1}


def client_of(url, mode):
    return instructor.from_openai(OpenAI(base_url=url, api_key="none", max_retries=0), mode=mode)


def tools(url):
    return client_of(url, instructor.Mode.TOOLS).chat.completions.create(response_model=Forecast, **CALL).model_dump()


def tools_streamed(url):
    client = client_of(url, instructor.Mode.TOOLS)
    partial = list(client.chat.completions.create_partial(response_model=Forecast, **CALL))
    return {"pieces": len(partial), "last": partial[-1].model_dump()}


def json_schema(url):
    client = client_of(url, instructor.Mode.JSON_SCHEMA)
    return client.chat.completions.create(response_model=Forecast, **CALL).model_dump()


RESPONSE = {"model": "demo", "input": CALL["messages"], "max_retries": 0, "extra_body": {"seed": 1}}


def response_tools(url):
    client = client_of(url, instructor.Mode.RESPONSES_TOOLS)
    return client.responses.create(response_model=Forecast, **RESPONSE).model_dump()


def response_tools_streamed(url):
    client = client_of(url, instructor.Mode.RESPONSES_TOOLS)
    partial = list(client.responses.create_partial(response_model=Forecast, **RESPONSE))
    return {"pieces": len(partial), "last": partial[-1].model_dump()}


run(tools, tools_streamed, json_schema, response_tools, response_tools_streamed)
