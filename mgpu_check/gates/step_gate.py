"""The gate for training steps: a step on several ranks trains the same model as on one device."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from types import MappingProxyType
from typing import Any

from hypothesis import strategies as st

from mgpu_check.diagnosis.observations import KINDS
from mgpu_check.errors import RankFailure, RankHang, ScalingMismatch
from mgpu_check.gates.comparison.coverage import check_unjudged
from mgpu_check.gates.comparison.wire import Wire, check_wire, undeclared
from mgpu_check.gates.gate_arguments import (
    Program,
    RanksFixture,
    check_arguments,
    check_count,
    check_quantizers,
    name_of,
    world_sizes_of,
)
from mgpu_check.gates.run.step_runs import run_step, run_traced
from mgpu_check.gates.search.scenario_search import SEVERAL_STEPS, Sizes, families, smallest_failure
from mgpu_check.gates.search.scenarios import Mesh, Scenario, check_meshes, size_of
from mgpu_check.gates.search.trials import Trial, Trials, try_seeds
from mgpu_check.numerics.placement import Placement

_EXAMPLES = 24
_SAMPLES = (12, 24, 48)
"""Batch sizes to try, each twice the one before: divisible by 1, 2, 3, 4, 6 and 12 micro-batches, then by 8 and 16."""


def micro_batches_of(ranks: RanksFixture, program: Program) -> int:
    """Return the number of samples that a rank's part must be divisible by, as runs on one device show it.

    It is the number of backward passes, if that does not depend on the number of samples; or the size of a micro-batch,
    if the passes grow with the samples. 1 if the step makes one pass, if it does not run alone, or if neither is so.
    """
    alone = replace(program, reference=None)
    passes: list[int] = []
    try:
        for samples in _SAMPLES:
            passes.append(ranks.run(run_step, alone, Scenario(1, samples), size=1)[0].backwards)
            if passes[-1] < 2 or passes[-2:-1] == passes[-1:]:
                return max(1, passes[-1])
    except (RankFailure, RankHang):
        return 1
    return _SAMPLES[0] // passes[0] if all(doubled == 2 * count for count, doubled in pairwise(passes)) else 1


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
    micro_batches: int | None = None,
    quantizers: Iterable[Callable[..., Any]] = (),
    wire: Wire = None,
) -> None:
    """Assert that a training step on several ranks gives the same results as on one device.

    The step runs on every rank of each world size drawn, on the same global batch, from the same seed. Its results are
    compared with one device: gradients, parameters, buffers, the optimizer's state and returned values. Ranks must
    agree with each other, and a second run must repeat the first. Tensors are compared within a tolerance that is
    measured on the step itself (`mgpu_check.numerics.steps`): the reference runs in float64, and again with random
    rounding errors.

    Args:
        ranks: the fixture.
        step: ``step(model, batch, rank) -> mapping of named tensors or numbers, or None``: the parallel step, called on
            every rank with the global batch; it takes its own part. `model` and `batch` are on the CPU, as built; the
            step moves them to ``rank.device``, or stays on the CPU. Returned values must be the same on all ranks.
            Tensors returned under the names of parameters, or one flat tensor of all parameters, replace the gradients
            of the model in the comparison. A class is called with (model, rank) first, and keeps objects that outlive
            one step: an optimizer, the wrapped model.
        build: ``build() -> nn.Module``, or a tuple or mapping of modules; called on every rank under the same seed.
        batch: ``batch(n)`` returns a global batch of n samples, called on every rank under the same seed: tensors in
            any structure, with the samples along their first dimension. Or a Hypothesis strategy of global batches.
        reference: ``reference(model, batch)`` computes the step on one device, and returns the same names as `step`.
            Default: the step itself at world size 1. A class is called with the model first, and its instance with
            (model, batch) for each step. A parameter called `world_size` gets the world size under test, for references
            that process the batch shard by shard.
        world_sizes: world sizes to try; default the powers of two up to ``ranks.size``, and ``ranks.size``.
        sizes: batch sizes: a strategy of integers, an integer, several integers, "divisible" for multiples of the world
            size and of `micro_batches`, or a function from the world size to a strategy. Default: sizes below, at and
            above the world size, divisible by it and not.
        observe: the kinds to compare, of "grads", "params", "buffers", "optimizer", "returned" and "rng".
        tolerance: replaces the measured tolerance: a fraction of the largest magnitude of each tensor, for all tensors
            or by name.
        max_examples: approximate number of cases to try; default 24.
        single_process: one process drives all devices, as with nn.DataParallel: the step runs in one process, and
            ``rank.size`` is the number of devices.
        meshes: meshes to try instead of world sizes: ``[{"dp": 2, "tp": 2}, {"pp": 4}]``. ``rank.mesh`` is the
            `DeviceMesh`. A failure names the axes that it needs.
        placement: the slice of each parameter that a rank holds, if the gate cannot find it out: a mapping from
            patterns of names to slices, or a function ``(name, rank)``. A slice is a dimension that is chunked over all
            ranks, a mapping from axes of the mesh to dimensions, "whole", or an index of the whole tensor. If the
            parameter has another name on one device, give a tuple of that name and a slice. Default: found from
            DTensor, FSDP1, the attributes that Megatron sets, and the values before the first step.
        returned_by: the ranks whose returned values count: "last" for the last stage (axis "pp", or the last rank), or
            a function of the coordinates, ``lambda at: at["tp"] == 0``. Default: all ranks.
        unjudged: parameters that need not be compared: a mapping from patterns to reasons.
        micro_batches: number of micro-batches that a rank divides its part of the batch into, for "divisible" sizes.
            Default: found out by runs on one device.
        quantizers: the functions of the step that round to a format without a dtype of torch, such as FP4 in float32.
            Each takes a tensor first, and returns it rounded, in the same shape. Their rounding then counts in the
            tolerance. Casts to bfloat16, float16 and float8 need no function.
        wire: the dtypes that ranks send: a mapping from patterns of names of collectives to a dtype or several,
            ``{"all_gather*": torch.float8_e4m3fn}``. Calls that torch makes in C++ are not seen; a pattern without a
            call fails.

    Raises:
        NotCompared: no error was found, but a trained parameter was not compared with one device.
        ScalingMismatch: a relation does not hold. The message names the smallest case, every result with its relations,
            and the likely mistake. `.ranks` holds the ranks at fault, `.mistakes` the classes.
        RankHang: ranks did not return in time.
        ValueError: an argument is wrong, or the step cannot be compared: it fails on one device, or `batch` returns
            another batch when it is called again under the same seed.
    """
    of_batch = None if isinstance(batch, st.SearchStrategy) else batch
    program = Program(step, build, of_batch, reference, single_process, placement=placement, returned_by=returned_by)
    program = replace(program, quantizers=check_quantizers(program.gate, quantizers))
    if program.quantizers and reference is not None:
        raise ValueError(
            f"{program.gate}: quantizers and reference are both given, but the tolerance is measured on the reference; "
            "leave the reference out, or give tolerance= in place of quantizers="
        )
    declared = check_wire(program.gate, wire)
    reasons = check_unjudged(program.gate, unjudged)
    if micro_batches is not None:
        check_count(program.gate, "micro_batches", micro_batches)
        if sizes != "divisible":
            raise ValueError(f'{program.gate}: micro_batches={micro_batches} is for sizes="divisible"; give both')
    _assert_scales(
        ranks,
        program,
        batch,
        world_sizes,
        sizes,
        observe,
        tolerance,
        max_examples,
        meshes,
        reasons,
        micro_batches,
        declared,
    )


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
    """Assert that a metric over several ranks equals the metric on one device, for all numbers of samples tried.

    ``metric(model, batch, rank)`` evaluates this rank's part of the global batch, and returns the metric of the whole
    batch, the same on every rank. The arguments are those of `assert_step_scales`. Changes to the model are ignored.

    Raises:
        ScalingMismatch: the metric differs from one device, or between ranks.
        ValueError: see `assert_step_scales`; or the metric returns nothing.
    """
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
    micro_batches: int | None = 1,
    wire: Mapping[str, frozenset[str]] = MappingProxyType({}),
) -> None:
    check_arguments(program, observe, tolerance, max_examples)
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
    if wire and allowed == [1]:
        raise ValueError(f"{program.gate}: wire is about several ranks, and world_sizes={allowed}; give 2 or more")
    trials = Trials(ranks, program, frozenset(observe), tolerance, name_of(program.step))
    if micro_batches is None:
        micro_batches = micro_batches_of(ranks, program) if sizes == "divisible" else 1
    for family in families(worlds, sizes, drawn, max_examples or _EXAMPLES, micro_batches):
        if family.name == SEVERAL_STEPS and not trials.trains:
            continue
        try:
            failed = smallest_failure(trials, family.scenarios, family.examples)
        except RankHang as hang:
            # Most gates pass, so the diagnosis is imported here: that takes a tenth of a second.
            from mgpu_check.gates.explanation.investigation import hang_of

            raise hang_of(trials, hang) from None
        if failed is not None:
            raise mismatch_of(trials, failed, [size for size, mesh in worlds if not mesh]) from failed.error
    trials.finish(worlds, unjudged)
    if wire:
        _check_wire(trials, wire)
    try_seeds(trials)


def _check_wire(trials: Trials, wire: Mapping[str, frozenset[str]]) -> None:
    """Raise a `ScalingMismatch` if ranks send other dtypes than declared, in a case that passed."""
    assert trials.passed is not None
    traces = [trace for _, trace in trials.run_on_ranks(trials.program, trials.passed, False, by=run_traced)]
    if calls := undeclared(wire, traces):
        from mgpu_check.diagnosis.report import Report

        site = next((site for line, site in calls if site), trials.defined)
        heading = f"{trials.name} does not send what wire= declares: {calls[0][0]}"
        report = Report(heading, trials.passed.described, remarks=[line for line, _ in calls[1:]], place=site)
        raise ScalingMismatch(str(report), site=site)


def mismatch_of(trials: Trials, failed: Trial, sizes: Sequence[int]) -> ScalingMismatch:
    """Diagnose a failed trial, on the fewest axes that show it, and return the error with the report."""
    from mgpu_check.gates.explanation.failure_report import report_of
    from mgpu_check.gates.explanation.investigation import failure_of, shrunk_to_axes

    failed, axes = shrunk_to_axes(trials, failed)
    report = report_of(failure_of(trials, failed, sizes, axes))
    return ScalingMismatch(str(report), ranks=failed.ranks, mistakes=report.mistakes, site=report.site)
