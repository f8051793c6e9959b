"""`llama-index`: `OpenAILike` as a model with function calling, and `OpenAIResponses`."""

from functools import partial

from cases import run
from forecast import QUESTION, Forecast, GetWeather
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai import OpenAIResponses
from llama_index.llms.openai_like import OpenAILike


def get_weather(city: str) -> str:
    """Looks the weather of a city up."""
    return f"Sunny in {city}."


TOOL = FunctionTool.from_defaults(get_weather, fn_schema=GetWeather)


def chat(url):
    return OpenAILike(
        model="demo",
        api_base=url,
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=1024,
        max_tokens=100,
        max_retries=0,
        additional_kwargs={"seed": 1},
    )


def responses(url):
    """A model of the Responses API. Without `strict` the package takes `additionalProperties` out of schemas."""
    return OpenAIResponses(
        model="demo",
        api_base=url,
        api_key="none",
        strict=True,
        context_window=1024,
        max_output_tokens=100,
        max_retries=0,
        additional_kwargs={"extra_body": {"seed": 1}},
    )


def chat_with_tools(model_of, url):
    model = model_of(url)
    answer = model.chat_with_tools([TOOL], QUESTION, tool_required=True)
    [call] = model.get_tool_calls_from_response(answer)
    return {"name": call.tool_name, "arguments": call.tool_kwargs}


def predict_and_call(model_of, url):
    return str(model_of(url).predict_and_call([TOOL], QUESTION, tool_required=True))


def streamed_tools(model_of, url):
    model = model_of(url)
    last = list(model.stream_chat_with_tools([TOOL], QUESTION, tool_required=True))[-1]
    [call] = model.get_tool_calls_from_response(last)
    return {"name": call.tool_name, "arguments": call.tool_kwargs}


def structured(model_of, url):
    return model_of(url).as_structured_llm(Forecast).chat([ChatMessage(QUESTION)]).raw.model_dump()


def text(model_of, url):
    return model_of(url).chat([ChatMessage(QUESTION)]).message.content


def streamed_text(model_of, url):
    pieces = [piece.delta for piece in model_of(url).stream_chat([ChatMessage(QUESTION)])]
    return {"pieces": len(pieces), "text": "".join(pieces)}


CASES = (chat_with_tools, predict_and_call, streamed_tools, structured, text, streamed_text)
run(**{f"{api.__name__}_{case.__name__}": partial(case, api) for api in (chat, responses) for case in CASES})
