"""Measure the results of a step on one device, and how far rounding may move them.

The program runs in a rank that is alone in its world: unperturbed, in float64, and with enlarged rounding errors: its
batch is moved, and its operators are perturbed. The precision of the step does not determine a result that the
perturbed runs change; see `mgpu_check.numerics.steps`. A step can also run on its ranks in such variations.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from mgpu_check.diagnosis.observations import Expected, ObservedRun, Result
from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.gates.gate_arguments import Program, modules_of
from mgpu_check.gates.run.draws import DrawsOfFloat32, Notes
from mgpu_check.gates.run.quantizers import Quantized, as_argument, mirrored
from mgpu_check.gates.run.step_recorder import Nudge
from mgpu_check.gates.run.step_runs import Around, observe
from mgpu_check.gates.search.scenarios import Scenario
from mgpu_check.numerics import steps
from mgpu_check.numerics.perturbation import Perturbed, unfused
from mgpu_check.numerics.reduction import unit_roundoff
from mgpu_check.numerics.steps import MeasuredStep
from mgpu_check.torch_hooks.nested import named_parameters, tensors_of, with_tensors
from mgpu_check.torch_hooks.patches import entered
from mgpu_check.torch_hooks.switches import one_thread, some_threads
from mgpu_check.torch_hooks.tensors import FLOAT8, all_finite, name_of, plain_copy

ROUNDOFF = unit_roundoff(torch.float32)


def generator_of(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def flip_of(value: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """Return the change that flips the elements whose sign is within what is allowed, and leaves the others alone."""
    return -value.sign() * allowed * (value.abs() <= allowed)


def add_to(gradient: torch.Tensor, change: torch.Tensor | None) -> None:
    if change is not None and change.shape == gradient.shape:
        gradient.add_(change.to(gradient.device, gradient.dtype))


def moved(batch: Any, spread: float, generator: torch.Generator) -> Any:
    """Return the batch with each element of its floating-point tensors moved by `spread` roundoffs, up or down."""
    with Perturbed(spread, generator, ROUNDOFF, counts=True):
        leaves = tensors_of(batch)
        return with_tensors(batch, [x.clone() if x.is_floating_point() or x.is_complex() else x for x in leaves])


@contextlib.contextmanager
def perturbed(
    model: Any, batches: Sequence[Any], spread: float, generator: torch.Generator, copies: bool, fused: bool
) -> Iterator[None]:
    """Perturb the parameters, and then the results of operators inside the context, with `copies` also of copies."""
    # With `fused`, operators that run a whole recurrent network are taken apart.
    mode = Perturbed(spread, generator, ROUNDOFF, counts=True)
    with unfused() if fused else contextlib.nullcontext(), mode, DrawsOfFloat32():
        with torch.no_grad():
            for module in modules_of(model).values():
                for _, parameter in named_parameters(module):
                    parameter.copy_(parameter.clone())
        mode.copies = copies
        yield


_Gradients = dict[tuple[int, Result], torch.Tensor]  # of a rank, by optimizer step and name: slices, if it holds slices


@dataclass(frozen=True)
class Variation:
    """One way to run a step, the same on all ranks: otherwise some would wait for the others."""

    spread: float = 0.0  # roundoffs that operators and batches are perturbed by, positive or negative; 0 for none
    pair: int = 0  # the seed of the signs. Runs of the same seed and opposite spreads belong together.
    batch_only: bool = False  # perturb the batches, and not the operators
    double: bool = False
    deep: bool = False  # keep the results of each optimizer step
    # Flip the gradients whose sign rounding decides. Optimizers that divide by the size of a gradient take a whole step
    # in the direction of its sign.
    nudged: bool = False


MOVED_BATCH = Variation(1.0, -1, batch_only=True)
"""Shows what rounding within operators adds: a batch that is moved by one roundoff."""


def run_varied(rank: Rank, program: Program, scenario: Scenario, variation: Variation) -> ObservedRun:
    run = functools.partial(_run, rank, program, scenario)
    if not variation.nudged:
        return run(variation)
    gradients: list[_Gradients] = []
    for spread in (0.0, variation.spread, -variation.spread):
        gradients.append({})
        run(Variation(spread, variation.pair), nudge=functools.partial(_keep, gradients[-1]))
    changes = _undecided(variation, *gradients)
    return run(Variation(), nudge=lambda step, name, gradient: add_to(gradient, changes.get((step, name))))


def _run(rank: Rank, program: Program, scenario: Scenario, how: Variation, **options: Any) -> ObservedRun:
    if how.spread:
        signs: dict[str, Any] = {"spread": how.spread, "generator": generator_of(how.pair + 1)}
        options["alter"] = functools.partial(moved, **signs)
        if not how.batch_only:
            options["around"] = functools.partial(perturbed, **signs, copies=False, fused=False)
    elif how.double:
        options["around"] = lambda model, batches: DrawsOfFloat32()
    run = observe(rank, program, scenario, deep=how.deep, double=how.double, digests=False, **options)
    run.initial = {}
    return run


def _keep(into: _Gradients, step: int, name: Result, gradient: torch.Tensor) -> None:
    with _disable_current_modes():  # a mode would perturb the copy
        into[step, name] = plain_copy(gradient).float()


def _undecided(how: Variation, plain: _Gradients, *others: _Gradients) -> _Gradients:
    """Return the changes that flip each gradient whose sign rounding decides, and leave the others alone."""
    common = {key: value for key, value in plain.items() if all(key in gradients for gradients in others)}
    granted = steps.granted_at_least(common, others, ROUNDOFF, abs(how.spread))
    return {key: flip_of(value, granted[key]) for key, value in common.items()}


_DIRECTIONS = (1, -1)
# Least number of elements of results that makes a step large. Large steps get fewer perturbations, since each needs a
# random sign for every intermediate value.
LARGE = 1_000_000


@dataclass(frozen=True)
class Measured:
    """One program on one device: its run, and the values of each stage (optimizer steps if requested, then the end)."""

    single: ObservedRun
    stages: list[MeasuredStep[Result]]
    undetermined: set[Result]  # results of other than floating-point dtypes that rounding changes
    precise: bool  # whether the exact values were computed in float64
    remarks: list[str]  # measurements that failed, for the report


# The unperturbed run of one program on one device, and a tolerance within which a result is surely right.
Provisional = tuple[ObservedRun, dict[Result, torch.Tensor]]


@dataclass(frozen=True)
class RunPart:
    """One of the runs of a provisional measurement."""

    observed: ObservedRun | None  # the results; None if the perturbed run fails, or if a result is not finite
    # Whether these runs suffice. A recurrent network in one operator, and an optimizer that is not linear in the
    # gradient, need more.
    simple: bool
    # drawn, narrow: `Notes.drawn` and `Notes.seen`; empty for perturbed runs.
    drawn: tuple[tuple[int, ...], ...] = ()
    narrow: frozenset[torch.dtype] = frozenset()


class Runs:
    """The runs of one program for one scenario.

    Each function `measure…` makes one in a rank that is alone in its world, calls one of `measured`, `provisional`,
    `part` and `slightly_moved`, and drops it. `narrow` is set if the program computes in dtypes narrower than float32.
    """

    def __init__(self, rank: Rank, program: Program, scenario: Scenario, of_reference: bool, threads: int) -> None:
        self._observe = functools.partial(observe, rank, program, scenario, of_reference=of_reference)
        self._quantizers = () if of_reference else program.quantizers
        self._threads = threads
        self._singles: list[ObservedRun] = []
        self._moved: list[ObservedRun] = []
        self._pairs: list[list[ObservedRun]] = []
        self._dithered: list[ObservedRun] = []
        self._failure: Exception | None = None
        self._deep: bool | str = False
        self._drew: list[str] = []
        self._copies = True
        self._fused = False
        self.narrow = self._coarse = False
        self._precise = True

    def _run(
        self,
        *,
        around: Around = lambda model, batches: contextlib.nullcontext(),
        digests: bool = False,
        initial: bool = False,
        **how: Any,
    ) -> ObservedRun:
        @contextlib.contextmanager
        def with_threads(model: Any, batches: Sequence[Any]) -> Iterator[None]:
            elements = sum(p.numel() for module in modules_of(model).values() for _, p in named_parameters(module))
            large = 2 * elements >= LARGE  # twice: each parameter has a gradient
            with some_threads(self._threads, large), around(model, batches):
                yield

        located = self._singles[0].located if self._singles else None
        return self._observe(around=with_threads, digests=digests, initial=initial, located=located, **how)

    @property
    def elements(self) -> int:
        return sum(value.numel() for value in self._singles[0].values.values())

    @property
    def large(self) -> bool:
        return self.elements >= LARGE

    def provisional(self, notes: Notes) -> Provisional | None:
        """Run three or four times in the precision of the program; None if inconclusive. See `granted_at_least`."""
        self._deep = "nonlinear"
        single = self._once(notes, digests=False)
        self._singles = [single]
        with some_threads(self._threads, self.large):
            if self.narrow or not all(map(all_finite, single.values.values())):
                return None  # perturbations of several roundoffs prove nothing where a roundoff is large
            self._copies = False
            self._exact, self._in_double = single, False
            self._spread = steps.deviations(self.elements)
            self.perturb(0)
            if single.nonlinear and len(self._moved) == 2 and (against := self._against_signs()) is not None:
                self.perturb(0, against, directions=(1,))
                if len(self._moved) < 3:
                    return None
            if len(self._moved) < 2:
                return None
            tolerance = self._granted(None)
        single.snapshots = []
        return single, tolerance

    def part(self, run: int, elements: int) -> RunPart:
        """Do one of `RUNS`, for a step that is known to be simple, with about as many elements of results."""
        notes = Notes()
        if run:
            self._copies, self._in_double, self._spread = False, False, steps.deviations(elements)
            observed = self._perturbed(0, run)
        else:
            observed = self._once(notes, digests=False)
            observed.initial = {}
        if observed is not None and not all(map(all_finite, observed.values.values())):
            observed = None
        simple = not self._fused and not self.narrow and not (observed is not None and observed.nonlinear)
        return RunPart(observed, simple, tuple(notes.drawn), frozenset(notes.seen))

    def slightly_moved(self) -> ObservedRun:
        """Run unperturbed on a batch moved by one roundoff, so that sums round differently."""
        return self._run(deep=self._deep, alter=lambda batch: moved(batch, 1.0, generator_of(0)))

    def _against_signs(self) -> Callable[[int], Nudge] | None:
        """Return a nudge that flips each gradient whose sign rounding decides, if there are any; see `undecided`."""
        stages = [(stage, self._granted(index)) for index, stage in enumerate(self._exact.snapshots)]
        slack = [{name: flip_of(value, granted[name]) for name, value in stage.items()} for stage, granted in stages]
        return _nudge_by(slack, lambda direction: 1)

    def _granted(self, index: int | None) -> dict[Result, torch.Tensor]:
        """Return tolerances within which results are surely right, at the end (None) or at an optimizer step."""
        exact, *moved_runs = (wide(_stage(run, index)) for run in (self._exact, *self._moved))
        return steps.granted_at_least(exact, moved_runs, ROUNDOFF, self._spread)

    def as_it_is(self, notes: Notes, deep: bool) -> None:
        """Run twice in the precision of the step; the second batch is moved, so that sums round differently."""
        self._deep = deep
        single = self._once(notes, digests=True)
        # `undecided` needs the gradients of each optimizer step.
        self._deep = deep or ("gradients" if single.optimizer_steps else False)
        self._singles = [single, self.slightly_moved()]
        self._spread = steps.deviations(self.elements)

    def _once(self, notes: Notes, digests: bool) -> ObservedRun:
        own, quantized = Notes(), Quantized(self._quantizers)
        modes = own, quantized
        single = self._run(
            deep=self._deep, digests=digests, initial=True, around=lambda model, batches: entered(*modes)
        )
        quantized.check()
        self._coarse = bool(own.seen & FLOAT8 or self._quantizers)
        self.narrow, self._drew, self._fused = bool(own.seen) or self._coarse, own.drew, own.fused
        notes.seen |= own.seen
        notes.rounded |= own.rounded
        notes.drawn += own.drawn
        return single

    def exactly(self) -> None:
        """Run in float64, unless the code insists on float32 somewhere."""
        single, notes = self._singles[0], Notes()
        self._exact = single
        try:
            narrow = (steps.Unnarrowed(), Quantized(self._quantizers, as_argument)) if self.narrow else ()
            modes = DrawsOfFloat32(), *narrow, notes
            exact = self._run(double=True, deep=self._deep, around=lambda model, batches: entered(*modes))
        except Exception:
            self._precise = False
        else:
            # float64 may use other operators (attention on GPUs) that draw other numbers: then it is no reference.
            self._precise = alike(single, exact) and notes.drew == self._drew
        if self._precise:
            self._exact = exact
        elif self._deep == "gradients":
            self._exact = self._run(deep=self._deep)
        # Rounding to a narrow dtype happens only in the step's own dtypes, so there it is perturbed.
        self._in_double = self._precise and not self.narrow

    def perturb(
        self, pair: int, nudge: Callable[[int], Nudge] | None = None, directions: Sequence[int] = _DIRECTIONS
    ) -> None:
        """Run perturbed once in each direction, and keep the results that are comparable with the exact run."""
        runs = [self._perturbed(pair, direction, nudge and nudge(direction)) for direction in directions]
        usable = [run for run in runs if run is not None and alike(self._exact, run)]
        self._moved += usable
        if len(usable) == len(_DIRECTIONS):
            self._pairs.append(usable)

    def dither(self) -> None:
        """Run with results of operators in narrow dtypes that are moved by one unit in the last place."""
        for number in range(steps.SAMPLES // 2 if self.large else steps.SAMPLES):
            generator = generator_of(number)
            dithered = steps.Dithered(generator, precise=self._precise)
            quantized = Quantized(self._quantizers, functools.partial(mirrored, generator), redrawn=generator)
            run = self._run_if_possible(around=lambda model, batches, modes=(dithered, quantized): entered(*modes))
            if run is not None and alike(self._singles[0], run):
                self._dithered.append(run)

    def _perturbed(self, pair: int, direction: int, nudge: Nudge | None = None) -> ObservedRun | None:
        generator, by = generator_of(pair + 1), direction * self._spread
        return self._run_if_possible(
            double=self._in_double,
            nudge=nudge,
            alter=functools.partial(moved, spread=by, generator=generator),
            around=functools.partial(perturbed, spread=by, generator=generator, copies=self._copies, fused=self._fused),
        )

    def _run_if_possible(self, **how: Any) -> ObservedRun | None:
        try:
            return self._run(deep=self._deep, **how)
        except Exception as error:  # for instance, a perturbed count is no longer an integer
            self._failure = error
            return None

    def undecided(self) -> Callable[[int], Nudge] | None:
        """Return a nudge that moves gradients within their tolerance, by direction; None if it changes no sign.

        Optimizers that divide by the size of the gradient take a whole step in the direction of its sign, even if the
        gradient is only rounding errors.
        """
        slack = [
            {
                name: torch.where((value != 0) & (value.abs() <= stage.tolerance[name]), stage.tolerance[name], 0.0)
                for name, value in stage.reference.items()
                if name.kind == "grads"
            }
            for stage in map(self._assess, range(len(self._exact.snapshots)))
        ]
        return _nudge_by(slack, lambda direction: direction)

    def measured(self, notes: Notes, deep: bool) -> Measured:
        """Run as often as needed to measure the tolerance of the results, with `deep` of each optimizer step, too."""
        self.as_it_is(notes, deep)
        self.exactly()
        pairs = steps.PAIRS - 1 if self.large else steps.PAIRS
        for pair in range(pairs):
            self.perturb(pair)
        if self.narrow:
            self.dither()
        if nudge := self.undecided():
            # Every nudge moves gradients by the same amounts, so one pair suffices for large, slow models.
            for pair in range(1 if self.large else pairs):
                self.perturb(pairs + pair, nudge)
        with some_threads(self._threads, self.large):
            return self._assessed(deep)

    def _assessed(self, deep: bool) -> Measured:
        exact = self._exact
        undetermined = {
            name
            for name, value in self._singles[0].values.items()
            if not value.is_floating_point()
            and any(not torch.equal(value, run.values[name]) for run in (exact, *self._moved))
        }
        remarks = []
        if self._failure is not None:
            kind, message = type(self._failure).__name__, next(iter(str(self._failure).splitlines()), "")
            remarks.append(f"tolerances may be too narrow: a perturbed run of the step failed: {kind}: {message}")
        if not self._moved:
            remarks.append(
                "tolerances may be too narrow: they come from unperturbed runs, because no perturbed run left "
                "comparable results"
            )
        stages = [self._assess(index) for index in (*(range(len(exact.snapshots)) if deep else ()), None)]
        return Measured(self._singles[0], stages, undetermined, self._precise, remarks)

    def _assess(self, index: int | None) -> MeasuredStep[Result]:
        """Assess the results at the end (None), or after an optimizer step."""
        of_exact = _stage(self._exact, index)
        reference = {name: value.double() for name, value in of_exact.items() if value.is_floating_point()}

        def usable(several: Sequence[ObservedRun]) -> list[dict[Result, torch.Tensor]]:
            # Infinities and NaN on one device are compared as such; they are measured as zeros.
            stages = [_stage(run, index) for run in several if index is None or index < len(run.snapshots)]
            return [
                {
                    name: torch.where(reference[name].isfinite() & values[name].isfinite(), values[name].double(), 0.0)
                    for name in reference
                }
                for values in stages
            ]

        (exact,) = usable([self._exact])
        assessed = steps.assess(exact, usable(self._singles), usable(self._moved), ROUNDOFF, self._spread)
        if not self._dithered:
            return MeasuredStep(reference, assessed.tolerance, assessed.amplification)
        # The plain run is made without the results of each optimizer step; the moved one rounds as it does.
        samples = usable([*self._singles[0 if index is None else 1 :], *self._dithered])
        pairs = [pair for runs in self._pairs if len(pair := usable(runs)) == len(_DIRECTIONS)]
        tolerance = dict(assessed.tolerance)
        for name in reference:
            values, dtype = [sample[name] for sample in samples], _stage(self._singles[-1], index)[name].dtype
            if not steps.is_narrow(dtype) and all(torch.equal(values[0], value) for value in values[1:]):
                continue  # no rounding to a narrow dtype reaches this result
            if not self._precise:
                exact[name] = torch.stack(values).mean(0)
                reference[name] = torch.where(reference[name].isfinite(), exact[name], reference[name])
            both = [(up[name], down[name]) for up, down in pairs]
            tolerance[name] = steps.narrow_tolerance(exact[name], values, both, dtype, self.elements, self._coarse)
        return MeasuredStep(reference, tolerance, assessed.amplification)


def _stage(run: ObservedRun, index: int | None) -> Mapping[Result, torch.Tensor]:
    """Return the results of a run at the end (None), or after an optimizer step."""
    return run.values if index is None else run.snapshots[index]


def _nudge_by(
    slack: Sequence[Mapping[Result, torch.Tensor]], factor: Callable[[int], int]
) -> Callable[[int], Nudge] | None:
    """Return a nudge that adds `slack` times the factor of the direction to the gradients; None if it is all zero."""
    if not any(bool(value.any()) for of_step in slack for value in of_step.values()):
        return None

    def of_direction(direction: int) -> Nudge:
        def nudge(step: int, name: Result, gradient: torch.Tensor) -> None:
            if step < len(slack) and name in slack[step]:
                add_to(gradient, factor(direction) * slack[step][name])

        return nudge

    return of_direction


def wide(values: Mapping[Result, torch.Tensor]) -> dict[Result, torch.Tensor]:
    """Return the floating-point values, with narrow dtypes widened to float32."""
    floating = {name: value for name, value in values.items() if value.is_floating_point()}
    return {name: value.float() if value.element_size() < 4 else value for name, value in floating.items()}


def finite(values: Mapping[Result, torch.Tensor]) -> dict[Result, torch.Tensor]:
    """Return the floating-point values, in float32 at least, with zeros in place of infinities and NaN."""
    return {name: torch.where(value.isfinite(), value, 0.0) for name, value in wide(values).items()}


def granted_on_ranks(
    plain: ObservedRun, moved_runs: Sequence[ObservedRun], spread: float, of_batch: ObservedRun | None
) -> dict[Result, torch.Tensor]:
    """Return how far rounding may move the results of a step on its ranks; see `granted_at_least`.

    `moved_runs`: perturbed by `spread` roundoffs. `of_batch`: the run of `MOVED_BATCH`, if there is one.
    """
    single = finite(plain.values)
    granted = steps.granted_at_least(single, [finite(run.values) for run in moved_runs], ROUNDOFF, spread)
    return granted if of_batch is None else steps.granted_with(granted, single, rounding_seen(plain, of_batch) or {})


def alike(run: ObservedRun, other_run: ObservedRun) -> bool:
    """Return whether two runs left results of the same names, shapes and finite places, in as many steps."""
    others = other_run.values
    return left_alike(run, other_run) and all(
        (all_finite(value) and all_finite(others[name])) or torch.equal(value.isfinite(), others[name].isfinite())
        for name, value in run.values.items()
    )


def left_alike(run: ObservedRun, other_run: ObservedRun) -> bool:
    """Return whether two runs left results of the same names and shapes after as many optimizer steps."""
    if run.values.keys() != other_run.values.keys() or run.optimizer_steps != other_run.optimizer_steps:
        return False
    return all(value.shape == other_run.values[name].shape for name, value in run.values.items())


RUNS = (0, 1, -1)
"""The runs of a provisional measurement: unperturbed (0), and perturbed in two opposite directions (1 and -1)."""


def rounding_seen(single: ObservedRun, moved_run: ObservedRun) -> dict[Result, float] | None:
    """Return the errors of a run, by one of `measure_slightly_moved`, if they are alike; see `steps.errors_seen`."""
    return steps.errors_seen(wide(single.values), wide(moved_run.values)) if alike(single, moved_run) else None


_FACTORS = tuple(2.0**power for power in range(30, -1, -1))


def measure(rank: Rank, program: Program, scenario: Scenario, deep: bool = False, alone: bool = True) -> Expected:
    """Run the reference, or else the step, unchanged, in float64, and perturbed; `numerics.steps` explains why.

    `deep`: also measure the results after each optimizer step. `alone`: if there is a reference, also run the step at
    world size 1, which shows which batches suit the step and which random numbers it draws. The tolerance comes from
    the reference only.
    """
    narrower: set[torch.dtype] = set()
    by_reference, own = program.reference is not None, None
    with one_thread() as threads:
        notes = Notes()
        main = Runs(rank, program, scenario, by_reference, threads).measured(notes, deep)
        drawn = tuple(notes.drawn)
        if by_reference and alone:
            of_step = Notes()
            with contextlib.suppress(Exception):  # a reference may be given because the step does not run alone
                own = observe(rank, program, scenario, around=lambda model, batches: entered(of_step))
                drawn = tuple(of_step.drawn)
                narrower = of_step.seen - notes.seen
                notes.seen |= of_step.seen
                notes.rounded |= of_step.rounded
    if not main.precise:
        main.remarks.append(
            "the step does not run in float64, or draws other random numbers there; the exact values are those of "
            "float32"
        )
    if notes.rounded and not program.quantizers:
        main.remarks.append(
            f"the step calls {', '.join(sorted(notes.rounded))}; if it quantizes there, give the function in "
            "quantizers=, or its rounding is not in the tolerances"
        )
    *earlier, last = [_with_room_for(stage, narrower) for stage in main.stages]
    return Expected(
        main.single,
        own,
        by_reference,
        last.reference,
        last.tolerance,
        main.undetermined,
        tuple(sorted(map(name_of, notes.seen))),
        drawn,
        [stage.reference for stage in earlier],
        [stage.tolerance for stage in earlier],
        main.remarks,
    )


def measure_provisionally(rank: Rank, program: Program, scenario: Scenario, alone: bool = True) -> Expected | None:
    """Run the reference, or else the step, unchanged and perturbed, in its own precision: most right steps pass that.

    Return None if the result is inconclusive, so that `measure` is needed. `alone`: see `measure`; here the step runs
    beside a reference only if batches were changed, to check that they suit the step.
    """
    by_reference, own = program.reference is not None, None
    with one_thread() as threads:
        notes = Notes()
        main = Runs(rank, program, scenario, by_reference, threads).provisional(notes)
        if main is None:
            return None
        if by_reference and alone and scenario.change:
            try:
                own = observe(rank, program, scenario)
            except Exception:
                return None
    main[0].initial = {}
    return _provisional(program, main, own, notes.drawn, notes.seen)


def measure_in_parts(
    rank: Rank, program: Program, scenario: Scenario, runs: Sequence[int], elements: int
) -> list[RunPart]:
    """Do this rank's share of the runs of `measure_provisionally`, with one thread; see `Runs.part`."""
    with one_thread():
        return [Runs(rank, program, scenario, program.reference is not None, 1).part(run, elements) for run in runs]


