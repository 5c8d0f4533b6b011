"""The gate for checkpoints: states of any kind are compared, or it is said why they cannot be."""

from __future__ import annotations

import enum
import random

import numpy
import pytest
import torch

from mgpu_check import assert_resume_continues

pytestmark = pytest.mark.gpus(2)


def unseeded():
    generator = torch.Generator()
    generator.seed()
    return generator


def test_a_tolerance_covers_what_it_covers(ranks):
    def train(rank, directory, start, stop):
        return {"x": stop + torch.rand(100, generator=unseeded()) * 0.3}

    assert_resume_continues(ranks, train, tolerance=0.1)
    with pytest.raises(ValueError, match="two uninterrupted runs"):
        assert_resume_continues(ranks, train, tolerance=0.01)


class Color(enum.Enum):
    RED = 1


@pytest.mark.slow
def test_what_needs_no_taking_apart(ranks):
    def train(rank, directory, start, stop):
        return {
            "stop": stop,
            "none": None,
            "dtype": torch.float16,
            "device": rank.device,
            "shape": torch.Size([2]),
            "path": directory.parent,
            "color": Color.RED,
            "kind": Color,
            "function": torch.relu,
            "lambda": lambda x: x,
            "set": {"b", "a"},
            "empty": {},
            "range": range(10**12),
            "bytes": bytearray(b"a"),
            "generator": torch.Generator().manual_seed(1),
            "python": random.Random(3),
            "numpy": numpy.random.default_rng(2),
            "legacy": numpy.random.RandomState(2),
            "texts": numpy.array(["a", "b"]),
            "objects": numpy.array([None, "b"]),
            "long": numpy.longdouble(1) / 3,
            "sparse": torch.eye(3).to_sparse(),
        }

    assert_resume_continues(ranks, train)
