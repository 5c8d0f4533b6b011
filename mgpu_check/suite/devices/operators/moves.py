"""Yield cases of operators that only move elements; they must keep every bit in every dtype and layout.

Two moves get no NaN of narrow floats, whose bits the CPU changes, and with it a GPU that is simulated there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch.nn import functional as F

from mgpu_check.suite.common.agreement import Case, Window
from mgpu_check.suite.common.operators import Function
from mgpu_check.suite.common.values import ALL, anything, whole
from mgpu_check.torch_hooks.tensors import name_of

_ROWS, _COLUMNS = 14, 9

_THROUGH_FLOAT32 = ("gather", "scatter")
"""Moves that change the bits of a NaN of a narrow float on the CPU, which converts it."""

_CHANGING = ("index_put", "assignment by a mask", "assignment to a slice")


def _put(a: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    a[index] = a.flip(0)[: len(index)].clone()
    return a


def _masked_put(a: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    mask = index % 3 == 1
    a[mask] = a[0].clone()
    return a


def _slice_put(a: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    a[1:5, ::2] = a[7:11, 1::2].repeat(1, 2)[:, :5].clone()
    return a


_MOVES: tuple[tuple[str, Function], ...] = (
    ("clone", lambda a, i: a.clone()),
    ("copy_", lambda a, i: torch.empty_like(a).copy_(a)),
    ("index_select", lambda a, i: torch.index_select(a, 0, i)),
    ("index", lambda a, i: a[i]),
    ("index in two dimensions", lambda a, i: a[i, i % _COLUMNS]),
    ("gather", lambda a, i: torch.gather(a, 1, (i % _COLUMNS)[:, None])),
    ("take", lambda a, i: torch.take(a, i * 2)),
    ("masked_select", lambda a, i: torch.masked_select(a, (i % 2 == 0)[:, None])),
    ("scatter", lambda a, i: torch.scatter(a, 0, i[None, :_COLUMNS], a)),
    ("index_copy", lambda a, i: torch.index_copy(a, 0, i, a.flip(0))),
    ("index_put", _put),
    ("assignment by a mask", _masked_put),
    ("assignment to a slice", _slice_put),
    ("cat", lambda a, i: torch.cat([a, a[:3], a[:, :].flip(0)])),
    ("cat of columns", lambda a, i: torch.cat([a[:, 4:], a], dim=1)),
    ("stack", lambda a, i: torch.stack([a, a.flip(0)], dim=1)),
    ("split", lambda a, i: torch.split(a, 4)),
    ("flip", lambda a, i: torch.flip(a, [0, 1])),
    ("roll", lambda a, i: torch.roll(a, 5)),
    ("transpose", lambda a, i: a.t().contiguous()),
    ("permute", lambda a, i: a.view(2, 7, 9).permute(2, 0, 1).reshape(-1)),
    ("expand", lambda a, i: a[:, None].expand(-1, 3, -1).contiguous()),
    ("repeat", lambda a, i: a.repeat(2, 3)),
    ("repeat_interleave", lambda a, i: torch.repeat_interleave(a, 3, dim=1)),
    ("where by a mask", lambda a, i: torch.where((i % 2 == 0)[:, None], a, a.flip(1))),
    ("pad", lambda a, i: F.pad(a, (1, 2), value=1)),
    ("tril", lambda a, i: torch.tril(a)),
    ("unfold", lambda a, i: a.unfold(0, 3, 2).contiguous()),
    ("diagonal", lambda a, i: torch.diagonal(a).contiguous()),
    ("strided", lambda a, i: a[::3, 1::2].contiguous()),
    ("view as bytes", lambda a, i: a.contiguous().view(torch.uint8)),
)


def _layouts(dtype: torch.dtype, seed: int) -> Iterator[tuple[str, torch.Tensor | Window]]:
    """Yield a matrix in each layout: contiguous, transposed, and with gaps."""
    data = anything(4 * _ROWS * _COLUMNS, dtype, seed)
    yield "", data[: _ROWS * _COLUMNS].view(_ROWS, _COLUMNS)
    yield ", transposed", Window(data[: _ROWS * _COLUMNS].view(_COLUMNS, _ROWS), lambda storage: storage.t())
    yield ", with gaps", Window(data.view(2 * _ROWS, 2 * _COLUMNS), lambda storage: storage[1::2, ::2])


def _without_nan(case: Case) -> Case:
    matrix, index = case.operands
    assert isinstance(matrix, torch.Tensor)
    return replace(case, operands=(torch.where(matrix.isnan(), 0, matrix), index))


def move_cases(seed: int = 0) -> Iterator[Case]:
    """Yield each move in each dtype on arbitrary bits of a contiguous matrix, and some moves in other layouts."""
    index = torch.arange(_ROWS, device="cpu") * 5 % _ROWS
    for dtype in ALL:
        for layout, operand in _layouts(dtype, seed):
            for name, call in _MOVES:
                if layout and name not in ("clone", "copy_", "index_select", "cat", "index_put", "stack", "flip"):
                    continue
                if dtype.is_complex and name == "pad":
                    continue  # it fills with a real number
                case = Case(
                    f"{name} of {name_of(dtype)}{layout}", call, (operand, index), "bits", changes=name in _CHANGING
                )
                through_float32 = name in _THROUGH_FLOAT32 and dtype in (torch.float16, torch.bfloat16)
                yield _without_nan(case) if through_float32 else case
        yield from _added(dtype, seed)
    yield Case("one_hot", lambda i: F.one_hot(i, 20), (index,))
    yield Case("nonzero", lambda i: torch.nonzero(i % 3), (index,))
    yield Case("arange", lambda i: torch.arange(-5, 40, 3, device=i.device), (index,))
    yield Case("linspace", lambda i: torch.linspace(-2, 2, 17, device=i.device), (index,))
    yield Case("eye", lambda i: torch.eye(5, device=i.device), (index,))


def _added(dtype: torch.dtype, seed: int) -> Iterator[Case]:
    """Yield moves that add up the elements that reach the same place, and an embedding."""
    if dtype == torch.bool or dtype.is_complex:
        return
    kind, places = name_of(dtype), torch.arange(_ROWS, device="cpu") % 4
    data = whole((_ROWS, _COLUMNS), dtype, seed)
    calls: tuple[tuple[str, Function], ...] = (
        ("index_add", lambda a, i: torch.index_add(torch.zeros_like(a), 0, i, a)),
        ("index_add with alpha", lambda a, i: torch.index_add(torch.ones_like(a), 0, i, a, alpha=2)),
        ("scatter_add", lambda a, i: torch.zeros_like(a).scatter_add_(0, i[:, None].expand_as(a), a)),
        ("index_put accumulate", lambda a, i: torch.zeros_like(a).index_put_((i,), a, accumulate=True)),
    )
    for name, call in calls:
        yield Case(f"{name} of {kind}", call, (data, places), "numbers")
    if dtype.is_floating_point:
        yield Case(
            f"embedding of {kind}",
            lambda a, i: F.embedding(i, a),
            (anything(63, dtype, seed).view(7, 9), places),
            "bits",
        )
