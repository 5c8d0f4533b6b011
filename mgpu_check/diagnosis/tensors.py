"""The results and calls that a gate recorded of a failure, with tests of hypotheses against them.

Parts are combined in known ways; the weight of each part in a sum is fitted by least squares over all elements, and so
is the one factor between two changes of tensors.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from mgpu_check.diagnosis.observations import (
    Alternative,
    CallEvent,
    Change,
    Division,
    Expected,
    Hypotheses,
    Kind,
    Left,
    ObservedRun,
    Other,
    RankTrace,
    Relations,
    Result,
    is_left,
)
from mgpu_check.numerics.factors import common_factor, evenly

CLOSE = 1e-5  # tolerance, as a fraction of the magnitude of a tensor, for values that are computed in the same order


def factor_of_change(
    was: Mapping[Result, torch.Tensor],
    stages: Sequence[Mapping[Result, torch.Tensor]],
    goals: Mapping[Result, torch.Tensor],
) -> float | None:
    """Return the factor between the changes of all ranks since `was` and the right one; None if none fits."""
    value_pairs: list[tuple[float, float]] = []
    for stage, (name, start) in itertools.product(stages, was.items()):
        value_pairs += pairs(stage[name].double() - start, goals[name] - start)
    several = sum(expected != 0 for _, expected in value_pairs) > 1  # a factor always fits a single number
    return common_factor(value_pairs, least=0.0, of_largest=CLOSE) if several else None


def has_shapes_of(wanted: Mapping[Result, torch.Tensor], values: Mapping[Result, torch.Tensor]) -> bool:
    return all(name in values and values[name].shape == value.shape for name, value in wanted.items())


def largest(value: torch.Tensor) -> float:
    return float(value.abs().max()) if value.numel() else 0.0


def pairs(got: torch.Tensor, expected: torch.Tensor) -> list[tuple[float, float]]:
    indices = evenly(got.numel())
    return list(zip(got.flatten()[indices].tolist(), expected.flatten()[indices].tolist(), strict=True))


COMBINED: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "own": lambda stacked, rank: stacked[rank],
    "first": lambda stacked, rank: stacked[0],
    "last": lambda stacked, rank: stacked[-1],
    "mean": lambda stacked, rank: stacked.mean(0),
    "sum": lambda stacked, rank: stacked.sum(0),
    "norm": lambda stacked, rank: stacked.square().sum(0).sqrt(),
    "max": lambda stacked, rank: stacked.amax(0),
    "min": lambda stacked, rank: stacked.amin(0),
}
"""Ways to combine all parts, which are stacked in rank order, to the result of one rank."""
LOOSE = 1e-4
"""Tolerance, as a fraction of the magnitude of a tensor: a hypothesis is summed in another order than the result."""
_INDEPENDENT = 1e-4  # fraction of the largest singular value below which columns of parts count as linearly dependent


def fitted(columns: Sequence[Sequence[torch.Tensor]], values: Sequence[torch.Tensor]) -> list[float] | None:
    """Return the weights of the columns that sum to the values; None if no weights do, or if they are not unique."""
    system = _system(columns, values)
    if system is None or int(torch.linalg.matrix_rank(system[0], rtol=_INDEPENDENT)) < len(columns):
        return None
    weights = _solved(*system)
    return None if weights is None else weights.tolist()


def spanned(columns: Sequence[Sequence[torch.Tensor]], values: Sequence[torch.Tensor]) -> bool | None:
    """Return whether the values are a weighted sum of the columns; None if too few, or not finite."""
    system = _system(columns, values)
    return None if system is None else _solved(*system) is not None


def _system(
    columns: Sequence[Sequence[torch.Tensor]], values: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor] | None:
    if not values or not all(columns):
        return None
    matrix = torch.stack([torch.cat(list(column)) for column in columns], dim=1)
    target = torch.cat([value.double().flatten() for value in values])
    if len(matrix) != len(target) or len(target) <= 2 * len(columns):
        return None
    return (matrix, target) if bool(matrix.isfinite().all() & target.isfinite().all()) else None


def _solved(matrix: torch.Tensor, target: torch.Tensor) -> torch.Tensor | None:
    """Return the least-squares weights of the columns; None if their sum does not match `target`."""
    weights = torch.linalg.lstsq(matrix, target[:, None], driver="gelsd").solution[:, 0]
    return None if bool(((matrix @ weights - target).abs() > LOOSE * target.abs().max()).any()) else weights


_NEAR = 2e-3  # relative tolerance of each element for a common factor: each element has its own rounding errors
_TELLING = 1e-2
"""Fraction of the largest element below which elements are ignored: they are differences of larger numbers, so that
their ratios are inexact."""
_SEVERAL = 3  # fewest elements of a tensor that is no multiple of another one by chance
_LEAST = 1e-3  # smallest difference of a factor from 1 that counts


@dataclass
class Tensors:
    """The recorded results of a failure."""

    size: int
    samples: int
    steps: int  # number of calls of the step
    expected: Expected  # the results of one device
    relations: Relations
    seen: Sequence[ObservedRun]  # the results of each rank, with all values
    traces: Sequence[RankTrace]
    hypotheses: Hypotheses  # the results of one device for parts of the batch
    wrong_alone: bool = False  # the step already differs from the reference at world size 1
    # Whether all relations hold for the same batch scaled down; None if that was not tried.
    right_when_small: bool | None = None
    controls: Sequence[Tensors] = ()  # cases with other data that fail too; sometimes they have more samples
    further: Sequence[Tensors] = ()  # the other ones of this case and its controls, if they have hypotheses
    elsewhere: Tensors | None = None  # the case at another world size, with the results of rank 0 there
    shardwise: bool = False  # the reference takes the world size, and processes the batch shard by shard
    alone: RankTrace | None = None  # the calls of one device
    mesh: Sequence[tuple[str, int]] = ()  # the axes of the mesh, the outermost first, with their sizes
    by_draws: Collection[Result] = ()  # the results that other random numbers change
    tried: Sequence[Change] = ()  # changes to single calls, and whether the step is right with them

    def wrong(self, *kinds: Kind) -> list[Result]:
        """Return the results that differ from one device, in the order of the model.

        With kinds, return only tensors of these kinds, and no texts.
        """
        values = self.expected.single.values.keys() | self.seen[0].values.keys()
        return [name for name in self.relations.wrong if not kinds or (name.kind in kinds and name in values)]

    @property
    def names(self) -> list[Result]:
        """The floating-point results that differ, which a hypothesis must explain.

        These are gradients and returned values if any differ, otherwise parameters and buffers.
        """
        wanted = [name for name in self.wrong("grads", "returned") if name in self.expected.exact]
        return wanted or [name for name in self.wrong("params", "buffers") if name in self.expected.exact]

    @property
    def gradient_like(self) -> bool:
        return not self.wrong("returned") or bool(self.relations.skipped) or bool(self.wrong("grads", "params"))

    @property
    def broken(self) -> list[Result]:
        return [name for name in self.wrong() if self.relations.held[name].get("finite") is False]

    @property
    def has_right_gradients(self) -> bool:
        """True if gradients were compared, and neither they nor returned values are wrong."""
        return any(name.kind == "grads" for name in self.relations.held) and not self.wrong("grads", "returned")

    @property
    def account(self) -> bool:
        """True if returned values replace gradients or parameters in the comparison."""
        return any(name.kind in ("grads", "params") for name in self.relations.skipped)

    @property
    def steps_alike(self) -> bool:
        """True if steps of optimizers can be paired: one device runs the step itself, or as many optimizers."""
        single = self.expected.single
        return not self.expected.by_reference or all(run.optimizers == single.optimizers for run in self.seen)

    def holders(self, name: Result) -> list[int]:
        """Return the ranks that have a result, or some of its elements."""
        has = [(name in run.values or name in run.digests, run.own.get(name)) for run in self.seen]
        return [rank for rank, (present, own) in enumerate(has) if present and (own is None or bool(own.any()))]

    def right_ranks(self, name: Result) -> list[int]:
        """Return the ranks that have a result, as one device has it."""
        return [rank for rank in self.holders(name) if rank not in self.relations.wrong.get(name, [])]

    def is_of_model(self, name: Result) -> bool:
        is_parameter = name.kind == "returned" and Result("params", name.of) in self.seen[0].values
        return is_parameter or name.kind in ("params", "buffers", "grads")

    def is_whole(self, name: str) -> bool:
        """Return whether every rank holds the whole parameter, as far as known."""
        divided = {result.of for run in self.seen for result in run.own if result.kind == "params"}
        return name not in divided and (not divided or name in self.expected.single.initial)

    def events(self, *kinds: str) -> Iterator[tuple[int, CallEvent]]:
        for rank, trace in enumerate(self.traces):
            for event in trace.of(*kinds):
                yield rank, event

    def together(self, kind: str) -> Iterator[tuple[CallEvent, ...]]:
        """Yield the calls of a kind that all ranks make, each with its counterparts in rank order."""
        return zip(*(trace.of(kind) for trace in self.traces), strict=False)

    def returned(self) -> Iterator[tuple[Result, torch.Tensor, torch.Tensor]]:
        """Yield each wrong returned value, as one device and as rank 0 has it, if both have one of one shape."""
        for name in self.wrong("returned"):
            expected, got = self.expected.single.values.get(name), self.seen[0].values.get(name)
            if expected is not None and got is not None and expected.shape == got.shape:
                yield name, expected, got

    def first(self, *kinds: str) -> CallEvent | None:
        return next((event for _, event in self.events(*kinds)), None)

    def right_with(self, *kinds: str) -> Change | None:
        """Return the change of these kinds with which the step is right; None if there is none."""
        return next((change for change in self.tried if change.kind in kinds and change.holds), None)

    def is_combined(self, division: Division, how: str, factor: float = 1.0, results: Collection[Result] = ()) -> bool:
        """Return whether the wrong results equal the results of all parts combined in this way; see `combined`."""
        results = results or self.names

        def values(case: Tensors) -> Sequence[Mapping[Result, torch.Tensor]] | None:
            divisions = case.hypotheses.divisions
            same = next((d for d in divisions if (d.name, d.windows) == (division.name, division.windows)), None)
            return None if same is None else case.combined(same, how, factor, results)

        explained = self.explains(self.combined(division, how, factor, results), results)
        return explained and self._is_confirmed(values, results)

    def _is_confirmed(
        self, values: Callable[[Tensors], Sequence[Mapping[Result, torch.Tensor]] | None], results: Collection[Result]
    ) -> bool:
        """Return whether `values` explain the results of all further cases, at least one of which is not right anyway.

        Where no further case could be run, nothing is refuted.
        """
        explanations = [(case, values(case) or ()) for case in self.further]
        if not all(each and case.explains(each, results, telling=False) for case, each in explanations):
            return False
        return not explanations or any(case.explains(each, results) for case, each in explanations)

    @cached_property
    def own_parts(self) -> list[tuple[Division, list[Result]]]:
        """The divisions where each rank holds the results of its own part, with those results.

        The results may also be divided by the world size.
        """
        split = [name for name in self.names if name in self.relations.split]
        owned = [
            (division, [name for name in split if self.is_combined(division, "own", factor, [name])])
            for division in self.hypotheses.divisions
            for factor in (1.0, 1.0 / self.size)
        ]
        return [(division, results) for division, results in owned if results]

    def is_alternative(self, alternative: Alternative) -> bool:
        """Return whether the wrong results equal the results of one device for another batch."""

        def values(case: Tensors) -> Sequence[Mapping[Result, torch.Tensor]] | None:
            others = case.hypotheses.alternatives
            identity = (alternative.kind, alternative.index)
            same = next((candidate for candidate in others if (candidate.kind, candidate.index) == identity), None)
            return None if same is None else [same.values] * case.size

        return self.explains([alternative.values] * self.size) and self._is_confirmed(values, self.names)

    def alternative(self, *kinds: Other) -> Alternative | None:
        """Return the first wrong batch or model of these kinds with the wrong results; None if none has them."""
        others = (other for other in self.hypotheses.alternatives if other.kind in kinds)
        return next((other for other in others if self.is_alternative(other)), None)

    def explains(
        self, values: Sequence[Mapping[Result, torch.Tensor]], results: Collection[Result] = (), telling: bool = True
    ) -> bool:
        """Return whether the results of each rank equal its `values`.

        Args:
            values: results by name, for each rank.
            results: the results to compare; by default all wrong ones.
            telling: return False if `values` also equal the results of one device: then they explain nothing.
        """
        tells = not telling
        for name in results or self.names:
            exact = self.expected.exact.get(name)
            for rank, run in enumerate(self.seen):
                got, value = run.values.get(name), values[rank].get(name)
                if exact is None or got is None or value is None or got.shape != value.shape:
                    return False
                if not self._near(name, got.double(), value.double()):
                    return False
                tells |= value.shape != exact.shape or not self._near(name, value.double(), exact)
        return tells

    def _near(self, name: Result, got: torch.Tensor, expected: torch.Tensor) -> bool:
        tolerance = self.expected.tolerance.get(name)
        slack = LOOSE * float(expected[expected.isfinite()].abs().max()) if bool(expected.isfinite().any()) else 0.0
        if tolerance is not None and tolerance.shape == got.shape:
            allowed = 4 * tolerance + min(slack, 1e-2)
        else:
            allowed = torch.full_like(got, slack)
        same = (got == expected) | (got.isnan() & expected.isnan())
        return bool((same | ((got - expected).abs() <= allowed)).all())

    def factor(self, results: Collection[Result] = ()) -> float | None:
        if (factor := self.factor_here(results)) is None:
            return None
        # Few numbers may fit a factor by chance: the cases with other seeds must have the same factor.
        others = []
        for case in self.further:
            wrong = case.relations.wrong
            names = [name for name in results or self.names if name in wrong]
            names = names or ([] if results else case.names)  # other results may be wrong there
            others += [case.factor_here(names)] if names else []
        alike = all(other is not None and abs(other - factor) <= 2e-3 * abs(factor) for other in others)
        return factor if alike else None

    def factor_of_updates(self) -> float | None:
        if any(name.owner not in self.expected.single.initial for name in self.names):
            return None  # a result without an initial value has no update
        return self._factor(self.names, self.expected.single.initial)

    def factor_here(self, results: Collection[Result] = ()) -> float | None:
        """Return the factor of this case alone; the cases with other seeds may have another one."""
        return self._factor(results or self.names, {})

    def factor_elsewhere(self) -> float | None:
        """Return the factor at another world size; None if that was not run, or no factor fits."""
        return None if self.elsewhere is None else self.elsewhere.factor_here(self.names)

    def _factor(self, results: Collection[Result], before: Mapping[str, torch.Tensor]) -> float | None:
        value_pairs: list[tuple[float, float]] = []
        for name in results:
            start, expected = before.get(name.owner or "", torch.zeros(())).double(), self.expected.exact.get(name)
            if expected is None or (start.dim() and start.shape != expected.shape):
                return None  # the result is a part, not the whole parameter
            exact = expected - start
            usable = exact.isfinite() & (exact.abs() > _TELLING * largest(exact)) & (exact != 0)
            for run in self.seen:
                got = run.values.get(name)
                if got is None or got.shape != exact.shape:
                    return None
                off = (got.double() - start)[usable]
                if not bool(off.isfinite().all()):
                    return None
                value_pairs += pairs(off, exact[usable])
        return common_factor(value_pairs, least=_LEAST, relative=_NEAR)

    @cached_property
    def first_factor(self) -> tuple[int, float, bool] | None:
        """The first wrong optimizer step, its factor on all ranks, and whether the factor is of the update.

        Gradients are checked before updates. None if no step is wrong, or if no factor fits the first wrong step.
        """
        before = {Result("params", name): value.double() for name, value in self.expected.single.initial.items()}
        for step, expected in enumerate(self.expected.snapshots):
            stages = [run.snapshots[step] for run in self.seen if step < len(run.snapshots)]
            if len(stages) < self.size or any(not has_shapes_of(expected, stage) for stage in stages):
                return None
            zeros = {name: torch.zeros(()) for name in expected if name.kind == "grads"}
            start = {name: before[name] for name in expected if name in before}
            if not has_shapes_of(start, expected):
                return None
            for was, is_update in ((zeros, False), (start, True)):
                allowed = self.expected.allowances[step]
                offs = [(name, stage[name].double() - expected[name]) for stage in stages for name in was]
                if any(bool((off.abs() > allowed[name]).any()) for name, off in offs):
                    factor = factor_of_change(was, stages, expected)
                    return None if factor is None else (step, factor, is_update)
            before = {name: expected[name] for name in start}
        return None

    @cached_property
    def mean_of_parts(self) -> tuple[Division, str] | None:
        """The first division whose parts have the wrong results as their plain mean, and a text on a further factor."""
        for division in self.hypotheses.divisions:
            divided, times = ", divided by the world size", ", times the world size"
            for factor, also in ((1.0, ""), (1.0 / self.size, divided), (float(self.size), times)):
                if self.is_combined(division, "mean", factor):
                    return division, also
        return None

    @staticmethod
    def same(got: torch.Tensor, expected: torch.Tensor, scale: torch.Tensor) -> bool:
        """Return whether both are equal within 1e-5 of the largest magnitude in `scale`, and not all zero."""
        near = (got - expected).abs() <= CLOSE * float(scale.abs().max())
        return bool(near.all()) and bool((expected != 0).any())

    def weights_of_windows(self, division: Division) -> list[float] | None:
        """Return the weight of each micro-batch in the results of rank 0; None if no weights fit.

        The weight is 1 for a micro-batch that counts as it should. Micro-batches are averaged over ranks.
        """
        columns: list[list[torch.Tensor]] = [[] for _ in range(division.windows)]
        got = [self.seen[0].values.get(name) for name in self.names]
        for name, value in zip(self.names, got, strict=True):
            for window, column in enumerate(columns):
                contributions = [windows[window].get(name) for windows in division.parts]
                if value is None or any(term is None or term.shape != value.shape for term in contributions):
                    return None
                stacked = torch.stack([term.double() for term in contributions if term is not None])
                column.append(stacked.mean(0).flatten() / division.windows)
        return fitted(columns, [value for value in got if value is not None])

    def weights_of_ranks(self, division: Division) -> list[list[float]] | None:
        """Return, for each rank, the weight of each rank's part in its results; None if no weights fit.

        In a mean over ranks each weight is 1 / world size.
        """
        columns = self._columns(division)
        if columns is None:
            return None
        several = [[run.values[name] for name in self.names if name in run.values] for run in self.seen]
        rows = [fitted(columns, values) if len(values) == len(self.names) else None for values in several]
        fitting = [row for row in rows if row is not None]
        return fitting if len(fitting) == len(rows) else None

    def is_sum_of_parts(self, division: Division) -> bool | None:
        """Return whether the results of one device are a weighted sum of the parts; None if that cannot be decided.

        Each micro-batch is a part, because micro-batches of unlike weights are a matter of weights, too.
        """
        columns = self._columns(division, each_window=True)
        return None if columns is None else spanned(columns, [self.expected.exact[name] for name in self.names])

    def norms_of_parts(self, division: Division) -> list[float]:
        return [float(torch.cat(column).norm()) for column in self._columns(division) or ()]

    def _columns(self, division: Division, each_window: bool = False) -> list[list[torch.Tensor]] | None:
        pieces = [[window] for piece in division.parts for window in piece] if each_window else division.parts
        columns: list[list[torch.Tensor]] = [[] for _ in pieces]
        for name in self.names:
            for column, windows in zip(columns, pieces, strict=True):
                piece = self._of_rank(name, windows)
                if piece is None or piece.shape != self.expected.exact[name].shape:
                    return None
                column.append(piece.flatten())
        return columns

    def stays_as_left(self, name: Result, gradients: Sequence[Left], scaled: bool = False) -> bool:
        """Return whether each rank ends with the gradient of its own backward pass, unlike other ranks.

        Args:
            name: of the gradient.
            gradients: sums and norms of the gradients after the backward pass, by rank.
            scaled: the ranks may have multiplied their gradients, each by a factor of its own, as by clipping.
        """
        values = [run.values[name].double() for run in self.seen if name in run.values]
        telling = bool(values) and values[0].numel() >= _SEVERAL  # one or two numbers may be any multiple
        if scaled and telling and len(values) == len(gradients) and all(name.of in own for own in gradients):
            norms = [(own[name.of]["norm"], float(value.norm())) for own, value in zip(gradients, values, strict=True)]
            values = [value * (left / now) if now else value for value, (left, now) in zip(values, norms, strict=True)]
        return len(values) == self.size and is_left(name, gradients, values)

    def combined(
        self, division: Division, how: str, factor: float = 1.0, labels: Collection[Result] = ()
    ) -> list[dict[Result, torch.Tensor]]:
        """Return, for each rank, the results of all parts combined, times `factor`.

        `how`: "mean", "sum", "norm", "own", "first", "last", "max" or "min".
        """
        results: list[dict[Result, torch.Tensor]] = [{} for _ in range(self.size)]
        for name in labels or self.names:
            pieces = [self._of_rank(name, windows) for windows in division.parts]
            defined = [piece for piece in pieces if piece is not None]
            if len(defined) < len(pieces) or len({piece.shape for piece in defined}) > 1:
                continue
            stacked = torch.stack(defined)
            for rank in range(self.size):
                results[rank][name] = factor * COMBINED[how](stacked, rank)
        return results

    def _of_rank(self, name: Result, windows: Sequence[Mapping[Result, torch.Tensor]]) -> torch.Tensor | None:
        exact = self.expected.exact.get(name)
        if exact is None:
            return None
        values = [window.get(name, torch.zeros_like(exact)).double() for window in windows]
        if len({value.shape for value in values}) > 1:
            return None
        return torch.stack([value.nan_to_num(0.0) for value in values]).mean(0)
