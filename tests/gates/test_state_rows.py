"""The gate for checkpoints: how it takes states apart, and an entry of a resumed run beside those of uninterrupted
ones."""

from __future__ import annotations

import collections
import dataclasses
import functools
import random
import threading
import types
from typing import Any

import numpy
import pytest
import torch

from mgpu_check.gates.run import states
from mgpu_check.gates.run.states import StateEntry, compare, flattened

RANK: Any = types.SimpleNamespace(index=0)
START, END = torch.tensor([0.0, 0.0]), torch.tensor([1.0, -2.0])
DIGEST = "0123456789abcdef" * 2


class ABSENT:
    """Stands for an entry that a state lacks; a class, because ids of tests must be the same in each worker."""


def kept(directory, value, generator=False):
    """Keep a state with one entry, or with none."""
    held = {} if value is ABSENT else {"w": value}
    entries, generators = ({}, held) if generator else (held, {})
    content = {states._ENTRIES: entries, states._GENERATORS: generators, states._EPOCHS: []}
    torch.save(content, states.kept(directory, RANK))
    return directory


def row(tmp_path, got, first=END, second=None, earlier=START, perturbed=(), tolerance=None, generator=False):
    second = first if second is None else second
    names = ["got", "first", "second", "earlier"]
    paths = [
        kept(tmp_path / name, value, generator)
        for name, value in zip(names, (got, first, second, earlier), strict=True)
    ]
    moves = [kept(tmp_path / f"perturbed {number}", value) for number, value in enumerate(perturbed)]
    (found,) = compare(paths[0], paths[1:3], paths[3], moves, tolerance, False, RANK)
    assert found.entry == StateEntry("w", generator)
    return found


@pytest.mark.parametrize(
    ("got", "expected", "detail"),
    [
        (END, END, ""),
        (END + torch.tensor([0.0, 1.0]), END, "element [1]: got -1, expected -2; all other 1 elements are right"),
        (END.double(), END, "got (2,) torch.float64, expected (2,) torch.float32"),
        (torch.tensor([float("nan"), 1.0]), torch.tensor([float("nan"), 1.0]), ""),
        (torch.tensor([1j]), torch.tensor([2j]), "element [0, 1]: got 1, expected 2; all other 1 elements are right"),
        (torch.tensor([True]), torch.tensor([False]), "element [0]: got True, expected False"),
        (3, 4, "got 3, expected 4"),
        (3, 3.0, "got 3, expected 3.0"),
        (DIGEST, DIGEST[::-1], f"got {DIGEST}, expected {DIGEST[::-1]}"),
        ("x" * 50, "b", f"got '{'x' * 38}…, expected 'b'"),
        ("x" * 38, "b", f"got '{'x' * 38}', expected 'b'"),
        (ABSENT, END, "is missing"),
        (END, ABSENT, "is there, but not in an uninterrupted run"),
    ],
    ids=str,
)
def test_an_entry_is_as_in_an_uninterrupted_run_or_it_is_said_how_it_differs(tmp_path, got, expected, detail):
    found = row(tmp_path, got, expected)
    assert (found.same, found.detail, found.repeats) == (not detail, detail, True)
    assert (found.got == found.expected) is (not detail)
    assert (found.got is None, found.expected is None) == (got is ABSENT, expected is ABSENT)


@pytest.mark.parametrize(
    ("first", "second", "repeats"),
    [
        (END, END + 0.001, True),  # 2^-10 of the largest, 2, is 0.00195
        (END, END + 0.003, False),
        (END, torch.tensor([1.0, float("nan")]), False),
        (torch.tensor([float("nan"), 2.0]), torch.tensor([float("nan"), 2.001]), True),
        (torch.tensor([float("inf"), 2.0]), torch.tensor([float("inf"), 2.001]), True),
        (torch.tensor([float("inf")]), torch.tensor([-float("inf")]), False),
        (END.bfloat16(), END.bfloat16() + 0.109375, True),  # 16 unit roundoffs of 2 are 0.125
        (END.bfloat16(), END.bfloat16() + 0.25, False),
        (torch.zeros(0), torch.zeros(0), True),
        (END, END[:1], False),
        ("a", "b", False),
        (0.5, 0.50001, False),
        (1, 1.0, False),
        (END, 1, False),
        (END, ABSENT, False),
        (ABSENT, END, False),
    ],
    ids=str,
)
def test_what_two_uninterrupted_runs_disagree_about_is_not_judged(tmp_path, first, second, repeats):
    assert row(tmp_path, first, first, second).repeats is repeats
    assert (row(tmp_path, first, first, second).same is None) is not repeats
    if not repeats:
        assert row(tmp_path, first, first, second).detail


