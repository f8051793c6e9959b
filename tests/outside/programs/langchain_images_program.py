"""`langchain-openai` sends images: of the user, and in the result of a tool."""

import base64
import struct
import zlib
from functools import partial

from cases import run
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI

SIDE = 60


def chunk(kind, data):
    body = kind + data
    return struct.pack("!I", len(data)) + body + struct.pack("!I", zlib.crc32(body))


ROW = b"\0" + b"\xff\0\0" * SIDE
HEAD = struct.pack("!IIBBBBB", SIDE, SIDE, 8, 2, 0, 0, 0)
PNG = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", HEAD) + chunk(b"IDAT", zlib.compress(ROW * SIDE)) + chunk(b"IEND", b"")
IMAGE = {"type": "image", "base64": base64.b64encode(PNG).decode(), "mime_type": "image/png"}
TEXT = {"type": "text", "text": "What is this?"}


def compare(url, seeing, blind, **options):
    model = ChatOpenAI(model="seeing", base_url=url, api_key="none", max_retries=0, max_tokens=9, **options)
    one, other = model.invoke(seeing), model.invoke(blind)
    return {
        "text": one.text,
        "with": one.usage_metadata["input_tokens"],
        "without": other.usage_metadata["input_tokens"],
    }


def image(options, url):
    return compare(url, [HumanMessage([IMAGE, TEXT])], [HumanMessage([TEXT])], **options)


def tool(options, url):
    call = AIMessage("", tool_calls=[{"name": "look", "args": {}, "id": "c1"}])
    before = [HumanMessage([TEXT]), call]
    seeing, blind = (ToolMessage(content, tool_call_id="c1") for content in ([TEXT, IMAGE], [TEXT]))
    return compare(url, [*before, seeing], [*before, blind], **options)


APIS = {"chat": {}, "responses": {"use_responses_api": True}}
run(**{f"{api}_{case.__name__}": partial(case, options) for api, options in APIS.items() for case in (image, tool)})
