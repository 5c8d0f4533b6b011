"""Check that each GPU computes right results, repeatedly, and the same bits as the other GPUs of its model."""

from __future__ import annotations

import pytest
from hypothesis import given

from mgpu_check.acceptance.compute.arithmetic import compute, measure_launches
from mgpu_check.acceptance.node import SEEDS, Node, drawn
from mgpu_check.oracles.devices.cases import FAMILIES, OPERATIONS, TIMED, ComputeCase, Laps
from mgpu_check.settings import active

_BYTES = 512  # bytes of GPU memory for each element of a matrix: enough for several float64 matrices and their results

_DENSE = ("products", "layers")
"""In these families each dtype has hardware units of its own, so every level checks all dtypes."""

_REPEATED = {
    "product known by algebra": 1.0,
    **{f"{name} known by algebra": 0.3 for name in ("batched product", "convolution", "attention")},
    **dict.fromkeys(("sum of two", "sum", "exp", "sort"), 0.1),
}
"""Operations to repeat many times, with their share of the time and of the repeats."""

_MANY = {"quick": (16, 0.25), "standard": (30_000, 8.0), "long": (300_000, 90.0)}
"""Repeats of an operation, and the limit in seconds. 30000 repeats show a fault of one in 10^4 with a probability of 95
%."""


def _side(node: Node) -> int:
    """Return the size of the matrices for the GPU with the least memory: 128 for 16 MiB, 8192 for 80 GiB."""
    elements = min(gpu.memory for gpu in node.gpus) // _BYTES
    return max(32, 1 << (elements.bit_length() - 1) // 2)


@pytest.mark.parametrize("family", FAMILIES)
@drawn(quick=1, standard=2, long=10)
@given(seed=SEEDS)
def test_results_are_right(node: Node, family: str, seed: int) -> None:
    """Each operation agrees with its oracle in each dtype, and gives the same bits every time and on all GPUs."""
    dense, quick = family in _DENSE, node.depth == "quick"
    repeats, seconds, share = {"quick": (4, 0.2, 2), "standard": (16, 0.5, 1), "long": (64, 2.0, 1)}[node.depth]
    side = max(32, _side(node) // (share if dense else 4))
    cases = [
        ComputeCase(operation, dtype, side, seed, repeats, seconds, timed=operation in TIMED)
        for number, (operation, dtypes) in enumerate(FAMILIES[family].items())
        for dtype in ((dtypes[(seed + number) % 2 :: 2] or dtypes) if quick and not dense else dtypes)
    ]
    compute(node, cases)


@pytest.mark.glance(only=True)
@drawn(quick=1, standard=1, long=1)
@given(seed=SEEDS)
def test_each_kind_of_kernel_once(node: Node, seed: int) -> None:
    """One operation of each kind of kernel is right; products in each dtype."""
    side = max(32, _side(node) // 4)
    cases = [
        ComputeCase(operation, dtype, side, seed, repeats=2, seconds=0.2)
        for number, operation in enumerate(TIMED)
        for index, dtype in enumerate(OPERATIONS[operation])
        if operation == TIMED[0] or index == (seed + number) % len(OPERATIONS[operation])
    ]
    compute(node, cases)


def test_speed_of_launches(node: Node) -> None:
    """Measure the time of small kernels, and of rare kernels that stall; the check of performance judges it."""
    repeats, count = {"quick": (5, 400), "standard": (15, 3200), "long": (51, 25_600)}[node.depth]
    node.on_ranks("compute", measure_launches, repeats, Laps(count, 1 << 10 if node.simulated else 64 << 20))


# A quick run repeats only products: its few repeats of the others would add nothing to `test_results_are_right`.
@pytest.mark.parametrize("operation", [name for name in _REPEATED if active().depth != "quick" or _REPEATED[name] == 1])
@drawn(quick=1, standard=1, long=3)
@given(seed=SEEDS)
def test_results_stay_right(node: Node, operation: str, seed: int) -> None:
    """An operation that is repeated many times gives the same bits each time.

    Operands are small to allow many repeats.
    """
    repeats, seconds = _MANY[node.depth]
    share = _REPEATED[operation]
    side = max(32, min(512, _side(node) // 4))
    often, seconds = max(2, int(share * repeats)), share * seconds
    cases = [ComputeCase(operation, dtype, side, seed, often, seconds) for dtype in OPERATIONS[operation]]
    if node.depth == "quick":
        compute(node, cases)
        return
    for case in cases:
        compute(node, [case])
