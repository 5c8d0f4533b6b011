"""Facts about a step that does not scale, as typed records, and their report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast

from mgpu_check.diagnosis.divergence import Parting, WrongModule
from mgpu_check.diagnosis.observations import PARITY, Expected, Relations, Result
from mgpu_check.diagnosis.report import Finding, Observable, Report
from mgpu_check.engine.failures import Account
from mgpu_check.errors import RankHang
from mgpu_check.processes.rank_lists import few, grouped, named


@dataclass(frozen=True)
class Axes:
    """The axes of a mesh that a failure needs."""

    needed: tuple[str, ...]  # the axes that the failure needs
    how: Literal["all", "any"]  # whether it needs all of them together ("all"), or any one of them ("any")
    passing: tuple[str, ...] = ()  # axes that pass alone: the step passes if only this axis is larger than 1
    others: tuple[str, ...] = ()  # axes whose size does not matter


@dataclass(frozen=True)
class FirstWrong:
    """The first optimizer step that is wrong on a rank."""

    step: int  # number of the step, from 1
    rank: int
    result: Result | None  # the first wrong result, in the order of the model; None if the rank skips the step


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A step that does not scale, in its smallest case.

    `failure_of` and `no_return_of` make it, a gate may replace its verdict, and `report_of` turns it into the report.
    """

    name: str
    case: Mapping[str, object]  # the smallest case, as name -> value
    findings: Sequence[Finding] = ()  # the mistakes that explain the failure, the likeliest first
    incomplete: Sequence[str] = ()  # failed parts of the diagnosis, a line each
    defined: str = ""  # the line where the step is defined; "" if it is unknown
    verdict: str = ""  # which configurations disagree; "" for a step that does not scale
    against: str = PARITY  # what the results are compared with

    @property
    def heading(self) -> str:
        return self.verdict or f"{self.name} does not scale"


@dataclass(frozen=True, kw_only=True)
class NoReturn(Failure):
    """Ranks that did not return."""

    account: Account | None  # how the call ended on each rank; None if only the error is known
    lines: Sequence[str]
    hung: bool  # True if the time ran out; False if a rank raised or died

    @property
    def stacks(self) -> list[str]:
        return [] if self.account is None else self.account.blocks()


@dataclass(frozen=True, kw_only=True)
class Mismatch(Failure):
    """Ranks that returned with other results than one device."""

    size: int  # the world size, or the number of devices of a single process
    single_process: bool
    relations: Relations
    expected: Expected
    patterns: Sequence[str] = ()  # descriptions of the first wrong values, a line each
    casts: Sequence[str] = ()  # what casts to float8 have lost, a line for each dtype
    # axes, first_wrong, parting, module: see their types; None if unknown.
    axes: Axes | None = None
    first_wrong: FirstWrong | None = None
    parting: Parting | None = None
    module: WrongModule | None = None
    factor: float | None = None  # the one factor of all results in `factor_of`; None if unknown
    factor_of: Sequence[Result] = ()
    of_update: bool = False  # the gradients are right and the parameters are wrong
    wrong_alone: bool = False  # the step already differs from the reference at world size 1
    repeated: bool = True  # a second run completed
    effort: str = ""  # the further cases and the changed runs of the diagnosis, and their time


_SHOWN = 8  # most ranks, or groups of ranks, whose values a report shows


def report_of(failure: Failure) -> Report:
    return _of_no_return(failure) if isinstance(failure, NoReturn) else _of_mismatch(cast(Mismatch, failure))


def _of_no_return(failure: NoReturn) -> Report:
    account, site = failure.account, ""
    if account is not None:
        # The first call that differs between ranks, or the last call of the first rank.
        entered = next(iter((account.parted or account.last).values()), None)
        site = entered.site if entered is not None and entered.file else ""
    headline, *rest = failure.lines
    ends = ["terminates: NO"] if failure.hung or account is None or not account.instead else []
    if ends and not failure.hung and failure.against != failure.name:
        ends = [f"terminates: NO, though it does on {failure.against}"]
    return Report(
        f"{failure.heading}: {headline}",
        failure.case,
        findings=failure.findings,
        remarks=[*ends, *rest, *failure.incomplete],
        place=site or failure.defined,
    )


def late_hang(failure: NoReturn, hang: RankHang) -> RankHang:
    """Return a new error with the report of a hang, because the engine rewrites its own when it is shown."""
    report = report_of(failure)
    late = RankHang("\n\n".join([str(report), *failure.stacks]), ranks=hang.ranks)
    late.mistakes, late.site = report.mistakes, report.site
    return late


