"""The check of subgroups works in worlds of any size."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.errors import CollectiveMismatch
from mgpu_check.suite.collectives.groups import assert_subgroups_divide


@pytest.fixture
def last_of_many() -> Iterator[Rank]:
    """The last of 64 ranks, whose collectives leave what each has: the others are not there."""
    dist.init_process_group("fake", store=FakeStore(), rank=63, world_size=64)
    yield Rank(63, 64, 63, 0, torch.device("cpu"))
    dist.destroy_process_group()


def test_a_sum_that_lacks_members_is_named_in_a_large_world(last_of_many: Rank) -> None:
    with pytest.raises(CollectiveMismatch, match=r"new_subgroups of 32: .*does not sum exactly its members"):
        assert_subgroups_divide(last_of_many)
