"""Find rounding of sums that leans to one side, by a statistic.

In each element one rank holds an integer M with all the bits of the dtype, and each other rank holds a fraction k /
2^j, with k uniform in 1 .. 2^j - 1. The ranks take turns with M. The bits are so few that fractions sum exactly. In any
order of summation, each rounding is of an integer plus a sum of such fractions.

As k and 2^j - k are equally likely, rounding to nearest errs up and down alike. So the mean error over elements, in
units in the last place, is 0. Each error is at most (n - 1) / 2 for n ranks. By Hoeffding's inequality the mean of N
elements is beyond ±t with probability at most 2 exp(-2 N t² / (n - 1)²) (W. Hoeffding, *Probability inequalities for
sums of bounded random variables*, JASA 58, 1963, Theorem 2). Truncation errs by -1/2 per rounding, and each element has
at least one rounding. The limit t = 1/4 is midway, and N is chosen so that a wrong verdict of either kind has a
probability below 1e-9.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.numerics.bounds import significand_bits
from mgpu_check.suite.collectives.cases import form_of
from mgpu_check.suite.collectives.findings import WrongResult, raise_findings
from mgpu_check.suite.collectives.runner import runner
from mgpu_check.torch_hooks.table import TRANSFERS
from mgpu_check.torch_hooks.tensors import name_of

LIMIT = 0.25
"""Limit of the mean error, in units in the last place: midway between rounding to nearest (0) and truncation (1/2)."""
_PROBABILITY = 1e-9


def elements_for(count: int) -> int:
    """Return how many sums of `count` terms make a wrong verdict less likely than 1e-9."""
    return math.ceil(math.log(2 / _PROBABILITY) * max(1, count - 1) ** 2 / (2 * LIMIT**2))


def most_ranks(dtype: torch.dtype) -> int:
    """Return the largest number of ranks whose sum leaves a bit of a dtype for fractions."""
    return int(2 ** (significand_bits(dtype) - 2) - 1)


def terms_of(count: int, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """Return the terms of each of `count` ranks.

    Raises:
        ValueError: the dtype has too few bits for `count` ranks.
    """
    bits = significand_bits(dtype)
    parts = min(8, bits - 1 - count.bit_length())
    if count > most_ranks(dtype):
        raise ValueError(f"terms_of: count={count} fractions do not add up exactly in {dtype}; use fewer ranks")
    elements = elements_for(count)
    generator = torch.Generator().manual_seed(seed)
    low, high = 2 ** (bits - 1), 2**bits - count
    large = torch.randint(low, high, (elements,), generator=generator, dtype=torch.int64).double()
    sign = 1.0 - 2.0 * torch.randint(0, 2, (elements,), generator=generator)
    holder = torch.arange(elements) % count
    found = []
    for rank in range(count):
        fraction = torch.randint(1, 2**parts, (elements,), generator=generator).double() / 2**parts
        found.append((sign * torch.where(holder == rank, large, fraction)).to(dtype))
    return found


def mean_error(got: torch.Tensor, terms: Sequence[torch.Tensor]) -> float:
    """Return the mean error of results in units in the last place; errors away from zero are positive.

    All values are below 2^bits + count, so float64 holds the difference exactly, if the large term is subtracted first.
    """
    holder = torch.stack([term.double().abs() for term in terms]).argmax(0)
    stacked = torch.stack([term.double() for term in terms])
    large = stacked.gather(0, holder[None])[0]
    fractions = stacked.scatter(0, holder[None], 0.0).sum(0)
    error = ((got.double() - large) - fractions) * torch.sign(large)
    return float(error.mean())


def assert_rounding_is_unbiased(rank: Rank, transfer: str, dtype: torch.dtype, place: str, seed: int) -> None:
    """Assert that the rounding of a collective's sums leans neither towards zero nor away from it.

    Args:
        transfer: a name in `TRANSFERS` that reduces; the root is the last rank.

    Raises:
        CollectiveMismatch: the mean error is more than a quarter of a unit in the last place.
    """
    terms = terms_of(rank.size, dtype, seed)
    mine = terms[rank.index].to(rank.device if place == "device" else "cpu", copy=True)
    whole = mine.repeat(rank.size) if TRANSFERS[transfer].divides else mine
    made = runner(transfer, "sum", whole, None, rank.size, rank.index, rank.size - 1)
    made.call()
    if made.output is None:
        return
    mean = mean_error(made.output.cpu(), terms)
    findings = []
    if not abs(mean) <= LIMIT:
        side = "towards zero" if mean < 0 else "away from zero"
        what = f"{form_of(transfer)} SUM, {name_of(dtype)}, {place} tensors, seed {seed}"
        text = (
            f"rounding leans {side}: the mean error of {mine.numel()} sums is {mean:.3f} units in the last place, "
            f"expected 0 ± {LIMIT}"
        )
        findings.append(WrongResult(what, text))
    raise_findings(findings, 1, rank)
