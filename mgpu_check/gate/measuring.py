"""In a rank alone in its world: what a step must give on one device, and how far rounding may lead from it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from mgpu_check.gate.draws import DrawsOfFloat32, Notes
from mgpu_check.gate.observing import Observation, Program, observe
from mgpu_check.gate.scenario import Scenario
from mgpu_check.numerics.bounds import unit_roundoff
from mgpu_check.numerics.perturbation import Perturbed
from mgpu_check.numerics.steps import PAIRS, Measurement, assess, deviations, full_precision
from mgpu_check.ranks import Rank

__all__ = ["Expected", "largest_factor", "measure", "one_thread"]

_LARGE = 1_000_000
"""Elements from which on fewer perturbations do: each draws a random sign for every intermediate value."""
_FACTORS = tuple(2.0**power for power in range(30, -1, -1))


@dataclass
class Expected:
    """What one device gives.

    Attributes:
        single: the run in the precision of the step: of the reference, or of the step itself.
        own: that of the step, where `single` is that of a reference; None if the step cannot run alone.
        by_reference: whether `single` is that of a reference.
        exact: floating-point results, in float64.
        tolerance: name -> for each element of `exact`.
        undetermined: names of results that rounding changes in a way that is not to be measured.
        precise: whether `exact` was computed in float64.
        narrow: the narrow dtypes in which the step computes.
        drawn: the shapes in which the step draws random numbers.
        snapshots, allowances: exact values and tolerances after each optimizer step, where asked for.
        remarks: what could not be measured.
    """

    single: Observation
    own: Observation | None
    by_reference: bool = False
    exact: dict[str, torch.Tensor] = field(default_factory=dict)
    tolerance: dict[str, torch.Tensor] = field(default_factory=dict)
    undetermined: set[str] = field(default_factory=set)
    precise: bool = True
    narrow: tuple[str, ...] = ()
    drawn: tuple[tuple[int, ...], ...] = ()
    snapshots: list[dict[str, torch.Tensor]] = field(default_factory=list)
    allowances: list[dict[str, torch.Tensor]] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    @property
    def finite(self) -> bool:
        """Whether all results are finite."""
        return all(bool(value.isfinite().all()) for value in self.single.values.values())


@dataclass(frozen=True)
class _Measured:
    """One program on one device: its run, and the values of each stage (optimizer steps, then the end)."""

    single: Observation
    stages: list[Measurement]
    undetermined: set[str]
    precise: bool
    remarks: list[str]


def measure(rank: Rank, program: Program, scenario: Scenario, deep: bool = False, alone: bool = True) -> Expected:
    """Run the reference, or the step, as it is, in float64, and perturbed; see `numerics.steps` for what that tells.

    Args:
        deep: measure what each step of an optimizer leaves, too.
        alone: beside a reference, run the step at world size 1, too, whose arithmetic may be less exact.
    """
    remarks: list[str] = []
    with full_precision(), one_thread():
        notes = Notes()
        by_reference = program.reference is not None
        main = _measured(rank, program, scenario, by_reference, deep, notes)
        drawn = tuple(notes.drawn)
        own = None
        if by_reference and not alone:
            remarks.append("the step does not run at world size 1")
        elif by_reference:
            notes.drawn.clear()
            try:
                own = _measured(rank, program, scenario, False, deep, notes)
                drawn = tuple(notes.drawn)
            except Exception as error:
                remarks.append(f"the step does not run at world size 1: {type(error).__name__}: {error}")
    remarks += main.remarks
    if not main.precise:
        remarks.append("the step does not run in float64; the reference is float32, as it is")
    expected = Expected(
        main.single,
        None if own is None else own.single,
        by_reference,
        undetermined=main.undetermined | (own.undetermined if own else set()),
        precise=main.precise,
        drawn=drawn,
        narrow=tuple(sorted(str(dtype).removeprefix("torch.") for dtype in notes.seen)),
        remarks=remarks,
    )
    stages = [_with_tolerance_of(stage, place, own) for place, stage in enumerate(main.stages)]
    *earlier, last = stages
    expected.exact, expected.tolerance = last
    expected.snapshots = [exact for exact, _ in earlier]
    expected.allowances = [tolerance for _, tolerance in earlier]
    return expected


def largest_factor(rank: Rank, program: Program, scenario: Scenario) -> float | None:
    """By how much the batch can be scaled so that all results of one device stay finite, if it computes in float16.

    None where it does not, or is finite at no scale.
    """
    notes = Notes()
    observe(rank, program, scenario, of_reference=False, around=lambda model: _entered(notes))
    if torch.float16 not in notes.seen:
        return None
    for factor in _FACTORS:
        scaled = Scenario(1, scenario.samples, 1, "scaled", factor, scenario.seed, scenario.batches)
        seen = observe(rank, program, scaled)
        if all(bool(value.isfinite().all()) for value in seen.values.values()):
            return factor
    return None


def _with_tolerance_of(
    stage: Measurement, place: int, own: _Measured | None
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Exact values and tolerances; these as large as the step's own arithmetic needs, if that is less exact."""
    tolerance = dict(stage.tolerance)
    if own is not None and place < len(own.stages):
        for name, value in own.stages[place].tolerance.items():
            if name in tolerance and tolerance[name].shape == value.shape:
                tolerance[name] = torch.maximum(tolerance[name], value)
    return stage.reference, tolerance


