"""A mistake is planted only where it changes what a drawn program computes (`benchmarks/divided.py`)."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def divided(monkeypatch: pytest.MonkeyPatch) -> Any:
    before = {*sys.modules}
    with monkeypatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        yield importlib.import_module("programs.divided.drawing")
    for name in {*sys.modules} - before:
        if name.partition(".")[0] == "programs":
            del sys.modules[name]


def mistakes(divided, way: str, axes: tuple[str, ...], blocks: tuple[str, ...], clip: float | None, *options: str):
    """The mistakes that can be planted in a drawn program with these settings."""
    one = next(one for n in range(1000) if (one := divided.drawn(n, 0)).way == way and {*dict(one.mesh)} == {*axes})
    shape = dataclasses.replace(one.shape, blocks=blocks, tokens=False)
    optimizer = dataclasses.replace(one.optimizer, clip=clip)
    program = dataclasses.replace(one, shape=shape, optimizer=optimizer, options=frozenset(options))
    return {plant.name for plant in divided.planted(program, 0)}


@pytest.mark.parametrize(
    ("blocks", "clip", "options", "shows"),
    [
        (("experts",), None, (), True),
        (("experts",), 0.05, (), False),  # all gradients have one factor, which clipping takes out again
        (("experts",), None, ("sequence",), False),  # all gradients are to be summed along tp
        (("mlp",), 0.05, (), True),  # sums of different slices
        (("mlp",), None, ("sequence",), True),
    ],
)
def test_a_sum_over_too_many_ranks_shows(divided, blocks, clip, options, shows):
    found = mistakes(divided, "ZeroRedundancyOptimizer", ("dp", "tp"), blocks, clip, *options)
    assert ("reduced over all ranks" in found) is shows


@pytest.mark.parametrize(
    ("blocks", "clip", "shows"), [("experts", None, True), ("experts", 0.05, False), ("mlp", 0.05, True)]
)
def test_a_sum_in_place_of_a_mean_shows(divided, blocks, clip, shows):
    found = mistakes(divided, "fsdp2", ("dp",), (blocks,), clip)
    assert ("sum in place of a mean" in found) is shows
