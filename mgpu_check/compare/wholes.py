"""Store the initial parameters and buffers of one device in a file, for ranks that hold slices of them.

For each tensor the file has a line of JSON, followed by the elements.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import warnings

import torch

from mgpu_check.numerics.placement.content import Wholes
from mgpu_check.torch_hooks.tensors import copied, memory_of, name_of

__all__ = ["read_wholes", "write_buffer", "write_whole"]


def write_whole(fd: int, name: str, tensor: torch.Tensor) -> None:
    """Append a parameter to the file."""
    _write(fd, name, tensor, "parameter")


def write_buffer(fd: int, name: str, tensor: torch.Tensor) -> None:
    """Append a buffer to the file."""
    _write(fd, name, tensor, "buffer")


def _write(fd: int, name: str, tensor: torch.Tensor, kind: str) -> None:
    here = copied(tensor)
    head = {"name": name, "kind": kind, "shape": list(here.shape), "dtype": name_of(here.dtype)}
    rest = memoryview(json.dumps(head).encode() + b"\n" + bytes(memory_of(here)))
    while rest:
        rest = rest[os.write(fd, rest) :]


def read_wholes(fd: int) -> tuple[Wholes, Wholes]:
    """Return the parameters and the buffers in a file."""
    size = os.fstat(fd).st_size
    if not size:
        return Wholes({}), Wholes({})
    data = mmap.mmap(fd, size, access=mmap.ACCESS_COPY)
    found: dict[str, dict[str, torch.Tensor]] = {"parameter": {}, "buffer": {}}
    while data.tell() < size:
        head = json.loads(data.readline())
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
    return Wholes(found["parameter"]), Wholes(found["buffer"])
