"""Compute the virtual time of operations on healthy simulated devices, in seconds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

_FLOPS = {
    torch.float64: 3e13,
    torch.float32: 6e13,
    torch.float16: 6e14,
    torch.bfloat16: 6e14,
    torch.float8_e4m3fn: 1.2e15,
    torch.float8_e5m2: 1.2e15,
}
_TF32 = 3e14


@dataclass(frozen=True)
class Rates:
    """Rates of a fictitious device.

    Attributes:
        flops: dtype -> floating-point operations per second in matrix products.
        memory: bytes per second that kernels read or write.
        link: bytes per second from one device to another, in each direction.
        pinned, pageable: bytes per second between a device and pinned or pageable host memory.
        kernel, copy, collective: fixed seconds of each operation, in addition to its work.
    """

    flops: Mapping[torch.dtype, float] = field(default_factory=lambda: _FLOPS)
    memory: float = 2e12
    link: float = 2e11
    pinned: float = 4e10
    pageable: float = 1.5e10
    kernel: float = 4e-6
    copy: float = 6e-6
    collective: float = 1e-5

    def of_operator(self, name: str, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> float:
        """Return the duration of an operator, bound by memory or by arithmetic."""
        moved = sum(t.numel() * t.itemsize for t in (*inputs, *outputs))
        seconds = moved / self.memory
        count = _COUNTS.get(name)
        if count is not None and inputs:
            dtype = inputs[0].dtype
            rate = self.flops.get(dtype, _FLOPS[torch.float32])
            if dtype is torch.float32 and torch.get_float32_matmul_precision() != "highest":
                rate = _TF32
            seconds = max(seconds, count(inputs, outputs) / rate)
        return self.kernel + seconds

    def of_copy(self, nbytes: int, host: bool, pinned: bool) -> float:
        """Return the duration of a copy between devices or, with ``host``, between a device and the host."""
        rate = self.link if not host else self.pinned if pinned else self.pageable
        return self.copy + nbytes / rate


Count = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], float]


def _product(first: int) -> Count:
    """Return the function that counts the operations of a product; ``first`` is the index of its first factor."""

    def count(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> float:
        if len(inputs) <= first or not outputs:
            return 0.0
        return 2.0 * outputs[0].numel() * inputs[first].shape[-1]

    return count


def _convolution(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> float:
    if len(inputs) < 2 or not outputs:
        return 0.0
    return 2.0 * outputs[0].numel() * math.prod(inputs[1].shape[1:])


_COUNTS: dict[str, Count] = {
    "mm": _product(0),
    "bmm": _product(0),
    "mv": _product(0),
    "dot": _product(0),
    "_scaled_mm": _product(0),
    "_int_mm": _product(0),
    "addmm": _product(1),
    "baddbmm": _product(1),
    "addmv": _product(1),
    "convolution": _convolution,
}
