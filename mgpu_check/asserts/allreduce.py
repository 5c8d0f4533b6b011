"""Check reductions over ranks or devices: each must hold the result that one device would compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from mgpu_check.asserts.bits import same_bits
from mgpu_check.errors import AllreduceMismatch
from mgpu_check.numerics.compare import difference
from mgpu_check.numerics.diagnosis import diagnose
from mgpu_check.numerics.reduction import reduced
from mgpu_check.processes.rank_lists import grouped, named
from mgpu_check.torch_hooks.tensors import name_of


def assert_allreduce_matches(
    results: Sequence[torch.Tensor] | Mapping[int, torch.Tensor],
    contributions: Sequence[torch.Tensor],
    *,
    operation: str = "sum",
    what: str = "allreduce",
) -> None:
    """Assert that every result is the reduction of all contributions.

    Elements whose sum is the same in every order are compared bit for bit: integers, and floating-point data such as
    that of `mgpu_check.numerics.exact.exact_parts`. Others may be off by gamma(n-1)·Σ|x| in the unit roundoff of the
    dtype, the bound for every order of summation.

    Args:
        results: the tensors of ranks (or devices) after the operation: all of them in order, or some of them by rank.
            On any device, in any layout.
        contributions: the input of each rank, in order, unchanged by the operation; all of the same shape and dtype.
        operation: "sum", "avg", "product", "min" or "max".
        what: the name of the operation under test, for the message.

    Raises:
        AllreduceMismatch: a result has the wrong dtype, shape or value. `.ranks` has the ranks with a wrong result.
        ValueError: no contributions, contributions that differ in shape or dtype, or a rank that is not among them.
    """
    __tracebackhide__ = True
    should = reduced(contributions, operation)
    count = len(should.parts)
    held = dict(results) if isinstance(results, Mapping) else dict(enumerate(results))
    strangers = sorted(rank for rank in held if not 0 <= rank < count)
    if strangers:
        raise ValueError(
            f"assert_allreduce_matches: results name ranks {strangers}, but contributions are of {count} ranks only"
        )
    if not isinstance(results, Mapping) and len(held) != count:
        raise AllreduceMismatch(f"{what}: {len(held)} results for {count} contributions", ranks=range(len(held), count))
    texts = (
        (_difference(result, should.value, should.tolerance, should.parts, rank, count), rank)
        for rank, result in sorted(held.items())
    )
    found = grouped((text, rank) for text, rank in texts if text)
    if not found:
        return
    wrong = sorted(rank for _, ranks in found for rank in ranks)
    first = should.parts[0]
    kind = f"{operation} of {count} x {tuple(first.shape)} {name_of(first.dtype)}"
    head = f"{what}: {kind} is wrong on {named(wrong)}" + (f" (of {len(held)})" if len(held) > 1 else "")
    lines = [f"  {named(ranks)}: {text}" for text, ranks in found[:4]]
    raise AllreduceMismatch("\n".join([head, *lines]), ranks=wrong)


def _difference(
    result: torch.Tensor,
    value: torch.Tensor,
    tolerance: torch.Tensor,
    parts: Sequence[torch.Tensor],
    rank: int,
    count: int,
) -> str:
    if result.dtype != parts[0].dtype:
        return f"has dtype {result.dtype}, expected {parts[0].dtype}"
    if result.shape != value.shape:
        return f"has shape {tuple(result.shape)}, expected {tuple(value.shape)}"
    wrong = difference(result, value, tolerance)
    if wrong is None:
        return ""
    looks = diagnose(result, value, tolerance, parts=parts, rank=rank, constants={"world size": count})
    return "; ".join([str(wrong), *looks])


def assert_contributions_kept(
    placed: Sequence[torch.Tensor], contributions: Sequence[torch.Tensor], *, what: str = "reduction"
) -> None:
    """Assert that a reduction into a new tensor did not change its inputs.

    Args:
        placed: the inputs after the reduction, one for each rank, on any device.
        contributions: their values before the reduction, of the same shapes and dtypes.
        what: the name of the operation under test, for the message.

    Raises:
        AllreduceMismatch: an input has changed; `.ranks` has the ranks of the changed inputs.
    """
    __tracebackhide__ = True
    changed = [
        rank for rank, (one, part) in enumerate(zip(placed, contributions, strict=True)) if not same_bits(part, one)
    ]
    if changed:
        raise AllreduceMismatch(
            f"{what}: the input of {named(changed)} has changed; expected the result in a new tensor", ranks=changed
        )
