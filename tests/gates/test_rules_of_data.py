"""Rules that judge how samples are divided among ranks, by what a step returns."""

from __future__ import annotations

import pytest
import torch

from mgpu_check.diagnosis.observations import Expected, Hypotheses, ObservedRun, Relations, Result
from mgpu_check.diagnosis.rules.data import counted_by_every_rank, samples_several_times
from mgpu_check.diagnosis.tensors import Tensors

SEEN = Result("returned", "seen")


def returned(right, *got):
    """Return the evidence of a step that returns these numbers on one device, and on ranks."""
    runs = [ObservedRun(values={SEEN: torch.tensor(value)}) for value in (right, *got)]
    relations = Relations(held={SEEN: {}}, wrong={SEEN: list(range(len(got)))})
    return Tensors(len(got), 4, 1, Expected(runs[0], None), relations, runs[1:], [], Hypotheses([], []))


@pytest.mark.parametrize(
    ("right", "got", "found"),
    [
        ([1, 1, 1], [2, 0, 1], True),
        ([3, 3], [4, 2], True),
        ([1, 1, 1], [2, 1, 1], False),  # on several, and none is missed
        ([1, 1, 1], [0, 1, 1], False),  # missed, and none is on several
        ([1, 2, 1], [2, 1, 1], False),  # these are no counts of samples
        ([1, 1], [2, 0, 1], False),
        ([[1, 1]], [[2, 0]], False),
        ([1], [2], False),
    ],
)
def test_counts_of_samples_tell_of_a_split_that_differs(right, got, found):
    finding = samples_several_times(returned(right, got, got))
    assert (finding is not None) is found
    assert finding is None or finding.mistake == "split-differs-between-ranks"


@pytest.mark.parametrize(
    ("right", "got", "found"),
    [
        (4, (8, 8), True),
        ([4, 2], ([8, 4], [8, 4]), True),
        (4, (12, 12, 12), True),
        (4, (8, 8, 8), False),
        (4, (8, 4), True),  # as on rank 0
        (4, (4, 8), False),
        (4.0, (8.0, 8.0), False),  # a sum may be off by the world size for other reasons
        (0, (0, 0), False),
        ([4], ([8, 8], [8, 8]), False),
    ],
)
def test_a_count_that_is_too_large_by_the_world_size_is_that_of_all_samples_on_each_rank(right, got, found):
    finding = counted_by_every_rank(returned(right, *got))
    assert (finding is not None) is found
    assert finding is None or finding.mistake == "dataset-not-split"
