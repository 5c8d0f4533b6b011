"""The gate for checkpoints: states of any kind are compared, or it is said why they cannot be."""

from __future__ import annotations

import enum
import random
import types
from typing import Any

import numpy
import pytest
import torch

from mgpu_check import assert_resume_continues
from tests.gates.checkpoints import refuted

pytestmark = pytest.mark.gpus(2)


def unseeded():
    generator = torch.Generator()
    generator.seed()
    return generator


def drawing(draw):
    def train(rank, directory, start, stop):
        return {"steps": stop, "w": draw()}  # nothing is saved

    return train


def test_training_that_cannot_be_repeated(ranks):
    differs = "two uninterrupted runs of steps 0 to 6 differ by more than rounding in w on ranks 0-1: w: "
    with pytest.raises(ValueError, match=differs):
        assert_resume_continues(ranks, drawing(lambda: torch.randn(400, generator=unseeded())))


def test_a_tolerance_covers_what_it_covers(ranks):
    def train(rank, directory, start, stop):
        return {"x": stop + torch.rand(100, generator=unseeded()) * 0.3}

    assert_resume_continues(ranks, train, tolerance=0.1)
    with pytest.raises(ValueError, match="two uninterrupted runs"):
        assert_resume_continues(ranks, train, tolerance=0.01)


class Meter:
    def __init__(self, w):
        self.w = w

    def __repr__(self):
        return "Meter"


def counting(hold, lost):
    def train(rank, directory, start, stop):
        w = torch.load(directory / f"{rank.index}.pt") if start and not lost else torch.zeros(3000)
        for _ in range(start, stop):
            w[1500] += 1  # which repr does not show
        torch.save(w, directory / f"{rank.index}.pt")
        return {"steps": stop, "state": hold(w)}

    return train


def test_tensors_in_objects(ranks):
    assert_resume_continues(ranks, counting(lambda w: [Meter(w), types.SimpleNamespace(w=w)], lost=False))
    refuted(ranks, counting(Meter, lost=True), "state-not-restored", match=r"element \[1500\]: got 3, expected 6")


def test_what_cannot_be_taken_apart(ranks):
    match = "cannot be compared: state is a dict_values, which cannot be taken apart; give it a state_dict"
    with pytest.raises(ValueError, match=match):
        assert_resume_continues(ranks, counting(lambda w: {"w": w}.values(), lost=False))
    with pytest.raises(ValueError, match=r"state\.0\.me is a Meter, which holds itself"):
        assert_resume_continues(ranks, counting(lambda w: [holds_itself()], lost=False))


def holds_itself():
    meter: Any = Meter(1)
    meter.me = meter
    return meter


class Color(enum.Enum):
    RED = 1


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


def test_generators_by_their_state(ranks):
    def train(rank, directory, start, stop):
        generator = random.Random(2)
        for _ in range(start, stop):  # and is not restored
            generator.random()
        return {"steps": stop, "drawn from": generator}

    refuted(ranks, train, "state-not-restored", match="drawn from.* on ranks 0-1", world_sizes=[2])
