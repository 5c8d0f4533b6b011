"""A reduction that makes a new tensor leaves what it was given."""

from __future__ import annotations

import pytest
import torch

from mgpu_check.asserts.collectives import assert_contributions_kept
from mgpu_check.errors import AllreduceMismatch


def test_contributions_that_changed_are_named() -> None:
    parts = [torch.tensor([1.0, float("nan")]), torch.tensor([2.0, 3.0]), torch.tensor([0.0, 4.0])]
    placed = [part.clone() for part in parts]
    assert_contributions_kept(placed, parts)
    placed[2][0] = -0.0
    with pytest.raises(AllreduceMismatch, match="reduce_add: the input of rank 2 has changed") as caught:
        assert_contributions_kept(placed, parts, what="reduce_add")
    assert caught.value.ranks == (2,)
