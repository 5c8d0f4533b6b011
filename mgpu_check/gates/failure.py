"""What is known of a step that does not scale: facts by type. `gates.telling` puts them into words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from mgpu_check.mistakes.report import Finding

if TYPE_CHECKING:
    from mgpu_check.engine.failures import Account
    from mgpu_check.mistakes.modules import WrongModule
    from mgpu_check.mistakes.observed import Expected, Relations
    from mgpu_check.mistakes.parting import Parting
    from mgpu_check.mistakes.results import Result

__all__ = ["Axes", "Failure", "FirstWrong", "Mismatch", "NoReturn"]


@dataclass(frozen=True)
class Axes:
    """The axes of a mesh that a failure needs.

    Attributes:
        needed: the failure needs each of them ("all"), or any one of them ("any").
        passing: axes with which alone the step passes.
        others: the axes whose size does not matter.
    """

    needed: tuple[str, ...]
    how: Literal["all", "any"]
    passing: tuple[str, ...] = ()
    others: tuple[str, ...] = ()


@dataclass(frozen=True)
class FirstWrong:
    """The first optimizer step that is wrong on a rank.

    Attributes:
        step: from 1.
        result: the first wrong result, in the order of the model; None if the rank does not make the step.
    """

    step: int
    rank: int
    result: Result | None


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A step that does not scale, in its smallest case.

    Attributes:
        name: of the step.
        case: what the smallest case consists of: name -> value.
        findings: the mistakes that explain it, the likeliest first.
        incomplete: parts of the diagnosis that have failed, a line each.
    """

    name: str
    case: Mapping[str, object]
    findings: Sequence[Finding] = ()
    incomplete: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class NoReturn(Failure):
    """Ranks that did not return.

    Attributes:
        account: how the call ended on each rank; None where nothing but the error is known.
        lines: what the error says.
        hung: the time was up; otherwise a rank has raised, or died.
    """

    account: Account | None
    lines: Sequence[str]
    hung: bool

    @property
    def stacks(self) -> list[str]:
        """Where each rank is, a block of text each."""
        return [] if self.account is None else self.account.blocks()


@dataclass(frozen=True, kw_only=True)
class Mismatch(Failure):
    """Ranks that returned, and left something else than one device.

    Attributes:
        size: the world size, or the number of devices of a single process.
        relations: what holds of each result, and what does not.
        expected: what one device leaves.
        patterns: what the first wrong values look like, a line each.
        axes, first, parting, module, factor: see their types; None where unknown. The factor is the one number by which
            all that differs is off.
        of_update: the gradients are right, and the parameters are not.
        wrong_alone: the step differs from the reference at world size 1 already.
        repeated: a second run came to its end.
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
    of_update: bool = False
    wrong_alone: bool = False
    repeated: bool = True
