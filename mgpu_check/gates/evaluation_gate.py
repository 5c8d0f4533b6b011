"""The gate for evaluation: after training, the models of all ranks give the same answers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from mgpu_check.diagnosis.evidence import Evidence, Start
from mgpu_check.diagnosis.report import Attempts, Observable, Report
from mgpu_check.diagnosis.rules.order import findings_of
from mgpu_check.errors import RankFailure, ScalingMismatch
from mgpu_check.gates.gate_arguments import RanksFixture, check_count, definition_of, noting, sizes_of, world_sizes_of
from mgpu_check.gates.run.evaluation import Compared, Evaluated, compare_ranks, train_and_evaluate
from mgpu_check.gates.run.hypotheses import left_on_cpu
from mgpu_check.gates.search.hash_seeds import with_seeds_apart
from mgpu_check.processes.rank_lists import few, named
from mgpu_check.processes.scratch import Scratch

_PER_RANK = 4
_SHOWN = 4
_LIKELY = 3  # causes that a report names


def assert_evaluation_agrees(
    ranks: RanksFixture,
    step: Callable[..., Any],
    *,
    build: Callable[[], nn.Module],
    batch: Callable[[int], Any],
    evaluate: Callable[[nn.Module, Any], Any] | None = None,
    steps: int = 3,
    sizes: int | Iterable[int] | None = None,
    world_sizes: Iterable[int] | None = None,
) -> None:
    """Assert that the models of all ranks give the same answers in evaluation mode after some training steps.

    Each rank calls ``build()`` under one seed and then ``step(model, batch, rank)`` on `steps` global batches, which
    are also made under one seed. It then calls ``model.eval()``, and ``evaluate(model, batch)`` under
    ``torch.no_grad()`` on one more global batch, the same on all ranks, without TF32. The answers of all ranks must be
    equal bit for bit. If parameters and buffers are equal bit for bit, answers may differ by rounding. The size of
    those rounding errors is measured on the evaluation (Monte Carlo arithmetic: D. S. Parker, UCLA CSD-970002, 1997).
    Each rank evaluates twice, under seeds that differ between ranks: an answer must not depend on random numbers.

    DistributedDataParallel with BatchNorm does not have this property by itself. It broadcasts buffers before each
    forward pass in training, so each rank's running statistics differ again after the last pass. Broadcast buffers
    before evaluation, or convert to SyncBatchNorm. If the training code evaluates on one rank, or on each rank's share,
    let `evaluate` do the same.

    Args:
        ranks: the fixture.
        step: the user's parallel training step, called on every rank. It takes its share of the global batch itself,
            and trains `model` in place. A class is called with (model, rank) first; its instance is called for each
            batch.
        build: returns the model, not yet on a device.
        batch: ``batch(n)`` returns a global batch of n samples, with new samples for each step.
        evaluate: returns the answers of the model: tensors, or mappings or lists of tensors. Default: ``model(x)`` of
            the first tensor of the batch, on the device of the model.
        steps: number of training steps.
        sizes: sizes of global batches, one or several; default 4 * world size.
        world_sizes: world sizes to check; default the powers of two from 2 on, and ``ranks.size``.

    Raises:
        ScalingMismatch: answers differ; raised at the smallest world size and batch where they do. ``.ranks`` are the
            ranks that differ from rank 0, or from their own first answer.
        ValueError: an argument is not valid; `build`, `batch` or `evaluate` returns something unusable; or `step`
            changes no parameter.
    """
    check_count("assert_evaluation_agrees", "steps", steps)
    numbers = sizes_of("assert_evaluation_agrees", sizes)
    worlds = world_sizes_of(ranks, world_sizes)
    for size in worlds:
        for samples in numbers or [_PER_RANK * size]:
            _judge(ranks, Evaluated(step, build, batch, evaluate, steps, samples), size)
    smallest = min((size for size in worlds if size > 1), default=None)
    if smallest is not None:
        program = Evaluated(step, build, batch, evaluate, steps, (numbers or [_PER_RANK * smallest])[0])
        with_seeds_apart(
            ranks,
            "assert_evaluation_agrees",
            (step, build, batch, evaluate),
            _case(program, smallest),
            lambda by: _judge(by, program, smallest),
        )


def _judge(ranks: RanksFixture, program: Evaluated, size: int) -> None:
    compared = _run(ranks, program, size, measure=False)
    if _wrong(compared) and not _of(compared, "parameter", "buffer"):
        compared = _run(ranks, program, size, measure=True)
    if disagreements := _wrong(compared):
        report = _report(compared, disagreements, _case(program, size), size, definition_of(program.step))
        at_fault = sorted({rank for row in disagreements for rank in row.wrong})
        raise ScalingMismatch(str(report), ranks=at_fault, mistakes=report.mistakes, site=report.site)


def _case(program: Evaluated, size: int) -> dict[str, object]:
    return {"world size": size, "samples": program.samples, "steps": program.steps}


def _run(ranks: RanksFixture, program: Any, size: int, *, measure: bool) -> list[Compared]:
    with Scratch.new("evaluate") as root:
        with noting(f"the evaluation of {program.samples} samples after {program.steps} steps at world size {size}"):
            run = functools.partial(ranks.run, train_and_evaluate, directory=root, measure=measure, size=size)
            try:
                problems = run(program)
            except RankFailure as error:
                if unmoved := left_on_cpu(program, error, run):
                    raise ValueError(f"assert_evaluation_agrees: {unmoved}\n\n{error}") from None
                raise
        for problem in filter(None, problems):
            raise ValueError(problem)
        compared: list[Compared] = ranks.run(compare_ranks, root, size, size=1)[0]
    if unequal := [row for row in compared if row.kind == "batches"]:
        raise ValueError(
            f"batch({program.samples}) differs on {named(unequal[0].wrong)} from that of rank 0, under the same "
            "seed; make it from torch's generator, from Python's or NumPy's, or from one with a seed of its own"
        )
    if _of(compared, "untouched"):
        raise ValueError(
            "step(model, batch, rank) leaves all parameters of the model as build() has made them, on all ranks; "
            "train the model that it is given, in place"
        )
    return compared


def _of(compared: Sequence[Compared], *kinds: str) -> list[Compared]:
    return [row for row in compared if row.kind in kinds and row.wrong]


def _wrong(compared: Sequence[Compared]) -> list[Compared]:
    return [row for row in _of(compared, "answer", "repeated") if not row.rounding]


def _evidence(compared: Sequence[Compared], disagreements: Sequence[Compared], size: int) -> Evidence:
    """Return the evidence for why answers differ. An earlier difference explains later ones, so only it is included."""
    initial, parameters, buffers = (_of(compared, value_kind) for value_kind in ("initial", "parameter", "buffer"))
    repeated = _of(disagreements, "repeated")
    evidence = Evidence(size)
    if initial:
        summary = f"{_listed(initial)}: different before the first step"
        evidence = replace(evidence, start=Start(summary, summary))
    elif parameters:
        summary = f"{_listed(parameters)}: equal before the first step, different after the last"
        evidence = replace(evidence, gradients_apart=summary)
    if buffers and not initial:
        evidence = replace(evidence, buffers_apart=_listed(buffers))
    if repeated:
        summary = (
            f"rank {repeated[0].wrong[0]} gives another answer under another seed: {repeated[0].detail}; look for "
            "dropout that is still on (model.eval() undone, functional.dropout without training=), or other random "
            "numbers"
        )
        return replace(evidence, answers_change=summary)
    if initial or parameters or buffers:
        return evidence
    equal = "parameters and buffers are equal on all ranks, to the bit"
    summary = f"{equal}, and the answers are not: {disagreements[0].detail}"
    return replace(evidence, answers_apart=summary)


def _report(
    compared: Sequence[Compared], disagreements: Sequence[Compared], case: dict[str, object], size: int, definition: str
) -> Report:
    parameters, buffers, repeated = _of(compared, "parameter"), _of(compared, "buffer"), _of(disagreements, "repeated")
    attempts = Attempts()
    evidence = attempts.of("the evidence", Evidence(size), _evidence, compared, disagreements, size)
    findings = findings_of(evidence, _LIKELY, attempts)
    remarks = []
    if evidence.buffers_apart:
        remarks.append(
            "DistributedDataParallel broadcasts buffers before a forward pass in training, so that running statistics "
            "differ after the last one: before evaluation, broadcast them (torch.distributed.broadcast of each of "
            "model.buffers() from rank 0), or train with torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)"
        )
    observables = []
    for row in compared:
        if row.kind in ("parameter", "buffer", "answer"):
            name = row.name if row.kind == "answer" else f"{row.kind} {row.name}"
            relations: dict[str, bool | None] = {"ranks agree": not row.wrong or row.rounding}
            if row.kind == "answer":
                relations["repeatable"] = not any(repeated_row.name == row.name for repeated_row in repeated)
            observables.append(Observable(name, relations, row.detail))
    # Name a wrong parameter or buffer before a wrong answer: it is the cause.
    cause = (parameters or buffers or list(disagreements))[0]
    unrepeatable = cause.kind == "repeated"
    summary = "another answer under another seed" if unrepeatable else f"{cause.kind} {cause.name!r} differs"
    return Report(
        f"ranks give different answers in evaluation mode: {summary} on {named(cause.wrong)}"
        + ("" if unrepeatable else f": {cause.detail}"),
        case,
        observables,
        findings,
        [*remarks, *attempts.remarks],
        place=definition,
    )


def _listed(rows: Sequence[Compared]) -> str:
    return few([f"{row.name} on {named(row.wrong)}" for row in rows], _SHOWN)
