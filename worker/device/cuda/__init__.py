"""Steps on a CUDA device: a runner that looks ahead, its graphs, and the plan of the device's memory."""

from quire.worker.device.cuda.graph_capture import capture_graphs, graph_buckets, release
from quire.worker.device.cuda.graphs import Graph, GraphBucket, Record, record_on_cuda, recorder
from quire.worker.device.cuda.memory_plan import plan_cuda_memory
from quire.worker.device.cuda.runner import DeviceRunner

__all__ = [
    "DeviceRunner",
    "Graph",
    "GraphBucket",
    "Record",
    "capture_graphs",
    "graph_buckets",
    "plan_cuda_memory",
    "record_on_cuda",
    "recorder",
    "release",
]
