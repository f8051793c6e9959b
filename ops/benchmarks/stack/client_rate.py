"""The highest event rate of the client of `quire bench`, with a server process that only writes prepared events.

python -m quire.ops.benchmarks.stack.client_rate                     1, 32 and 256 streams
python -m quire.ops.benchmarks.stack.client_rate --streams 64 --tokens 500

The server process answers like an OpenAI server, with one event per token and one write per event, as fast as it can.
Both processes share the machine. Also prints the client's processor time per event, which a server on the same machine
loses.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import time
from multiprocessing.connection import Connection

import uvloop

from quire.ops.loadgen.client import RequestRecord, clock, encode, new_session, stream

EVENT = (
    b'id: 17\ndata: {"id":"cmpl-0123456789abcdef0123456789abcdef","object":"text_completion","created":1763740800,'
    b'"model":"m","choices":[{"index":0,"text":" word","logprobs":null,"finish_reason":null}],"usage":null}\n\n'
)


def serve(port: Connection) -> None:
    """Answer every request with `max_tokens` events. Sends its port through the pipe first."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
                tokens = json.loads(await reader.readexactly(int(length.split(b":")[1])))["max_tokens"]
                writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
                for _ in range(tokens):
                    writer.write(b"%x\r\n%s\r\n" % (len(EVENT), EVENT))
                    await writer.drain()
                    await asyncio.sleep(
                        0
                    )  # let other streams run, so that the events of one stream do not arrive in one piece
                usage = b'data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":%d}}\n\n' % tokens
                end = usage + b"data: [DONE]\n\n"
                writer.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(end), end))
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def run() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=1024)
        port.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    uvloop.run(run())


async def measure(url: str, streams: int, tokens: int) -> tuple[float, float]:
    """Events per second, and the client's processor time per event in microseconds."""
    body = encode({"model": "m", "prompt": [1], "max_tokens": tokens, "stream": True})
    records = [RequestRecord(index, 1, tokens) for index in range(streams)]
    async with new_session(timeout_s=None) as session:
        await stream(session, f"{url}/v1/completions", body, RequestRecord(0, 1, tokens))
        started, used = clock(), time.process_time()
        await asyncio.gather(*(stream(session, f"{url}/v1/completions", body, record) for record in records))
        seconds, used = clock() - started, time.process_time() - used
    assert all(record.ok and record.tokens == tokens == len(record.chunks) for record in records)
    return streams * tokens / seconds, 1e6 * used / (streams * tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", default="1,32,256")
    parser.add_argument("--tokens", type=int, default=500)
    args = parser.parse_args()
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs,), daemon=True)
    process.start()
    url = f"http://127.0.0.1:{ours.recv()}"
    print(f"{'streams':>8}{'events/s':>10}{'us of the client per event':>28}")
    for streams in map(int, args.streams.split(",")):
        rate, used = uvloop.run(measure(url, streams, args.tokens))
        print(f"{streams:>8}{rate:>10.0f}{used:>28.1f}")
    process.kill()


if __name__ == "__main__":
    main()
