"""Describe the tensors that the code under test passes to collectives and models, while a failure is diagnosed."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd.function import FunctionCtx

from mgpu_check.diagnosis.results import Result
from mgpu_check.gates.batches import samples_in
from mgpu_check.processes.frames import is_file_under_test
from mgpu_check.processes.record import relative
from mgpu_check.torch_hooks.nested import tensors_of
from mgpu_check.torch_hooks.tensors import as_real, digest_of, name_of

_KEPT = 64
"""Largest number of elements whose values are kept."""
_FRAMES = 4
"""Frames of the code under test that are searched for a tensor that shares memory with an operand."""


def facts(
    value: torch.Tensor,
    result_in: Callable[[torch.Tensor], Result | None],
    frame: types.FrameType,
    named: Iterable[tuple[str, torch.Tensor]] = (),
) -> dict[str, Any]:
    """Describe an operand as the collective starts: dtype, shape, layout, autograd history, its result.

    Args:
        result_in: returns the gradient or parameter that a tensor shares memory with.
        named: the parameters of the model; "upstream" names the ones that the operand depends on.
    """
    said: dict[str, Any] = {
        "dtype": name_of(value.dtype),
        "shape": tuple(value.shape),
        "gaps": not _is_dense(value),
        "layout": layout(value),
        "differentiable": value.requires_grad and torch.is_grad_enabled(),
        "detached": False,
        "result": result_in(value),
    }
    history = _history(value, frame)
    if history is not None:
        said["detached"] = history is not value or not torch.is_grad_enabled()
        said["upstream"] = upstream(history.grad_fn, named)
    if value.numel() == 1:
        said["value"] = float(as_real(value.detach()).sum())
    return said


def arrived(given: Sequence[Any]) -> bool:
    """Return whether a collective has put this rank's own operand into the list that it fills."""
    own = [one for one in given if isinstance(one, torch.Tensor)]
    parts = [part for one in given if isinstance(one, (list, tuple)) for part in one if isinstance(part, torch.Tensor)]
    return any(part.shape == one.shape and bool((part == one).all()) for one in own for part in parts)


def contents(value: torch.Tensor) -> dict[str, Any]:
    """Return the sum and the norm of a tensor in float64, and the values of a small tensor."""
    flat = _flat(value)
    return {"sum": float(flat.sum()), "norm": float(flat.norm())} | _few_values(value)


def _few_values(value: torch.Tensor) -> dict[str, list[float]]:
    numbers = as_real(value)
    return {"values": _flat(value).tolist()} if numbers.numel() <= _KEPT else {}


def _flat(value: torch.Tensor) -> torch.Tensor:
    return as_real(value.detach()).cpu().double().flatten()


def sums_of(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, float]:
    """Return the sum of each tensor, but not of a DTensor, because each rank holds its own part."""
    whole = [(name, value.detach()) for name, value in named if not hasattr(value, "full_tensor")]
    return {name: float(as_real(value).double().sum()) for name, value in whole}


class Rows:
    """The samples of the global batches, recognized by their values in the inputs of models."""

    def __init__(self, batches: Sequence[Any]) -> None:
        of_leaves: dict[int, list[tuple[str, tuple[int, int]]]] = {}
        for step, batch in enumerate(batches):
            count = samples_in(batch)
            for number, leaf in enumerate(tensors_of(batch)):
                if leaf.dim() > 1 and len(leaf) == count:
                    rows = ((digest_of(row), (step, index)) for index, row in enumerate(leaf))
                    of_leaves.setdefault(number, []).extend(rows)
        # A leaf with equal rows cannot identify its samples.
        self._known = [dict(rows) for rows in of_leaves.values() if len(dict(rows)) == len(rows)]

    def samples(self, given: torch.Tensor) -> list[tuple[int, int]] | None:
        """Return the samples in `given` as (batch, index); None unless all are rows of one leaf of the batches."""
        if given.dim() < 2:
            return None
        digests = [digest_of(row) for row in given.detach().cpu()]
        for known in self._known:
            if all(digest in known for digest in digests):
                return [known[digest] for digest in digests]
        return None


def layout(value: torch.Tensor) -> tuple[int, ...]:
    """Return the dimensions with more than one element, from the outermost in memory to the innermost."""
    sized = [dim for dim, size in enumerate(value.shape) if size > 1]
    strides = value.stride()
    return tuple(sorted(sized, key=lambda dim: strides[dim], reverse=True))


def _is_dense(value: torch.Tensor) -> bool:
    """Return whether the elements fill a stretch of memory without gaps, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(
        (stride, size) for stride, size in zip(value.stride(), value.shape, strict=True) if size > 1
    ):
        if stride != expected:
            return False
        expected *= size
    return True


def _history(value: torch.Tensor, frame: types.FrameType) -> torch.Tensor | None:
    """Return the tensor with the autograd history of an operand; None without a history.

    That tensor is the operand itself, or a tensor of the code under test that the operand was detached from.
    """
    if value.dim() < 1 or not value.numel() or not (value.is_floating_point() or value.is_complex()):
        return None
    if value.requires_grad:
        return value if value.grad_fn is not None else None
    start = value.data_ptr()
    above = _held_above(frame)
    return next(
        (one for one in above if one.grad_fn is not None and one.shape == value.shape and one.data_ptr() == start), None
    )


def upstream(start: Any, named: Iterable[tuple[str, torch.Tensor]]) -> tuple[str, ...]:
    """Return the names of the parameters that a node of autograd's graph depends on."""
    nodes, known, leaves = [start], {start}, set()
    while nodes:
        node = nodes.pop()
        leaves.add(id(getattr(node, "variable", None)))
        below = {one for one, _ in node.next_functions if one is not None} - known
        known |= below
        nodes += below
    return tuple(name for name, parameter in named if id(parameter) in leaves)


def in_function(frame: types.FrameType) -> bool:
    """Return whether a frame is inside a `torch.autograd.Function`, which has its own backward pass."""
    caller, left = frame.f_back, _FRAMES
    while caller is not None and left:
        left -= is_under_test(caller)
        if isinstance(caller.f_locals.get("ctx"), FunctionCtx):
            return True
        caller = caller.f_back
    return False


def _held_above(frame: types.FrameType) -> Iterator[torch.Tensor]:
    """Yield the tensors among the local variables of the nearest frames of the code under test."""
    caller, left = frame.f_back, _FRAMES
    while caller is not None and left:
        if is_under_test(caller):
            left -= 1
            yield from (value for value in caller.f_locals.values() if isinstance(value, torch.Tensor))
        caller = caller.f_back


def site(frame: types.FrameType | None) -> str:
    """Return the innermost line of the code under test among the callers of a frame: "train.py:40"."""
    caller = frame.f_back if frame is not None else None
    while caller is not None:
        if is_under_test(caller):
            return line_of(caller)
        caller = caller.f_back
    return ""


def line_of(frame: types.FrameType) -> str:
    return f"{relative(frame.f_code.co_filename)}:{frame.f_lineno}"


def is_under_test(frame: types.FrameType) -> bool:
    """Return whether a frame belongs to the code under test, not to an installed package or to the gate."""
    return is_file_under_test(frame.f_code.co_filename)
