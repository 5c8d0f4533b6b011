"""What a gate compared: the parameters, and the others with reasons; what passing cases could not show; and whether
all ranks together get the samples of one rank, each once, and in a new order in each epoch.
"""

from __future__ import annotations

import fnmatch
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from mgpu_check.diagnosis.evidence import Accepted, EpochSamples
from mgpu_check.diagnosis.observations import PARITY, Expected, ObservedRun, Relations, Result
from mgpu_check.errors import NotCompared
from mgpu_check.gates.gate_arguments import Program
from mgpu_check.gates.search.scenarios import Mesh, Scenario, where_is
from mgpu_check.processes.rank_lists import grouped

# Widest tolerance, as a fraction of the values: a wider one may accept a factor of 2, or a missing rank. Of the
# elements of a tensor some are two or three times the root mean square, and show smaller errors.
_WIDE = 0.25
_SMALL = 1e-2  # of the largest gradient: a smaller one may be rounding errors only, as for a bias before a norm
_ENOUGH = 4096  # elements to sample from a large tensor for its magnitude


def unjudged(
    relations: Relations,
    expected: Expected,
    runs: Sequence[ObservedRun],
    kinds: Collection[str],
    tolerance: float | Mapping[str, float] | None,
) -> dict[str, str]:
    """Return the trained parameters with neither gradient nor value compared with one device, and the reasons.

    A measured tolerance wider than a quarter of the values decides nothing; `relations.too_wide` gets the parameters
    that only have such tolerances.
    """
    if not {"grads", "params"} & set(kinds):
        return {}
    single = expected.single
    if expected.by_reference and not {"grads", "params"} & single.touched:
        return {}  # the reference leaves no gradients or parameters, only returned values to compare with
    trained = single.trained.union(*(run.trained for run in runs))
    returned = (value for name, value in runs[0].values.items() if name.kind == "returned")
    accounted = any(value.dim() == 1 and value.numel() > 1 for value in returned) and bool(relations.skipped)
    reasons: dict[str, str] = {}
    largest: dict[str, float] = {}
    for name in sorted(trained - {result.of for result in relations.local}):
        reason: str | None = None
        too_wide = False
        for result in (Result("grads", name), Result("params", name)):
            verdicts = relations.held.get(result)
            if verdicts is None or verdicts.get(PARITY) is None:
                reason = reason or relations.skipped.get(result)
            elif tolerance is not None or (wide := _wide(expected, result, largest)) is None:
                break
            else:
                reason, too_wide = wide, True
        else:
            if accounted or any(compared.of == name and compared.kind == "returned" for compared in relations.held):
                continue
            if Result("grads", name) not in single.values and Result("params", name) not in single.values:
                continue  # not in the built model
            if too_wide:
                relations.too_wide.add(name)
            reasons[name] = reason or "no rank leaves a gradient or a value of it"
    return reasons


def _wide(expected: Expected, result: Result, largest: dict[str, float]) -> str | None:
    """Return why the tolerance of a result is too wide to prove anything, if so."""
    exact, allowed = expected.exact.get(result), expected.tolerance.get(result)
    if exact is None or allowed is None or not exact.numel():
        return None
    if result.kind not in largest:
        sizes = [_size(value) for name, value in expected.exact.items() if name.kind == result.kind]
        largest[result.kind] = max(sizes, default=0.0)
    size, width = _size(exact), _size(allowed)
    if width <= _WIDE * max(size, _SMALL * largest[result.kind]):
        return None
    return (
        f"rounding alone may change {result} by {width:.2g}, and its values are about {size:.2g}: "
        "the measured tolerance proves nothing"
    )


