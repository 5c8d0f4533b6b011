"""A module with parameters and buffers of every dtype and random bits, to test that copies and broadcasts are exact."""

from __future__ import annotations

import torch
from torch import nn

_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64)
# Without int16, because neither NCCL nor gloo sends it.
_WHOLE = (torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool, torch.float32)
_MANY = 66_000


class Everything(nn.Module):
    """A module with parameters of different sizes, buffers, and shared and frozen parts.

    Parameters have no dimensions, 7 or 64 elements; in float32, 66,000 in place of 64. All bits are random: the values
    include NaN with payloads, infinities and subnormals.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def bits(dtype: torch.dtype, count: int) -> torch.Tensor:
            most = 2 if dtype == torch.bool else 256
            return torch.randint(0, most, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator).view(dtype)

        for dtype in _FLOATS:
            for count in (1, 7, _MANY if dtype == torch.float32 else 64):
                name = f"{str(dtype).removeprefix('torch.')}_{count}"
                values = bits(dtype, count)
                self.register_parameter(name, nn.Parameter(values[0] if count == 1 else values))
        for dtype in _WHOLE:
            self.register_buffer(f"buffer_{str(dtype).removeprefix('torch.')}", bits(dtype, 9))
        self.frozen = nn.Parameter(bits(torch.float32, 5), requires_grad=False)
        self.inner = nn.Linear(3, 2)
        self.inner.weight = nn.Parameter(bits(torch.float32, 6).view(2, 3))
        self.inner.bias = nn.Parameter(bits(torch.float32, 2))
        self.twin = self.inner
        self.tied = self.inner.weight
