"""A collective that is used rightly is not accused of a mistake elsewhere."""

from __future__ import annotations

import functools
import inspect
import re

import pytest
import torch

from mgpu_check import ScalingMismatch, assert_step_scales
from tests.gates.collective_uses import USES, build, reference, step

pytestmark = [pytest.mark.gpus(2), pytest.mark.slow, pytest.mark.filterwarnings("ignore::FutureWarning")]

OF_DATA = [f"{name} of data" for name in USES if "differentiable" not in name]
# In one step.
OFTEN = ["all_reduce", "all_reduce differentiable", "all_gather uneven", "reduce_scatter", "isend of a pipeline"]
EACH = [pytest.param([name], id=name) for name in (*USES, *OF_DATA)]
# One term of the loss makes the gradients of the last layer, so a factor of that term explains them, too.
MISTAKES = {"doubled": ("world-size-factor", "loss-term-factor"), "local": ("gradients-not-synchronized",)}


def gate(ranks, names, mistake):
    assert_step_scales(
        ranks,
        functools.partial(step, names=names, mistake=mistake),
        build=functools.partial(build, len(names)),
        batch=lambda n: torch.randn(n, 4),
        reference=reference,
        sizes=[4],
        world_sizes=[2],
        max_examples=1,
    )


def test_right_uses_pass(ranks):
    gate(ranks, list(USES), "")


@pytest.mark.parametrize("mistake", ["local", "doubled"])
@pytest.mark.parametrize("names", [pytest.param(OFTEN, id="some"), *EACH])
def test_a_mistake_elsewhere_is_not_blamed_on_a_collective(ranks, names, mistake):
    with pytest.raises(ScalingMismatch) as caught:
        gate(ranks, names, mistake)
    assert caught.value.mistakes[0] in MISTAKES[mistake], str(caught.value)
    seen = "\n".join(line for line in str(caught.value).splitlines() if line.startswith("    seen: "))
    blamed = [int(line) for line in re.findall(r"collective_uses\.py:(\d+)", seen)]
    for name in names:
        lines, first = inspect.getsourcelines(USES[name.removesuffix(" of data")])
        assert not [line for line in blamed if first <= line < first + len(lines)], seen
