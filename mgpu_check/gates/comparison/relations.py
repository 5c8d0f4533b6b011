"""Decide which relations hold between the results of ranks and of one device."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence

import torch

from mgpu_check.diagnosis.observations import AGREE, FINITE, PARITY, REPEATS, Expected, ObservedRun, Relations, Result
from mgpu_check.gates.comparison.coverage import unjudged
from mgpu_check.numerics.differences import difference, show
from mgpu_check.processes.rank_lists import grouped, named
from mgpu_check.torch_hooks.tensors import all_finite

RANDOM = Result("rng", "state of the random numbers")
_DIVIDED = ("grads", "params", "optimizer")


def relations_of(
    expected: Expected,
    runs: Sequence[ObservedRun],
    kinds: Collection[str],
    tolerance: float | Mapping[str, float] | None,
) -> Relations:
    """Compare the results of each rank with one device, and the ranks with each other.

    `runs`: in rank order. Ranks other than 0 may lack values, if the results are large. `tolerance`: the user's
    tolerance, as a fraction of the largest magnitude of a tensor, for all tensors or by name; None for the measured
    one.
    """
    relations = Relations()
    first_run = runs[0]
    left_out = _left_out(expected, first_run)
    for name in dict.fromkeys((*expected.single.values, *first_run.values)):
        result_kind = name.kind
        if result_kind not in kinds:
            continue
        if result_kind in left_out:
            relations.skipped[name] = left_out[result_kind]
            continue
        comparable = _is_comparable(expected, runs, name)
        if not comparable and (reason := _local(expected, runs, name)):
            relations.local[name] = reason
            continue
        if reason := _not_placed(expected, runs, name):
            relations.skipped[name] = reason
            continue
        allowed = allowed_for(expected, name, tolerance)
        relations.held[name] = {
            PARITY: _parity(relations, expected, runs, name, allowed) if comparable else None,
            AGREE: _agreement(relations, runs, name, allowed),
            FINITE: _finite(expected, runs, name),
        }
    if "params" in kinds:
        _take_starts(relations, runs)
    if "rng" in kinds and (expected.single.draws or any(run.draws for run in runs)):
        # A difference between random states is only reported, because it may be on purpose.
        relations.streams = [ranks for _, ranks in grouped((run.rng, rank) for rank, run in enumerate(runs))]
        relations.held[RANDOM] = {}
    if "returned" in kinds:
        _take_texts(relations, expected, runs)
    relations.unjudged = unjudged(relations, expected, runs, kinds, tolerance)
    relations.left_out = left_out
    relations.placements = {name: text for name, text in first_run.placements.items() if name.kind == "params"}
    return relations


def repeats(
    relations: Relations,
    expected: Expected,
    runs: Sequence[ObservedRun],
    repeated_runs: Sequence[ObservedRun],
    tolerance: float | Mapping[str, float] | None,
) -> None:
    """Add to `relations` whether a second run gives the same results."""
    for name, verdicts in relations.held.items():
        if name == RANDOM:
            verdicts[REPEATS] = all(run.rng == repeated.rng for run, repeated in zip(runs, repeated_runs, strict=True))
            continue
        if name in expected.undetermined:
            continue  # rounding decides the result, and some kernels sum in no fixed order
        ranks = ranks_changed(expected, runs, repeated_runs, name, tolerance)
        verdicts[REPEATS] = not ranks
        if ranks and name not in relations.details:
            relations.details[name] = f"a second run gives other values, {named(ranks)}"


def ranks_changed(
    expected: Expected,
    runs: Sequence[ObservedRun],
    repeated_runs: Sequence[ObservedRun],
    name: Result,
    tolerance: float | Mapping[str, float] | None,
) -> list[int]:
    """Return the ranks where two runs have other values of a result."""
    return [
        rank
        for rank, (run, repeated) in enumerate(zip(runs, repeated_runs, strict=True))
        if run.digests.get(name) != repeated.digests.get(name)
        and not close(run.values.get(name), repeated.values.get(name), allowed_for(expected, name, tolerance))
    ]


def close(got: torch.Tensor | None, expected: torch.Tensor | None, allowed: torch.Tensor | float) -> bool:
    """Return whether two values are equal within `allowed`; False if one is missing, as large values on ranks are."""
    if got is None or expected is None or got.shape != expected.shape:
        return False
    if isinstance(allowed, torch.Tensor) and allowed.shape != got.shape:
        allowed = 0.0  # neither value has the shape of the result of one device, so no tolerance applies
    return difference(got, expected, allowed) is None


def _take_texts(relations: Relations, expected: Expected, runs: Sequence[ObservedRun]) -> None:
    for name in {**expected.single.others, **runs[0].others}:
        text = expected.single.others.get(name)
        differing_ranks = [rank for rank, run in enumerate(runs) if run.others.get(name) != text]
        relations.held[name] = {PARITY: not differing_ranks}
        if differing_ranks:
            got = runs[differing_ranks[0]].others.get(name)
            relations.details[name] = f"got {got}, expected {text}, {named(differing_ranks)}"
            relations.wrong[name] = differing_ranks


def _take_starts(relations: Relations, runs: Sequence[ObservedRun]) -> None:
    """Compare the initial values of parameters that are not compared otherwise."""
    for name in runs[0].stepped:
        result = Result("params", name)
        recorded = [run.stepped[name] for run in runs if name in run.stepped]
        # Parameters that get the same gradient on all ranks are copies of each other, so their values must be equal.
        if result in relations.held or len(recorded) < len(runs) or len({gradient for _, gradient in recorded}) > 1:
            continue
        if len({values for values, _ in recorded}) > 1:
            relations.held[result] = {AGREE: False}
            relations.split.append(result)
            relations.details[result] = "ranks apply the same gradient to different values, so they are not copies"


def _is_comparable(expected: Expected, runs: Sequence[ObservedRun], name: Result) -> bool:
    """Return whether a result of one device has a counterpart on ranks, and the other way round."""
    # A tensor outside of the model is known by its place in an optimizer only. That place means the same on one device
    # if the step itself runs there, or if the reference has as many optimizers. A replica, and a tensor of an optimizer
    # that was made for a later step, belong to one rank.
    outside = [run.outside[name] for run in (expected.single, *runs) if name in run.outside]
    if not outside:
        return True
    if any(tensor.replica or tensor.late for tensor in outside) or name not in expected.single.values:
        return False
    return not expected.by_reference or expected.single.optimizers == runs[0].optimizers


def _local(expected: Expected, runs: Sequence[ObservedRun], name: Result) -> str | None:
    """Return why ranks need not agree on a result of a tensor outside of the model; None if they must."""
    if not any(name in run.digests or name in run.values for run in runs):
        return f"only {'the reference' if expected.by_reference else 'one device'} has it"
    histories = {run.outside[name].history if name in run.outside else None for run in runs}
    return "ranks train it with different gradients, and one device has no such tensor" if len(histories) > 1 else None


def _not_placed(expected: Expected, runs: Sequence[ObservedRun], name: Result) -> str | None:
    """Return why the ranks' parts of a result cannot be assembled, if so."""
    expected_value = expected.single.values.get(name)
    if expected_value is None or name.kind not in _DIVIDED:
        return None
    owner = name.parameter
    unused = name.of in expected.single.trained and all(name.of in run.unused for run in runs)
    differs = any(run.values[name].shape != expected_value.shape for run in runs if name in run.values)
    lost = all(name not in run.values for run in runs)
    reason = next((run.unplaced[owner] for run in runs if owner in run.unplaced), None)
    if differs and reason is not None:
        return str(reason)
    if (lost or unused) and any(run.unplaced for run in runs):
        return "no tensor of a rank is known to hold it"
    return None if not differs or name.kind != "optimizer" else "it is divided in a way that is not known"