def test_generators_are_never_noise(tmp_path):
    found = row(tmp_path, "a", "b", generator=True)
    assert (found.same, found.repeats, found.detail) == (False, True, "got 'a', expected 'b'")
    found = row(tmp_path, "a", "a", "b", generator=True)
    assert (found.same, found.repeats) == (None, True)


@pytest.mark.parametrize(
    ("off", "more", "same"),
    [
        (0.0, {}, True),
        (0.0005, {}, False),
        (0.0005, {"second": END + 0.0001}, True),  # 8 times what two runs differ by
        (0.0009, {"second": END + 0.0001}, False),
        (0.0015, {"perturbed": [END + 0.001, END - 0.001]}, True),
        (0.05, {"perturbed": [END + 0.001, END - 0.001]}, False),
        (0.15, {"tolerance": 0.1}, True),  # of the largest, 2
        (0.25, {"tolerance": 0.1}, False),
    ],
)
def test_a_difference_is_granted_that_is_measured_or_given(tmp_path, off, more, same):
    found = row(tmp_path, END + off, **more)
    assert (found.same, found.repeats) == (same, True)
    assert bool(found.detail) is not same


@pytest.mark.parametrize(("earlier", "moved"), [(START, True), (END, False), (ABSENT, True), (END.double(), True)])
def test_an_entry_has_moved_since_the_earlier_step(tmp_path, earlier, moved):
    assert row(tmp_path, START, earlier=earlier).moved is moved


@dataclasses.dataclass
class State:
    w: torch.Tensor


class Meter:
    def __init__(self, w):
        self.w = w

    def __repr__(self):
        return "Meter"


ROUND = Meter(None)
ROUND.w = ROUND


class Slots:
    __slots__ = ("w",)

    def __init__(self, w):
        self.w = w

    def __repr__(self):
        return f"Slots({self.w})"


HOLDERS = {
    "dataclass": State,
    "object": Meter,
    "namespace": lambda w: types.SimpleNamespace(w=w),
    "deque": lambda w: collections.deque([w]),
    "mapping": lambda w: {"a": (1, [w])},
}


@pytest.mark.parametrize("kind", HOLDERS)
def test_tensors_in_objects(kind):
    w = torch.arange(3000.0)  # of which repr does not show all
    parts = flattened(HOLDERS[kind](w), "state")
    assert [torch.equal(part, w) for part in parts.values() if isinstance(part, torch.Tensor)] == [True]


@pytest.mark.parametrize(
    ("state", "match"),
    [
        (Slots(START), "state is a Slots, which cannot be taken apart; give it a state_dict"),
        ({"a": [threading.Lock()]}, r"state\.a\.0 is a lock, which cannot"),
        ({"a.b": 1, "a": {"b": 1}}, r"there are two entries 'state\.a\.b'"),
        ({1: 1, "1": 1}, r"there are two entries 'state\.1'"),
        ([ROUND], r"state\.0\.w is a Meter, which holds itself"),
    ],
    ids=["slots", "lock", "dots", "keys", "round"],
)
def test_what_cannot_be_taken_apart(state, match):
    with pytest.raises(states.Opaque, match=match):
        flattened(state, "state")


NUMPYS, PYTHONS, TORCHS = numpy.random.default_rng(2), random.Random(2), torch.Generator().manual_seed(2)


@pytest.mark.parametrize(
    ("generator", "draw"),
    [(NUMPYS, NUMPYS.random), (PYTHONS, PYTHONS.random), (TORCHS, functools.partial(torch.rand, 3, generator=TORCHS))],
    ids=["numpy", "python", "torch"],
)
def test_generators_by_their_state(generator, draw):
    def numbers():
        return [value.tolist() if isinstance(value, torch.Tensor) else value for value in flattened(generator).values()]

    before = numbers()
    assert numbers() == before
    draw()
    assert numbers() != before
