"""The terms of a loss: where each is computed, what depends on it, and how to scale the gradient of one of them."""

from __future__ import annotations

import contextlib
import re
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from mgpu_check.diagnosis.observed import Term
from mgpu_check.gates.operands import site, upstream
from mgpu_check.gates.program import modules_of
from mgpu_check.processes.frames import is_file_under_test
from mgpu_check.processes.record import relative
from mgpu_check.torch_hooks.members import named_parameters
from mgpu_check.torch_hooks.patches import replaced

_MOST = 6
"""Most terms of one loss that are recorded, the nearest to the loss first: trying one costs runs."""
_MOST_NODES = 1000
"""Most nodes of a graph that are visited: terms of a loss are near its root."""
_ADDS = {"AddBackward0", "SubBackward0", "StackBackward0", "CatBackward0"}
_SCALES = {
    *("MulBackward0", "DivBackward0", "NegBackward0", "SumBackward0", "SumBackward1", "MeanBackward0", "MeanBackward1"),
    *("CloneBackward0", "ToCopyBackward0", "ViewBackward0", "ReshapeAliasBackward0", "UnsqueezeBackward0"),
    *("SqueezeBackward0", "SqueezeBackward1"),
}
"""Functions that are linear in one operand if the other operands need no gradient."""
_FRAME = re.compile(r'File "(.+)", line (\d+)')

Paths = tuple[tuple[int, ...], ...]
_Edge = tuple[Any, int]
"""A node of the graph, and the index of its operand that is a term."""


@contextlib.contextmanager
def noting_terms(model: Any, found: dict[tuple[str, Paths], Term]) -> Iterator[None]:
    """Record each loss that backward is called on, and its terms, by the calling line and the graph path."""
    named = [pair for module in modules_of(model).values() for pair in named_parameters(module)]

    def note(line: str, roots: Sequence[Any]) -> list[RemovableHandle]:
        for root in roots:
            if isinstance(root, torch.Tensor) and root.numel() == 1 and root.grad_fn is not None:
                for paths, edges in [(((),), []), *_terms(root.grad_fn)]:
                    node = _below(edges[0]) if edges else root.grad_fn
                    found.setdefault((line, paths), Term(line, paths, _line_of(node), upstream(node, named)))
        return []

    # Anomaly detection makes each node keep the traceback of its creation.
    with torch.autograd.set_detect_anomaly(True, check_nan=False), around_backward(note):
        yield


@contextlib.contextmanager
def scaling_term(term: Term, times: float) -> Iterator[None]:
    """Multiply the gradient that reaches one term of a loss, or the loss itself."""

    def scale(line: str, roots: Sequence[Any]) -> list[RemovableHandle]:
        if line != term.backward:
            return []
        if not term.paths[0]:
            return [root.grad_fn.register_prehook(_all_multiplied(times)) for root in roots]
        found = [edges for root in roots for paths, edges in _terms(root.grad_fn) if paths == term.paths]
        return [node.register_hook(_multiplied(index, times)) for edges in found for node, index in edges]

    with around_backward(scale):
        yield


def _multiplied(index: int, times: float) -> Callable[..., Any]:
    def hook(inputs: tuple[torch.Tensor | None, ...], outputs: Any) -> tuple[torch.Tensor | None, ...]:
        return tuple(one * times if number == index and one is not None else one for number, one in enumerate(inputs))

    return hook


def _all_multiplied(times: float) -> Callable[..., Any]:
    return lambda gradients: tuple(None if one is None else one * times for one in gradients)


def _leave_alone() -> None:
    pass


@contextlib.contextmanager
def around_backward(
    look: Callable[[str, Sequence[Any]], list[RemovableHandle]] = lambda line, roots: [],
    then: Callable[[], None] = _leave_alone,
) -> Iterator[None]:
    """Call `look` before each backward pass, with its line and its losses, and `then` after it.

    The hooks that `look` returns are removed after the pass. Passes inside of others do not count.
    """
    run = torch.autograd._engine_run_backward  # type: ignore[attr-defined]  # imported, not exported
    inside = 0

    def watched(roots: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        hooks = [] if inside else look(site(sys._getframe()), roots)
        inside += 1
        try:
            result = run(roots, *args, **kwargs)
        finally:
            inside -= 1
            for hook in hooks:
                hook.remove()
        if not inside:
            then()
        return result

    with replaced(torch.autograd, "_engine_run_backward", watched):
        yield


def _terms(root: Any) -> list[tuple[Paths, list[_Edge]]]:
    """Return the terms of a loss: its summands, and losses that an autograd function attaches to another tensor."""
    added = [((path,), [edge]) for path, edge in _added(root)]
    injected: dict[str, list[tuple[tuple[int, ...], _Edge]]] = {}
    for path, edge in _injected(root):
        injected.setdefault(edge[0].name(), []).append((path, edge))
    several = [(tuple(path for path, _ in some), [edge for _, edge in some]) for some in injected.values()]
    return [*added, *several]


def _added(root: Any) -> Iterator[tuple[tuple[int, ...], _Edge]]:
    """Yield the summands of a loss, the nearest first, each with its path through the graph."""
    waiting: deque[tuple[tuple[int, ...], Any]] = deque([((), root)])
    yielded = visited = 0
    while waiting and visited < _MOST_NODES:
        path, node = waiting.popleft()
        visited += 1
        operands, name = _operands(node), node.name()
        adds = name in _ADDS and len(operands) > 1
        if not adds and not (name in _ADDS | _SCALES and len(operands) == 1):
            continue
        for index, below in operands:
            if adds:
                yield (*path, index), (node, index)
                yielded += 1
                if yielded == _MOST:
                    return
            waiting.append(((*path, index), below))


def _injected(root: Any) -> Iterator[tuple[tuple[int, ...], _Edge]]:
    """Yield scalar operands, such as losses of layers, that an autograd function takes beside others."""
    waiting: deque[tuple[tuple[int, ...], Any]] = deque([((), root)])
    known = {root}
    while waiting and len(known) < _MOST_NODES:
        path, node = waiting.popleft()
        operands = _operands(node)
        of_python = isinstance(node, torch.autograd.function.BackwardCFunction)
        for index, below in operands:
            if of_python and len(operands) > 1 and [tuple(one.shape) for one in below._input_metadata] == [()]:
                yield (*path, index), (node, index)
            if below not in known:
                known.add(below)
                waiting.append(((*path, index), below))


def _operands(node: Any) -> list[tuple[int, Any]]:
    return [(index, below) for index, (below, _) in enumerate(node.next_functions) if below is not None]


def _below(edge: _Edge) -> Any:
    node, index = edge
    return node.next_functions[index][0]


def _line_of(node: Any) -> str:
    """Return the line of the code under test that computed a term, ignoring operations that only scale it."""
    while node.name() in _SCALES and len(below := _operands(node)) == 1:
        node = below[0][1]
    for told in reversed(node.metadata.get("traceback_", [])):
        for file, number in _FRAME.findall(told):
            if is_file_under_test(file):
                return f"{relative(file)}:{number}"
    return ""
