"""Provide ``torch.cuda.CUDAGraph``: capture the work of a stream, and replay it, under torch's own Python code."""

from __future__ import annotations

import itertools
import warnings
from typing import Any, Self

import torch

from mgpu_check.simulated.capturing import Capture
from mgpu_check.simulated.recording import GraphNode, GraphRecorder, recorder_of
from mgpu_check.simulated.refusals import refused
from mgpu_check.simulated.state import cuda_error
from mgpu_check.simulated.streams import Stream, as_on, chosen_streams, current_stream, is_capturing
from mgpu_check.torch_hooks.patches import Patches

_Pool = tuple[int, int]
_numbers = itertools.count(1)
_ILLEGAL_STATE = 401, "the operation cannot be performed in the present state"


class _Underway:
    """A capture that has begun and not ended."""

    def __init__(self, stream: Stream, mode: str) -> None:
        self.stream = stream
        self.recorder = GraphRecorder()
        self.capture = Capture(mode)
        self.recorder.start()
        self.capture.begin_on(stream)

    def end(self) -> list[GraphNode]:
        """Undo the captured operations, and return them; raise CUDA's error if the capture is invalid."""
        self.recorder.stop()
        nodes = self.recorder.finish()
        self.capture.end()
        return nodes


class CUDAGraph:
    """``torch.cuda.CUDAGraph`` of simulated devices."""

    _tracker: Any = None
    _underway: _Underway | None = None
    _nodes: list[GraphNode] | None = None
    _handle: _Pool = (0, 0)
    _instantiated = False

    def __new__(cls, keep_graph: bool = False) -> Self:
        made = super().__new__(cls)
        made._keep_graph = keep_graph
        return made

    _keep_graph: bool

    def __init__(self, keep_graph: bool = False) -> None:
        pass

    def capture_begin(
        self, pool: _Pool | None = None, capture_error_mode: str = "global", check_input_liveness: bool = False
    ) -> None:
        if self._instantiated:
            raise RuntimeError(
                "This CUDAGraph instance already owns a captured graph. To capture a new graph, create a new instance."
            )
        stream = current_stream()
        if not stream.stream_id:
            raise RuntimeError(
                "CUDA graphs must be captured on a non-default stream. (However, after capture, it's ok to replay them "
                "on the default stream.)"
            )
        if stream.is_capturing():
            raise cuda_error(*_ILLEGAL_STATE)
        self._handle = pool or (next(_numbers), 0)
        self._underway = _Underway(stream, capture_error_mode)
        if check_input_liveness:
            from torch.utils._cuda_debug import _CUDAGraphInputLivenessTracker

            self._tracker = _CUDAGraphInputLivenessTracker()
            self._tracker.start()

    def capture_end(self) -> None:
        underway = self._underway
        if underway is None:
            raise RuntimeError("capture_end() called before capture_begin().")
        if current_stream() != underway.stream:
            raise RuntimeError("Capture must end on the same stream it began on.")
        self._underway = None
        if self._tracker is not None:
            self._tracker.stop()
        nodes = underway.end()
        if not nodes:
            warnings.warn(
                "The CUDA Graph is empty. This usually means that the graph was attempted to be captured on wrong "
                "device or stream.",
                stacklevel=2,
            )
        self._nodes, self._device = nodes, underway.stream.device
        self._instantiated = not self._keep_graph

    def instantiate(self) -> None:
        if self._nodes is None:
            raise RuntimeError("capture_end() must have been called before calling instantiate")
        if self._instantiated and not self._keep_graph:
            raise RuntimeError("instantiate() is intended to be called by the user only when keep_graph=true")
        self._instantiated = True

    def replay(self) -> None:
        if self._nodes is None:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        if self._tracker is not None:
            self._tracker.check_alive(self._handle)
        self._instantiated = True
        outer = recorder_of(self._device)
        if outer is not None:
            outer.adopt(self._nodes)
            return
        with as_on(self._device.index, {**chosen_streams()}):
            for node in self._nodes:
                node.replay()

    def reset(self) -> None:
        if self._tracker is not None:
            self._tracker.stop()
        self._tracker = self._nodes = None
        self._instantiated = False

    def pool(self) -> _Pool:
        if self._nodes is None:
            raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
        return self._handle

    def register_generator_state(self, generator: torch.Generator) -> None:
        """Do nothing: a replay draws from each generator that the capture drew from."""

    def enable_debug_mode(self) -> None:
        """Do nothing: there is no graph of the driver to keep."""

    debug_dump = refused("torch.cuda.CUDAGraph.debug_dump")
    raw_cuda_graph = refused("torch.cuda.CUDAGraph.raw_cuda_graph")
    raw_cuda_graph_exec = refused("torch.cuda.CUDAGraph.raw_cuda_graph_exec")
    get_graph_data = refused("torch.cuda.CUDAGraph.get_graph_data")
    get_currently_capturing_graph = staticmethod(refused("torch.cuda.CUDAGraph.get_currently_capturing_graph"))


CUDAGraph.__module__ = "torch.cuda.graphs"
CUDAGraph.__qualname__ = "CUDAGraph"


def graph_functions() -> dict[str, object]:
    return {
        "_CUDAGraph": CUDAGraph,
        "_graph_pool_handle": lambda: (0, next(_numbers)),
        "_cuda_isCurrentStreamCapturing": lambda: is_capturing(),
    }


def install_graphs(patches: Patches) -> None:
    """Replace ``torch.cuda.CUDAGraph``, and forget the stream that ``torch.cuda.graph`` keeps."""
    patches.replace(torch.cuda.graphs.CUDAGraph, CUDAGraph)
    patches.set(torch.cuda.graphs.graph, "default_capture_stream", None)
