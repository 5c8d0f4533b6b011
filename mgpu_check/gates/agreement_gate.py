"""The gate for configurations: implementations of a step agree with each other, and with options on and off."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st

from mgpu_check.diagnosis.observations import KINDS, PARITY
from mgpu_check.diagnosis.report import Finding
from mgpu_check.errors import RankHang, ScalingMismatch
from mgpu_check.gates.comparison.coverage import check_unjudged
from mgpu_check.gates.explanation.failure_report import Failure, report_of
from mgpu_check.gates.explanation.investigation import failure_of, hang_of, shrunk_to_axes
from mgpu_check.gates.gate_arguments import Program, RanksFixture, check_arguments
from mgpu_check.gates.run.switches import AXES, Switch
from mgpu_check.gates.search.agreement import Agreement, Disagreement, OnOneDevice, OnSwitch, WithoutOneDevice
from mgpu_check.gates.search.scenario_search import SEVERAL_STEPS, Family, Sizes, families, smallest_failure
from mgpu_check.gates.search.scenarios import Place, check_places
from mgpu_check.gates.search.trials import Trials, try_seeds
from mgpu_check.numerics.placement import Placement

_GATE = "assert_steps_agree"
_EXAMPLES = 12
_SWITCHED_EXAMPLES = 2
_MOST_SHRINKS = 16  # fewer than for one step, because each case runs all configurations
_SWITCHED_SHRINKS = 6  # torch.compile takes seconds for a case


@dataclass(frozen=True)
class Configuration:
    """One of the configurations of `assert_steps_agree`: a step, and the ranks that it runs on.

    Attributes:
        step: ``step(model, batch, rank)``, or a class, as in `assert_step_scales`.
        on: the number of ranks, or a mesh: ``{"dp": 2, "tp": 2}``. Default: all ranks, without a mesh.
        placement: the slice of each parameter that a rank holds, as in `assert_step_scales`.
        returned_by: the ranks whose returned values count, as in `assert_step_scales`.
        unjudged: parameters that need not be compared: a mapping from patterns to reasons.
    """

    step: Callable[..., Any]
    on: int | Mapping[str, int] | None = None
    placement: Placement = None
    returned_by: Callable[[Mapping[str, int]], bool] | str | None = None
    unjudged: Mapping[str, str] | None = None


def assert_steps_agree(
    ranks: RanksFixture,
    steps: Mapping[str, Configuration | Callable[..., Any]],
    *,
    build: Callable[[], Any],
    batch: Callable[[int], Any] | st.SearchStrategy[Any],
    reference: Callable[..., Any] | None = None,
    one_device: bool = True,
    axes: Iterable[str] = (),
    sizes: Sizes = None,
    observe: Collection[str] = KINDS,
    tolerance: float | Mapping[str, float] | None = None,
    max_examples: int | None = None,
) -> None:
    """Assert that several configurations of one training step give the same results.

    All configurations build the model from the same seed, and get the same global batches. Slices that their ranks hold
    are joined, and compared by the names of the parameters: gradients, parameters, buffers, the optimizer's state and
    returned values.

    With ``one_device=True`` each configuration is also compared with one device, as `assert_step_scales` does. One
    device is the control: a failure names the configurations that differ from it. Without it, two configurations that
    differ are reported as a pair. Among three or more, those that differ from a majority are named. Then the tolerance
    is measured on the ranks: the step runs again, with random rounding errors in every operator.

    Each of `axes` is an option of training. The step of each configuration runs with this option on and off, on the
    same ranks, and must give the same results:

    - "compiled": with ``torch.compile(backend="aot_eager")``, up to rounding.
    - "checkpointed": with activation checkpointing of each block, bit for bit if a second run of the step repeats the
      first and no sum has more than two terms from ranks; up to rounding otherwise.
    - "bfloat16": under autocast, up to 8 roundings to bfloat16.
    - "fused", "foreach": with such optimizers of torch, up to rounding.

    If the step uses the option itself, it runs without it for the comparison.

    Args:
        ranks: the fixture.
        steps: the configurations by name, each a `Configuration`, or a step that runs on all ranks. One is enough if
            there are `axes`.
        build: ``build() -> nn.Module``, as in `assert_step_scales`; the same for all configurations.
        batch: ``batch(n)``, or a Hypothesis strategy of global batches, as in `assert_step_scales`.
        reference: ``reference(model, batch)`` computes the step on one device. Default: each configuration at world
            size 1; then they must also agree there.
        one_device: whether configurations are compared with one device. Give False if they do not run on one.
        axes: some of "compiled", "checkpointed", "bfloat16", "fused" and "foreach".
        sizes: batch sizes, as in `assert_step_scales`, where the world size is a multiple of those of all
            configurations. Default: "divisible".
        observe: the kinds to compare, as in `assert_step_scales`.
        tolerance: replaces the measured tolerance, as in `assert_step_scales`.
        max_examples: approximate number of cases to try; default 12.

    Raises:
        NotCompared: no error was found, but a trained parameter was not compared, or an axis has no effect.
        ScalingMismatch: configurations differ. The message names them, and the first result that differs.
        RankHang: ranks did not return in time.
        ValueError: an argument is wrong, or the steps cannot be compared, as in `assert_step_scales`.
    """
    configurations = _checked(steps)
    switches = list(dict.fromkeys([axes] if isinstance(axes, str) or not isinstance(axes, Iterable) else axes))
    unknown = switches if isinstance(axes, str) else [axis for axis in switches if axis not in AXES]
    if unknown:
        shown = axes if isinstance(axes, str) else unknown
        raise ValueError(f"{_GATE}: axes has {shown!r}; give a list of {', '.join(map(repr, AXES))}")
    if len(configurations) < 2 and not switches:
        (only,) = configurations
        raise ValueError(f"{_GATE}: steps has one configuration, {only!r}; give another one, or axes")
    if type(one_device) is not bool:
        raise ValueError(f"{_GATE}: one_device={one_device!r}; give True or False")
    if reference is not None and not one_device:
        raise ValueError(f"{_GATE}: reference and one_device=False are both given; a reference runs on one device")
    of_batch, drawn = (None, batch) if isinstance(batch, st.SearchStrategy) else (batch, None)
    programs = {
        name: Program(
            each.step, build, of_batch, reference, gate=_GATE, placement=each.placement, returned_by=each.returned_by
        )
        for name, each in configurations.items()
    }
    for program in programs.values():
        check_arguments(program, observe, tolerance, max_examples)
    places: dict[str, Place] = {}
    for name, configuration in configurations.items():
        on = ranks.size if configuration.on is None else configuration.on
        (places[name],) = check_places(_GATE, f"on of {name!r}", [on], ranks.size)
    reasons = {name: check_unjudged(_GATE, configuration.unjudged) for name, configuration in configurations.items()}
    if drawn is not None and sizes is not None:
        raise ValueError(f"{_GATE}: sizes and a strategy of batches are both given; batches bring their sizes")
    worlds: list[Place] = [(math.lcm(*(size for size, _ in places.values())), ())]
    sizes = "divisible" if sizes is None and drawn is None else sizes
    kinds = frozenset(observe)
    if one_device or len(programs) > 1:
        how = OnOneDevice if one_device else WithoutOneDevice
        agreement: Agreement = how(ranks, programs, places, kinds, tolerance)
        _search(agreement, families(worlds, sizes, drawn, max_examples or _EXAMPLES))
        for trials in agreement.comparisons:
            trials.finish([places[trials.name]], reasons[trials.name])
            if one_device:
                try_seeds(trials)
    of_one_step, *others = families(worlds, sizes, drawn, 1)
    of_several = next(candidate for candidate in others if candidate.name == SEVERAL_STEPS)
    for name in configurations if switches else ():
        on_switch = OnSwitch(ranks, {name: programs[name]}, places, kinds, tolerance)
        for axis in switches:
            # After a step, errors of bfloat16 hide others.
            family = of_one_step if axis == "bfloat16" else of_several
            _try_axis(on_switch, axis, replace(family, examples=_SWITCHED_EXAMPLES), reasons[name])


def _checked(steps: Mapping[str, Configuration | Callable[..., Any]]) -> dict[str, Configuration]:
    wanted = 'give a mapping from names to configurations, such as {"tp": Configuration(step, {"tp": 2}), "ddp": step}'
    if not isinstance(steps, Mapping) or not steps:
        raise ValueError(f"{_GATE}: steps={steps!r:.80}; {wanted}")
    configurations = {}
    for name, step in steps.items():
        if not isinstance(name, str) or not name.strip():
            raise ValueError(f"{_GATE}: steps has the name {name!r}; {wanted}")
        configurations[name] = step if isinstance(step, Configuration) else Configuration(step)
    return configurations


def _try_axis(agreement: OnSwitch, axis: str, family: Family, reasons: Mapping[str, str]) -> None:
    agreement.switch(Switch(axis))
    _search(agreement, [replace(family, examples=1)])
    agreement.switch(Switch(axis, on=not agreement.switched.effects))
    _search(agreement, [family], _SWITCHED_SHRINKS)
    agreement.finish(reasons)


def _search(agreement: Agreement, families: Iterable[Family], most_shrinks: int = _MOST_SHRINKS) -> None:
    for family in families:
        if family.name == SEVERAL_STEPS and not agreement.trains:
            continue
        try:
            disagreement = smallest_failure(agreement, family.scenarios, family.examples, most_shrinks)
        except RankHang as hang:
            raise hang_of(agreement.current, hang, f"{agreement.current.name} does not return") from None
        if disagreement is not None:
            raise _error_of(disagreement) from disagreement.failures[0][1].error


def _error_of(disagreement: Disagreement) -> ScalingMismatch:
    trials, failed = disagreement.failures[0]
    failed, needed = shrunk_to_axes(trials, failed) if trials.one_device else (failed, None)
    failure = failure_of(trials, failed, [], needed)
    findings = _findings(disagreement, trials, failure)
    if not disagreement.control:
        # Without a control, a mistake may be one of either configuration.
        for other_trials, of_other in disagreement.failures[1:]:
            other_findings = _findings(disagreement, other_trials, failure_of(other_trials, of_other, []))
            mistakes = {finding.mistake for finding in findings}
            findings += [finding for finding in other_findings if finding.mistake not in mistakes]
    failure = replace(failure, findings=findings, verdict=disagreement.verdict)
    report = report_of(failure)
    remarks = list(report.remarks)
    if not disagreement.control:
        remarks.append(f"nothing shows which of them is wrong: expected values are those of {trials.against}")
    if 1 < len(disagreement.groups) < sum(map(len, disagreement.groups)):
        remarks.append("these agree with each other: " + "; ".join(", ".join(group) for group in disagreement.groups))
    return ScalingMismatch(
        str(replace(report, remarks=remarks)),
        ranks=failed.ranks if disagreement.control else (),
        mistakes=report.mistakes,
        site=report.site,
    )


def _findings(disagreement: Disagreement, trials: Trials, failure: Failure) -> list[Finding]:
    """Return the findings in words for what the configuration was compared with; one if it may be right."""
    if trials.one_device:
        return list(failure.findings)
    findings = [
        replace(finding, evidence=finding.evidence.replace(PARITY, trials.against))
        for finding in failure.findings
        # With a switch, both runs are on the same ranks, from the same seeds.
        if not trials.of_switch or finding.mistake != "random-numbers-per-rank"
    ]
    if disagreement.control:
        return findings
    condition = f"if {trials.against} is right and {trials.name} is wrong"
    return [replace(finding, evidence=f"{condition}: {finding.evidence}") for finding in findings[:1]]
