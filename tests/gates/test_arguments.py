"""The gate for steps: what its arguments are there for, and which it refuses."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import strategies as st
from torch import nn

from mgpu_check import assert_metric_scales
from tests.gates.steps import batch, build, passes, refuted, right, total

pytestmark = pytest.mark.gpus(4)


def of_no_seed(n):
    return torch.tensor(list(os.urandom(n * 6)), dtype=torch.float32).view(n, 6)


def fails(model, batch, rank):
    raise KeyError("labels")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"observe": ("gradients",)}, r"observe=\('gradients',\); choose some of grads, params"),
        ({"tolerance": 2}, "tolerance=2; give a fraction"),
        ({"tolerance": {"0.weight": -1}}, "give a fraction"),
        ({"max_examples": 0}, "max_examples=0; give an integer"),
        ({"sizes": "even"}, 'sizes=.even. is no batch size; .*"divisible"'),
        ({"sizes": [0]}, "not all positive integers"),
        ({"sizes": 2.5}, r"sizes=2\.5 is no batch size"),
        ({"world_sizes": [5]}, "world_sizes has 5; give ints from 1 to 4"),
        ({"batch": st.just(batch(4)), "sizes": 4}, "sizes and a strategy of batches are both given"),
        ({"build": lambda: 3}, r"build\(\) returned int; return an nn\.Module"),
        ({"batch": of_no_seed}, "gives other batches"),
        ({"build": nn.Linear(2, 2)}, "build=.* is not a function"),
        ({"reference": 3}, "reference=3 is not a function"),
        ({"build": lambda: build().to("meta")}, r"0\.weight on meta"),
        ({"world_sizes": [1]}, "compares one device with itself"),
        ({"gate": assert_metric_scales, "max_examples": True}, "assert_metric_scales: max_examples=True"),
        ({"tolerance": {"wieght": 0.1}}, "tolerance has 'wieght', which is not observed"),
        ({"step": fails}, r"fails fails on one device: .*KeyError: 'labels'; so it was for every"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong(ranks, options, message):
    with pytest.raises(ValueError, match=message):
        passes(ranks, **{"step": total, **options})


@pytest.mark.slow
def test_a_granted_tolerance(ranks):
    def step(model, batch, rank):
        right(model, batch, rank)
        for parameter in model.parameters():
            parameter.grad *= 1 + 1e-3 * (rank.size - 1)

    refuted(ranks, step)
    passes(ranks, step, tolerance=1e-2)
    refuted(ranks, step, tolerance={"gradient of 0.weight": 1e-2}, match=r"first gradient of 0\.bias")
