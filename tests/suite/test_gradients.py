"""`assert_gradients_agree` passes within the tolerance, and names parameter, element, ratio and cause beyond it."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from mgpu_check.asserts.models import assert_gradients_agree
from mgpu_check.errors import GradientMismatch
from mgpu_check.numerics.steps import MeasuredStep
from mgpu_check.oracles.training.training_steps import _assert_as_measured

EXPECTED = {
    "weight": torch.randn(3, 4, generator=torch.Generator().manual_seed(0)),
    "bias": torch.tensor([1.0, -2.0, 3.0]),
}
EQUAL = dict.fromkeys(EXPECTED, 0.0)


def _message(got: dict[str, torch.Tensor], **options: Any) -> str:
    given: dict[str, Any] = {"tolerance": EQUAL} | options
    with pytest.raises(GradientMismatch) as caught:
        assert_gradients_agree(got, EXPECTED, **given)
    return str(caught.value)


def test_equal_results_pass() -> None:
    assert_gradients_agree({name: value.clone() for name, value in EXPECTED.items()}, EXPECTED, tolerance=EQUAL)
    assert_gradients_agree({}, {}, tolerance={})


def test_the_tolerance_is_that_of_the_element() -> None:
    tolerance: dict[str, torch.Tensor | float] = {"weight": 0.0, "bias": torch.tensor([0.0, 0.5, 0.0])}
    assert_gradients_agree(EXPECTED | {"bias": torch.tensor([1.0, -2.4, 3.0])}, EXPECTED, tolerance=tolerance)
    text = _message(EXPECTED | {"bias": torch.tensor([1.0, -2.4, 3.1])}, tolerance=tolerance)
    assert "bias: element [2]: got 3.0999999" in text
    assert "all other 2 elements are right" in text


def test_names_parameter_element_ratio_and_cause() -> None:
    text = _message(EXPECTED | {"weight": EXPECTED["weight"] * 4}, constants={"world size": 4}, rank=2, what="my step")
    first, second = text.splitlines()
    assert first.startswith("my step, rank 2: weight: element")
    assert "all 12 elements differ (ratio 4); float32[3, 4]; " in first
    assert second == "  1 of 2 results differ from those of one device"
    assert "4 times the expected (world size)" in text


def test_one_factor_for_all_results() -> None:
    text = _message({name: value / 4 for name, value in EXPECTED.items()})
    assert "all results together are 0.25 times those of one device" in text


def test_results_that_are_off_by_rounding_are_off_by_no_factor() -> None:
    up = {name: torch.nextafter(value, torch.full_like(value, 9.0)) for name, value in EXPECTED.items()}
    text = _message(up)
    assert "2 of 2 results differ" in text and "all results together" not in text, text
    off = {name: value * 1.01 for name, value in EXPECTED.items()}
    assert "all results together are 1.01 times" in _message(off)


def test_missing_and_unknown_results() -> None:
    text = _message({"weight": EXPECTED["weight"], "scale": torch.ones(1)})
    assert "lacks bias; has unknown scale" in text


def test_shapes() -> None:
    assert "bias: has shape (2,), expected (3,)" in _message(EXPECTED | {"bias": torch.ones(2)})


def test_stale_results() -> None:
    before = {"bias": torch.tensor([7.0, 8.0, 9.0])}
    assert "stale" in _message(EXPECTED | before, previous=before)


def test_local_results() -> None:
    parts = {"bias": [torch.tensor([5.0, 5.5, 5.25]), EXPECTED["bias"] - torch.tensor([5.0, 5.5, 5.25])]}
    assert "equal its own part alone" in _message(EXPECTED | {"bias": parts["bias"][0]}, parts=parts, rank=0)


def test_nan_is_a_difference() -> None:
    assert "got nan" in _message(
        EXPECTED | {"bias": torch.tensor([1.0, torch.nan, 3.0])}, tolerance=dict.fromkeys(EXPECTED, 1e9)
    )


def test_there_is_no_default_tolerance() -> None:
    with pytest.raises(ValueError, match="measure_step"):
        assert_gradients_agree(EXPECTED, EXPECTED)
    with pytest.raises(ValueError, match="no entry for weight"):
        assert_gradients_agree(EXPECTED, EXPECTED, tolerance={"bias": 0.0})


@pytest.mark.parametrize(("granted", "right"), [(0.5, True), (0.1, False)])
def test_what_is_off_is_measured_again_before_it_is_said(granted, right) -> None:
    """More and larger perturbations grant what a few have passed over, and nothing else."""
    asked = []

    class Measure:
        def provisionally(self) -> MeasuredStep[str]:
            return self.in_full(pairs=0)

        def in_full(self, *, pairs: int, seed: int = 0, magnified: float = 1.0) -> MeasuredStep[str]:
            asked.append(pairs)
            allowed = granted if magnified > 1 else 0.01
            return MeasuredStep({"x": torch.ones(3).double()}, {"x": torch.full((3,), allowed).double()}, {"x": 1.0})

    measure: Any = Measure()
    with contextlib.nullcontext() if right else pytest.raises(GradientMismatch, match=r"1\.29|1\.3"):
        _assert_as_measured({"x": torch.tensor([1.0, 1.3, 1.0])}, measure)
    assert len(asked) == 3
    _assert_as_measured({"x": torch.ones(3)}, measure)
    assert asked[3:] == [0], "what is right is measured once, provisionally"