def _of_mismatch(failure: Mismatch) -> Report:
    relations = failure.relations
    return Report(
        f"{failure.heading}: {_what_differs(failure)}",
        failure.case,
        [
            Observable(
                str(name),
                {failure.against if relation == PARITY else relation: holds for relation, holds in verdicts.items()},
                relations.details.get(name, ""),
            )
            for name, verdicts in relations.held.items()
        ],
        failure.findings,
        [*_remarks(failure), *failure.incomplete],
        parting="" if failure.parting is None else _parting(failure.parting),
        known=[] if failure.findings else list(_known(failure)),
        axes="" if failure.axes is None else _axes(failure.axes),
        place=(failure.parting.site if failure.parting is not None else "") or failure.defined,
    )


def _what_differs(failure: Mismatch) -> str:
    verdicts, broken = failure.relations.held, failure.relations.broken
    parted = sum(verdicts[name].get(PARITY) is False for name in broken)
    if parted:
        unit = "device" if failure.single_process else "rank"
        devices = f"{failure.size} {unit}{'' if failure.size == 1 else 's'}"
        summary = f"{parted} of {len(verdicts)} results on {devices} differ from {failure.against}"
    else:
        summary = f"{len(broken)} of {len(verdicts)} results differ between ranks, or from run to run"
    return summary + _where_first(failure, broken)


def _where_first(failure: Mismatch, broken: Sequence[Result]) -> str:
    first_wrong = failure.first_wrong
    if first_wrong is None:
        return f", first {broken[0]}" if broken else ""
    if first_wrong.result is None:
        return f", first optimizer step {first_wrong.step}, which rank {first_wrong.rank} does not do"
    return f", first {first_wrong.result} in optimizer step {first_wrong.step} on rank {first_wrong.rank}"


def _axes(axes: Axes) -> str:
    if axes.how == "all":
        return f"fails only when {' and '.join(axes.needed)} > 1 together; passes with each alone"
    if len(axes.needed) > 1:
        return f"fails when {' or '.join(axes.needed)} > 1, each by itself"
    summary = f"fails when {axes.needed[0]} > 1, for any {' and '.join(axes.others)}"
    return summary + (f"; passes with {' and '.join(axes.passing)} alone" if axes.passing else "")


def _known(failure: Mismatch) -> Iterator[str]:
    if failure.of_update:
        yield "gradients are right; what the optimizer makes of them is not"
    if failure.module is not None:
        module = failure.module
        before = "" if module.what == "output" else "outputs of modules are right; "
        subject = f"{module.name}, on {named(module.ranks)}"
        yield f"{before}the first module whose {module.what} is not that of {failure.against} is {subject}"
    if failure.factor is not None:
        verb = "is" if len(failure.factor_of) == 1 else "are"
        yield f"{few(failure.factor_of)} {verb} {failure.factor:.6g} times what {failure.against} gives"


def _parting(parting: Parting) -> str:
    at = f" {'after' if parting.after else 'at'} {parting.site}" if parting.site else ""
    each = [f"{value} on {named(ranks)}" for value, ranks in grouped((v, r) for r, v in enumerate(parting.values))]
    return f"ranks first part{at}, in {parting.what}: {few(each, _SHOWN)}"


def _remarks(failure: Mismatch) -> Iterator[str]:
    relations = failure.relations
    yield "terminates: yes"
    if not failure.findings:
        yield from failure.patterns
    yield from failure.casts
    if failure.wrong_alone:
        yield "the step differs from the reference at world size 1 already"
    yield from sorted({f"not compared: {reason}" for reason in relations.left_out.values()})
    skipped = {name: reason for name, reason in relations.skipped.items() if name.kind not in relations.left_out}
    for label, reasons in (("not compared", skipped), ("local", relations.local)):
        by_reason = grouped((reason, name) for name, reason in reasons.items())
        yield from (f"{label}: {few(result_names)}: {reason}" for reason, result_names in by_reason)
    yield from (f"{name} is divided: {placement}" for name, placement in relations.placements.items())
    if len(relations.streams) > 1:
        groups = "; ".join(named(ranks) for ranks in relations.streams)
        yield f"random numbers: the CPU generators of ranks are in different states in the end ({groups})"
    if not failure.repeated:
        yield "a second run fails"
    if failure.effort:
        yield failure.effort
    yield from failure.expected.remarks
