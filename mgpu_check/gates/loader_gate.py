"""The gate for data loading: in each epoch, all ranks together get each sample once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

from mgpu_check.diagnosis.evidence import Accepted, Loader
from mgpu_check.diagnosis.report import Attempts, Observable, Report
from mgpu_check.diagnosis.rules.order import distinct, findings_of_loader
from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.errors import ScalingMismatch
from mgpu_check.gates.comparison.coverage import Coverage, Visits, coverage_of, same_orders, samples_of
from mgpu_check.gates.gate_arguments import RanksFixture, check_count, definition_of, noting, world_sizes_of
from mgpu_check.gates.run.evaluation import visit
from mgpu_check.gates.search.hash_seeds import with_seeds_apart
from mgpu_check.processes.rank_lists import named

_EPOCHS_DIFFER = "epochs differ"


def assert_loader_covers(
    ranks: RanksFixture,
    make_loader: Callable[[Rank], Any],
    *,
    epochs: int = 2,
    world_sizes: Iterable[int] | None = None,
    padding: bool = False,
    dropped: bool = False,
    uneven: bool = False,
    key: Callable[[Any], Iterable[Hashable]] | None = None,
) -> None:
    """Assert that the loaders of all ranks together give each sample once per epoch.

    A run of the same code at world size 1 gives the expected samples. A sample is identified by its content: all leaves
    of a batch (tensors, arrays, lists of texts or numbers) have one row per sample along dim 0. At each world size and
    in every epoch these relations must hold:

    - *all seen*, *only once*: each sample is on exactly one rank; *known*: world size 1 gives every sample, too;
    - *as many batches*: all ranks have as many; in a loop with collectives, a rank with more batches waits forever;
    - *repeatable*: a second run under the same seeds gives each rank the same samples (checked at the smallest size).

    If the order at world size 1 changes between epochs, or the loader has a sampler that should shuffle, then also:

    - *epochs differ*: no rank visits its samples in the same order in all epochs.

    Args:
        ranks: the fixture.
        make_loader: called on every rank with its `Rank`; it makes the loader as training code does. It returns the
            loader, any iterable of batches, which is iterated once per epoch without further calls. Or it is a
            generator function that yields the loader (not its batches) once per epoch: ``for epoch in range(epochs):
            sampler.set_epoch(epoch); yield loader``. All ranks have the same seeds when it is called.
        epochs: number of epochs to check; from 2 on, their orders are compared.
        world_sizes: world sizes to check; default the powers of two from 2 on, and ``ranks.size``.
        padding: accept repeated samples that give all ranks as many samples, or full batches: at most
            world size * batch size - 1 of them, with as many samples on each rank.
        dropped: accept that at most world size * batch size - 1 samples of an epoch are on no rank (``drop_last``).
        uneven: accept different numbers of batches, as in an evaluation without collectives in its loop.
        key: returns the ids of the samples of a batch, hashable and comparable between processes (a tensor of ids is
            accepted). Needed if samples are augmented at random or padded to the longest of their batch, or if batches
            have no rows.

    Raises:
        ScalingMismatch: a relation does not hold; raised at the smallest world size where it fails. World size 1 is
            checked, too, if worker processes read an IterableDataset, since each may read all of it. ``.ranks`` are the
            ranks at fault.
        ValueError: an argument is not valid, or world size 1 does not determine the samples: it gives no samples, or
            different ones in each epoch.
    """
    check_count("assert_loader_covers", "epochs", epochs, ", and 2 or more to compare their orders")
    if not callable(make_loader):
        raise ValueError(
            f"make_loader is a {type(make_loader).__name__}; give a function that makes the loader, so that each rank "
            "has one"
        )
    if key is not None and not callable(key):
        raise ValueError(
            f"key is {key!r}; give a function from a batch to the ids of its samples, such as lambda batch: batch['id']"
        )
    sizes = world_sizes_of(ranks, world_sizes)
    accepted, definition = Accepted(padding=padding, dropped=dropped, uneven=uneven), definition_of(make_loader)

    def visits_of(size: int, *, inline: bool = False, by: RanksFixture = ranks) -> list[Visits]:
        with noting(f"the loader at world size {size}, {epochs} epochs"):
            visits: list[Visits] = by.run(visit, make_loader, epochs, key, inline, size=size)
        for problem in filter(None, (rank_visits.problem for rank_visits in visits)):
            raise ValueError(problem)
        return visits

    (alone,) = visits_of(1, inline=True)
    expected = _expected(alone, dropped)
    shuffled = alone.shuffles or len({epoch.samples for epoch in alone.epochs}) > 1
    repeated_at = min((size for size in sizes if size > 1), default=None)
    for size in sizes if not alone.workers else sorted({1, *sizes}):
        visits = visits_of(size)
        repeated_visits = visits_of(size) if size == repeated_at else None
        _check(expected, alone, visits, repeated_visits, accepted, shuffled, definition)
    if repeated_at is not None:

        def judge(by: RanksFixture, size: int = repeated_at) -> None:
            _check(expected, alone, visits_of(size, by=by), None, accepted, shuffled, definition)

        case: dict[str, object] = {"world size": repeated_at, "samples": expected.total()}
        with_seeds_apart(ranks, "assert_loader_covers", (make_loader, key), case, judge)


def _expected(alone: Visits, dropped: bool) -> Counter[Hashable]:
    """Return how often each sample should be seen in an epoch: as often as at world size 1."""
    counts = [epoch.counts for epoch in alone.epochs]
    union = counts[0].copy()
    for count in counts[1:]:
        union |= count
    if not union:
        raise ValueError("make_loader gives no samples at world size 1; give it a dataset that has some")
    differ = next((number for number, count in enumerate(counts) if count != counts[0]), None)
    if differ is not None and alone.bare and not counts[differ] & counts[0]:
        raise ValueError(
            f"at world size 1, what make_loader yields for epoch {differ} has no sample in common with what it yields "
            "for epoch 0; if it yields batches, return a loader, or a list of the batches, in place of yielding "
            "them; if it yields loaders whose samples are augmented at random, pass key=, a function from a batch to "
            "the ids of its samples"
        )
    if differ is not None and not dropped:
        others = (counts[differ] - counts[0]).total() or (counts[0] - counts[differ]).total()
        raise ValueError(
            f"at world size 1, epoch {differ} of make_loader differs from epoch 0 in {others} of {union.total()} "
            "samples, so the set of samples is not known; where samples are augmented at random, pass key=, a "
            "function from a batch to the ids of its samples; where drop_last drops others each time, pass "
            "dropped=True; where a sampler draws with replacement, as WeightedRandomSampler does, pass epochs=1: all "
            "ranks together must then draw what one draws in one epoch"
        )
    return union


def _check(
    expected: Counter[Hashable],
    alone: Visits,
    visits: Sequence[Visits],
    repeated_visits: Sequence[Visits] | None,
    accepted: Accepted,
    shuffled: bool,
    definition: str,
) -> None:
    labels = {sample: text for visit in (*visits, alone) for sample, text in visit.labels.items()}
    workers = max(visit.workers for visit in visits)
    by_epoch = [[visit.epochs[number] for visit in visits] for number in range(len(alone.epochs))]
    evidence = [samples_of(expected, rank_epochs, accepted, labels, workers) for rank_epochs in by_epoch]
    epochs = [coverage_of(samples) for samples in evidence]
    for number, coverage in enumerate(epochs):
        if repeated_visits is not None:
            _repeatable(coverage, visits, repeated_visits, number)
    order = _order(visits, len(expected), shuffled or any(visit.shuffles for visit in visits))
    rows = [(f"epoch {number}", coverage) for number, coverage in enumerate(epochs)]
    rows += [("all epochs", order)] if len(epochs) > 1 else []
    observables = [Observable(name, coverage.relations, "; ".join(coverage.details)) for name, coverage in rows]
    broken = next((observable for observable in observables if not observable.right), None)
    if broken is None:
        return
    attempts = Attempts()
    findings = findings_of_loader(Loader(evidence, sorted(order.ranks), "; ".join(order.details)), attempts)
    remarks = list(dict.fromkeys(remark for coverage in epochs for remark in coverage.remarks))
    case: dict[str, object] = {"world size": len(visits), "samples": expected.total()}
    if workers:
        case["workers"] = workers
    report = Report(
        f"the loader does not give each sample once at world size {len(visits)}: {broken.name}: {broken.detail}"
        if len(epochs) == 1 or broken is not observables[-1]
        else f"the loader does not shuffle at world size {len(visits)}: {broken.detail}",
        case,
        observables,
        distinct(findings),
        [*remarks, *attempts.remarks],
        place=definition,
    )
    at_fault = {rank for coverage in (*epochs, order) for rank in coverage.ranks}
    at_fault.update(rank for finding in findings for rank in finding.ranks)
    raise ScalingMismatch(str(report), ranks=sorted(at_fault), mistakes=report.mistakes, site=report.site)


def _repeatable(coverage: Coverage, visits: Sequence[Visits], repeated_visits: Sequence[Visits], number: int) -> None:
    others = [
        rank
        for rank, (visit, repeated) in enumerate(zip(visits, repeated_visits, strict=True))
        if visit.epochs[number].counts != repeated.epochs[number].counts
    ]
    coverage.relations["repeatable"] = not others
    if others:
        verb = "gets" if len(others) == 1 else "get"
        coverage.details.append(f"run again under the same seeds, {named(others)} {verb} other samples")
        coverage.remarks.append(
            "an epoch that cannot be repeated can be neither resumed nor debugged: seed the generator that draws the "
            "order, from one seed for all ranks"
        )
        coverage.ranks.update(others)


def _order(visits: Sequence[Visits], samples: int, shuffled: bool) -> Coverage:
    same, conclusive = same_orders(visits, samples)
    result = Coverage({_EPOCHS_DIFFER: None if not shuffled or (same and not conclusive) else not same})
    if result.relations[_EPOCHS_DIFFER] is False:
        who = "all ranks" if len(same) == len(visits) else f"{named(same)} only"
        result.details.append(f"{who}: the same order in each of {len(visits[0].epochs)} epochs")
        result.ranks.update(same)
    elif shuffled and same:
        result.details.append("unknown: with so few samples or epochs, a shuffle may repeat an order by chance")
    return result
