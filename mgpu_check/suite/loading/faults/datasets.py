"""Defects of splits of datasets, and of resumed epochs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import ConcatDataset, RandomSampler, Subset

from mgpu_check.suite.common.faults.breaking import around, given
from mgpu_check.suite.common.faults.registry import FaultRow, fault, register
from mgpu_check.suite.common.faults.when import When
from mgpu_check.suite.recipes import loading
from mgpu_check.torch_hooks.patches import replaced

_NESTED = When("Subset of a Subset, batches", lambda real, self, places: isinstance(self.dataset, Subset))


@fault("random_split ignores its generator, so ranks split the dataset differently", "test_datasets_are_divided")
def split_by_the_global_generator() -> Iterator[None]:
    """One rank validates on samples that another rank trains on."""
    real = torch.randperm

    def randperm(n: int, *args: Any, generator: Any = None, **named: Any) -> torch.Tensor:
        return real(n, *args, **named)

    with replaced(torch, "randperm", randperm), replaced(torch.utils.data.dataset, "randperm", randperm):
        yield


@fault("a sampler does not draw from its restored generator", "test_epochs_are_resumed",
       by=around(RandomSampler, "__iter__"), when="after a checkpoint")  # fmt: skip
def restored_generator_ignored(real: Any, self: Any) -> Iterator[int]:
    """A resumed epoch has another order: some samples are repeated and others are missing."""
    given, self.generator = self.generator, torch.Generator().manual_seed(int(torch.rand(()) * 1e6))
    try:
        yield from list(real(self))
    finally:
        self.generator = given


register(
    __name__,
    # As with a bisection from the wrong side.
    FaultRow("seam-off-by-one", "ConcatDataset returns the previous sample for the first sample of a later part",
        "test_datasets_are_divided", given(ConcatDataset, "__getitem__"), lambda self, index: (self, index - 1),
        When("first samples of later parts", lambda self, index: index > 0 and index in self.cumulative_sizes[:-1])),
    # Each part is a prefix of the dataset.
    FaultRow("part-forgets-its-indices", "samples of a part are indexed in the whole dataset",
        "test_datasets_are_divided", around(Subset, "__getitem__"), lambda real, self, index: self.dataset[index],
        "parts that were divided by random_split"),
    # Single samples are right.
    FaultRow("inner-parts-skipped", "batches of a nested Subset ignore the inner Subset", "test_datasets_are_divided",
        around(Subset, "__getitems__"),
        lambda real, self, places: [self.dataset.dataset[self.indices[place]] for place in places], _NESTED),
    # The last batch before the checkpoint is trained on twice.
    FaultRow("resumed-a-batch-too-early", "a resumed loader starts one batch too early", "test_epochs_are_resumed",
        given(loading.ResumableSampler, "load_state_dict"),
        lambda self, state: (self, {**state, "start": max(0, state["start"] - 2)}),
        "resumed after the first batch or later"),
)  # fmt: skip
