"""The dtypes that ranks send to each other, compared with those that the user declares.

A narrow message that is silently sent wide costs time and changes no result, so no comparison of results can show it.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from mgpu_check.diagnosis.observations import CallEvent, RankTrace
from mgpu_check.processes.rank_lists import few, grouped, named
from mgpu_check.torch_hooks.tensors import name_of

Wire = Mapping[str, "torch.dtype | Iterable[torch.dtype]"] | None
"""Patterns of names of collectives with the dtypes that they may send; None for no declaration."""


def check_wire(gate: str, wire: Wire) -> dict[str, frozenset[str]]:
    """Return the names of the dtypes by pattern; raise a ValueError for anything else."""
    if wire is not None and not isinstance(wire, Mapping):
        raise ValueError(f'{gate}: wire={wire!r}; give a mapping such as {{"all_gather*": torch.float8_e4m3fn}}')
    declared = {}
    for pattern, value in (wire or {}).items():
        dtypes = [value] if isinstance(value, torch.dtype) or not isinstance(value, Iterable) else list(value)
        if not dtypes or not all(isinstance(dtype, torch.dtype) for dtype in dtypes):
            raise ValueError(f"{gate}: wire[{pattern!r}]={value!r}; give a dtype of torch, or several")
        declared[pattern] = frozenset(map(name_of, dtypes))
    return declared


def undeclared(wire: Mapping[str, frozenset[str]], traces: Sequence[RankTrace]) -> list[tuple[str, str]]:
    """Return the calls whose tensors have another dtype than declared, and the patterns without a call.

    Each is described by a line, and has the line of code that makes the call, "train.py:40"; "" without a call. Calls
    that torch makes in C++, such as those of DistributedDataParallel without a hook, are not in a trace.
    """
    calls = [(rank, event) for rank, trace in enumerate(traces) for event in trace.events if event.kind == "collective"]
    lines: list[tuple[str, str]] = []
    for pattern, dtypes in wire.items():
        matching = [(rank, event) for rank, event in calls if fnmatch.fnmatch(event.name, pattern)]
        wrong = grouped(((line, event.site), rank) for rank, event in matching for line in _wrong(event, dtypes))
        allowed = " or ".join(sorted(dtypes))
        lines += [(f"{line} on {named(set(ranks))}; declared: {allowed}", site) for (line, site), ranks in wrong]
        if not matching:
            names = few(sorted({event.name for _, event in calls})) or "none"
            lines.append((f"no call matches {pattern!r}; the step's calls from Python: {names}", ""))
    return lines


def _wrong(event: CallEvent, dtypes: frozenset[str]) -> Iterator[str]:
    operands = {(tensor["dtype"], tuple(tensor["shape"])) for tensor in event.tensors if tensor["dtype"] not in dtypes}
    if operands:
        dtype, shape = min(operands)
        yield f"{event.where} sends {dtype}{list(shape)}"
