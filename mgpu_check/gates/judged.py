"""Find the trained parameters that were not judged, with the reasons."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from mgpu_check.diagnosis.observed import PARITY, Expected, ObservedRun, Relations
from mgpu_check.diagnosis.results import Result

_WIDE = 0.25
"""Widest tolerance, as a fraction of the values: a wider one may accept a factor of 2, or a missing rank.

Of the elements of a tensor some are two or three times the root mean square, and show smaller errors.
"""
_SMALL = 1e-2
"""Fraction of the largest gradient below which a gradient may be rounding errors only, as for a bias before a norm."""
_ENOUGH = 4096
"""Elements to sample from a large tensor for its magnitude."""


def unjudged(
    relations: Relations,
    expected: Expected,
    seen: Sequence[ObservedRun],
    kinds: Collection[str],
    tolerance: float | Mapping[str, float] | None,
) -> dict[str, str]:
    """Return the trained parameters with neither gradient nor value compared with one device, and the reasons.

    A measured tolerance wider than a quarter of the values decides nothing; `relations.too_wide` gets the parameters
    that only have such tolerances.
    """
    if not {"grads", "params"} & set(kinds):
        return {}
    single = expected.single
    if expected.by_reference and not {"grads", "params"} & single.touched:
        return {}  # the reference leaves no gradients or parameters, only returned values to compare with
    trained = single.trained.union(*(one.trained for one in seen))
    flat = any(
        name.kind == "returned" and value.dim() == 1 and value.numel() > 1 for name, value in seen[0].values.items()
    )
    accounted = flat and bool(relations.skipped)
    found: dict[str, str] = {}
    largest: dict[str, float] = {}
    for name in sorted(trained - {result.of for result in relations.local}):
        why, too_wide = "", False
        for result in (Result("grads", name), Result("params", name)):
            held = relations.held.get(result)
            if held is None or held.get(PARITY) is None:
                why = why or relations.skipped.get(result, "")
            elif tolerance is not None or (wide := _wide(expected, result, largest)) == "":
                break
            else:
                why, too_wide = wide, True
        else:
            if accounted or any(one.of == name and one.kind == "returned" for one in relations.held):
                continue
            if Result("grads", name) not in single.values and Result("params", name) not in single.values:
                continue  # not in the built model
            if too_wide:
                relations.too_wide.add(name)
            found[name] = why or "no rank leaves a gradient or a value of it"
    return found


def _wide(expected: Expected, result: Result, largest: dict[str, float]) -> str:
    """Return why the tolerance of a result is too wide to prove anything; "" if it is narrow enough."""
    exact, allowed = expected.exact.get(result), expected.tolerance.get(result)
    if exact is None or allowed is None or not exact.numel():
        return ""
    if result.kind not in largest:
        sizes = [_size(value) for name, value in expected.exact.items() if name.kind == result.kind]
        largest[result.kind] = max(sizes, default=0.0)
    size, width = _size(exact), _size(allowed)
    if width <= _WIDE * max(size, _SMALL * largest[result.kind]):
        return ""
    return (
        f"rounding alone may change {result} by {width:.2g}, and its values are about {size:.2g}: "
        "the measured tolerance proves nothing"
    )


def _size(value: torch.Tensor) -> float:
    """Return the root mean square of the finite values; large tensors are sampled."""
    some = value.reshape(-1)[:: max(1, value.numel() // _ENOUGH)]
    finite = some[some.isfinite()].double()
    return float(finite.square().mean().sqrt()) if finite.numel() else 0.0
