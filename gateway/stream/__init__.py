"""The output of calls, from published frames to the socket of a client.

subscription -> router -> buffer -> transcript -> writer        each passes on to the next only; no cycles

Other folders use `Subscription`, `FrameRouter`, `OutputBuffer`, `Transcript`, `writer` and the event format `sse`. The
modules `cursor` (positions in the tokens of a request) and `silence` (lost messages are noticed) are internal.
"""
