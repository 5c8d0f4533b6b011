"""Check that a parallel step gives the gradients, parameters and buffers of one device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from mgpu_check.errors import GradientMismatch
from mgpu_check.numerics.compare import Difference, difference, show
from mgpu_check.numerics.diagnosis import diagnose
from mgpu_check.numerics.steps import MeasuredStep
from mgpu_check.torch_hooks.tensors import name_of, plain

_SHOWN = 4


def assert_gradients_agree(
    got: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor] | MeasuredStep[str],
    *,
    tolerance: Mapping[str, torch.Tensor | float] | None = None,
    rank: int | None = None,
    parts: Mapping[str, Sequence[torch.Tensor]] | None = None,
    previous: Mapping[str, torch.Tensor] | None = None,
    constants: Mapping[str, float] | None = None,
    what: str = "step",
) -> None:
    """Assert that the named results of a parallel step agree with those of one device.

    There is no default tolerance, because none fits all models. Measure it with
    `mgpu_check.numerics.steps.measure_step`, whose result replaces `expected` and `tolerance`.

    Args:
        got: gradients (or parameters, buffers, outputs) by name, on any device.
        expected: the same names and shapes, in float64 if the values are exact; or a `MeasuredStep`.
        tolerance: for each name the largest error of an element: a number, or a tensor of the shape of the result. 0
            means that the values must be equal.
        rank: the rank that holds `got`, for the message.
        parts: for each name the contribution of each rank to a sum or mean; for the diagnosis.
        previous: the results of the step before; for the diagnosis.
        constants: factors that may explain a difference, by name ("world size": 4); for the diagnosis.
        what: the name of the step under test, for the message.

    Raises:
        GradientMismatch: a result is missing, has another shape, or is off; names result, element, values, ratio and
            diagnosis. `.ranks` holds `rank`.
        ValueError: the tolerance is missing, or lacks a name.
    """
    __tracebackhide__ = True
    if isinstance(expected, MeasuredStep):
        if tolerance is not None:
            raise ValueError("assert_gradients_agree: tolerance is part of a Measurement; give one of them")
        measured = expected
        expected, tolerance = measured.reference, measured.tolerance
    if tolerance is None:
        raise ValueError(
            "assert_gradients_agree: tolerance is missing; give the result of "
            "mgpu_check.numerics.steps.measure_step as expected, or a tolerance for each name (0: equal)"
        )
    without = sorted(expected.keys() - tolerance.keys())
    if without:
        raise ValueError(
            f"assert_gradients_agree: tolerance has no entry for {', '.join(without)}; give one for each name"
        )
    ranks = () if rank is None else (rank,)
    where = f"{what}: " if rank is None else f"{what}, rank {rank}: "
    missing, unknown = sorted(expected.keys() - got.keys()), sorted(got.keys() - expected.keys())
    if missing or unknown:
        text = "; ".join(
            f"{verb} {', '.join(names)}" for verb, names in (("lacks", missing), ("has unknown", unknown)) if names
        )
        raise GradientMismatch(where + text, ranks=ranks)
    lines: list[str] = []
    wrong = 0
    for name, value in expected.items():
        if got[name].shape != value.shape:
            found = f"has shape {tuple(got[name].shape)}, expected {tuple(value.shape)}"
        else:
            off = difference(got[name], value, tolerance[name])
            if off is None:
                continue
            found = f"{_describe(off)}; {_kind_of(got[name])}" + _looks(
                diagnose(
                    got[name],
                    value,
                    tolerance[name],
                    parts=(parts or {}).get(name, ()),
                    rank=rank,
                    constants=constants,
                    previous=(previous or {}).get(name),
                )
            )
        wrong += 1
        if len(lines) < _SHOWN:
            lines.append(f"{name}: {found}")
    if not wrong:
        return
    if wrong > len(lines):
        lines.append(f"… and {wrong - len(lines)} more")
    first, *others = lines
    count = f"{wrong} of {len(expected)} results differ from those of one device"
    rest = [count, *others, *_common(got, expected, wrong)]
    raise GradientMismatch("\n  ".join([where + first, *rest]), ranks=ranks)


def assert_same(
    got: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
    what: str,
    rank: int | None = None,
    constants: Mapping[str, float] | None = None,
) -> None:
    """Assert that results of exact data equal those of one device in every bit, except for the sign of zeros.

    Raises:
        GradientMismatch: a result is missing or has another value; names the first of them, with the worst element.
    """
    __tracebackhide__ = True
    tolerance = dict.fromkeys(expected, 0.0)
    assert_gradients_agree(got, expected, tolerance=tolerance, rank=rank, constants=constants, what=what)


def gradient_or_zeros(parameter: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a parameter, or zeros if it is None, because no sample has used the parameter."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _describe(off: Difference) -> str:
    ratio = f" (ratio {show(off.got / off.expected, torch.float32)})" if off.expected else ""
    return f"{off}{ratio}"


def _kind_of(got: torch.Tensor) -> str:
    """Return dtype and shape, and the device of a tensor that is still there: results are often copied to the CPU."""
    where = f" on {got.device}" if got.device.type == "cuda" else ""
    return f"{name_of(got.dtype)}{list(got.shape)}{where}"


def _looks(found: Sequence[str]) -> str:
    return "".join(f"; {line}" for line in found)


def _common(got: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], wrong: int) -> list[str]:
    """Return a line about a common factor of all results, which is stronger evidence than a factor for each."""
    if wrong < len(expected) or wrong < 2:
        return []
    ratios = torch.cat(
        [(plain(got[name]).double() / plain(value).double()).flatten() for name, value in expected.items()]
    )
    ratios = ratios[ratios.isfinite()]
    if not len(ratios):
        return []
    low, middle, high = (float(ratios.quantile(part)) for part in (0.1, 0.5, 0.9))
    # Four fifths of all elements are within a thousandth of the median; gradients of another batch would scatter more.
    if high - low > 1e-3 * abs(middle) or abs(middle - 1) <= 1e-3:
        return []
    return [f"all results together are {middle:.5g} times those of one device, in four of five elements or more"]