def _left_out(expected: Expected, first_run: ObservedRun) -> dict[str, str]:
    out: dict[str, str] = {}
    returned = _account(first_run)
    if returned:
        reason = "what the step returns stands for them"
        out["grads"] = f"gradients; {reason}"
        gradients = [first_run.values.get(Result("grads", name)) for name in returned]
        of_parameters = _tells(returned, [first_run.values.get(Result("params", name)) for name in returned])
        # Returned gradients do not replace parameters. If neither matches the model, its own state is not comparable.
        if of_parameters or (not _tells(returned, gradients) and "params" in first_run.touched):
            out["params"] = f"parameters; {reason}"
            out["optimizer"] = f"the optimizer's state; {reason}"
    elif expected.by_reference and _returns_gradients(expected.single):
        out["grads"] = "gradients; the reference returns the gradients to compare"
    if expected.by_reference:
        for result_kind, description in (("grads", "gradients"), ("params", "parameters")):
            if result_kind in first_run.touched - expected.single.touched:
                out.setdefault(result_kind, f"{description}; the reference does not change them")
        if first_run.optimizers != expected.single.optimizers:
            out.setdefault("optimizer", "the optimizers' state; the reference has another number of optimizers")
    return out


def _returns_gradients(reference: ObservedRun) -> bool:
    """Return whether the reference returns a tensor that equals a gradient of its model bit for bit."""
    by_kind = dict(grouped((name.kind, value) for name, value in reference.values.items() if value.numel() > 1))
    pairs = itertools.product(by_kind.get("returned", ()), by_kind.get("grads", ()))
    return "grads" in reference.touched and any(own.shape == grad.shape and own.equal(grad) for own, grad in pairs)


def _account(run: ObservedRun) -> dict[str, torch.Tensor]:
    """Return the gradients or parameters that the step returns by their names, or as one flat tensor in order."""
    parameters = {name.of: value for name, value in run.values.items() if name.kind == "params"}
    # Later entries overwrite earlier ones, so the last step counts.
    returned = {name.of: value for name, value in run.values.items() if name.kind == "returned"}
    named = {name: returned[name] for name in parameters if name in returned}
    if named:
        return named
    total = sum(value.numel() for value in parameters.values())
    flat = next((value for value in returned.values() if value.dim() == 1 and value.numel() == total > 1), None)
    if flat is None:
        return {}
    pieces = flat.split([value.numel() for value in parameters.values()])
    return {name: piece.view_as(parameters[name]) for name, piece in zip(parameters, pieces, strict=True)}


