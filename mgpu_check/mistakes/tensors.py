"""All that a gate knows of a failure, and how far a hypothesis explains it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from mgpu_check.mistakes.changes import CLOSE, factor_of_change, has_shapes_of, largest, pairs
from mgpu_check.mistakes.left import Left, is_left
from mgpu_check.mistakes.observed import (
    Alternative,
    Change,
    Division,
    Event,
    Expected,
    Hypotheses,
    Observation,
    Relations,
    Trace,
)
from mgpu_check.mistakes.results import Kind, Result
from mgpu_check.mistakes.weights import LOOSE, fitted, spanned
from mgpu_check.numerics.factors import common_factor

__all__ = ["Tensors"]

_NEAR = 2e-3
"""Of each element: a factor is looked for in elements that went through sums of their own."""
_TELLING = 1e-2
"""Of the largest element: smaller ones are differences of larger numbers, and their ratios say little."""
_LEAST = 1e-3
"""By how much a factor must differ from 1."""


@dataclass
class Tensors:
    """The tensors that were seen of a failure.

    Attributes:
        size: the world size.
        samples: in each batch.
        steps: how often the step was called.
        seen: of each rank, with all values.
        traces: of each rank, what it has called.
        hypotheses: what one device gives for parts of the batch.
        wrong_alone: the step differs from the reference at world size 1 already.
        shardwise: the reference knows the world size, and goes through the batch as ranks do.
        alone: what one device has called.
        elsewhere: another world size, and what rank 0 has left there.
        tried: changes to single calls, and whether the step is right with them.
        further: the same case with other random numbers.
        right_when_small: whether all relations hold for the same batch, scaled down; None where that was not tried.
    """

    size: int
    samples: int
    steps: int
    expected: Expected
    relations: Relations
    seen: Sequence[Observation]
    traces: Sequence[Trace]
    hypotheses: Hypotheses
    wrong_alone: bool = False
    right_when_small: bool | None = None
    further: Sequence[Tensors] = ()
    elsewhere: tuple[int, Observation] | None = None
    shardwise: bool = False
    alone: Trace | None = None
    tried: Sequence[Change] = ()

    def wrong(self, *kinds: Kind) -> list[Result]:
        """Return what differs from one device, in the order of the model: all of it, or the values of some kinds,
        without texts.
        """
        values = self.expected.single.values.keys() | self.seen[0].values.keys()
        return [name for name in self.relations.wrong if not kinds or (name.kind in kinds and name in values)]

    @property
    def names(self) -> list[Result]:
        """Floating-point values that differ, and that a hypothesis would have to explain."""
        wanted = [name for name in self.wrong("grads", "returned") if name in self.expected.exact]
        return wanted or [name for name in self.wrong("params", "buffers") if name in self.expected.exact]

    @property
    def gradient_like(self) -> bool:
        """True if what differs is gradients, or parameters, rather than metrics."""
        return not self.wrong("returned") or bool(self.relations.skipped) or bool(self.wrong("grads", "params"))

    @property
    def broken(self) -> list[Result]:
        """The results that are wrong by not being finite where they are on one device."""
        return [name for name in self.wrong() if self.relations.held[name].get("finite") is False]

    @property
    def account(self) -> bool:
        """True if what the step returns stands for gradients or parameters."""
        return any(name.kind in ("grads", "params") for name in self.relations.skipped)

    def is_of_model(self, name: Result) -> bool:
        """Return whether a result is one of the model, or what the step returns under the name of a parameter."""
        return name.kind in ("params", "buffers", "grads") or (
            name.kind == "returned" and Result("params", name.of) in self.seen[0].values
        )

    def is_whole(self, name: str) -> bool:
        """Return whether every rank holds the whole of a parameter, as far as is known."""
        divided = {result.of for one in self.seen for result in one.own if result.kind == "params"}
        return name not in divided and (not divided or name in self.expected.single.initial)

    def events(self, *kinds: str) -> Iterator[tuple[int, Event]]:
        for rank, trace in enumerate(self.traces):
            for event in trace.of(*kinds):
                yield rank, event

    def first(self, *kinds: str) -> Event | None:
        return next((event for _, event in self.events(*kinds)), None)

    def is_combined(self, division: Division, how: str, factor: float = 1.0, names: Collection[Result] = ()) -> bool:
        """Return whether what differs is the results of all parts combined in that way; see `combined`."""
        names = names or self.names
        if not self.explains(self.combined(division, how, factor, names), names):
            return False
        for other in self.further:
            same = next(
                (d for d in other.hypotheses.divisions if (d.name, d.windows) == (division.name, division.windows)),
                None,
            )
            if same is None or not other.explains(other.combined(same, how, factor, names), names, False):
                return False
        return True

    @cached_property
    def own_parts(self) -> list[tuple[Division, list[Result]]]:
        """The divisions by which ranks hold what is each one's own, and what that is; as it is, or divided by the world
        size.
        """
        split = [name for name in self.names if name in self.relations.split]
        found = [
            (division, [name for name in split if self.is_combined(division, "own", factor, [name])])
            for division in self.hypotheses.divisions
            for factor in (1.0, 1.0 / self.size)
        ]
        return [(division, names) for division, names in found if names]

    def is_alternative(self, alternative: Alternative) -> bool:
        """Return whether what differs is what one device gives for another batch."""
        if not self.explains([dict(alternative.values)] * self.size):
            return False
        for other in self.further:
            same = next(
                (
                    a
                    for a in other.hypotheses.alternatives
                    if (a.kind, a.index) == (alternative.kind, alternative.index)
                ),
                None,
            )
            if same is None or not other.explains([dict(same.values)] * self.size, self.names, False):
                return False
        return True

    def explains(
        self, values: Sequence[Mapping[Result, torch.Tensor]], names: Collection[Result] = (), telling: bool = True
    ) -> bool:
        """Return whether each rank has left `values`, of that rank, where it differs from one device.

        Args:
            telling: no where they are what one device gives, too: they explain nothing then.
        """
        tells = not telling
        for name in names or self.names:
            exact = self.expected.exact.get(name)
            for rank, one in enumerate(self.seen):
                got, value = one.values.get(name), values[rank].get(name)
                if exact is None or got is None or value is None or got.shape != value.shape:
                    return False
                if not self._near(name, got.double(), value.double()):
                    return False
                tells |= value.shape != exact.shape or not self._near(name, value.double(), exact)
        return tells

    def _near(self, name: Result, one: torch.Tensor, other: torch.Tensor) -> bool:
        tolerance = self.expected.tolerance.get(name)
        slack = LOOSE * float(other[other.isfinite()].abs().max()) if bool(other.isfinite().any()) else 0.0
        if tolerance is not None and tolerance.shape == one.shape:
            allowed = 4 * tolerance + min(slack, 1e-2)
        else:
            allowed = torch.full_like(one, slack)
        same = (one == other) | (one.isnan() & other.isnan())
        return bool((same | ((one - other).abs() <= allowed)).all())

    def factor(self, names: Collection[Result] = ()) -> float | None:
        """Return the one number by which everything that differs is off, on all ranks; None if there is none."""
        found = self._factor(names or self.names, {})
        if found is None:
            return None
        # One number has some ratio to any other: it is one only if it comes again.
        again = [other._factor(names or self.names, {}) for other in self.further]
        return found if all(one is not None and abs(one - found) <= 2e-3 * abs(found) for one in again) else None

    def factor_of_updates(self) -> float | None:
        """Return the same of what the step adds to the parameters, as a learning rate changes it."""
        if any(name.owner not in self.expected.single.initial for name in self.names):
            return None  # a single number is some multiple of any other
        return self._factor(self.names, self.expected.single.initial)

    def factor_here(self, names: Collection[Result] = ()) -> float | None:
        """Return the same of this case by itself: with other random numbers it may be another one."""
        return self._factor(names or self.names, {})

    def factor_elsewhere(self) -> tuple[int, float] | None:
        """Return another world size, and the factor there."""
        if self.elsewhere is None:
            return None
        size, seen = self.elsewhere
        there = Tensors(self.size, self.samples, self.steps, self.expected, self.relations, [seen], (), self.hypotheses)
        ratio = there._factor(self.names, {})
        return None if ratio is None else (size, ratio)

    def _factor(self, names: Collection[Result], before: Mapping[str, torch.Tensor]) -> float | None:
        found: list[tuple[float, float]] = []
        for name in names:
            start, right = before.get(name.owner or "", torch.zeros(())).double(), self.expected.exact.get(name)
            if right is None or (start.dim() and start.shape != right.shape):
                return None  # a part has taken the place of the whole parameter
            exact = right - start
            usable = exact.isfinite() & (exact.abs() > _TELLING * largest(exact)) & (exact != 0)
            for one in self.seen:
                got = one.values.get(name)
                if got is None or got.shape != exact.shape:
                    return None
                off = (got.double() - start)[usable]
                if not bool(off.isfinite().all()):
                    return None
                found += pairs(off, exact[usable])
        return common_factor(found, least=_LEAST, relative=_NEAR)

    @cached_property
    def first_factor(self) -> tuple[int, float, bool] | None:
        """The first optimizer step that is wrong, the factor by which it is off on all ranks, and whether its update is.

        Its gradients are looked at first; None where no step is wrong, or no factor explains the first that is.
        """
        before = {Result("params", name): value.double() for name, value in self.expected.single.initial.items()}
        for step, right in enumerate(self.expected.snapshots):
            stages = [one.snapshots[step] for one in self.seen if step < len(one.snapshots)]
            if len(stages) < self.size or any(not has_shapes_of(right, stage) for stage in stages):
                return None
            zeros = {name: torch.zeros(()) for name in right if name.kind == "grads"}
            start = {name: before[name] for name in right if name in before}
            if not has_shapes_of(start, right):
                return None
            for was, is_update in ((zeros, False), (start, True)):
                if self._is_off(step, stages, was):
                    factor = factor_of_change(was, stages, right)
                    return None if factor is None else (step, factor, is_update)
            before = {name: right[name] for name in start}
        return None

    def _is_off(self, step: int, stages: Sequence[Mapping[Result, torch.Tensor]], names: Collection[Result]) -> bool:
        right, allowed = self.expected.snapshots[step], self.expected.allowances[step]
        return any(
            bool(((stage[name].double() - right[name]).abs() > allowed[name]).any())
            for stage in stages
            for name in names
        )

    @cached_property
    def mean_of_parts(self) -> tuple[Division, str] | None:
        """The first division by which what differs is the plain mean of the parts, and by what else it is off, in words."""
        for division in self.hypotheses.divisions:
            for factor, also in (
                (1.0, ""),
                (1.0 / self.size, ", divided by the world size"),
                (float(self.size), ", times the world size"),
            ):
                if self.is_combined(division, "mean", factor):
                    return division, also
        return None

    @staticmethod
    def same(one: torch.Tensor, other: torch.Tensor, scale: torch.Tensor) -> bool:
        """Return whether both are equal to 1e-5 of the largest magnitude in `scale`, and not all zero."""
        near = (one - other).abs() <= CLOSE * float(scale.abs().max())
        return bool(near.all()) and bool((other != 0).any())

    def weights_of_windows(self, division: Division) -> list[float] | None:
        """Return how much each micro-batch counts, 1 where it counts as it should; None where no weights explain what
        is wrong.

        Of rank 0, of what ranks have for each of their micro-batches.
        """
        columns: list[list[torch.Tensor]] = [[] for _ in range(division.windows)]
        got = [self.seen[0].values.get(name) for name in self.names]
        for name, value in zip(self.names, got, strict=True):
            for window, column in enumerate(columns):
                parts = [part[window].get(name) for part in division.parts]
                if value is None or any(part is None or part.shape != value.shape for part in parts):
                    return None
                stacked = torch.stack([part.double() for part in parts if part is not None])
                column.append(stacked.mean(0).flatten() / division.windows)
        return fitted(columns, [value for value in got if value is not None])

    def weights_of_ranks(self, division: Division) -> list[list[float]] | None:
        """Return, for each rank, how much each rank's part counts in what it holds, 1 / world size where all count alike in
        a mean; None where no weights explain what is wrong.
        """
        columns = self._columns(division)
        if columns is None:
            return None
        found = []
        for one in self.seen:
            values = [value for name in self.names if (value := one.values.get(name)) is not None]
            weights = fitted(columns, values) if len(values) == len(self.names) else None
            if weights is None:
                return None
            found.append(weights)
        return found

    def is_sum_of_parts(self, division: Division) -> bool | None:
        """Return whether one device has a sum of the parts, each times some number; None where too few elements tell it."""
        columns = self._columns(division)
        return None if columns is None else spanned(columns, [self.expected.exact[name] for name in self.names])

    def norms_of_parts(self, division: Division) -> list[float]:
        """Return the norm of all that differs, in each rank's part."""
        return [float(torch.cat(column).norm()) for column in self._columns(division) or ()]

    def _columns(self, division: Division) -> list[list[torch.Tensor]] | None:
        columns: list[list[torch.Tensor]] = [[] for _ in division.parts]
        for name in self.names:
            for column, windows in zip(columns, division.parts, strict=True):
                part = self._of_rank(name, windows)
                if part is None or part.shape != self.expected.exact[name].shape:
                    return None
                column.append(part.flatten())
        return columns

    def stays_as_left(self, name: Result, left: Sequence[Left]) -> bool:
        """Return whether each rank ends with the gradient that its backward pass has left, by sum and norm, and it is not the
        same on all.

        Args:
            left: of each rank, by the name of the parameter.
        """
        values = [one.values[name] for one in self.seen if name in one.values]
        return len(values) == self.size and is_left(name, left, values)

    def combined(
        self, division: Division, how: str, factor: float = 1.0, names: Collection[Result] = ()
    ) -> list[dict[Result, torch.Tensor]]:
        """Return, for each rank, the results of all parts combined: "mean", "sum", "norm", "own", "first", "last", "max"
        or "min".
        """
        results: list[dict[Result, torch.Tensor]] = [{} for _ in range(self.size)]
        for name in names or self.names:
            parts = [self._of_rank(name, windows) for windows in division.parts]
            known = [part for part in parts if part is not None]
            if len(known) < len(parts) or len({part.shape for part in known}) > 1:
                continue
            stacked = torch.stack(known)
            for rank in range(self.size):
                results[rank][name] = factor * _COMBINED[how](stacked, rank)
        return results

    def _of_rank(self, name: Result, windows: Sequence[Mapping[Result, torch.Tensor]]) -> torch.Tensor | None:
        """Return the mean over a rank's micro-batches; zero where a part without samples has no result."""
        exact = self.expected.exact.get(name)
        if exact is None:
            return None
        values = [window.get(name, torch.zeros_like(exact)).double() for window in windows]
        if len({value.shape for value in values}) > 1:
            return None
        return torch.stack([value.nan_to_num(0.0) for value in values]).mean(0)


_COMBINED: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {  # of the parts of all ranks, and a rank
    "own": lambda parts, rank: parts[rank],
    "first": lambda parts, rank: parts[0],
    "last": lambda parts, rank: parts[-1],
    "mean": lambda parts, rank: parts.mean(0),
    "sum": lambda parts, rank: parts.sum(0),
    "norm": lambda parts, rank: parts.square().sum(0).sqrt(),
    "max": lambda parts, rank: parts.amax(0),
    "min": lambda parts, rank: parts.amin(0),
}