def of_parts(program: Program, run_parts: Sequence[RunPart], elements: int) -> Expected | None:
    """Join one part for each of `RUNS` as `measure_provisionally` does; None if inconclusive."""
    runs = [run_part.observed for run_part in run_parts if run_part.observed is not None and run_part.simple]
    if len(runs) < len(RUNS) or not all(left_alike(runs[0], run) for run in runs[1:]):
        return None
    single, *moved = runs
    granted = steps.granted_at_least(
        wide(single.values), [wide(run.values) for run in moved], ROUNDOFF, steps.deviations(elements)
    )
    return _provisional(program, (single, granted), None, run_parts[0].drawn, run_parts[0].narrow)


def _provisional(
    program: Program,
    main: Provisional,
    own: ObservedRun | None,
    drawn: Iterable[tuple[int, ...]],
    narrow: Iterable[torch.dtype],
) -> Expected:
    single, tolerance = main
    exact = {name: single.values[name] for name in tolerance}
    dtypes = tuple(sorted(map(name_of, narrow)))
    of_reference = program.reference is not None
    return Expected(single, own, of_reference, exact, tolerance, narrow=dtypes, drawn=tuple(drawn), provisional=True)


def measure_slightly_moved(rank: Rank, program: Program, scenario: Scenario) -> ObservedRun:
    """Run the reference, or else the step, once more, on a batch moved by one roundoff."""
    # The difference shows rounding inside operators, which a perturbation of their results cannot show.
    with one_thread() as threads:
        run = Runs(rank, program, scenario, program.reference is not None, threads).slightly_moved()
    run.initial = {}
    return run


def largest_factor(rank: Rank, program: Program, scenario: Scenario) -> float | None:
    """Return the largest factor of the batch, if any, that keeps all results of one device finite in float16."""
    notes = Notes()
    observe(rank, program, scenario, of_reference=False, around=lambda model, batches: entered(notes))
    if torch.float16 not in notes.seen:
        return None
    for factor in _FACTORS:
        scaled = Scenario(1, scenario.samples, 1, "scaled", factor, scenario.seed, scenario.batches)
        if all(bool(value.isfinite().all()) for value in observe(rank, program, scaled).values.values()):
            return factor
    return None


def _with_room_for(stage: MeasuredStep[Result], narrower: Iterable[torch.dtype]) -> MeasuredStep[Result]:
    """Return the stage with tolerances for rounding to dtypes that only the step uses, not the reference."""
    roundoff = max(map(unit_roundoff, narrower), default=0.0)
    if not roundoff:
        return stage
    tolerance = dict(stage.tolerance)
    for name, exact in stage.reference.items():
        if not torch.equal(exact, exact.round()):  # whole numbers, such as counts, must be exact
            tolerance[name] = steps.with_roundings(tolerance[name], exact, roundoff)
    return MeasuredStep(stage.reference, tolerance, stage.amplification)
