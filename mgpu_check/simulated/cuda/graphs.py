"""Provide ``torch.cuda.CUDAGraph`` under torch's own Python code: capture the work of a stream, with the memory that
its operators read and write, and replay it.

Operators run while they are captured, so that results have shapes, and values that later operators can index by.
When the capture ends, all memory that they wrote holds again what it held before, or what was never written: CUDA
runs nothing until the replay. A replay runs the same operators on the same memory.

A `TorchDispatchMode` sees the operators, so what C++ calls is recorded too: autograd, and DistributedDataParallel
with the collectives that it sends.
"""

from __future__ import annotations

import functools
import itertools
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

from mgpu_check.simulated.cuda import streams
from mgpu_check.simulated.cuda.streams import Capture, Stream, as_on, chosen_streams, current_stream, is_capturing
from mgpu_check.simulated.distributed.collectives import wait_pending
from mgpu_check.simulated.node import BLOCK, cuda_error, refused
from mgpu_check.simulated.operators.generators import Draws
from mgpu_check.simulated.tensor import EMPTY, SimulatedTensor, bytes_of, mapped, never_written, raw, tag, tensors_in
from mgpu_check.torch_hooks.patches import Patches, replaced
from mgpu_check.torch_hooks.tensors import Argument, argument_values, written_by

# Operators whose schemas do not declare all written arguments: the running statistics.
_WRITES_UNDECLARED = frozenset(
    ["native_batch_norm", "cudnn_batch_norm", "batch_norm_gather_stats", "batch_norm_gather_stats_with_counts"]
)
# Operators that change only the tensor object, or create memory without values: a replay does not need them.
_OF_THE_HOST = EMPTY | {"resize_", "resize_as_", "set_"}
_no_dispatch = torch._C._DisableTorchDispatch
_own_dispatch = torch.Tensor.__torch_dispatch__


@dataclass(eq=False)
class GraphNode:
    """One operation: a replay calls `run`, and copies each new tensor to the memory in `targets` at the same index."""

    run: Callable[[], object]
    reads: list[torch.Tensor]
    targets: list[torch.Tensor]
    writes: list[torch.Tensor]
    draws: Draws
    after: Callable[[Any], object] | None = None

    def replay(self) -> None:
        with torch.inference_mode(), self.draws.states():  # inference mode allows writes to all tensors
            for target, result in zip(self.targets, _made(self.run(), self.reads), strict=True):
                wait_pending(result)
                with _no_dispatch():
                    raw(target).copy_(raw(result))
            if self.after is not None:
                self.after(next(iter(self.targets), None))


def _storage(t: torch.Tensor) -> int:
    return int(t.untyped_storage()._cdata) if t.layout is torch.strided else -1


