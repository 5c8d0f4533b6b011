"""Make the inputs of a reduction on the devices: exact in every order, and different for each rank and element.

Terms are integers times a power of two, which all ranks share in an element. The terms of a sum are so small that each
partial sum is exact, and each rank has its own band of values in an element. In a product one rank has many bits, and
the others hold ±1 or ±2.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass

import torch

from mgpu_check.numerics.bounds import significand_bits, unit_roundoff
from mgpu_check.torch_hooks.tensors import as_bits

_MIX = (0x9E3779B97F4A7C15 - (1 << 64), 0xBF58476D1CE4E5B9 - (1 << 64))
_MOST_BITS = 50  # of a hash, which float64 has too
_POWERS = range(-4, 4)

_COMBINE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": operator.add,
    "avg": operator.add,
    "product": operator.mul,
    "min": torch.minimum,
    "max": torch.maximum,
}


@dataclass(frozen=True)
class Terms:
    """The terms of a reduction.

    Attributes:
        reduction: "sum", "avg", "product", "min" or "max".
        count: of ranks.
    """

    reduction: str
    dtype: torch.dtype
    count: int
    seed: int

    @property
    def tolerance(self) -> float:
        """The largest error of a right result, relative to its terms' largest magnitude; 0 if every order is exact.

        For a mean, libraries multiply each term by 1 / count, which rounds unless count is a power of two.
        """
        if self.reduction != "avg" or self.count & (self.count - 1) == 0:
            return 0.0
        return 2 * (self.count + 1) * unit_roundoff(self.dtype)

    def of_rank(self, rank: int, index: torch.Tensor) -> torch.Tensor:
        """Return the terms of one rank at the elements `index` (int64), in the dtype of the reduction."""
        return self._scaled(self._term(rank, *self._drawn(index)), index)

    def result(self, index: torch.Tensor) -> torch.Tensor:
        """Return the exact result at the elements `index`; a mean is rounded once."""
        drawn = self._drawn(index)
        total = functools.reduce(_COMBINE[self.reduction], (self._term(rank, *drawn) for rank in range(self.count)))
        if self.reduction == "avg":
            return (self._scaled(total, index, torch.float64) / self.count).to(self.dtype)
        return self._scaled(total, index)

    def _drawn(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a pseudorandom number for each element, equal on all ranks, and the element's index modulo `count`."""
        drawn = index * _MIX[0] + (self.seed * 2 + 1) * 0x632BE59B
        drawn.bitwise_xor_((drawn >> 29).bitwise_and_((1 << 35) - 1)).mul_(_MIX[1])
        return (drawn >> 13).bitwise_and_((1 << _MOST_BITS) - 1), index % self.count

    def _term(self, rank: int, drawn: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        bits = min(significand_bits(self.dtype), _MOST_BITS)
        signed = self.dtype.is_floating_point or self.dtype.is_signed
        if self.reduction == "product":
            many = drawn % (2**bits - 1) + 1
            few = 2 if rank in (1, 2) else 1
            term = torch.where(place == rank, many, few)
        else:
            most = (2**bits - 1) // self.count
            band = most // self.count
            position = (place + rank) % self.count
            term = position * band + 1 + drawn % band if band else position % max(1, most) + 1
        if not signed:
            return term
        return torch.where((drawn >> rank % 16 + 3).bitwise_and_(1) == 1, -term, term)

    def _scaled(self, term: torch.Tensor, index: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        dtype = dtype or self.dtype
        if not dtype.is_floating_point or self.reduction == "product":
            return term.to(dtype)
        # From a table: exp2 on a device may be off by a unit in the last place.
        powers = torch.tensor([2.0**power for power in _POWERS], dtype=torch.float64, device=index.device)
        return (term.double() * powers[(index >> 3).bitwise_and_(len(_POWERS) - 1)]).to(dtype)

    def who(self, index: torch.Tensor, got: torch.Tensor) -> tuple[str, int] | None:
        """Infer from wrong elements which rank's term is missing, doubled, or alone; None if none of these fits.

        Args:
            index: indices of some wrong elements; on the CPU, as is `got`.
        """
        if self.reduction not in ("sum", "avg"):
            return self._alone(index, got)
        times = self.count if self.reduction == "avg" else 1
        total = functools.reduce(operator.add, (self.of_rank(rank, index).double() for rank in range(self.count)))
        found = got.double() * times
        for rank in range(self.count):
            term = self.of_rank(rank, index).double()
            if torch.equal(found, total - term):
                return "lacks the term of", rank
            if torch.equal(found, total + term):
                return "has twice the term of", rank
        return self._alone(index, got)

    def _alone(self, index: torch.Tensor, got: torch.Tensor) -> tuple[str, int] | None:
        for rank in range(self.count):
            if torch.equal(as_bits(self.of_rank(rank, index)), as_bits(got)):
                return "is only the term of", rank
        return None

    def filled(
        self, make: Callable[[torch.Tensor], torch.Tensor], length: int, device: torch.device, chunk: int
    ) -> torch.Tensor:
        """Return `make` applied to the indices below `length`, `chunk` of them at a time."""
        whole = torch.empty(length, dtype=self.dtype, device=device)
        for start in range(0, length, chunk):
            end = min(start + chunk, length)
            whole[start:end] = make(torch.arange(start, end, device=device))
        return whole