def _measured(
    rank: Rank, program: Program, scenario: Scenario, of_reference: bool, deep: bool, notes: Notes
) -> _Measured:
    def run(double: bool, **how: Any) -> Observation:
        return observe(rank, program, scenario, of_reference=of_reference, double=double, deep=deep, **how)

    single = run(False, around=lambda model: _entered(notes))
    generator = torch.Generator().manual_seed(0)
    # Two runs in the precision of the step: their errors are those that another order of the same sums has.
    singles = [single, run(False, alter=lambda batch: _moved(batch, 1.0, generator))]
    elements = sum(value.numel() for value in single.values.values())
    spread = deviations(elements)
    pairs = PAIRS if elements < _LARGE else PAIRS - 1
    try:
        exact = run(True, around=lambda model: _entered(DrawsOfFloat32()))
        precise = _alike(single, exact)
    except Exception:  # the code insists on float32 somewhere
        precise = False
    if not precise:
        exact = single
    moved: list[Observation] = []
    remarks: list[str] = []
    for _ in range(pairs):
        before = generator.get_state()
        for direction in (spread, -spread):
            generator.set_state(before)
            try:
                found = run(
                    precise,
                    alter=lambda batch, by=direction: _moved(batch, by, generator),
                    around=lambda model, by=direction: _perturbed(model, by, generator),
                )
            except Exception as error:  # a perturbed count is none, for instance
                remarks = [
                    f"not all of it runs with its numbers perturbed: {type(error).__name__}: {_first_line(error)}"
                ]
                continue
            if _alike(exact, found):
                moved.append(found)
    if not moved:
        remarks.append("tolerances are those of one run: no perturbed one has left results to compare")
    undetermined = {
        name
        for name, value in single.values.items()
        if not value.is_floating_point() and any(not torch.equal(value, one.values[name]) for one in (exact, *moved))
    }
    stages = [_assess(exact, singles, moved, place, spread) for place in range(len(exact.snapshots))]
    return _Measured(single, [*stages, _assess(exact, singles, moved, None, spread)], undetermined, precise, remarks)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")


def _assess(
    exact: Observation, singles: Sequence[Observation], moved: Sequence[Observation], place: int | None, spread: float
) -> Measurement:
    """Of what was left at the end, or after an optimizer step."""

    def stage(seen: Observation) -> Mapping[str, torch.Tensor]:
        return seen.values if place is None else seen.snapshots[place]

    names = [name for name, value in stage(exact).items() if value.is_floating_point()]
    reference = {name: stage(exact)[name].double() for name in names}

    def usable(seen: Observation) -> dict[str, torch.Tensor]:
        # Infinities and NaN that the step has on one device are compared as such, and measured as if they were zero.
        values = stage(seen)
        return {
            name: torch.where(reference[name].isfinite() & values[name].isfinite(), values[name].double(), 0.0)
            for name in names
        }

    ran = [one for one in singles if place is None or place < len(one.snapshots)]
    roundoff = unit_roundoff(torch.float32)
    assessed = assess(usable(exact), [usable(one) for one in ran], [usable(one) for one in moved], roundoff, spread)
    return Measurement(reference, assessed.tolerance, assessed.amplification)


def _alike(one: Observation, other: Observation) -> bool:
    """Whether two runs have left the same things, finite in the same places, after as many steps."""
    if one.values.keys() != other.values.keys() or len(one.snapshots) != len(other.snapshots):
        return False
    return all(
        value.shape == other.values[name].shape and torch.equal(value.isfinite(), other.values[name].isfinite())
        for name, value in one.values.items()
    )


def _moved(batch: Any, spread: float, generator: torch.Generator) -> Any:
    """The floating-point tensors of a batch, each element some roundoffs larger or smaller."""
    with Perturbed(spread, generator, unit_roundoff(torch.float32)):
        return tree_map(
            lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf, batch
        )


@contextlib.contextmanager
def _perturbed(model: Any, spread: float, generator: torch.Generator) -> Iterator[None]:
    with Perturbed(spread, generator, unit_roundoff(torch.float32)), DrawsOfFloat32():
        for module in (
            model.values() if isinstance(model, Mapping) else model if isinstance(model, (list, tuple)) else [model]
        ):
            if isinstance(module, torch.nn.Module):
                with torch.no_grad():
                    for parameter in module.parameters():
                        parameter.copy_(parameter.clone())
        yield


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread, as ranks do that share a machine: small steps gain nothing from more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def _entered(mode: TorchDispatchMode) -> Iterator[None]:
    with mode:
        yield
