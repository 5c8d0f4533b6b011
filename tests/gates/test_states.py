"""The gate for checkpoints: states of any kind are compared, or it is said why they cannot be."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import random
import threading
import types
from collections.abc import Callable
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


DRAWN = {
    "floats": lambda: torch.randn(400, generator=unseeded()),
    "complex": lambda: torch.randn(4, dtype=torch.complex64, generator=unseeded()),
    "half": lambda: torch.randn(4, generator=unseeded()).half(),
    "ints": lambda: torch.randint(2**40, (4,), generator=unseeded()),
    "text": lambda: torch.randint(2**40, (1,), generator=unseeded()).numpy().tobytes().hex(),
    "infinite": lambda: torch.tensor([1.0, float("inf")]) * torch.randn(2, generator=unseeded()),
}


@pytest.mark.parametrize("kind", DRAWN)
def test_training_that_cannot_be_repeated(ranks, kind):
    with pytest.raises(
        ValueError, match="two uninterrupted runs of steps 0 to 6 differ by more than rounding in w on ranks 0-1: w: "
    ):
        assert_resume_continues(ranks, drawing(DRAWN[kind]))


def test_a_tolerance_covers_what_it_covers(ranks):
    def train(rank, directory, start, stop):
        return {"x": stop + torch.rand(100, generator=unseeded()) * 0.3}

    assert_resume_continues(ranks, train, tolerance=0.1)
    with pytest.raises(ValueError, match="two uninterrupted runs"):
        assert_resume_continues(ranks, train, tolerance=0.01)


def test_narrow_dtypes_round_more(ranks):
    def train(rank, directory, start, stop):
        return {"x": (stop * (1 + 2**-8 * torch.randint(2, (99,), generator=unseeded()))).bfloat16()}

    assert_resume_continues(ranks, train)


@dataclasses.dataclass
class State:
    w: torch.Tensor


class Meter:
    def __init__(self, w):
        self.w = w

    def __repr__(self):
        return "Meter"


class Slots:
    __slots__ = ("w",)

    def __init__(self, w):
        self.w = w

    def __repr__(self):
        return f"Slots({self.w})"


HOLDERS = [
    State,
    Meter,
    Slots,
    lambda w: types.SimpleNamespace(w=w),
    lambda w: collections.deque([w]),
    lambda w: {"a": (1, [w])},
]


def counting(hold, lost):
    def train(rank, directory, start, stop):
        w = torch.load(directory / f"{rank.index}.pt") if start and not lost else torch.zeros(3000)
        for _ in range(start, stop):
            w[1500] += 1  # which repr does not show
        torch.save(w, directory / f"{rank.index}.pt")
        return {"steps": stop, "state": hold(w)}

    return train


@pytest.mark.parametrize("hold", HOLDERS)
def test_tensors_in_objects(ranks, hold):
    assert_resume_continues(ranks, counting(hold, False), world_sizes=[2])
    refuted(
        ranks, counting(hold, True), "state-not-restored", match=r"element \[1500\]: got 3, expected 6", world_sizes=[2]
    )


def test_what_cannot_be_taken_apart(ranks):
    for hold, match in [
        (
            lambda w: {"w": w}.values(),
            "cannot be compared: state is a dict_values, which cannot be taken apart; give it a state_dict",
        ),
        (lambda w: {"a": [threading.Lock()]}, "state.a.0 is a lock, which cannot"),
        (lambda w: {"a.b": w, "a": {"b": w}}, "there are two entries 'state.a.b'"),
        (lambda w: {1: w, "1": w}, "there are two entries 'state.1'"),
        (lambda w: [holds_itself()], "state.0.me is a Meter, which holds itself"),
    ]:
        with pytest.raises(ValueError, match=match):
            assert_resume_continues(ranks, counting(hold, False))


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


@pytest.mark.parametrize("kind", ["numpy", "python", "torch"])
def test_generators_by_their_state(ranks, kind):
    def train(rank, directory, start, stop):
        generator: Any
        draw: Callable[[], object]
        if kind == "numpy":
            generator = numpy.random.default_rng(2)
            draw = generator.random
        elif kind == "python":
            generator = random.Random(2)
            draw = generator.random
        else:
            generator = torch.Generator().manual_seed(2)
            draw = functools.partial(torch.rand, 3, generator=generator)
        for _ in range(start, stop):  # and is not restored
            draw()
        return {"steps": stop, "drawn from": generator}

    refuted(ranks, train, "state-not-restored", match="drawn from.* on ranks 0-1", world_sizes=[2])
