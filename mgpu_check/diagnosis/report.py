"""Read the table of mistakes, register the rules that recognize them in evidence, and write the report of a failure:
the smallest case, the likely causes, and every observable with its relations.

Each module of `mgpu_check/diagnosis/rules/` registers the rules of one theme; ``mistakes.toml`` has the mistakes. A
verdict whose diagnosis fails is kept: the report names the part that failed, and the other parts are attempted.
"""

from __future__ import annotations

import functools
import os
import tomllib
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from typing import TYPE_CHECKING, Generic, ParamSpec, TypeVar

from mgpu_check.errors import RankHang
from mgpu_check.processes.rank_lists import few

if TYPE_CHECKING:
    from mgpu_check.diagnosis.evidence import EpochSamples, Evidence, HashSeeds, Loader, Restored, UnfinishedCall
    from mgpu_check.diagnosis.tensors import Tensors


_SHOWN_OBSERVABLES = 12
_MARKS = {True: "yes", False: "NO", None: "-"}


@dataclass(frozen=True)
class Finding:
    """A class of mistakes that the evidence points to."""

    mistake: str  # the name of a known mistake
    evidence: str  # one or more clauses that describe the evidence with the names of the user's code
    ranks: tuple[int, ...] = ()  # the ranks at fault, if they are known
    site: str = ""  # the line of the user's code that the evidence is about: "src/train.py:40"; "" if it is unknown
    advice: str = ""  # a more precise advice than that of the mistake; "" if there is no such
    confirmed: bool = False  # an experiment has shown it, or its evidence covers further cases with other data
    also: bool = False  # it holds besides the finding before it, and is no other explanation

    def __post_init__(self) -> None:
        known_mistake(self.mistake)  # raises for an unknown one


@dataclass(frozen=True)
class Observable:
    """A value that was compared: a gradient, a returned value, the samples of an epoch."""

    name: str
    relations: Mapping[str, bool | None]
    """"one device", "ranks agree", …: whether the relation holds; None if that is unknown, or if it does not apply."""
    detail: str = ""  # the wrong element, its values and their ratio

    @property
    def right(self) -> bool:
        return all(value is not False for value in self.relations.values())


@dataclass(frozen=True)
class Report:
    """The report of a failure."""

    headline: str  # one line: the relation that fails, the ranks, and the first place
    case: Mapping[str, object] = field(default_factory=dict)  # the smallest case that fails: name -> value
    observables: Sequence[Observable] = ()  # all compared values; wrong ones are shown first
    findings: Sequence[Finding] = ()  # the likely causes, the likeliest first
    remarks: Sequence[str] = ()  # further remarks, a line each
    parting: str = ""  # a clause on where ranks first part, with the value of each rank; "" if that is unknown
    known: Sequence[str] = ()  # other facts about the cause, a line each: the first wrong module, a factor
    axes: str = ""  # a description of the axes of a mesh that the failure needs
    place: str = ""  # the line of the user's code that the failure is about, for a first finding without a line

    @property
    def site(self) -> str:
        """The line of the user's code that the report is about: "src/train.py:40"; "" if it is unknown."""
        return (self.findings[0].site if self.findings else "") or self.place

    @property
    def mistakes(self) -> tuple[str, ...]:
        return tuple(finding.mistake for finding in self.findings)

    def __str__(self) -> str:
        lines = [self.headline, *([f"  {self.axes}"] if self.axes else [])]
        if self.case:
            lines.append("  smallest case: " + ", ".join(f"{name} {value}" for name, value in self.case.items()))
        if not self.findings and self.observables:
            lines.append("  no known mistake explains this")
        lines += [f"  {line}" for line in (*self.known, self.parting) if line]
        for number, finding in enumerate(self.findings):
            entry = known_mistake(finding.mistake)
            lines += [
                f"  {('and' if finding.also else 'or') if number else 'looks like'} {entry.name}: {entry.title}",
                f"    seen: {finding.evidence}",
                f"    do: {finding.advice or entry.advice}",
                f"    see: {entry.page}",
            ]
        lines += ["", *_table(self.observables)] if self.observables else []
        lines += [f"  {remark}" for remark in self.remarks]
        return "\n".join(lines)


def _table(observables: Sequence[Observable]) -> list[str]:
    """Return a header and a line for each observable, wrong ones first, with a column for each relation."""
    ordered = sorted(observables, key=lambda observable: observable.right)
    shown, rest = ordered[:_SHOWN_OBSERVABLES], ordered[_SHOWN_OBSERVABLES:]
    columns = list(dict.fromkeys(name for observable in observables for name in observable.relations))
    width = max(len(observable.name) for observable in shown)
    lines = ["  " + " " * width + "".join(f"  {column}" for column in columns)]
    for observable in shown:
        marks = "".join(f"  {_MARKS[observable.relations.get(column)]:<{len(column)}}" for column in columns)
        lines.append(f"  {observable.name:<{width}}{marks}  {observable.detail}".rstrip())
    if rest:
        wrong_count = sum(not observable.right for observable in rest)
        lines.append(f"  … and {len(rest)} more ({wrong_count} wrong)")
    return lines


RAISE = "_MGPU_CHECK_RAISE"
"""Environment variable that lets errors of a diagnosis propagate; set in this project's own tests, which must see
them."""

_SHOWN = 3  # most parts that one line names: an error in shared evidence fails every rule

_S = TypeVar("_S")
_T = TypeVar("_T")
_P = ParamSpec("_P")