def _size(value: torch.Tensor) -> float:
    """Return the root mean square of the finite values; large tensors are sampled."""
    sample = value.reshape(-1)[:: max(1, value.numel() // _ENOUGH)]
    finite = sample[sample.isfinite()].double()
    return float(finite.square().mean().sqrt()) if finite.numel() else 0.0


_ALIKE = 0.01  # losses of ranks that differ by no more than this fraction hide how the ranks are weighted


class PassLimits:
    """The limits of a verdict: what no case that passed has shown, although a mistake may lie there.

    `Trials` makes one, adds each case that passes on several ranks, and reads its lines once, in `Trials.finish`.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._passes = 0
        self._equal_lengths: set[bool] = set()
        self._alike: set[bool] = set()

    def add(self, expected: Expected, runs: Sequence[ObservedRun]) -> None:
        """Add a case that passed: the results of one device, and of ranks."""
        single = expected.single
        self._passes = max(self._passes, single.backwards // max(1, single.optimizer_steps or single.calls))
        if single.equal_lengths is not None:
            self._equal_lengths.add(single.equal_lengths)
        if len(runs) > 1 and runs[0].losses:
            several = [run.losses for run in runs]
            self._alike.add(
                len(set(map(len, several))) == 1
                and all(max(own) - min(own) <= _ALIKE * max(map(abs, own)) for own in zip(*several, strict=True))
            )

    def lines(self) -> Iterator[str]:
        if self._passes > 1 and self._program.reference is None:
            yield (
                f"a wrong weight of micro-batches: backward ran {self._passes} times for each optimizer step, on one "
                "device too; give a reference= that takes the whole batch at once"
            )
        if self._equal_lengths == {True}:
            yield (
                "samples of different lengths: batch returned equal lengths only; pad some labels with -100, or return "
                "a mask"
            )
        if self._alike == {True}:
            yield (
                "a wrong weight of ranks: the loss was the same within 1 % on all ranks; let batch draw samples that "
                "differ more"
            )


_SHOWN = 12


class ParameterCoverage:
    """The trained parameters that were compared in some case, by world size or mesh.

    `Trials` makes one, adds each case whose relations hold, and ends with `finish`, which raises for what was missed.
    """

    def __init__(self, program: Program, name: str, against: str = PARITY) -> None:
        self._program, self._name, self._against = program, name, against
        self._trained: dict[tuple[int, Mesh], set[str]] = defaultdict(set)
        self._missed: dict[tuple[int, Mesh], dict[str, str]] = defaultdict(dict)
        self._judged: dict[tuple[int, Mesh], set[str]] = defaultdict(set)
        self._local: set[str] = set()
        self._too_wide: set[str] = set()

    def add(self, scenario: Scenario, expected: Expected, relations: Relations) -> None:
        world, trained = scenario.place, expected.single.trained | relations.unjudged.keys()
        self._trained[world] |= trained
        self._judged[world] |= trained - relations.unjudged.keys()
        self._missed[world].update(relations.unjudged)
        self._local |= {result.of for result in relations.local}
        self._too_wide |= relations.too_wide

    def finish(self, unjudged: Mapping[str, str]) -> None:
        """Check that every trained parameter was compared at every world size, except for patterns in `unjudged`."""
        not_compared: dict[tuple[int, Mesh], dict[str, str]] = {}
        used_patterns = {each for each in unjudged if any(fnmatch.fnmatchcase(name, each) for name in self._local)}
        for world, missed in self._missed.items():
            for name in sorted(missed.keys() - self._judged[world]):
                patterns = [pattern for pattern in unjudged if fnmatch.fnmatchcase(name, pattern)]
                used_patterns.update(patterns)
                if not patterns:
                    not_compared.setdefault(world, {})[name] = missed[name]
        if not_compared:
            raise NotCompared(self._message(not_compared), names=sorted(set().union(*not_compared.values())))
        if idle := [pattern for pattern in unjudged if pattern not in used_patterns]:
            raise ValueError(
                f"{self._program.gate}: unjudged has {', '.join(map(repr, idle))}, which matches no parameter that was "
                "not compared; take it out, so that it hides nothing later"
            )

    def _message(self, not_compared: Mapping[tuple[int, Mesh], Mapping[str, str]]) -> str:
        missed = set().union(*not_compared.values())
        counts = f"{len(missed)} of {len(set().union(*self._trained.values()))} trained parameters"
        lines = [f"{self._name} is undecided: {counts} were not compared with {self._against}"]
        for world, reasons in not_compared.items():
            for reason, several in grouped((reason, name) for name, reason in reasons.items()):
                suffix = f" and {len(several) - _SHOWN} more" if len(several) > _SHOWN else ""
                lines.append(f"  at {where_is(*world)}: {', '.join(several[:_SHOWN])}{suffix}: {reason}")
        ways = []
        if missed & self._too_wide:
            ways.append("give a tolerance with tolerance=, or a reference= that computes in float32")
        if missed - self._too_wide:
            slices = "declare which slice each rank holds with placement="
            ways += [slices, "build the model from one seed on all ranks"]
        lines.append(f'  do: {", ".join(ways)}, or accept it with unjudged={{"pattern": "reason"}}')
        return "\n".join(lines)


def check_unjudged(gate: str, unjudged: Mapping[str, str] | None) -> Mapping[str, str]:
    """Return `unjudged`, or an empty mapping for None."""
    if unjudged is None:
        return {}
    if not isinstance(unjudged, Mapping) or not all(
        isinstance(text, str) and text.strip() for entry in unjudged.items() for text in entry
    ):
        raise ValueError(
            f"{gate}: unjudged={unjudged!r}; give a mapping from patterns of parameters to the reasons why they need "
            'not be compared, such as {"head.*": "frozen after the first epoch"}'
        )
    return unjudged


ALL_SEEN, ONLY_ONCE, KNOWN, AS_MANY = "all seen", "only once", "known", "as many batches"
"""Relations: each sample is on some rank; no sample is on two ranks; every sample is known at world size 1; all ranks
have as many batches."""
_CHANCE = 1e-4  # a repeated order proves that a loader does not shuffle, if chance repeats it less often than this


@dataclass(frozen=True)
class Epoch:
    """The samples that one rank got in one epoch, as their identities by batch."""

    batches: tuple[tuple[Hashable, ...], ...]

    @property
    def samples(self) -> tuple[Hashable, ...]:
        return tuple(sample for batch in self.batches for sample in batch)

    @property
    def counts(self) -> Counter[Hashable]:
        return Counter(self.samples)


@dataclass
class Visits:
    """The epochs that one rank got."""

    epochs: list[Epoch] = field(default_factory=list)
    labels: dict[Hashable, str] = field(default_factory=dict)  # the text that a report shows for a sample, by identity
    shuffles: bool = False  # whether the loader has a sampler that should shuffle
    workers: int = 0  # the largest number of worker processes that read an IterableDataset
    bare: bool = False  # whether a generator yielded lists or tuples, which may be loaders or batches
    problem: str | None = None  # why the user's functions cannot be used, if so


@dataclass
class Coverage:
    """The coverage of one epoch, or the order of all epochs."""

    relations: dict[str, bool | None] = field(default_factory=dict)
    details: list[str] = field(default_factory=list)  # the defects, a clause each
    remarks: list[str] = field(default_factory=list)
    ranks: set[int] = field(default_factory=set)  # the ranks at fault, if they are known


def samples_of(
    expected: Counter[Hashable],
    rank_epochs: Sequence[Epoch],
    accepted: Accepted,
    labels: Mapping[Hashable, str],
    workers: int = 0,
) -> EpochSamples:
    """Return the samples that the ranks got in one epoch, with the samples that they should get together."""
    largest = max((len(batch) for rank_epoch in rank_epochs for batch in rank_epoch.batches), default=0)
    batches = [len(rank_epoch.batches) for rank_epoch in rank_epochs]
    counts = [rank_epoch.counts for rank_epoch in rank_epochs]
    return EpochSamples(expected, counts, largest, batches, labels, workers, accepted)


def coverage_of(samples: EpochSamples) -> Coverage:
    result = Coverage()
    result.relations = {
        ALL_SEEN: samples.all_seen,
        ONLY_ONCE: samples.only_once,
        KNOWN: samples.known,
        AS_MANY: None if len(samples.counts) == 1 else not samples.uneven,
    }
    size, missing, repeated, unknown = samples.expected.total(), samples.missing, samples.repeated, samples.unknown
    if not samples.all_seen:
        result.details.append(f"{missing.total()} of {size} samples on no rank: {samples.shown(missing)}")
    if not samples.only_once:
        result.details.append(f"{repeated.total()} of {size} samples too many: {samples.shown(repeated)}")
    if not samples.known:
        result.details.append(f"{unknown.total()} seen that world size 1 does not give: {samples.shown(unknown)}")
    if samples.uneven:
        result.details.append(samples.told_of_batches)
        result.ranks.update(sorted((ranks for _, ranks in samples.numbers_of_batches), key=len)[0])
        result.remarks.append(
            "where ranks have different numbers of batches, DistributedDataParallel waits in backward for those that "
            "are done: drop or pad the last ones, or use torch.distributed.algorithms.Join; uneven=True accepts it in "
            "loops without collectives"
        )
    if not samples.covered and min(samples.shares_unknown) > 0:
        result.remarks.append(
            "the contents differ from those at world size 1: where samples are augmented at random, or padded to the "
            "longest of their batch, pass key=, a function from a batch to the ids of its samples"
        )
    return result


def same_orders(visits: Sequence[Visits], samples: int) -> tuple[list[int], bool]:
    """Return the ranks that visit their samples in the same order in all epochs, and whether chance is excluded."""
    orders_of_ranks = enumerate({epoch.samples for epoch in visit.epochs} for visit in visits)
    same = [rank for rank, orders in orders_of_ranks if len(orders) == 1 and any(orders)]
    most = max((len(set(visits[rank].epochs[0].samples)) for rank in same), default=0)
    drawn = samples if len(same) == len(visits) else min(most, samples)
    # A rank that draws k of n shuffled samples has n!/(n-k)! possible orders.
    possible = math.lgamma(samples + 1) - math.lgamma(samples - drawn + 1)
    repeats = len(visits[0].epochs) - 1
    return same, repeats > 0 and possible * repeats > -math.log(_CHANCE)
