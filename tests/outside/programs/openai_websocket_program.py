"""The SDK `openai` over a WebSocket: a chain of responses that are not stored, an error, and its sessions."""

from cases import run
from openai import AsyncOpenAI
from openai.lib.responses_websocket import AsyncResponsesWebSocketSession, ResponsesWebSocketLimits

PLAIN = {"model": "demo", "store": False, "max_output_tokens": 20, "temperature": 0}
LIMITS = ResponsesWebSocketLimits(
    max_lanes=1, max_events_per_lane=1000, max_events=1000, max_bytes_per_lane=2**24, max_bytes=2**24
)
ENDS = ("response.completed", "response.incomplete")


async def chain(url):
    answers = []
    async with AsyncOpenAI(base_url=url, api_key="none") as client, client.responses.connect() as connection:
        more = {}
        for text in ("Tell me a story about a boat.", "And then?"):
            await connection.response.create(input=text, **PLAIN, **more)
            async for event in connection:
                if event.type in ENDS:
                    break
            answers.append([event.response.output_text, event.response.usage.input_tokens])
            more = {"previous_response_id": event.response.id}
        await connection.response.create(input="x", model="demo", temperature=-1)
        error = await connection.recv()
    return {"answers": answers, "error": [error.type, error.status, error.error.code, error.error.param]}


async def session(url):
    async with (
        AsyncOpenAI(base_url=url, api_key="none") as client,
        client.responses.connect() as connection,
        AsyncResponsesWebSocketSession(connection, limits=LIMITS) as opened,
    ):
        await opened.default.send({"type": "response.create", "input": "Tell me a story about a boat.", **PLAIN})
        response = await opened.default.get_final_response()
    return response.output_text


async def posted(url):
    async with AsyncOpenAI(base_url=url, api_key="none") as client:
        return (await client.responses.create(input="Tell me a story about a boat.", **PLAIN)).output_text


run(chain, session, posted)
