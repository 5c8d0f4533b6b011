"""Plant a defect in one function of torch, or in the hardware of the simulated node, for some of its calls only."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from mgpu_check.simulated.defects.compute import Unit
from mgpu_check.simulated.hardware import Defect, Hardware, planted
from mgpu_check.torch_hooks.patches import replaced

__all__ = ["altered", "hardware", "last", "narrowed", "on", "unit"]

_MEMORY = 16 << 30

Concerns = Callable[..., bool]


def last() -> int:
    """Return the index of the last device. A check of the first device alone misses a defect there."""
    return torch.cuda.device_count() - 1


def on(tensor: object, index: int, *dtypes: torch.dtype) -> bool:
    """Return whether `tensor` is a tensor on device `index` and of one of the dtypes, if any are given."""
    return (
        isinstance(tensor, torch.Tensor)
        and tensor.device.type == "cuda"
        and tensor.device.index == index
        and (not dtypes or tensor.dtype in dtypes)
    )


def narrowed(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Clear the lowest `bits` bits of float32 numbers."""
    return (x.contiguous().view(torch.int32) >> bits << bits).view(torch.float32)


@contextlib.contextmanager
def altered(owner: Any, name: str, concerns: Concerns, instead: Callable[..., Any]) -> Iterator[None]:
    """Replace ``owner.name`` by ``instead(function, *arguments)`` for arguments that `concerns` accepts."""
    function = getattr(owner, name)
    inside = False

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        if inside or not concerns(*args, **kwargs):
            return function(*args, **kwargs)
        inside = True  # the replacement may call the function itself
        try:
            return instead(function, *args, **kwargs)
        finally:
            inside = False

    with replaced(owner, name, call):
        yield


def hardware(*defects: Defect) -> contextlib.AbstractContextManager[None]:
    """Give the simulated node hardware with these defects."""
    return planted(Hardware(defects, _MEMORY))


def unit(operations: Sequence[str], **parameters: Any) -> contextlib.AbstractContextManager[None]:
    """Make some operators wrong on one device; see `mgpu_check.simulated.defects.compute.Unit`."""
    return hardware(Unit({"seed": 0, "pattern": "bits", **parameters}, tuple(operations)))
