"""`litellm` over chat completions and Responses: tools, streams, answers by a JSON schema; and its embeddings."""

import litellm
from cases import run
from forecast import QUESTION, WEATHER, Forecast

MESSAGES = [{"role": "user", "content": QUESTION}]
TOOLS = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}


def complete(url, **options):
    options = {"messages": MESSAGES, "seed": 1, "max_tokens": 100, "num_retries": 0, **options}
    return litellm.completion(model="openai/demo", api_base=url, api_key="none", **options)


def tools(url):
    """A call, its result, and an answer."""
    message = complete(url, **TOOLS).choices[0].message
    [call] = message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "Sunny."}
    answer = complete(url, messages=[*MESSAGES, message, result], tools=[WEATHER], tool_choice="none")
    called = {"name": call.function.name, "arguments": call.function.arguments}
    return {"call": called, "answer": answer.choices[0].message.content}


def tools_streamed(url):
    chunks = list(complete(url, **TOOLS, stream=True))
    message = litellm.stream_chunk_builder(chunks, messages=MESSAGES).choices[0].message
    [call] = message.tool_calls
    return {"chunks": len(chunks), "name": call.function.name, "arguments": call.function.arguments}


def json_schema(url):
    return Forecast.model_validate_json(complete(url, response_format=Forecast).choices[0].message.content).model_dump()


FUNCTION = {"type": "function", "strict": True, **WEATHER["function"]}
RESPONSE_TOOLS = {"tools": [FUNCTION], "tool_choice": "required", "parallel_tool_calls": False}


def respond(url, **options):
    options = {"input": MESSAGES, "extra_body": {"seed": 1}, "max_output_tokens": 100, "num_retries": 0, **options}
    return litellm.responses(model="openai/demo", api_base=url, api_key="none", **options)


def text_of(response):
    [message] = [item for item in response.output if item.type == "message"]
    return message.content[0].text


def response_tools(url):
    """A call, its result, and an answer, with all items and with those that the server keeps."""
    response = respond(url, **RESPONSE_TOOLS)
    [call] = response.output
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny."}
    rest = {"tools": [FUNCTION], "tool_choice": "none"}
    items = [*MESSAGES, *(item.model_dump() for item in response.output), result]
    whole = respond(url, input=items, **rest)
    continued = respond(url, input=[result], previous_response_id=response.id, **rest)
    return {"name": call.name, "arguments": call.arguments, "answers": [text_of(whole), text_of(continued)]}


def response_streamed(url):
    events = list(respond(url, stream=True))
    delta = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    return {"delta": delta, "text": text_of(events[-1].response), "whole": text_of(respond(url))}


def response_parsed(url):
    return Forecast.model_validate_json(text_of(respond(url, text_format=Forecast))).model_dump()


def embeddings(url):
    def embed(**options):
        answer = litellm.embedding(
            model="openai/demo", input=["A fox.", "A boat."], api_base=url, api_key="none", **options
        )
        return [one["embedding"] for one in answer.data]

    return {"default": embed(), "floats": embed(encoding_format="float")}


run(tools, tools_streamed, json_schema, response_tools, response_streamed, response_parsed, embeddings)
