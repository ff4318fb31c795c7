"""How a CUDA graph rings for a host layer: memory operations of the driver, which take no multiprocessor while they wait."""

from __future__ import annotations

import torch

from fastattention_vllm import cuda_driver
from fastattention_vllm.cuda_driver import WAIT, WRITE, DriverError


class CudaBell:
    """The doorbell of an NVIDIA GPU. Steps run on torch's current stream."""

    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def ring(self, rung: int, answered: int, call: int) -> None:
        steps = cuda_driver.operations([(WRITE, answered, 0), (WRITE, rung, call), (WAIT, answered, call)])
        cuda_driver.run(steps, torch.cuda.current_stream().cuda_stream)


def why_not() -> str | None:
    """Why this GPU or its driver cannot ring in a graph, in one sentence without a full stop; None if it can.

    It captures a write and a wait for what was written, and runs them.
    """
    words = torch.zeros(2, dtype=torch.int32).pin_memory()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            stream = torch.cuda.current_stream().cuda_stream
            steps = [(WRITE, words.data_ptr(), 5), (WAIT, words.data_ptr(), 5), (WRITE, words.data_ptr() + 4, 7)]
            cuda_driver.run(cuda_driver.operations(steps), stream)
        graph.replay()
        torch.cuda.synchronize()
    except (DriverError, RuntimeError) as error:
        return str(error).splitlines()[0].rstrip(".")
    return None if words.tolist() == [5, 7] else f"the driver's memory operations wrote {words.tolist()}, not [5, 7]"
