"""Specs of the inputs of a reduction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mgpu_check.oracles.tensors import TensorSpec

if TYPE_CHECKING:
    import torch

REDUCIBLE = ("float32", "float64", "float16", "bfloat16", "int64", "int32", "int8", "uint8")
"""The dtypes that both gloo and NCCL reduce."""

DENSE = ("contiguous", "channels_last")
"""Layouts without gaps, which NCCL accepts."""

GAPPED = ("sliced", "strided")
"""Layouts with gaps: views into a larger storage."""


@dataclass(frozen=True)
class Contributions:
    """One tensor per rank: equal shape, dtype and layout, different values.

    "exact" values have the same result in every order of the operation; "random" values use all bits.
    """

    tensor: TensorSpec
    operation: str = "sum"

    def parts(self, count: int) -> list[torch.Tensor]:
        """Return the contributions of `count` ranks, contiguous, on the CPU."""
        import torch

        from mgpu_check.numerics import reduction

        make = reduction.random_parts
        if self.tensor.values == "exact":
            make = reduction.exact_factors if self.operation == "product" else reduction.exact_parts
        dtype: torch.dtype = getattr(torch, self.tensor.dtype)
        return make(self.tensor.shape, dtype, count=count, seed=self.tensor.seed)

    def placed(self, term: torch.Tensor, device: str | torch.device) -> torch.Tensor:
        """Copy `term` to `device`, in the layout of the spec."""
        return self.tensor.build(device).copy_(term)
