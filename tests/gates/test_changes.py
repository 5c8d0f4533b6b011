"""Batches: the seeds under which they are made, and what a gate changes of them to provoke mistakes."""

from __future__ import annotations

import random
from typing import Any

import numpy
import pytest
import torch

from mgpu_check.gates.search.scenarios import changed, has_padding, make_batches, samples_in

VALUES = torch.tensor([[3.0, 1.0], [1.0, 5.0], [2.0, 0.0], [4.0, 4.0], [0.0, 2.0]])
LABELS = torch.tensor([3, 1, 2, 4, 0])
SHARED = torch.tensor([7.0, 8.0, 9.0])  # no samples: weights of classes, say
SCALAR = torch.tensor(0.5)
MASK = torch.tensor([[1, 1, 1, 0]] * 3 + [[0, 1, 1, 1], [1, 1, 1, 1]])
TOKENS = torch.tensor([[4, 5, 6, -100]] * 3 + [[-100, 5, 6, 7], [4, 5, 6, 7]])


@pytest.mark.parametrize(
    ("change", "values", "labels"),
    [
        ("scaled", 1024 * VALUES, LABELS),
        ("ragged", VALUES, LABELS),  # there is no padding
        ("duplicated", VALUES[[0, 1, 2, 0, 1]], LABELS[[0, 1, 2, 0, 1]]),
        ("sorted", VALUES[[4, 1, 2, 0, 3]], LABELS[[4, 1, 2, 0, 3]]),
    ],
)
def test_samples_change_together_and_nothing_else_does(change, values, labels):
    before: dict[str, Any] = {"x": VALUES.clone(), "of": [LABELS.clone(), SHARED.clone()], "rate": SCALAR, "name": "a"}
    found = changed(before, change)
    assert found["x"].equal(values) and found["of"][0].equal(labels)
    assert found["of"][1].equal(SHARED) and found["rate"] == SCALAR and found["name"] == "a"
    assert before["x"].equal(VALUES)  # the batch itself is as it was


def test_a_permutation_depends_on_its_seed_alone():
    orders = [changed((VALUES, LABELS), "permuted", seed=seed) for seed in (1, 1, 2, 3)]
    assert all(sorted(labels.tolist()) == [0, 1, 2, 3, 4] for _, labels in orders)
    assert all(values[:, 0].equal(labels.float()) for values, labels in orders)  # sample by sample
    assert orders[0][1].equal(orders[1][1])
    assert len({tuple(labels.tolist()) for _, labels in orders}) > 1


@pytest.mark.parametrize(
    "batch",
    [(torch.empty(0, 2),), (torch.tensor([1 + 1j, 0j]),), (torch.empty(3, 0),)],
    ids=["no samples", "complex", "no values"],
)
def test_what_has_no_order_is_left_alone(batch):
    assert changed(batch, "sorted")[0].equal(batch[0])


def test_masks_and_labels_are_cut_alike():
    seen = set()
    for seed in range(40):
        mask, tokens, values = changed((MASK, TOKENS, VALUES), "ragged", seed=seed)
        assert values.equal(VALUES)
        lengths = mask.sum(1)
        seen |= set(lengths.tolist())
        assert (tokens != -100).equal(mask == 1)
        for row, was in zip(tokens, TOKENS, strict=True):
            kept, valid = row[row != -100], was[was != -100]
            assert len(kept) >= 1 and kept.equal(valid[: len(kept)])  # the first positions stay
    assert seen == {1, 2, 3, 4}


def test_ranks_have_unlike_counts_of_what_is_cut():
    whole = torch.ones(4, 9)
    for seed in range(40):
        lengths = changed((whole,), "ragged", seed=seed)[0].sum(1)
        for size in (2, 3, 4):
            for parts in (lengths.tensor_split(size), [lengths[rank::size] for rank in range(size)]):
                assert len({int(part.sum()) for part in parts}) > 1
    assert changed((torch.ones(1, 4),), "ragged")[0].sum() >= 1  # one sample has no ranks to differ
    assert changed((whole[:0],), "ragged")[0].shape == (0, 9)


@pytest.mark.parametrize(
    ("tensor", "padded"),
    [
        (MASK, True),
        (MASK.bool(), True),
        (MASK.float(), True),
        (torch.zeros(3, 4).long(), False),  # no position is valid
        (MASK[:, :2], False),  # two columns of zeros and ones are labels, say
        (MASK[0], False),
        (TOKENS, True),
        (TOKENS[-1:], False),
        (TOKENS.float(), False),
        (VALUES, False),
    ],
    ids=lambda value: "" if isinstance(value, bool) else str(value.dtype),
)
def test_masks_and_padded_labels_are_known(tensor, padded):
    assert has_padding({"x": VALUES, "it": tensor}) is padded


@pytest.mark.parametrize(
    ("batch", "count"),
    [
        ((VALUES, LABELS, SHARED), 5),
        ((SHARED, VALUES, LABELS), 5),
        ((SHARED, VALUES), 3),  # a tie
        ((SCALAR,), 0),
        ((), 0),
    ],
)
def test_the_length_of_most_tensors_counts_samples(batch, count):
    assert samples_in(batch) == count


def test_each_step_has_a_batch_of_its_own_seed():
    def batch(n):
        return (torch.rand(n, 2) + random.random() + numpy.random.rand(),)

    one, again = (make_batches(batch, (), 3, 2, "", 2.0, 4) for _ in range(2))
    assert [made[0].shape for made in one] == [(3, 2)] * 2
    assert all(made[0].equal(other[0]) for made, other in zip(one, again, strict=True))
    assert not one[0][0].equal(one[1][0])
    assert not one[0][0].equal(make_batches(batch, (), 3, 1, "", 2.0, 5)[0][0])
    (scaled,) = make_batches(batch, (), 3, 1, "scaled", 2.0, 4)
    assert scaled[0].equal(2.0 * one[0][0])
    assert make_batches(None, [(VALUES,), (LABELS,)], 0, 2, "", 2.0, 4) == [(VALUES,), (LABELS,)]
