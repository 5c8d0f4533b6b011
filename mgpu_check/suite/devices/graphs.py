"""Check CUDA graphs: a replay computes on what its inputs hold then, and gives the results of the same operators."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from mgpu_check.asserts.collectives import same_bits
from mgpu_check.asserts.models import gradient_or_zeros
from mgpu_check.errors import DeviceMismatch
from mgpu_check.suite.common.values import small

_SHAPE = (5, 6)


def assert_graphs_replay(devices: Sequence[torch.device], seed: int) -> None:
    """Assert that graphs, captured in each way, replay on each device, and that graphed layers train."""
    for number, device in enumerate(devices):
        with torch.cuda.device(device):
            for name, capture in _WAYS.items():
                given = [small(_SHAPE, torch.float32, seed + number + turn) for turn in range(3)]
                x = given[0].to(device)
                replay, result = capture(x)
                for turn, values in enumerate(given[1:]):
                    x.copy_(values)
                    replay()
                    _require(device, f"{name}, replay {turn}", result, _computed(values))
            default: Any = torch.cuda.graph.default_capture_stream
            if default is None or default.device == device:  # of a process, not of a device
                _judge_graphed(device, seed + number)


def _computed(x: torch.Tensor) -> torch.Tensor:
    return (x * 2 + 1).flip(0)


_Captured = tuple[Callable[[], None], torch.Tensor]


def _options() -> dict[str, Any]:
    """Return the option that this version of torch may lack. The simulated `capture_begin` always has it."""
    name = "check_input_liveness"
    return {name: True} if name in inspect.signature(torch.cuda.graph).parameters else {}


def _in_context(x: torch.Tensor) -> _Captured:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        result = _computed(x)
    return graph.replay, result


def _in_context_with_options(x: torch.Tensor) -> _Captured:
    graph = torch.cuda.CUDAGraph()
    pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local", **_options()):
        result = _computed(x)
    return graph.replay, result


def _by_hand(x: torch.Tensor) -> _Captured:
    first, graph = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph(keep_graph=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        first.capture_begin()
        _computed(x)
        first.capture_end()
        graph.capture_begin(pool=first.pool(), capture_error_mode="relaxed", **_options())
        result = _computed(x)
        graph.capture_end()
    first.reset()
    graph.instantiate()
    torch.cuda.current_stream().wait_event(stream.record_event(torch.cuda.Event()))
    return graph.replay, result


_WAYS: dict[str, Callable[[torch.Tensor], _Captured]] = {
    "torch.cuda.graph": _in_context,
    "torch.cuda.graph with a pool and a stream": _in_context_with_options,
    "capture_begin": _by_hand,
}


def _judge_graphed(device: torch.device, seed: int) -> None:
    """Compare outputs and gradients of a layer from `make_graphed_callables` with those of the layer itself."""
    for options in ({}, {"num_warmup_iters": 2, "allow_unused_input": True, "pool": torch.cuda.graph_pool_handle()}):
        layer, alone = (nn.Linear(_SHAPE[1], 3).to(device) for _ in range(2))
        layer.load_state_dict(alone.state_dict())
        sample = small(_SHAPE, torch.float32, seed).to(device).requires_grad_()
        made: Any = torch.cuda.make_graphed_callables
        graphed = made(layer, (sample,), **options)
        for turn in (1, 2):
            inputs = small(_SHAPE, torch.float32, seed + turn).to(device)
            found = []
            for kind in (graphed, alone):
                x = inputs.clone().requires_grad_()
                for value in kind.parameters():
                    value.grad = None
                outputs = kind(x).clone()
                outputs.square().sum().backward()
                found.append([outputs.detach(), x.grad, *(gradient_or_zeros(value) for value in kind.parameters())])
            for number, (got, right) in enumerate(zip(*found, strict=True)):
                what = f"make_graphed_callables with {[*options]}, call {turn}, result {number}"
                if not float((got - right).abs().max()) <= 1e-5 * max(1.0, float(right.abs().max())):
                    raise DeviceMismatch(f"{device}: {what} is {got.tolist()}, expected {right.tolist()}")


def _require(device: torch.device, what: str, got: torch.Tensor, right: torch.Tensor) -> None:
    if not same_bits(right, got.cpu()):
        raise DeviceMismatch(f"{device}: {what} is {got.tolist()}, expected {right.tolist()}", ranks=[device.index])
