"""Devices: each computes, keeps, copies and counts as it must, alone and beside the others, in every dtype."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given

from mgpu_check import strategies
from mgpu_check.suite.budget import examples

if TYPE_CHECKING:
    import torch


@examples(3, quick=1)
@given(seed=strategies.seeds())
def test_elementwise_results(gpus: tuple[torch.device, ...], seed: int) -> None:
    """Functions of elements give what the CPU gives, in each dtype, for special values in all pairs; so do conversions."""
    from mgpu_check.checks.operating.agreement import assert_devices_agree
    from mgpu_check.checks.operating.elementwise import elementwise_cases

    assert_devices_agree(gpus, elementwise_cases(seed))


@examples(3, quick=1)
@given(seed=strategies.seeds())
def test_products(gpus: tuple[torch.device, ...], seed: int) -> None:
    """Products and convolutions, in every spelling and floating dtype, lose no digit of a factor and none of a sum."""
    from mgpu_check.checks.operating.agreement import assert_devices_agree
    from mgpu_check.checks.operating.products import product_cases

    assert_devices_agree(gpus, product_cases(seed))


@examples(3, quick=1)
@given(seed=strategies.seeds())
def test_reductions(gpus: tuple[torch.device, ...], seed: int) -> None:
    """Sums, extremes, orders and searches are exact in each dtype."""
    from mgpu_check.checks.operating.agreement import assert_devices_agree
    from mgpu_check.checks.operating.reductions import reduction_cases

    assert_devices_agree(gpus, reduction_cases(seed))


@examples(3, quick=1)
@given(seed=strategies.seeds())
def test_moves_keep_every_bit(gpus: tuple[torch.device, ...], seed: int) -> None:
    """What moves elements within a device keeps every bit of each dtype, contiguous or not."""
    from mgpu_check.checks.operating.agreement import assert_devices_agree
    from mgpu_check.checks.operating.moves import move_cases

    assert_devices_agree(gpus, move_cases(seed))


@examples(3, quick=1)
@given(seed=strategies.seeds())
def test_layers_and_gradients(gpus: tuple[torch.device, ...], seed: int) -> None:
    """Layers, losses and gradients are as near to those in float64 as their dtype allows."""
    from mgpu_check.checks.operating.agreement import assert_devices_agree
    from mgpu_check.checks.operating.layers import layer_cases

    assert_devices_agree(gpus, layer_cases(seed))


@examples(2, quick=1)
@given(seed=strategies.seeds())
def test_large_results(gpus: tuple[torch.device, ...], seed: int) -> None:
    """What reads or writes more than 4 MiB is as right as what is small."""
    from mgpu_check.checks.operating.agreement import assert_devices_agree
    from mgpu_check.checks.operating.large import large_cases
    from mgpu_check.settings import active

    assert_devices_agree(gpus, large_cases(seed, more=active().gpu_level != "quick"))


@examples(3, quick=1)
@given(seed=strategies.seeds())
def test_functions_and_drawing(gpus: tuple[torch.device, ...], seed: int) -> None:
    """Functions are within their documented bounds; random numbers are spread as they should be."""
    from mgpu_check.checks.operating.judged import assert_arithmetic_known

    assert_arithmetic_known(gpus, ("functions", "drawing"), seed)
