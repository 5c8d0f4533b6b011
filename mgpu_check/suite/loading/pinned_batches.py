"""Check batches in pinned memory: all tensors are pinned and unchanged, also in classes with their own `pin_memory`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from mgpu_check.errors import ShardError
from mgpu_check.suite.loading.loaders import LARGE, assert_batches, sent, torchs_own_warnings
from mgpu_check.suite.loading.numbered import Numbered, assert_batch
from mgpu_check.suite.loading.sampling import batches_of


@torchs_own_warnings()
def assert_pinned_batches(devices: Sequence[torch.device]) -> None:
    """Assert that ``pin_memory`` pins each tensor of a batch, in dicts and lists too, without changing a bit.

    Covers loaders with and without a worker process, and batches of 2.4 MB and of some bytes. A non-blocking copy sends
    each batch to the next of `devices`, where it is compared too.
    """
    for features, workers, length in ((4, 0, 9), (LARGE, 0, 2), (LARGE, 1, 3)):
        dataset = Numbered(length, features=features)
        loader = DataLoader(dataset, batch_size=2, pin_memory=True, num_workers=workers)
        what = f"pinned loader, {workers} workers, {features} features"
        expected = batches_of(range(length), 2, False)
        batches = list(loader)
        assert_batches(batches, expected, dataset, what, pinned=True)
        for number, batch in enumerate(batches):
            device = devices[number % len(devices)]
            there = sent(batch, device)
            assert_batch(there, expected[number], dataset, f"{what}: batch {number}, copied to {device}", device)


class _Own:
    """A user's class of samples with its own `pin_memory`, which returns a new object that counts the calls."""

    def __init__(self, samples: torch.Tensor, times: int = 0) -> None:
        self.samples, self.times = samples, times

    def pin_memory(self) -> _Own:
        return _Own(self.samples.pin_memory(), self.times + 1)


class _Two(NamedTuple):
    one: Any
    other: Any


def _own(samples: list[int], place: int) -> _Own:
    return _Own(torch.tensor(samples, device="cpu") * 10 + place)


def _collated(samples: list[int]) -> dict[str, Any]:
    value, one, two, three, four, five, six = (_own(samples, place) for place in range(7))
    return {"value": value, "tuple": (one, [two]), "named tuple": _Two(three, {"inner": four}), "list": [five, six]}


def _alone(samples: list[int]) -> _Own:
    return _own(samples, 0)


def _owned(batch: Any) -> dict[str, Any]:
    """Return name of a place in `_collated` -> object at this place, in the same order."""
    (one, (two,)), (three, four), (five, six) = batch["tuple"], batch["named tuple"], batch["list"]
    return {
        "the value of a dict": batch["value"],
        "a tuple": one,
        "a list in a tuple": two,
        "a named tuple": three,
        "a dict in a named tuple": four["inner"],
        "a list": five,
        "the end of a list": six,
    }


@torchs_own_warnings()
def assert_pinned_by_themselves() -> None:
    """Assert that ``pin_memory`` of a loader calls the method `pin_memory` of an object once, and yields its result.

    The object is the batch itself, or is in dicts, tuples, named tuples and lists. Loaders have a worker process, or
    none.
    """
    length, size = 3, 2
    dataset: Any = range(length)
    ways: tuple[tuple[str, int, Any, Any], ...] = (
        ("nested", 0, _collated, _owned),
        ("nested", 1, _collated, _owned),
        ("alone", 0, _alone, lambda batch: {"the batch": batch}),
    )
    for how, workers, collate, places in ways:
        loader: DataLoader[Any] = DataLoader(
            dataset, batch_size=size, collate_fn=collate, pin_memory=True, num_workers=workers
        )
        for number, (batch, indices) in enumerate(zip(loader, batches_of(range(length), size, False), strict=True)):
            what = f"pinned loader, {workers} workers, batches of a class of one's own, {how}: batch {number}"
            for place, (name, one) in enumerate(places(batch).items()):
                _require_own(one, torch.tensor(indices, device="cpu") * 10 + place, f"{what}, {name}")


def _require_own(one: Any, right: torch.Tensor, what: str) -> None:
    if not isinstance(one, _Own):
        raise ShardError(f"{what}: it is a {type(one).__name__}, expected one of the class that was collated")
    if one.times != 1:
        raise ShardError(f"{what}: it was pinned {one.times} times by its own method, expected once")
    if not one.samples.is_pinned():
        raise ShardError(f"{what}: its tensor is not in pinned memory")
    if not torch.equal(one.samples, right):
        raise ShardError(f"{what}: it holds {one.samples.tolist()}, expected {right.tolist()}")
