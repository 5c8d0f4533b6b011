"""Defects of splits of datasets, and of resumed epochs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import (
    ConcatDataset,
    RandomSampler,
    Subset,
)

from mgpu_check.suite.common.faults.registry import fault
from mgpu_check.suite.recipes import loading
from mgpu_check.torch_hooks.patches import replaced


@fault("random_split ignores its generator, so ranks split the dataset differently", "test_datasets_are_divided")
def split_by_the_global_generator() -> Iterator[None]:
    """One rank validates on samples that another rank trains on."""
    real = torch.randperm

    def randperm(n: int, *args: Any, generator: Any = None, **named: Any) -> torch.Tensor:
        return real(n, *args, **named)

    with replaced(torch, "randperm", randperm), replaced(torch.utils.data.dataset, "randperm", randperm):
        yield


@fault(
    "ConcatDataset returns the previous sample for the first sample of a later part",
    "test_datasets_are_divided",
    condition="first samples of later parts",
)
def seam_off_by_one() -> Iterator[None]:
    """As with a bisection from the wrong side."""
    real = ConcatDataset.__getitem__

    def changed(self: Any, index: int) -> Any:
        return real(self, index - 1 if index in self.cumulative_sizes[:-1] and index else index)

    with replaced(ConcatDataset, "__getitem__", changed):
        yield


@fault(
    "samples of a part are indexed in the whole dataset",
    "test_datasets_are_divided",
    condition="parts that were divided by random_split",
)
def part_forgets_its_indices() -> Iterator[None]:
    """Each part is a prefix of the dataset."""

    def changed(self: Any, index: Any) -> Any:
        return self.dataset[index]

    with replaced(Subset, "__getitem__", changed):
        yield


@fault("a sampler does not draw from its restored generator", "test_epochs_are_resumed", condition="after a checkpoint")
def restored_generator_ignored() -> Iterator[None]:
    """A resumed epoch has another order: some samples are repeated and others are missing."""
    real = RandomSampler.__iter__

    def changed(self: Any) -> Iterator[int]:
        given, self.generator = self.generator, torch.Generator().manual_seed(int(torch.rand(()) * 1e6))
        try:
            yield from list(real(self))
        finally:
            self.generator = given

    with replaced(RandomSampler, "__iter__", changed):
        yield


@fault(
    "a resumed loader starts one batch too early",
    "test_epochs_are_resumed",
    condition="resumed after the first batch or later",
)
def resumed_a_batch_too_early() -> Iterator[None]:
    """The last batch before the checkpoint is trained on twice."""
    real = loading.ResumableSampler.load_state_dict

    def changed(self: Any, state: dict[str, int]) -> None:
        real(self, {**state, "start": max(0, state["start"] - 2)})

    with replaced(loading.ResumableSampler, "load_state_dict", changed):
        yield


@fault(
    "batches of a nested Subset ignore the inner Subset",
    "test_datasets_are_divided",
    condition="Subset of a Subset, batches",
)
def inner_parts_skipped() -> Iterator[None]:
    """Single samples are right."""
    real = Subset.__getitems__

    def items(self: Any, places: list[int]) -> Any:
        if isinstance(self.dataset, Subset):
            return [self.dataset.dataset[self.indices[place]] for place in places]
        return real(self, places)

    with replaced(Subset, "__getitems__", items):
        yield
