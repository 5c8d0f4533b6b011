"""Store the initial parameters and buffers of one device in a file, for ranks that hold slices of them.

For each tensor the file has a line of JSON, followed by the elements. States of optimizers have no elements there:
ranks need only their shapes.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from mgpu_check.compare.trace import write_all
from mgpu_check.numerics.placement import Wholes
from mgpu_check.torch_hooks.tensors import copied, memory_of, name_of


class Kept(NamedTuple):
    """The tensors of one device.

    Attributes:
        parameters, buffers: their initial values.
        states: name of a state of an optimizer -> its shape.
    """

    parameters: Wholes
    buffers: Wholes
    states: Mapping[str, Sequence[int]]


def write_whole(fd: int, name: str, tensor: torch.Tensor) -> None:
    """Append a parameter to the file."""
    _write(fd, name, tensor, "parameter")


def write_buffer(fd: int, name: str, tensor: torch.Tensor) -> None:
    """Append a buffer to the file."""
    _write(fd, name, tensor, "buffer")


def write_shape(fd: int, name: str, shape: Sequence[int]) -> None:
    """Append the shape of a state of an optimizer to the file."""
    _append(fd, {"name": name, "kind": "state", "shape": list(shape)})


def _write(fd: int, name: str, tensor: torch.Tensor, kind: str) -> None:
    here = copied(tensor)
    head = {"name": name, "kind": kind, "shape": list(here.shape), "dtype": name_of(here.dtype)}
    _append(fd, head, bytes(memory_of(here)))


def _append(fd: int, head: Mapping[str, object], elements: bytes = b"") -> None:
    write_all(fd, json.dumps(head).encode() + b"\n", elements)


def read_wholes(fd: int) -> Kept:
    """Return the tensors in a file."""
    size = os.fstat(fd).st_size
    if not size:
        return Kept(Wholes({}), Wholes({}), {})
    data = mmap.mmap(fd, size, access=mmap.ACCESS_COPY)
    found: dict[str, dict[str, torch.Tensor]] = {"parameter": {}, "buffer": {}}
    states: dict[str, Sequence[int]] = {}
    while data.tell() < size:
        head = json.loads(data.readline())
        if head["kind"] == "state":
            states[head["name"]] = head["shape"]
            continue
        dtype = getattr(torch, head["dtype"])
        count, start = math.prod(head["shape"]), data.tell()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            value = (
                torch.frombuffer(data, dtype=torch.uint8, count=count * dtype.itemsize, offset=start)
                if count
                else torch.empty(0, dtype=torch.uint8)
            )
        # Cloned, because a view as another dtype must be aligned.
        found[head["kind"]][head["name"]] = value.clone().view(dtype).view(head["shape"])
        data.seek(start + count * dtype.itemsize)
    return Kept(Wholes(found["parameter"]), Wholes(found["buffer"]), states)
