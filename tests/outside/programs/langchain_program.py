"""`langchain-openai` over chat completions and Responses, and its embeddings.

Bound tools, streams, structured output in its three methods, and a schema together with tools.
"""

import json
import urllib.request
from contextlib import suppress
from functools import partial
from unittest import mock

from cases import run
from forecast import QUESTION, Forecast, GetWeather
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from openai import LengthFinishReasonError


def chat(url, **options):
    return ChatOpenAI(model="demo", base_url=url, api_key="none", max_retries=0, seed=1, max_tokens=100, **options)


def responses(url, **options):
    """A model of the Responses API, for which the package drops `seed`."""
    return ChatOpenAI(
        model="demo",
        base_url=url,
        api_key="none",
        max_retries=0,
        max_tokens=100,
        use_responses_api=True,
        extra_body={"seed": 1},
        **options,
    )


def bound_tools(model_of, url):
    """A call, its result, and an answer with the tools still bound."""
    forced = model_of(url).bind_tools([GetWeather], tool_choice="required", parallel_tool_calls=False)
    call = forced.invoke(QUESTION)
    result = ToolMessage("Sunny.", tool_call_id=call.tool_calls[0]["id"])
    answer = model_of(url).bind_tools([GetWeather]).invoke([HumanMessage(QUESTION), call, result])
    return {"calls": call.tool_calls, "invalid": call.invalid_tool_calls, "answer": answer.text or answer.tool_calls}


def named_tool(model_of, url):
    bound = model_of(url).bind_tools([GetWeather, Forecast], tool_choice="Forecast", parallel_tool_calls=False)
    return bound.invoke(QUESTION).tool_calls


def streamed_tools(model_of, url):
    bound = model_of(url).bind_tools([GetWeather], tool_choice="required", parallel_tool_calls=False)
    chunks = list(bound.stream(QUESTION))
    total = sum(chunks[1:], chunks[0])
    return {"chunks": len(chunks), "calls": total.tool_calls}


def function_calling(model_of, url):
    return model_of(url).with_structured_output(Forecast, method="function_calling").invoke(QUESTION).model_dump()


def json_schema(model_of, url):
    return model_of(url).with_structured_output(Forecast, method="json_schema").invoke(QUESTION).model_dump()


def json_mode(model_of, url):
    """JSON without a schema. The demo model answers some of these prompts with a short object."""
    model = model_of(url, temperature=0).with_structured_output(None, method="json_mode")
    for number in range(40):
        with suppress(LengthFinishReasonError):
            return model.invoke(f"{{}} {number}")
    return None


def streamed_text(model_of, url):
    chunks = list(model_of(url).stream(QUESTION))
    return {"chunks": len(chunks), "text": "".join(chunk.text for chunk in chunks)}


def text(model_of, url):
    return model_of(url).invoke(QUESTION).text


def schema_with_tools(model_of, url):
    """The model chooses between the tool and the schema; later requests leave it only the schema."""
    calls, parsed = [], []
    for number in range(20):
        choice = "auto" if number < 10 else "none"
        bound = model_of(url).bind_tools(
            [GetWeather], tool_choice=choice, response_format=Forecast, strict=True, parallel_tool_calls=False
        )
        answer = bound.invoke(f"{QUESTION} {number}")
        calls += answer.tool_calls
        parsed += [] if answer.tool_calls else [answer.additional_kwargs["parsed"].model_dump()]
        if calls and parsed:
            break
    return {"calls": calls, "parsed": parsed}


def kept_conversation(url):
    """With all messages in the request, and after the response that the server keeps: the prompt has equal tokens."""
    answer = responses(url).invoke(QUESTION)
    messages = [HumanMessage(QUESTION), answer, HumanMessage("Tell me a story about a fox.")]
    again = [responses(url, use_previous_response_id=kept).invoke(messages) for kept in (False, True)]
    return [{"text": one.text, "prompt_tokens": one.usage_metadata["input_tokens"]} for one in again]


class ServedEncoding:
    """The tokenizer of the served model in the place of one of tiktoken, which must be downloaded."""

    def __init__(self, url):
        self._url = url.removesuffix("/v1") + "/tokenize"

    def encode_ordinary(self, text):
        body = json.dumps({"model": "demo", "prompt": text}).encode()
        request = urllib.request.Request(self._url, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as reply:
            return json.load(reply)["tokens"]


def embeddings(url):
    """By default the package sends token ids, of texts that it has cut into pieces; else it sends texts."""
    texts = ["A fox.", "A boat " * 20]
    options = {"model": "demo", "base_url": url, "api_key": "none", "max_retries": 0}
    sent_as_text = OpenAIEmbeddings(**options, check_embedding_ctx_length=False)
    with mock.patch("tiktoken.encoding_for_model", return_value=ServedEncoding(url)):
        ids = OpenAIEmbeddings(**options).embed_documents(texts)
    return {"ids": ids, "texts": sent_as_text.embed_documents(texts), "query": sent_as_text.embed_query(texts[0])}


CASES = (
    bound_tools,
    named_tool,
    streamed_tools,
    function_calling,
    json_schema,
    json_mode,
    text,
    streamed_text,
    schema_with_tools,
)
run(
    embeddings,
    kept_conversation,
    **{f"{api.__name__}_{case.__name__}": partial(case, api) for api in (chat, responses) for case in CASES},
)
