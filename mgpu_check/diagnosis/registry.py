"""The registry of mistakes, and of the rules that recognize them in evidence.

Each module of `mgpu_check/diagnosis/rules/` registers the mistakes and the rules of one theme.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from mgpu_check.diagnosis.evidence import EpochSamples, Evidence, HashSeeds, Loader, Restored, UnfinishedCall
    from mgpu_check.diagnosis.report import Finding
    from mgpu_check.diagnosis.tensors import Tensors

_PAGES = "https://github.com/mgpu-check/mgpu-check/blob/main/docs/classes/"
_RULES = "mgpu_check.diagnosis.rules"

_Evidence = TypeVar("_Evidence")
RuleOf = Callable[[_Evidence], "Finding | None"]


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


class Precedence(IntEnum):
    """Name what a rule on results proves, the most first: the place of such a rule is `Precedence.NAME + number`.

    Evidence up to `EXPERIMENTS` proves a mistake by itself. From `OWN_VALUES` to `UPDATES` a mistake explains results.
    Several mistakes explain the evidence of `AMBIGUOUS`. The evidence of `POSSIBLE` does not rule a mistake out.
    """

    UNDEFINED = 0  # calls that are always mistakes. Their results are undefined, so later numbers are no evidence.
    APART = 1000  # calls show that ranks act differently, which explains every other difference
    SAMPLES = 2000  # samples and labels that ranks saw, observed directly, or inferred from the loader and from counts
    CALLS_AND_VALUES = 3000  # calls together with the values that they explain: either alone would be weaker evidence
    ANOTHER_BATCH = 4000  # one device gives exactly this result for another batch, or updates other parameters
    EXPERIMENTS = 5000  # a change to one call makes the step right
    OWN_VALUES = 6000
    """Ranks draw random numbers, or decide by values of their own. Either invalidates the rules on sums."""
    CLIPPING = 7000  # how gradients were clipped. A mean of clipped parts is also a mean of parts, and leaves factors.
    SUMS = 8000
    """How gradients were combined: factors that differ between ranks, and rounded counts, before equal weights.

    Batch statistics of parts also give gradients of parts. All of these also leave factors.
    """
    UPDATES = 9000  # the gradients of the first step with wrong parameters are right
    AMBIGUOUS = 10_000  # evidence that several mistakes explain
    POSSIBLE = 11_000  # mistakes that the evidence does not rule out, as a last resort


class RuleList(Generic[_Evidence]):
    """The rules on one kind of evidence. An instance is a decorator that registers a rule at a place.

    Rules are called in the order of their places. The first finding is the likeliest cause: places are their only
    weight. Special rules come before general ones, because a general rule would also fire on what a special rule
    explains.
    """

    def __init__(self) -> None:
        self._at: dict[int, RuleOf[_Evidence]] = {}

    def __call__(self, position: int) -> Callable[[RuleOf[_Evidence]], RuleOf[_Evidence]]:
        """Return a decorator that registers a rule, and returns it unchanged.

        `position`: a number that no other rule has. For rules on results, a precedence plus a number below 1000.
        """

        return functools.partial(self.register, position)

    def register(self, position: int, rule: RuleOf[_Evidence]) -> RuleOf[_Evidence]:
        holder = self._at.get(position, rule)
        held_by, name = (f"{each.__module__}.{each.__name__}" for each in (holder, rule))
        if held_by != name:
            raise ValueError(
                f"place {position} of rule {name} is that of {held_by}; choose a number between two others"
            )
        self._at[position] = rule
        return rule

    def ordered(self) -> tuple[RuleOf[_Evidence], ...]:
        _load()
        return tuple(rule for _, rule in sorted(self._at.items()))


on_evidence: RuleList[Evidence] = RuleList()  # rules on the results of ranks, and on the calls that led to them
on_calls: RuleList[UnfinishedCall] = RuleList()  # rules on ranks that did not return
on_epoch: RuleList[EpochSamples] = RuleList()  # rules on the samples that a loader gives in one epoch
on_loader: RuleList[Loader] = RuleList()  # rules on the order of samples in all epochs of a loader
on_checkpoint: RuleList[Restored] = RuleList()  # rules on a resumed run
on_hash_seeds: RuleList[HashSeeds] = RuleList()  # rules on ranks that fail only with different hash seeds


def on_tensors(position: int) -> Callable[[RuleOf[Tensors]], RuleOf[Tensors]]:
    """Return a decorator for a rule on evidence that needs its whole tensors; without tensors it finds nothing."""

    def decorate(rule: RuleOf[Tensors]) -> RuleOf[Tensors]:
        @functools.wraps(rule)
        def judge(evidence: Evidence) -> Finding | None:
            return None if evidence.tensors is None else rule(evidence.tensors)

        on_evidence.register(position, judge)
        return rule

    return decorate


@functools.cache
def _load() -> None:
    for module in pkgutil.iter_modules(importlib.import_module(_RULES).__path__):
        if module.name != "order":
            importlib.import_module(f"{_RULES}.{module.name}")
