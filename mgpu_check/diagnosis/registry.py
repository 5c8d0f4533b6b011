"""The registry of mistakes, and of the rules that recognize them in evidence.

Each module of `mgpu_check/diagnosis/rules/` registers the mistakes and the rules of one theme.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from mgpu_check.diagnosis.evidence import EpochSamples, Evidence, HashSeeds, Loader, Restored, UnfinishedCall
    from mgpu_check.diagnosis.report import Finding
    from mgpu_check.diagnosis.tensors import Tensors

_PAGES = "https://github.com/mgpu-check/mgpu-check/blob/main/docs/classes/"
_RULES = "mgpu_check.diagnosis.rules"

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


_mistakes: dict[str, MistakeClass] = {}


def mistake(name: str, title: str, advice: str, *, of_ranks: bool = False) -> None:
    """Register a mistake. For the arguments, see `MistakeClass`."""
    new = MistakeClass(name, title, advice, of_ranks)
    registered = _mistakes.setdefault(name, new)
    if registered != new:
        raise ValueError(
            f"mistake: {name!r} is the name of two: {registered.title!r} and {title!r}; give each its own name"
        )


def all_mistakes() -> dict[str, MistakeClass]:
    """Return all mistakes by name, in alphabetical order. Imports no torch."""
    _load()
    return dict(sorted(_mistakes.items()))


def known_mistake(name: str) -> MistakeClass:
    if name not in _mistakes:
        _load()
    if name not in _mistakes:
        raise ValueError(f"mistake {name!r} is unknown; choose one of {', '.join(sorted(_mistakes))}")
    return _mistakes[name]


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
        """Return what applies these rules, in this order.

        Raises:
            ValueError: a rule that was registered is missing, or stands twice.
        """
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


@functools.cache
def _load() -> None:
    for module in pkgutil.iter_modules(importlib.import_module(_RULES).__path__):
        if module.name != "order":
            importlib.import_module(f"{_RULES}.{module.name}")
