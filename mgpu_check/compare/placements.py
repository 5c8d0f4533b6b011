"""Store the slices that a rank holds in a file, for the same rank in another run.

For each slice the file has a line of JSON, followed by the positions of the elements.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch

from mgpu_check.compare.trace import write_all
from mgpu_check.numerics.placement import Slice
from mgpu_check.torch_hooks.tensors import memory_of


class Files(NamedTuple):
    """File descriptors of a run; None for files that it neither reads nor writes.

    Attributes:
        keep: receives the initial parameters and buffers of this run.
        wholes: has the initial parameters and buffers of another run, to find slices in.
        found: receives the slices that this run places.
        placed: has the slices that another run placed.
        tape: receives what this rank was given; see `mgpu_check.compare.replay`.
        replay: has what all ranks were given, for one device.
        kept: receives what a trace file has besides the trace; see `mgpu_check.compare.traces.keeping`.
    """

    keep: int | None = None
    wholes: int | None = None
    found: int | None = None
    placed: int | None = None
    tape: int | None = None
    replay: int | None = None
    kept: int | None = None


def write_placement(fd: int, label: str, parts: Sequence[Slice]) -> None:
    """Append the slices of a tensor to the file."""
    for part in parts:
        count = None if part.at is None else len(part.at)
        head = {"label": label, "whole": part.whole, "shape": part.shape, "within": part.within, "count": count}
        at = b"" if part.at is None or not count else bytes(memory_of(part.at.to(torch.int64).contiguous()))
        write_all(fd, json.dumps(head).encode() + b"\n", at)


def read_placements(fd: int) -> dict[str, list[Slice]]:
    """Return the slices of each tensor, by its name on this rank."""
    size = os.fstat(fd).st_size
    data, start = os.pread(fd, size, 0), 0
    found: dict[str, list[Slice]] = defaultdict(list)
    while start < size:
        end = data.index(b"\n", start)
        head, start = json.loads(data[start:end]), end + 1
        at = None
        if head["count"] is not None:
            stop = start + 8 * head["count"]
            own = bytearray(data[start:stop])
            at = torch.frombuffer(own, dtype=torch.int64) if own else torch.empty(0, dtype=torch.int64)
            start = stop
        within = None if head["within"] is None else (head["within"][0], head["within"][1])
        found[head["label"]].append(Slice(head["whole"], tuple(head["shape"]), at, within))
    return dict(found)