def _tells(returned: Mapping[str, torch.Tensor], values: Sequence[torch.Tensor | None]) -> bool:
    """Return whether the returned tensors equal the values in the model bit for bit."""
    return all(
        value is not None and value.shape == tensor.shape and torch.equal(value, tensor)
        for tensor, value in zip(returned.values(), values, strict=True)
    )


def allowed_for(
    expected: Expected, name: Result, tolerance: float | Mapping[str, float] | None
) -> torch.Tensor | float:
    exact = expected.exact.get(name)
    if exact is None:
        return 0.0
    relative = tolerance.get(str(name)) if isinstance(tolerance, Mapping) else tolerance
    if relative is None:
        return expected.tolerance[name]
    finite = exact[exact.isfinite()]
    allowed = relative * float(finite.abs().max()) if finite.numel() else 0.0
    if not expected.provisional:
        return allowed
    # The provisional reference has errors of its own. They get half of the tolerance, if that exceeds the known
    # rounding.
    return 0.5 * allowed if 2 * float(expected.tolerance[name].max()) <= allowed else 0.0


def _parity(
    relations: Relations, expected: Expected, runs: Sequence[ObservedRun], name: Result, allowed: torch.Tensor | float
) -> bool | None:
    first_run = runs[0]
    if name not in expected.single.values or name in expected.undetermined:
        return None
    expected_value = expected.exact.get(name, expected.single.values[name])
    if name not in first_run.values or name in first_run.gaps:
        missing = name not in first_run.values
        relations.wrong[name] = list(range(len(runs)))
        relations.details[name] = "missing on rank 0" if missing else f"no rank holds {first_run.gaps[name]}"
        return False
    mismatches: dict[int, str] = {}
    for rank, run in enumerate(runs):
        if rank and run.digests.get(name) == first_run.digests[name] and name not in run.own:
            if 0 in mismatches:
                mismatches[rank] = mismatches[0]
            continue
        value = run.values.get(name)
        if value is None:
            continue  # `_agreement` reports that it differs from rank 0
        if name in run.own and value.shape == expected_value.shape:
            # Judge only elements that the rank holds.
            value = torch.where(run.own[name], value, expected_value.to(value.dtype))
        if value.shape != expected_value.shape:
            mismatches[rank] = f"has shape {list(value.shape)}, expected {list(expected_value.shape)}"
        elif (off := difference(value, expected_value, allowed)) is not None:
            ratio = f" (ratio {show(off.got / off.expected, torch.float32)})" if off.expected else ""
            mismatches[rank] = f"{off}{ratio}"
    if not mismatches:
        return True
    relations.wrong[name] = sorted(mismatches)
    ranks = "" if len(mismatches) == len(runs) else f", {named(mismatches)}"
    relations.details[name] = next(iter(mismatches.values())) + ranks
    return False


def _agreement(
    relations: Relations, runs: Sequence[ObservedRun], name: Result, allowed: torch.Tensor | float
) -> bool | None:
    if len(runs) == 1:
        return None
    if len({run.digests.get(name) for run in runs}) == 1:
        return True
    if name in runs[0].broadcast:
        # DistributedDataParallel broadcasts rank 0's buffers before the next forward pass, so only they count
        # (torch/nn/parallel/distributed.py, _check_and_sync_module_buffers, torch 2.13).
        return None
    values = [run.values.get(name) for run in runs]
    if all(close(value, values[0], allowed) for value in values):
        if name.kind not in ("params", "optimizer") or not _has_equal_gradients(runs, name):
            return True
        histories = {run.histories.get(name.parameter) for run in runs}
        if histories == {None}:
            relations.drifting.append(name)
            return True
        if len(histories) > 1 or None in histories:
            return True
        head = values[0]
        assert head is not None
        differs = torch.stack([torch.ne(value, head) for value in values if value is not None]).any(0)
        relations.details[name] = (
            f"{int(differs.sum())} of {differs.numel()} elements differ between ranks, though all ranks began with "
            "equal values and applied equal gradients"
        )
    relations.split.append(name)
    if name not in relations.details:
        others = [rank for rank, value in enumerate(values) if not close(value, values[0], allowed)]
        relations.details[name] = f"other values than on rank 0 on {named(others)}"
    return False


def _has_equal_gradients(runs: Sequence[ObservedRun], name: Result) -> bool:
    if name in runs[0].outside or any(name in run.own for run in runs):
        return False
    gradients = {run.digests.get(Result("grads", name.parameter)) for run in runs}
    return len(gradients) == 1 and None not in gradients


def _finite(expected: Expected, runs: Sequence[ObservedRun], name: Result) -> bool | None:
    value = expected.exact.get(name)
    if value is None:
        return None
    several = [run.values[name] for run in runs if name in run.values]
    return all(all_finite(got) for got in several) or not any(
        got.shape == value.shape and bool((value.isfinite() & ~got.isfinite()).any()) for got in several
    )
