"""The check of samplers that draw passes on torch's own, and names the sampler that draws wrongly."""

from __future__ import annotations

import pytest

from mgpu_check.errors import ShardError
from mgpu_check.suite.common.faults.registry import planted
from mgpu_check.suite.loading.samplers import assert_samplers_draw


def test_samplers_of_torch_pass() -> None:
    for seed in (0, 1, 1 << 31):
        assert_samplers_draw(seed)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("generator-begins-anew", "RandomSampler: epochs 0 and 1 have the same order"),
        (
            "weights-drawn-globally",
            "WeightedRandomSampler without replacement: it draws from torch's global generator",
        ),
        ("epochs-alike-with-a-dropped-tail", r"drop_last=True: set_epoch\(1\) does not change the order"),
    ],
)
def test_samplers_that_draw_wrongly_are_named(fault: str, words: str) -> None:
    with planted(fault), pytest.raises(ShardError, match=words):
        assert_samplers_draw(0)
