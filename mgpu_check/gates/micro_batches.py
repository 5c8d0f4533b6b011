"""Find out into how many micro-batches a step divides its part of a batch."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from mgpu_check.errors import RankFailure, RankHang
from mgpu_check.gates.program import Program
from mgpu_check.gates.running import run_step
from mgpu_check.gates.scenario import Scenario
from mgpu_check.gates.worlds import RanksFixture

_SAMPLES = (12, 24, 48)
"""Batch sizes to try, each twice the one before: divisible by 1, 2, 3, 4, 6 and 12 micro-batches, then by 8 and 16."""


def micro_batches_of(ranks: RanksFixture, program: Program) -> int:
    """Return the number of samples that a rank's part must be divisible by, as runs on one device show it.

    It is the number of backward passes, if that does not depend on the number of samples; or the size of a micro-batch,
    if the passes grow with the samples. 1 if the step makes one pass, if it does not run alone, or if neither is so.
    """
    alone = replace(program, reference=None)
    passes: list[int] = []
    try:
        for samples in _SAMPLES:
            passes.append(ranks.run(run_step, alone, Scenario(1, samples), size=1)[0].backwards)
            if passes[-1] < 2 or passes[-2:-1] == passes[-1:]:
                return max(1, passes[-1])
    except (RankFailure, RankHang):
        return 1
    grows = all(more == 2 * fewer for fewer, more in pairwise(passes))
    return _SAMPLES[0] // passes[0] if grows else 1
