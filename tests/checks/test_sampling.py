"""The checks of samplers and of launched scripts name what is wrong, and at whose place."""

from __future__ import annotations

from typing import Any

import pytest

from mgpu_check.checks.launching import Launched, assert_trained, speed_of
from mgpu_check.checks.sampling import assert_shares
from mgpu_check.errors import CheckFailure, ShardError


@pytest.mark.parametrize(
    ("shares", "drop_last", "at_fault", "words"),
    [
        ([[0, 2, 4], [1, 3]], False, (1,), "rank 1 of 2 has 2 of 5 samples, expected 3"),
        ([[0, 2, 4], [1, 3, 5]], False, (1,), "rank 1 of 2 has 5, which is none of 5 samples"),
        ([[0, 2, 2], [1, 3, 4]], False, (0,), "rank 0 of 2 has sample 2 twice"),
        ([[0, 1, 2], [1, 2, 3]], False, (), "sample 4 of 5 is there 0 times over 2 ranks"),
        ([[0, 1], [0, 2]], True, (0, 1), r"sample 0 of 5 is there 2 times over 2 ranks \(on rank 0, rank 1\)"),
    ],
)
def test_wrong_shares_are_named(
    shares: list[list[int]], drop_last: bool, at_fault: tuple[int, ...], words: str
) -> None:
    with pytest.raises(ShardError, match=words) as caught:
        assert_shares(shares, 5, drop_last=drop_last, what="a sampler")
    assert caught.value.ranks == at_fault


def test_right_shares_pass() -> None:
    assert_shares([[0, 2, 4], [1, 3, 0]], 5, drop_last=False, what="padded")
    assert_shares([[0, 2], [1, 3]], 5, drop_last=True, what="dropped")
    assert_shares([[], []], 0, drop_last=False, what="empty")
    assert_shares([[0], [1], [0], [1], [0]], 2, drop_last=False, what="fewer samples than ranks")


def run(world: int, **changed: Any) -> Launched:
    told = [
        {
            "rank": rank,
            "world_size": world,
            "device": f"cuda:{rank}",
            "current_device": rank,
            "environment": {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
            | {"LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"},
            "losses": [1.0, 0.4],
            "seconds": [9.0, 2.0 / world, 2.0 / world],
            "parameters": "a",
        }
        for rank in range(world)
    ]
    told[-1] |= changed
    return Launched(tuple(told))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"device": "cuda:0"}, "rank 1 of 2: device is 'cuda:0', expected 'cuda:1'"),
        ({"parameters": "b"}, "rank 1 ended with other parameters than rank 0: b, rank 0 a"),
        ({"losses": [1.0, 0.3]}, "rank 1 ended with other losses"),
    ],
)
def test_wrong_ranks_are_named(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckFailure, match=words) as caught:
        assert_trained("torchrun", [run(1), run(2, **changed)])
    assert caught.value.ranks == (1,)


def test_losses_are_those_of_one_device_and_fall() -> None:
    assert_trained("torchrun", [run(1), run(2)])
    with pytest.raises(CheckFailure, match=r"the loss of epoch 1 is 0.4 on 2 ranks, but 0.3 on 1"):
        assert_trained("torchrun", [run(1, losses=[1.0, 0.3]), run(2)])
    with pytest.raises(CheckFailure, match="the loss does not fall to its half"):
        assert_trained("torchrun", [run(1, losses=[1.0, 0.9])])


def test_speed_is_claimed_for_real_devices_only() -> None:
    runs = [run(1), run(4)]
    assert speed_of(runs, simulated=False).endswith("4.00 times as fast, efficiency 100%")
    assert "times as fast" not in speed_of(runs, simulated=True)
