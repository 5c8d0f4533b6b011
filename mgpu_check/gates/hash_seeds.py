"""Try one case of a gate on ranks with different hash seeds, as torchrun starts them, if the code under test uses sets.

The ranks of a gate are forks of one interpreter, so all of them iterate over a set of texts in the same order.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, cast

from mgpu_check.diagnosis.evidence import HashSeeds
from mgpu_check.diagnosis.report import Report
from mgpu_check.engine import hash_seeds
from mgpu_check.errors import CheckFailure, RankFailure, RankHang, ScalingMismatch
from mgpu_check.gates.sets_used import sets_used
from mgpu_check.gates.worlds import RanksFixture
from mgpu_check.processes.rank_lists import few

_SHOWN = 3
_LONGEST = 300


def with_seeds_apart(
    ranks: RanksFixture,
    gate: str,
    functions: tuple[object, ...],
    case: Mapping[str, object],
    judge: Callable[[RanksFixture], None],
) -> None:
    """Judge a case again with different hash seeds, if the code under test uses sets.

    A failure counts only if it occurs twice, and if the same case passes in between with one seed. A hang counts at
    once, because waiting for it twice takes too long.

    Args:
        judge: runs the case on the given ranks and raises an error if it fails; it has passed with one hash seed.
    """
    if ranks._seeds_apart or not (used := sets_used(functions)):
        return
    if seed := hash_seeds.given(os.environ):
        ranks._remark(
            f"{gate}: different hash seeds on ranks were not tried, because {hash_seeds.VARIABLE}={seed} fixes the seed"
        )
        return
    apart = cast(RanksFixture, _Apart(ranks))
    failed = _failure(judge, apart)
    if failed is None:
        return
    judge(ranks)
    if not isinstance(failed, RankHang) and _failure(judge, apart) is None:
        return  # the failure is intermittent, and does not depend on the seeds
    from mgpu_check.diagnosis.rules.order import findings_of_hash_seeds  # here, because few gates need its rules

    what = (str(failed).splitlines() or [type(failed).__name__])[0]
    told = (
        f"the case passes if all ranks share one hash seed; with a seed for each rank, {what[:_LONGEST]}; sets are "
        f"used in {few(used, _SHOWN)}"
    )
    report = Report(
        f"{gate}: ranks with different hash seeds fail, as they have them under torchrun: {what}",
        case,
        findings=findings_of_hash_seeds(HashSeeds(told)),
        remarks=["with one hash seed on all ranks the same case passes"],
        place=getattr(failed, "site", ""),
    )
    wrong = getattr(failed, "ranks", ())
    if isinstance(failed, RankHang):
        late = RankHang(str(report), ranks=wrong)
        late.mistakes, late.site = report.mistakes, report.site
        raise late from None
    raise ScalingMismatch(str(report), ranks=wrong, mistakes=report.mistakes, site=report.site) from failed


def _failure(judge: Callable[[RanksFixture], None], ranks: RanksFixture) -> BaseException | None:
    try:
        judge(ranks)
    except (CheckFailure, RankFailure, RankHang, ValueError) as error:
        return error
    return None


class _Apart:
    """The fixture `ranks`, with different hash seeds on the ranks of one world."""

    def __init__(self, ranks: RanksFixture) -> None:
        self._ranks = ranks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ranks, name)

    def run(self, *args: Any, size: int | None = None, **kwargs: Any) -> list[Any]:
        environment = None if size == 1 else hash_seeds.APART
        return self._ranks.run(*args, size=size, environment=environment, **kwargs)
