"""The gate in one call: the same step on one device and on several trains the same model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase
from hypothesis import strategies as st
from hypothesis.errors import Flaky, Unsatisfiable
from hypothesis.reporting import with_reporter
from torch import nn

from mgpu_check.errors import RankHang, ScalingMismatch
from mgpu_check.gates.axes import shrunk_to_axes
from mgpu_check.gates.comparability import check_unjudged
from mgpu_check.gates.investigation import failure_of, no_return_of
from mgpu_check.gates.meshes import Mesh, check_meshes, size_of
from mgpu_check.gates.program import Program, name_of
from mgpu_check.gates.scenario import Scenario
from mgpu_check.gates.scenario_families import SEVERAL_STEPS, Sizes, families
from mgpu_check.gates.step_seeds import try_seeds
from mgpu_check.gates.telling import report_of
from mgpu_check.gates.trial import Trial, Trials
from mgpu_check.gates.worlds import RanksFixture, check_tolerance, world_sizes_of
from mgpu_check.mistakes.results import KINDS
from mgpu_check.numerics.placement.declared import Placement, check_placement

__all__ = ["assert_metric_scales", "assert_step_scales"]

_AS_IN = {
    "step": "step(model, batch, rank)",
    "build": "build() that makes the model",
    "batch": "batch(n) that makes n samples, or a strategy of batches",
    "reference": "reference(model, batch)",
}
_EXAMPLES = 24
_MOST_SHRINKS = 40
"""Cases that are run to find a smaller one, once one has failed."""


def assert_step_scales(
    ranks: RanksFixture,
    step: Callable[..., Any],
    *,
    build: Callable[[], Any],
    batch: Callable[[int], Any] | st.SearchStrategy[Any],
    reference: Callable[..., Any] | None = None,
    world_sizes: Iterable[int] | None = None,
    sizes: Sizes = None,
    observe: Collection[str] = KINDS,
    tolerance: float | Mapping[str, float] | None = None,
    max_examples: int | None = None,
    single_process: bool = False,
    meshes: Iterable[Mapping[str, int]] | None = None,
    placement: Placement = None,
    returned_by: Callable[[Mapping[str, int]], bool] | str | None = None,
    unjudged: Mapping[str, str] | None = None,
) -> None:
    """Assert that a training step on several ranks does what it does on one device.

    The step runs on every rank of each world size drawn, on the same global batch, from the same seed. All that it leaves
    is compared with one device: gradients, parameters, buffers, the optimizer's state, what it returns. Ranks must agree
    with each other, and a second run must repeat the first. Tensors are compared within a tolerance that is measured on the
    step itself (`mgpu_check.numerics.steps`): the reference is computed in float64, and perturbed by rounding errors.

    Args:
        ranks: the fixture of that name.
        step: ``step(model, batch, rank) -> mapping of named tensors or numbers, or None``: the parallel step, called on
            every rank with the global batch, of which it takes its part. `model` and `batch` are on the CPU, as they are
            built; the step moves them to ``rank.device``, or stays on the CPU. What it returns must be the same on all
            ranks. What it returns under the names of parameters, or as one flat tensor of all, stands for the gradients
            that it leaves. A class is called with (model, rank) first, and keeps what must outlive one step: an optimizer, the
            wrapped model.
        build: ``build() -> nn.Module``, or a tuple or mapping of them; called on every rank under the same seed.
        batch: ``batch(n)``: a global batch of n samples, called on every rank under the same seed: tensors in any
            structure, their first dimension that of the samples. Or a Hypothesis strategy of global batches.
        reference: ``reference(model, batch)``, what one device does; it returns what `step` does. Default: the step
            itself at world size 1. A class is called with the model first, and the object with (model, batch) for each
            step. A parameter called `world_size` is given the world size under test, for references
            that go through the batch shard by shard.
        world_sizes: those to try; default the powers of two up to ``ranks.size``, and it.
        sizes: batch sizes: a strategy of integers, an integer, several, "divisible" for multiples of the world size, or a
            function from the world size to a strategy. Default: divisible by it and not, below it, at it and above.
        observe: what is compared, of "grads", "params", "buffers", "optimizer", "returned" and "rng".
        tolerance: granted instead of the measured one: a fraction of the largest magnitude of each tensor, for all or by
            name.
        max_examples: cases to try, about; default 24.
        single_process: one process drives all devices, as with nn.DataParallel: the step runs in one process, and
            ``rank.size`` is the number of devices.
        meshes: meshes to try, in place of world sizes: ``[{"dp": 2, "tp": 2}, {"pp": 4}]``. ``rank.mesh`` is the
            `DeviceMesh`. A failure names the axes that it needs.
        placement: which slice of which parameter a rank holds, where that cannot be found out: a mapping from patterns of
            names, or a function ``(name, rank)``. A slice is given by the dimension that is chunked over all ranks, by a
            mapping from axes of the mesh to dimensions, as "whole", or as an index of the whole tensor; a tuple of a name
            and one of these where the parameter has another name on one device. Default: DTensor, FSDP1, the attributes
            that Megatron sets, and the values before the first step tell.
        returned_by: the ranks whose returned values count: "last" for those of the last stage (axis "pp", or the last
            rank), or a function of the coordinates, ``lambda at: at["tp"] == 0``. Default: all ranks.
        unjudged: parameters that need not be compared, by pattern, with the reason of each.

    Raises:
        NotCompared: nothing is known to be wrong, but a parameter that is trained was not compared with one device.
        ScalingMismatch: a relation does not hold; names the smallest case, every observable with its relations, and the
            likely mistake. `.ranks` holds the ranks, `.mistakes` the classes.
        RankHang: ranks did not return in time.
        ValueError: an argument is wrong, or the step cannot be compared: it fails on one device, or `batch` gives other
            batches when it is called again under the same seed.
    """
    __tracebackhide__ = True
    program = Program(
        step,
        build,
        None if isinstance(batch, st.SearchStrategy) else batch,
        reference,
        single_process,
        placement=placement,
        returned_by=returned_by,
    )
    reasons = check_unjudged(program.gate, unjudged)
    _assert_scales(ranks, program, batch, world_sizes, sizes, observe, tolerance, max_examples, meshes, reasons)


def assert_metric_scales(
    ranks: RanksFixture,
    metric: Callable[..., Any],
    *,
    build: Callable[[], Any],
    batch: Callable[[int], Any] | st.SearchStrategy[Any],
    reference: Callable[..., Any] | None = None,
    world_sizes: Iterable[int] | None = None,
    sizes: Sizes = None,
    tolerance: float | Mapping[str, float] | None = None,
    max_examples: int | None = None,
) -> None:
    """Assert that a metric over several ranks is that of one device, for every number of samples.

    ``metric(model, batch, rank)`` evaluates this rank's part of the global batch, and returns the metric of all of it: the
    same on every rank. All arguments are those of `assert_step_scales`; what is left in the model is not looked at.

    Raises:
        ScalingMismatch: the metric differs from that of one device, or between ranks.
        ValueError: see `assert_step_scales`; or the metric returns nothing.
    """
    __tracebackhide__ = True
    of_batch = None if isinstance(batch, st.SearchStrategy) else batch
    program = Program(metric, build, of_batch, reference, gate="assert_metric_scales")
    _assert_scales(ranks, program, batch, world_sizes, sizes, ("returned",), tolerance, max_examples)


def _assert_scales(
    ranks: RanksFixture,
    program: Program,
    batch: Callable[[int], Any] | st.SearchStrategy[Any],
    world_sizes: Iterable[int] | None,
    sizes: Sizes,
    observe: Collection[str],
    tolerance: float | Mapping[str, float] | None,
    max_examples: int | None,
    meshes: Iterable[Mapping[str, int]] | None = None,
    unjudged: Mapping[str, str] = MappingProxyType({}),
) -> None:
    __tracebackhide__ = True
    _check_arguments(program, observe, tolerance, max_examples)
    if meshes is None:
        worlds: list[tuple[int, Mesh]] = [(size, ()) for size in world_sizes_of(ranks, world_sizes)]
    else:
        several = check_meshes(program.gate, meshes, ranks.size, world_sizes, program.single_process)
        worlds = [(size_of(mesh), mesh) for mesh in several]
    allowed = sorted({size for size, _ in worlds})
    drawn = batch if isinstance(batch, st.SearchStrategy) else None
    if drawn is not None and sizes is not None:
        raise ValueError(f"{program.gate}: sizes and a strategy of batches are both given; batches bring their sizes")
    if allowed == [1] and program.reference is None:
        raise ValueError(
            f"{program.gate}: world_sizes={allowed} compares one device with itself; give a reference, or 2"
        )
    trials = Trials(ranks, program, frozenset(observe), tolerance, name_of(program.step))
    for kind in families(worlds, sizes, drawn, max_examples or _EXAMPLES):
        if kind.name == SEVERAL_STEPS and not trials.trains:
            continue
        try:
            failed = _search(trials, kind.scenarios, kind.examples)
        except RankHang as hang:
            failure = no_return_of(trials.name, trials.current, hang)
            report, stacks = report_of(failure), failure.stacks
            late = RankHang("\n\n".join([str(report), *stacks]), ranks=hang.ranks)
            late.mistakes = report.mistakes
            raise late from None  # another one: the engine rewrites its own when it is shown
        if failed is not None:
            failed, axes = shrunk_to_axes(trials, failed)
            report = report_of(failure_of(trials, failed, [size for size, mesh in worlds if not mesh], axes))
            raise ScalingMismatch(str(report), ranks=failed.ranks, mistakes=report.mistakes) from failed.error
    trials.finish(worlds, unjudged)
    try_seeds(trials)


def _check_arguments(
    program: Program,
    observe: Collection[str],
    tolerance: float | Mapping[str, float] | None,
    max_examples: int | None,
) -> None:
    gate = program.gate
    for name in ("step", "build", "batch", "reference"):
        value = getattr(program, name)
        if value is not None and (not callable(value) or isinstance(value, nn.Module)):
            raise ValueError(f"{gate}: {name}={value!r:.80} is no function; give one, as in {_AS_IN[name]}")
    if isinstance(observe, str) or not isinstance(observe, Collection) or not set(observe) or set(observe) - set(KINDS):
        raise ValueError(f"{gate}: observe={observe!r}; choose some of {', '.join(KINDS)}")
    check_tolerance(gate, tolerance)
    check_placement(gate, program.placement)
    if program.returned_by not in (None, "last") and not callable(program.returned_by):
        raise ValueError(
            f'{gate}: returned_by={program.returned_by!r}; give "last", or a function of the coordinates of a rank'
        )
    if max_examples is not None and (type(max_examples) is not int or max_examples < 1):
        raise ValueError(f"{gate}: max_examples={max_examples!r}; give an integer of at least 1")


def _search(trials: Trials, scenarios: st.SearchStrategy[Scenario], examples: int) -> Trial | None:
    """Return the smallest failure that Hypothesis finds among some scenarios; None where all are right, or there are
    none.
    """
    found: list[Trial] = []
    left = _MOST_SHRINKS

    @hypothesis.settings(
        max_examples=examples,
        database=None,
        deadline=None,
        derandomize=True,  # a gate says the same of the same code each time
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        print_blob=False,
    )
    @hypothesis.given(scenarios)
    def try_one(scenario: Scenario) -> None:
        nonlocal left
        if found:
            left -= 1
            if left < 0 and not trials.knows(scenario):
                return
        try:
            trial = trials.run(scenario)
        except RankHang:
            if not found:
                raise
            left = 0  # each would take the whole deadline
            return
        if trial is not None:
            found.append(trial)
            raise _Failed

    with with_reporter(lambda text: None):  # the gate has a better account of the failing example
        try:
            try_one()
        except Unsatisfiable:
            return None
        except (_Failed, Flaky):  # a step that fails now and then fails
            if not found:
                raise
            return found[-1]
    return None


class _Failed(AssertionError):
    """A scenario has failed; Hypothesis looks for a smaller one."""
