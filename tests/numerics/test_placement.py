"""Placements: a slice is found by its values where it can be one only, and slices make wholes again."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mgpu_check.numerics.placement import Slice, Unplaced, Wholes, assembled, indexed


def numbers(*shape: int, start: int = 0) -> torch.Tensor:
    """A tensor whose elements are all different, and not zero."""
    count = torch.Size(shape).numel()
    return torch.arange(start, start + count, dtype=torch.float32).view(shape) / 8 + 1


WHOLES = {"a": numbers(8, 6), "b": numbers(5, 4, start=100), "bias": numbers(7, start=200)}


def found(local: torch.Tensor, hint: str = "") -> list[Slice]:
    """The slices of a local tensor, which have its elements."""
    slices = Wholes(WHOLES).find(local, hint)
    assert not isinstance(slices, Unplaced), slices
    for one in slices:
        whole = WHOLES[one.whole].reshape(-1)
        assert one.shape == tuple(WHOLES[one.whole].shape)
        assert torch.equal(whole if one.at is None else whole[one.at], one.of(local))
    return slices


CHUNKS: dict[str, tuple[Callable[[], torch.Tensor], str, str]] = {
    "whole": (lambda: WHOLES["a"], "a", "all"),
    "chunk of rows": (lambda: WHOLES["a"].chunk(4)[1], "a", "dim 0: 2 to 3 of 8"),
    "chunk of columns": (lambda: WHOLES["a"].chunk(3, 1)[2], "a", "dim 1: 4 to 5 of 6"),
    "uneven chunk": (lambda: WHOLES["b"].chunk(2)[1], "b", "dim 0: 3 to 4 of 5"),
    "interleaved": (lambda: WHOLES["a"][[0, 1, 4, 5]], "a", "dim 0: 0 to 1 and 4 to 5 of 8"),
    "of one dimension": (lambda: WHOLES["bias"][2:5], "bias", "dim 0: 2 to 4 of 7"),
    "box": (lambda: WHOLES["a"][2:4, 3:6], "a", "dim 0: 2 to 3 of 8, dim 1: 3 to 5 of 6"),
    "transposed": (lambda: WHOLES["b"].T, "b", "all"),
    "chunk transposed": (lambda: WHOLES["a"].T[:, 2:4], "a", "dim 0: 2 to 3 of 8"),
    "flat range": (lambda: WHOLES["a"].reshape(-1)[9:14], "a", "elements 9 to 13 of 48"),
    "empty": (lambda: torch.empty(0, 6), "", ""),
}


@pytest.mark.parametrize("kind", CHUNKS)
def test_a_slice_is_found_by_its_values(kind):
    make, name, told = CHUNKS[kind]
    slices = found(make())
    if kind == "empty":
        assert slices == []
        return
    (one,) = slices
    assert one.whole == name
    assert str(one if one.at is None else Slice(name, one.shape, one.at)) == told


def test_rows_in_another_order_are_found():
    (one,) = found(WHOLES["a"][[5, 0]])
    assert one.at is not None and one.at.tolist() == [*range(30, 36), *range(6)]


def test_a_flat_range_over_several_tensors_with_padding():
    flat = torch.cat([WHOLES["a"].view(-1)[40:], WHOLES["b"].view(-1), WHOLES["bias"][:3], torch.zeros(5)])
    assert [(one.whole, one.within) for one in found(flat)] == [("a", (0, 8)), ("b", (8, 28)), ("bias", (28, 31))]


def test_a_tensor_under_another_name_is_found():
    (one,) = found(WHOLES["b"].clone(), hint="a")
    assert (one.whole, one.at) == ("b", None)


ZERO = {**WHOLES, "zero": torch.zeros(12)}
ENDING = torch.cat([WHOLES["bias"], torch.tensor([0.0, 1000.0])])


@pytest.mark.parametrize(
    ("wholes", "local", "hint", "why"),
    [
        pytest.param(ZERO, torch.zeros(6), "", Unplaced.AMBIGUOUS, id="a constant"),
        pytest.param(ZERO, torch.zeros(6), "zero", Unplaced.AMBIGUOUS, id="a constant with a name"),
        pytest.param(ZERO, torch.cat([WHOLES["bias"], torch.zeros(5)]), "", Unplaced.AMBIGUOUS, id="padding"),
        pytest.param({"a": torch.ones(300)}, torch.ones(400), "", Unplaced.AMBIGUOUS, id="many equal values"),
        pytest.param(WHOLES, numbers(2, 6, start=1000), "", Unplaced.NOWHERE, id="other values"),
        pytest.param(WHOLES, WHOLES["a"][:2].double(), "", Unplaced.NOWHERE, id="another dtype"),
        pytest.param(WHOLES, ENDING, "", Unplaced.NOWHERE, id="a whole, and other values at the end"),
    ],
)
def test_what_may_be_in_several_places_or_in_none_has_no_place(wholes, local, hint, why):
    assert Wholes(wholes).find(local, hint) is why


def test_values_that_come_twice_are_told_by_the_name_only():
    wholes = Wholes({"one": WHOLES["a"], "other": WHOLES["a"].clone()})
    assert wholes.find(WHOLES["a"]) is Unplaced.AMBIGUOUS
    assert wholes.find(WHOLES["a"][:2]) is Unplaced.AMBIGUOUS
    named = wholes.find(WHOLES["a"][:2], "other")
    assert not isinstance(named, Unplaced)
    (one,) = named
    assert one.whole == "other"


def test_rows_that_come_twice_are_told_by_their_neighbours():
    whole = WHOLES["a"].clone()
    whole[5] = whole[1]
    slices = Wholes({"a": whole}).find(whole[5:7])
    assert not isinstance(slices, Unplaced)
    (one,) = slices
    assert str(one) == "dim 0: 5 to 6 of 8"
    assert Wholes({"a": whole}).find(whole[5:6]) is Unplaced.AMBIGUOUS


@st.composite
def divisions(draw: st.DrawFn) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A tensor, and what ranks hold of it: chunks along a dimension, of each of some equal parts; or of all,
    flattened."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    whole = numbers(*shape)[
        ..., torch.randperm(shape[-1], generator=torch.Generator().manual_seed(draw(st.integers(0, 9))))
    ]
    ranks = draw(st.integers(2, 4))
    if draw(st.booleans()):
        return whole, list(whole.reshape(-1).chunk(ranks))
    dim = draw(st.integers(0, len(shape) - 1))
    stride = draw(st.sampled_from([n for n in (1, 2, 3) if shape[dim] % n == 0]))
    parts = [part.chunk(ranks, dim) for part in whole.chunk(stride, dim)]
    return whole, [torch.cat(chunks, dim) for chunks in zip(*parts, strict=True)]


@given(divisions())
def test_any_division_is_found_and_put_together(division):
    whole, locals_ = division
    wholes = Wholes({"other": numbers(9, 5, start=500), "whole": whole.contiguous()})
    parts = []
    for local in locals_:
        slices = wholes.find(local)
        assert not isinstance(slices, Unplaced)
        parts += [(one, local * 2) for one in slices]
    again = assembled(parts)
    assert again.missing is None
    assert torch.equal(again.value, whole * 2)
    held = torch.stack([one.mask.long() for one, _ in parts]).sum(0)
    assert bool((held == 1).all())


def test_a_gap_is_missing():
    rows = [Slice("a", (8, 6), indexed((8, 6), slice(first, first + 2))) for first in (0, 6)]
    gap = assembled([(rows[0], torch.ones(2, 6)), (rows[1], torch.ones(2, 6))])
    assert gap.missing is not None
    assert gap.missing.any(1).tolist() == [False, False, True, True, True, True, False, False]
    assert gap.value[gap.missing].unique().tolist() == [0.0]


def test_a_slice_reads_and_writes_its_elements():
    one = Slice("bias", (7,), torch.tensor([4, 2]), within=(1, 3))
    local, whole = torch.tensor([9.0, 1.0, 2.0, 9.0]), torch.zeros(7)
    one.put(local, whole)
    assert whole.tolist() == [0, 0, 2, 0, 1, 0, 0]
    assert one.of(local).tolist() == [1.0, 2.0]


def test_every_contiguous_range_of_two_flat_tensors_is_found():
    everything = torch.cat([WHOLES["bias"], WHOLES["b"].view(-1)])
    wholes = Wholes({name: WHOLES[name] for name in ("bias", "b")})
    for first, last in itertools.combinations(range(0, len(everything) + 1, 3), 2):
        slices = wholes.find(everything[first:last].clone())
        assert not isinstance(slices, Unplaced)
        assert sum(one.mask.sum() for one in slices) == last - first
