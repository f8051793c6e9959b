"""Batches: files of calls that run in the class `batch`, and the endpoints below /v1/batches.

input file -> `validation` -> windows of lines -> `window_run`, which submits each line as the call that it is, waits
for its end, and writes the answers -> output file and error file
"""
