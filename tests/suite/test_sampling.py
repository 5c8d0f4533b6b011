"""The checks of samplers name what is wrong, and at whose place."""

from __future__ import annotations

import pytest

from mgpu_check.errors import ShardError
from mgpu_check.suite.common.faults.registry import planted
from mgpu_check.suite.loading.checks import assert_sampler_shuffles, assert_shares


@pytest.mark.parametrize(
    ("shares", "drop_last", "at_fault", "words"),
    [
        ([[0, 2, 4], [1, 3]], False, (1,), "rank 1 of 2 has 2 of 5 samples, expected 3"),
        ([[0, 2, 4], [1, 3, 5]], False, (1,), "rank 1 of 2 has 5, not an index of 5 samples"),
        ([[0, 2, 2], [1, 3, 4]], False, (0,), "rank 0 of 2 has sample 2 twice"),
        ([[0, 1, 2], [1, 2, 3]], False, (), "sample 4 of 5 is there 0 times over 2 ranks"),
        ([[0, 1], [0, 2]], True, (0, 1), r"sample 0 of 5 is there 2 times over 2 ranks \(on rank 0, rank 1\)"),
    ],
)
def test_wrong_shares_are_named(
    shares: list[list[int]], drop_last: bool, at_fault: tuple[int, ...], words: str
) -> None:
    with pytest.raises(ShardError, match=words) as caught:
        assert_shares(shares, 5, drop_last=drop_last, label="a sampler")
    assert caught.value.ranks == at_fault


def test_right_shares_pass() -> None:
    assert_shares([[0, 2, 4], [1, 3, 0]], 5, drop_last=False, label="padded")
    assert_shares([[0, 2], [1, 3]], 5, drop_last=True, label="dropped")
    assert_shares([[], []], 0, drop_last=False, label="empty")
    assert_shares([[0], [1], [0], [1], [0]], 2, drop_last=False, label="fewer samples than ranks")


def test_equal_epochs_are_named() -> None:
    with (
        planted("epochs-alike-with-a-dropped-tail"),
        pytest.raises(ShardError, match=r"drop_last=True.* has the order"),
    ):
        assert_sampler_shuffles(2, 0)
