"""Facts about a step that does not scale, as typed records. `gates.telling` formats them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from mgpu_check.diagnosis.observed import PARITY
from mgpu_check.diagnosis.report import Finding

if TYPE_CHECKING:
    from mgpu_check.diagnosis.modules import WrongModule
    from mgpu_check.diagnosis.observed import Expected, Relations
    from mgpu_check.diagnosis.parting import Parting
    from mgpu_check.diagnosis.results import Result
    from mgpu_check.engine.failures import Account


@dataclass(frozen=True)
class Axes:
    """The axes of a mesh that a failure needs.

    Attributes:
        needed: the axes that the failure needs.
        how: whether it needs all of them together ("all"), or any one of them ("any").
        passing: axes that pass alone: the step passes if only this axis is larger than 1.
        others: axes whose size does not matter.
    """

    needed: tuple[str, ...]
    how: Literal["all", "any"]
    passing: tuple[str, ...] = ()
    others: tuple[str, ...] = ()


@dataclass(frozen=True)
class FirstWrong:
    """The first optimizer step that is wrong on a rank.

    Attributes:
        step: number of the step, from 1.
        result: the first wrong result, in the order of the model; None if the rank skips the step.
    """

    step: int
    rank: int
    result: Result | None


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A step that does not scale, in its smallest case.

    Attributes:
        case: the smallest case, as name -> value.
        findings: the mistakes that explain the failure, the likeliest first.
        incomplete: failed parts of the diagnosis, a line each.
        defined: the line where the step is defined; "" if it is unknown.
        verdict: which configurations disagree; "" for a step that does not scale.
        against: what the results are compared with.
    """

    name: str
    case: Mapping[str, object]
    findings: Sequence[Finding] = ()
    incomplete: Sequence[str] = ()
    defined: str = ""
    verdict: str = ""
    against: str = PARITY


@dataclass(frozen=True, kw_only=True)
class NoReturn(Failure):
    """Ranks that did not return.

    Attributes:
        account: how the call ended on each rank; None if only the error is known.
        hung: True if the time ran out; False if a rank raised or died.
    """

    account: Account | None
    lines: Sequence[str]
    hung: bool

    @property
    def stacks(self) -> list[str]:
        return [] if self.account is None else self.account.blocks()


@dataclass(frozen=True, kw_only=True)
class Mismatch(Failure):
    """Ranks that returned with other results than one device.

    Attributes:
        size: the world size, or the number of devices of a single process.
        patterns: descriptions of the first wrong values, a line each.
        axes, first, parting, module: see their types; None if unknown.
        factor: the one factor of all results in `factor_of`; None if unknown.
        of_update: the gradients are right and the parameters are wrong.
        wrong_alone: the step already differs from the reference at world size 1.
        repeated: a second run completed.
    """

    size: int
    single_process: bool
    relations: Relations
    expected: Expected
    patterns: Sequence[str] = ()
    axes: Axes | None = None
    first: FirstWrong | None = None
    parting: Parting | None = None
    module: WrongModule | None = None
    factor: float | None = None
    factor_of: Sequence[Result] = ()
    of_update: bool = False
    wrong_alone: bool = False
    repeated: bool = True
