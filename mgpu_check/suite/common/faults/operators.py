"""Plant defects in functions of torch, for some calls only, or in the hardware of the simulated node.

A fault of a function is a function too: it gets the original, and then the arguments of the call::

    copies = caught_by("test_copies_that_convert")

    @copies("copies of one device lose the sign", around(Tensor, "copy_"), one_device(torch.bfloat16))
    def sign_lost(copy, target, source, *args, **kwargs):
        return copy(target, source.abs(), *args, **kwargs)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from mgpu_check.simulated.defects.compute import Unit
from mgpu_check.simulated.hardware import Defect, Hardware, planted
from mgpu_check.suite.common.faults.when import When
from mgpu_check.torch_hooks.tensors import name_of

_MEMORY = 16 << 30


def call(text: str, holds: Callable[..., bool]) -> When:
    """Return a condition on the arguments of a call, for faults that `around` plants."""
    return When(text, lambda real, *args, **kwargs: holds(*args, **kwargs))


def first(text: str, holds: Callable[[Any], bool]) -> When:
    """Return a condition on the first argument of a call, for faults that `around` plants."""
    return When(text, lambda real, *args, **kwargs: bool(args) and holds(args[0]))


def dtype(*dtypes: torch.dtype, text: str = "") -> When:
    """Return the condition that the first argument is a tensor of one of the dtypes, on a device."""
    return first(
        text or _names(dtypes),
        lambda x: isinstance(x, torch.Tensor) and x.is_cuda and (not dtypes or x.dtype in dtypes),
    )


def one_device(*dtypes: torch.dtype, text: str = "") -> When:
    """Return the condition that the first argument is a tensor on the last device, of one of the dtypes if any are
    given."""
    return first(text or ", ".join(filter(None, ("one device", _names(dtypes)))), lambda x: on(x, last(), *dtypes))


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return " and ".join(map(name_of, dtypes))


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


def hardware(*defects: Defect) -> AbstractContextManager[None]:
    """Give the simulated node hardware with these defects until the context exits.

    Raises:
        ValueError: on entry; no simulated node is active, or a real device backs it.
    """
    return planted(Hardware(defects, _MEMORY))


def unit(operations: Sequence[str], **parameters: Any) -> AbstractContextManager[None]:
    """Make some operators wrong on one device; see `mgpu_check.simulated.defects.compute.Unit`."""
    return hardware(Unit({"seed": 0, "pattern": "bits", **parameters}, tuple(operations)))
