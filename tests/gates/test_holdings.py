"""Copies of what a rank holds of a tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mgpu_check.gates.run.shards import Held


class Divided:
    """Stands for a DTensor: a value with a placement, of which this rank has some rows."""

    def __init__(self, placements: tuple[str, ...], rows: list[float]) -> None:
        self.placements, self.rows = placements, torch.tensor(rows)

    def redistribute(self, placements: tuple[str, ...]) -> Divided:
        return Divided(placements, [10 * row for row in self.rows.tolist()])

    def to_local(self) -> torch.Tensor:
        return self.rows

    def detach(self) -> Divided:
        return self

    def full_tensor(self) -> torch.Tensor:
        return torch.tensor([0.0, *self.rows.tolist()])


SHARDED, PARTIAL = ("shard",), ("partial",)


@pytest.mark.parametrize(
    ("local", "value", "copied"),
    [
        pytest.param(True, Divided(SHARDED, [1.0, 2.0]), [1.0, 2.0], id="as the tensor"),
        pytest.param(True, Divided(PARTIAL, [1.0, 2.0]), [10.0, 20.0], id="a gradient that is not reduced"),
        pytest.param(True, torch.tensor([3.0]), [3.0], id="a plain tensor"),
        pytest.param(False, Divided(SHARDED, [1.0, 2.0]), [0.0, 1.0, 2.0], id="placed as a whole"),
        pytest.param(False, torch.tensor([3.0]), [3.0], id="a plain tensor, placed as a whole"),
    ],
)
def test_a_copy_has_the_part_that_was_placed(local, value, copied):
    tensor: Any = Divided(SHARDED, [5.0, 6.0])
    held = Held("params", "w", tensor, local=local)
    assert held.copy_of(value).tolist() == copied