class Attempts:
    """The parts of one diagnosis, rules and pieces of evidence, each attempted on its own."""

    def __init__(self) -> None:
        self._failed: dict[str, list[str]] = {}  # error -> parts

    @property
    def remarks(self) -> list[str]:
        """A line for the report on each error, with the parts that failed with it."""
        return [
            f"the diagnosis is incomplete: {few(labels, _SHOWN)} failed with {error}; the verdict does not depend on "
            "it; please report this line"
            for error, labels in self._failed.items()
        ]

    def of(self, label: str, otherwise: _T, attempt: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Return the result of a part of the diagnosis, or `otherwise` if it fails."""
        try:
            return attempt(*args, **kwargs)
        except (Exception, RankHang) as error:  # the verdict does not depend on the diagnosis
            if os.environ.get(RAISE):
                raise
            labels = self._failed.setdefault(_told(error), [])
            labels += [label] if label not in labels else []  # several cases are diagnosed alike
            return otherwise

    def piece(self, read: Callable[[_S], _T], subject: _S, otherwise: _T) -> _T:
        """Return a piece of evidence, or `otherwise` if reading it fails."""
        return self.of(f"the evidence of {read.__name__.strip('_').replace('_', ' ')}", otherwise, read, subject)


def _told(error: BaseException) -> str:
    message = next(iter(str(error).splitlines()), "")
    frames = traceback.extract_tb(error.__traceback__)
    at = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}{f': {message}' if message else ''}{at}"


_PAGES = "https://github.com/mgpu-check/mgpu-check/blob/main/docs/classes/"

_Evidence = TypeVar("_Evidence")
RuleOf = Callable[[_Evidence], "Finding | None"]
_Rule = TypeVar("_Rule", bound=Callable[..., object])


@dataclass(frozen=True)
class MistakeClass:
    """A common mistake in code for several devices."""

    name: str  # for example "mean-of-means"; its page has the same name
    title: str  # what goes wrong, in one clause
    advice: str  # what to do, in one line
    # It takes several ranks, so it does not explain a step that is wrong at world size 1 already.
    of_ranks: bool = False

    @property
    def page(self) -> str:
        return f"{_PAGES}{self.name}.md"


@functools.cache
def all_mistakes() -> Mapping[str, MistakeClass]:
    """Return the mistakes of ``mistakes.toml`` by name, in alphabetical order."""
    table = tomllib.loads(files(__package__).joinpath("mistakes.toml").read_text(encoding="utf-8"))
    return {name: MistakeClass(name, **row) for name, row in sorted(table.items())}


def known_mistake(name: str) -> MistakeClass:
    mistakes = all_mistakes()
    if name not in mistakes:
        raise ValueError(f"mistake {name!r} is unknown; choose one of {', '.join(mistakes)}")
    return mistakes[name]


class RuleList(Generic[_Evidence]):
    """The rules on one kind of evidence. An instance is a decorator that registers a rule.

    `mgpu_check.diagnosis.rules.order` puts them in order.
    """

    def __init__(self) -> None:
        self._judges: dict[str, RuleOf[_Evidence]] = {}

    def __call__(self, rule: RuleOf[_Evidence]) -> RuleOf[_Evidence]:
        """Register a rule, and return it unchanged."""
        return self.register(rule, rule)

    def register(self, rule: _Rule, judge: RuleOf[_Evidence]) -> _Rule:
        """Register a rule by the function that applies it to the evidence, and return the rule."""
        self._judges[_full_name(rule)] = judge
        return rule

    def in_order(self, *rules: Callable[..., Finding | None]) -> tuple[RuleOf[_Evidence], ...]:
        """Return what applies these rules, in this order."""
        names = [_full_name(rule) for rule in rules]
        if missing := sorted(self._judges.keys() - set(names)):
            raise ValueError(f"order of rules: {missing[0]} is registered and has no place; add it to the list")
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"order of rules: {twice} has two places; leave one")
        return tuple(self._judges[name] for name in names)


def _full_name(rule: Callable[..., object]) -> str:
    return f"{rule.__module__}.{rule.__qualname__}"


on_evidence: RuleList[Evidence] = RuleList()  # rules on the results of ranks, and on the calls that led to them
on_calls: RuleList[UnfinishedCall] = RuleList()  # rules on ranks that did not return
on_epoch: RuleList[EpochSamples] = RuleList()  # rules on the samples that a loader gives in one epoch
on_loader: RuleList[Loader] = RuleList()  # rules on the order of samples in all epochs of a loader
on_checkpoint: RuleList[Restored] = RuleList()  # rules on a resumed run
on_hash_seeds: RuleList[HashSeeds] = RuleList()  # rules on ranks that fail only with different hash seeds


def on_tensors(rule: RuleOf[Tensors]) -> RuleOf[Tensors]:
    """Register a rule on evidence that needs its whole tensors; without tensors it finds nothing."""

    @functools.wraps(rule)
    def judge(evidence: Evidence) -> Finding | None:
        return None if evidence.tensors is None else rule(evidence.tensors)

    return on_evidence.register(rule, judge)


def on_experiments(rule: RuleOf[Tensors]) -> RuleOf[Tensors]:
    """Register a rule that finds a mistake only if a changed run, without the mistake, is right."""

    @functools.wraps(rule)
    def confirmed(tensors: Tensors) -> Finding | None:
        finding = rule(tensors)
        return None if finding is None else replace(finding, confirmed=True)

    return on_tensors(confirmed)