def _made(result: object, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors of a result with new memory: no wrappers, and none that share memory with ``inputs``."""
    storages = set(map(_storage, inputs))
    return [t for t in tensors_in(result) if _storage(t) not in storages and not _wraps(type(t))]


def _wraps(tensor_class: Any) -> bool:
    """Return whether tensors of this type wrap others and dispatch on them, as DTensor does."""
    return tensor_class is not SimulatedTensor and tensor_class.__torch_dispatch__ is not _own_dispatch


def _bare(t: torch.Tensor) -> torch.Tensor:
    """Return the same memory without autograd and with its own version counter: autograd must not see a replay."""
    with _no_dispatch():
        bare = raw(t)
        bare = bare.data if bare.layout is torch.strided else bare
        return tag(bare, t._dev) if isinstance(t, SimulatedTensor) else bare


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator; wait for its work if it is a collective that C++ sent."""
    result = func(*args, **kwargs)
    for item in result if isinstance(result, (list, tuple)) else (result,):
        if isinstance(item, torch.ScriptObject) and func.namespace == "c10d":
            dist.Work.unbox(item).wait()
    return result


@functools.cache
def _effects_of(func: Any) -> tuple[Sequence[Argument], bool]:
    """Return the arguments that an operator writes, and whether it makes new tensors."""
    schema = func._schema
    name = schema.name.rpartition("::")[2]
    if name in _OF_THE_HOST:
        return [], False
    undeclared = func.namespace == "c10d" or name in _WRITES_UNDECLARED
    written = [(i, a.name) for i, a in enumerate(schema.arguments)] if undeclared else written_by(func)
    makes = func.namespace != "c10d" and any(r.alias_info is None and "Tensor" in str(r.type) for r in schema.returns)
    return written, makes


class GraphRecorder(TorchDispatchMode):
    """Record the operations that a thread queues on capturing streams, and undo them at the end.

    `CUDAGraph.capture_begin` makes it and enters it as a mode. Torch then passes it all operators of the thread; copies
    and factories call `record` themselves. At the end of the capture `finish` hands its nodes to the graph.
    """

    def __init__(self) -> None:
        super().__init__()
        self.nodes: list[GraphNode] = []
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by storage: its bytes, and a copy
        self._memory: dict[int, torch.Tensor] = {}  # storage -> memory that the capture created
        self.paused = False
        self._there: dict[int, torch.device] = {}  # storage -> device whose operators wrote it

    def start(self) -> None:
        if _current.recorder is not None:
            raise RuntimeError("a thread captures one CUDA graph at a time: end its other capture first")
        _push_mode(self)
        _current.recorder = self

    def stop(self) -> None:
        """Leave this mode, and keep the modes that were entered since."""
        above = []
        while (mode := _pop_mode()) is not self:
            above.append(mode)
        for mode in reversed(above):
            _push_mode(mode)
        _current.recorder = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        if any(map(_wraps, types)):
            return NotImplemented  # its operators on the wrapped tensors come here next
        arguments, makes = _effects_of(func)
        if not makes and not arguments:
            return func(*args, **kwargs)
        device = next(
            (t._dev for t in tensors_in([args, tuple(kwargs.values())]) if isinstance(t, SimulatedTensor)), None
        )
        if device is not None and not is_capturing(device.index):
            return func(*args, **kwargs)
        written = list(tensors_in(argument_values(arguments, args, kwargs)))
        if device is not None:
            self._there.update((_storage(t), device) for t in written)
        substitute = self._tagged if device is not None else _bare
        return self.record(
            lambda args, kwargs: _run(func, args, kwargs), args, kwargs, written, device, substitute=substitute
        )

    def _tagged(self, t: torch.Tensor) -> torch.Tensor:
        """Return the same memory as `_bare`, on its device even if C++ treats it as host memory."""
        bare = _bare(t)
        device = self._there.get(_storage(t))
        return bare if device is None or isinstance(bare, SimulatedTensor) else tag(bare, device)

    def record(
        self,
        run: Callable[[tuple[Any, ...], dict[str, Any]], Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        written: list[torch.Tensor],
        device: torch.device | None,
        *,
        after: Callable[[Any], object] | None = None,
        substitute: Callable[[torch.Tensor], torch.Tensor] = _bare,
    ) -> Any:
        """Run an operation on a device, and record it.

        Args:
            run: runs the operation with the positional and keyword arguments.
            written: tensors among the arguments that the operation writes.
            device: device of the operation; None if no argument is on a device.
            after: called after each replay with its first new tensor; None without new tensors.
            substitute: returns the tensor that a replay uses in place of a tensor argument.
        """
        for t in written:
            self._keep(t)
        operands = mapped(args, substitute)
        named = {name: mapped(value, substitute) for name, value in kwargs.items()}
        reads = list(tensors_in([operands, tuple(named.values())]))
        draws = Draws()
        with replaced(self, "paused", True), draws.noted():
            result = run(args, kwargs)
        targets = [_bare(t) for t in _made(result, reads)]
        for target in targets:
            self._memory.setdefault(_storage(target), target)
        self.nodes.append(
            GraphNode(lambda: run(operands, named), reads, targets, [_bare(t) for t in written], draws, after)
        )
        if device is not None:
            branch = current_stream(device).branch
            assert branch is not None
            branch.work += 1
        return result

    def adopt(self, nodes: list[GraphNode]) -> None:
        """Replay another graph, and record it as a part of this one."""
        for node in nodes:
            for t in (*node.writes, *node.targets):
                self._keep(t)
        with replaced(self, "paused", True):
            for node in nodes:
                node.replay()
        self.nodes.extend(nodes)

    def _keep(self, t: torch.Tensor) -> None:
        """Save the values of a tensor's memory before its first write, unless the capture created the memory."""
        key = _storage(t)
        if key in self._before or key in self._memory or t.layout is not torch.strided:
            return
        with _no_dispatch(), torch.no_grad():
            content = bytes_of(t.untyped_storage())
            self._before[key] = content, content.clone()

    def finish(self) -> list[GraphNode]:
        """Undo all captured operations, and return them without those on host memory alone."""
        for node in reversed(self.nodes):
            node.draws.undo()
        nodes = self._on_devices()
        written = {_storage(t) for node in nodes for t in (*node.writes, *node.targets)}
        with _no_dispatch(), torch.inference_mode():
            for key, (memory, before) in self._before.items():
                if key in written:
                    memory[: before.numel()].copy_(before)
            for node in nodes:
                for target in node.targets:
                    if _storage(target) not in self._before:
                        never_written(raw(target))
        self._before, self._memory, self._there, self.nodes = {}, {}, {}, []
        return nodes

    def _on_devices(self) -> list[GraphNode]:
        """Return the operations on memory of a device, including buckets, which C++ treats as host memory."""
        device_storages: set[int] = set()
        kept = []
        for node in self.nodes:
            touched = (*node.reads, *node.writes, *node.targets)
            if any(
                isinstance(t, SimulatedTensor)
                or _storage(t) in device_storages
                or (t.layout is torch.strided and BLOCK in t.untyped_storage().__dict__)
                for t in touched
            ):
                if node.after is None:  # a copy to the host writes host memory
                    device_storages.update(_storage(t) for t in (*node.writes, *node.targets))
                kept.append(node)
        return kept


class _CurrentRecorder(threading.local):
    recorder: GraphRecorder | None = None


_current = _CurrentRecorder()


def abandon() -> None:
    if _current.recorder is not None:
        _current.recorder.stop()
    streams.abandon()


def recorder_of(device: torch.device) -> GraphRecorder | None:
    recorder = _current.recorder
    if recorder is None or recorder.paused or not is_capturing(device.index):
        return None
    return recorder


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
    """``torch.cuda.CUDAGraph`` of simulated devices.

    The program makes it, mostly for ``torch.cuda.graph``, which begins and ends the capture. It holds the recorded
    operations with their memory until ``reset``, and replays them any number of times.
    """

    _tracker: Any = None
    _underway: _Underway | None = None
    _nodes: list[GraphNode] | None = None
    _handle: _Pool = (0, 0)
    _instantiated = False

    def __new__(cls, keep_graph: bool = False) -> Self:
        graph = super().__new__(cls)
        graph._keep_graph = keep_graph
        return graph

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
    """Replace ``torch.cuda.CUDAGraph``, and forget the stream that ``torch.cuda.graph`` keeps.

    The class keeps the stream of its first use for good: torch/cuda/graphs.py, graph.__init__, torch 2.13.
    """
    patches.replace(torch.cuda.graphs.CUDAGraph, CUDAGraph)
    patches.set(torch.cuda.graphs.graph, "default_capture_stream", None)
