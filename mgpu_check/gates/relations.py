"""Decide which relations hold between the results of ranks and of one device."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from mgpu_check.diagnosis.observations import (
    AGREE,
    FINITE,
    PARITY,
    REPEATS,
    Expected,
    Kind,
    ObservedRun,
    Relations,
    Result,
)
from mgpu_check.gates.parameter_coverage import unjudged
from mgpu_check.numerics.differences import Difference, difference, show
from mgpu_check.processes.rank_lists import grouped, named
from mgpu_check.torch_hooks.tensors import all_finite

RANDOM = Result("rng", "state of the random numbers")


_DIVIDED: tuple[Kind, ...] = ("grads", "params", "optimizer")


def relations_of(
    expected: Expected,
    seen: Sequence[ObservedRun],
    kinds: Collection[str],
    tolerance: float | Mapping[str, float] | None,
) -> Relations:
    """Compare the results of each rank with one device, and the ranks with each other.

    Args:
        seen: in rank order. Ranks other than 0 may lack values, if the results are large.
        tolerance: the user's tolerance, as a fraction of the largest magnitude of a tensor, for all tensors or by name;
            None for the measured one.
    """
    relations = Relations()
    first = seen[0]
    left_out = _left_out(expected, first)
    for name in dict.fromkeys((*expected.single.values, *first.values)):
        kind = name.kind
        if kind not in kinds:
            continue
        if kind in left_out:
            relations.skipped[name] = left_out[kind]
            continue
        comparable = _is_comparable(expected, seen, name)
        if not comparable and (why := _local(expected, seen, name)):
            relations.local[name] = why
            continue
        if why := _not_placed(expected, seen, name):
            relations.skipped[name] = why
            continue
        held: dict[str, bool | None] = {}
        allowed = allowed_for(expected, name, tolerance)
        held[PARITY] = _parity(relations, expected, seen, name, allowed) if comparable else None
        held[AGREE] = _agreement(relations, seen, name, allowed)
        held[FINITE] = _finite(expected, seen, name)
        relations.held[name] = held
    if "params" in kinds:
        _take_starts(relations, seen)
    if "rng" in kinds and (expected.single.draws or any(one.draws for one in seen)):
        _take_random_state(relations, seen)
    if "returned" in kinds:
        _take_texts(relations, expected, seen)
    relations.unjudged = unjudged(relations, expected, seen, kinds, tolerance)
    relations.left_out = left_out
    relations.placements = {name: told for name, told in first.placements.items() if name.kind == "params"}
    return relations


def repeats(
    relations: Relations,
    expected: Expected,
    seen: Sequence[ObservedRun],
    again: Sequence[ObservedRun],
    tolerance: float | Mapping[str, float] | None,
) -> None:
    """Add to `relations` whether a second run gives the same results."""
    for name, held in relations.held.items():
        if name == RANDOM:
            held[REPEATS] = all(one.rng == other.rng for one, other in zip(seen, again, strict=True))
            continue
        if name in expected.undetermined:
            continue  # rounding decides the result, and some kernels sum in no fixed order
        ranks = ranks_changed(expected, seen, again, name, tolerance)
        held[REPEATS] = not ranks
        if ranks and name not in relations.details:
            relations.details[name] = f"a second run gives other values, {named(ranks)}"


def ranks_changed(
    expected: Expected,
    seen: Sequence[ObservedRun],
    again: Sequence[ObservedRun],
    name: Result,
    tolerance: float | Mapping[str, float] | None,
) -> list[int]:
    """Return the ranks where two runs have other values of a result."""
    return [
        rank
        for rank, (one, other) in enumerate(zip(seen, again, strict=True))
        if one.digests.get(name) != other.digests.get(name)
        and not close(one.values.get(name), other.values.get(name), allowed_for(expected, name, tolerance))
    ]


def close(one: torch.Tensor | None, other: torch.Tensor | None, allowed: torch.Tensor | float) -> bool:
    """Return whether two values are equal within `allowed`.

    False if a value is missing: ranks other than 0 do not send large values.
    """
    if one is None or other is None or one.shape != other.shape:
        return False
    if isinstance(allowed, torch.Tensor) and allowed.shape != one.shape:
        allowed = 0.0  # neither value has the shape of the result of one device, so no tolerance applies
    return difference(one, other, allowed) is None


def _take_texts(relations: Relations, expected: Expected, seen: Sequence[ObservedRun]) -> None:
    """Compare returned values that are not numbers, for equality."""
    for name in {**expected.single.others, **seen[0].others}:
        text = expected.single.others.get(name)
        wrong = [rank for rank, one in enumerate(seen) if one.others.get(name) != text]
        relations.held[name] = {PARITY: not wrong}
        if wrong:
            relations.details[name] = f"got {seen[wrong[0]].others.get(name)}, expected {text}, {named(wrong)}"
            relations.wrong[name] = wrong


def _take_starts(relations: Relations, seen: Sequence[ObservedRun]) -> None:
    """Compare the initial values of parameters that are not compared otherwise.

    Parameters that get the same gradient on all ranks are copies of each other, so their values must be equal.
    """
    for name in seen[0].stepped:
        result = Result("params", name)
        found = [one.stepped.get(name) for one in seen]
        known = [one for one in found if one is not None]
        if result in relations.held or len(known) < len(seen) or len({gradient for _, gradient in known}) > 1:
            continue
        if len({values for values, _ in known}) > 1:
            relations.held[result] = {AGREE: False}
            relations.split.append(result)
            relations.details[result] = "ranks apply the same gradient to different values, so they are not copies"


def _take_random_state(relations: Relations, seen: Sequence[ObservedRun]) -> None:
    """Group ranks by their random state: a difference is only reported, because it may be on purpose."""
    relations.streams = [list(ranks) for _, ranks in grouped((one.rng, rank) for rank, one in enumerate(seen))]
    relations.held[RANDOM] = {}


def _is_comparable(expected: Expected, seen: Sequence[ObservedRun], name: Result) -> bool:
    """Return whether a result of one device has a counterpart on ranks, and the other way round.

    A tensor outside of the model is known by its place in an optimizer only. That place means the same on one device
    if the step itself runs there, or if the reference has as many optimizers. A replica, and a tensor of an optimizer
    that was made for a later step, belong to one rank.
    """
    outside = [run.outside[name] for run in (expected.single, *seen) if name in run.outside]
    if not outside:
        return True
    if any(of.replica or of.late for of in outside) or name not in expected.single.values:
        return False
    return not expected.by_reference or expected.single.optimizers == seen[0].optimizers


def _local(expected: Expected, seen: Sequence[ObservedRun], name: Result) -> str:
    """Return why ranks need not agree on a result of a tensor outside of the model; "" if they must."""
    if not any(name in run.digests or name in run.values for run in seen):
        return f"only {'the reference' if expected.by_reference else 'one device'} has it"
    histories = {run.outside[name].history if name in run.outside else None for run in seen}
    return "ranks train it with different gradients, and one device has no such tensor" if len(histories) > 1 else ""


def _not_placed(expected: Expected, seen: Sequence[ObservedRun], name: Result) -> str:
    """Return why the ranks' parts of a result cannot be assembled; "" if they can."""
    right = expected.single.values.get(name)
    if right is None or name.kind not in _DIVIDED:
        return ""
    owner = name.parameter
    unused = name.of in expected.single.trained and all(name.of in one.unused for one in seen)
    apart = any(one.values[name].shape != right.shape for one in seen if name in one.values)
    lost = all(name not in one.values for one in seen)
    why = next((one.unplaced[owner] for one in seen if owner in one.unplaced), None)
    if apart and why is not None:
        return str(why)
    if (lost or unused) and any(one.unplaced for one in seen):
        return "no tensor of a rank is known to hold it"
    return "" if not apart or name.kind != "optimizer" else "it is divided in a way that is not known"


def _left_out(expected: Expected, first: ObservedRun) -> dict[str, str]:
    """Return the kinds that are not compared with one device, with the reasons."""
    out: dict[str, str] = {}
    told = _account(first)
    if told:
        why = "what the step returns stands for them"
        out["grads"] = f"gradients; {why}"
        gradients = [first.values.get(Result("grads", name)) for name in told]
        parameters = [first.values.get(Result("params", name)) for name in told]
        of_parameters = _tells(told, parameters)
        # Returned gradients do not replace parameters. If neither matches the model, its own state is not comparable.
        if of_parameters or (not _tells(told, gradients) and "params" in first.touched):
            out["params"] = f"parameters; {why}"
            out["optimizer"] = f"the optimizer's state; {why}"
    elif expected.by_reference and _returns_gradients(expected.single):
        out["grads"] = "gradients; the reference returns the gradients to compare"
    if expected.by_reference:
        for kind, what in (("grads", "gradients"), ("params", "parameters")):
            if kind in first.touched - expected.single.touched:
                out.setdefault(kind, f"{what}; the reference does not change them")
        if first.optimizers != expected.single.optimizers:
            out.setdefault("optimizer", "the optimizers' state; the reference has another number of optimizers")
    return out


def _returns_gradients(reference: ObservedRun) -> bool:
    """Return whether the reference returns a tensor that equals a gradient of its model bit for bit."""
    held = {
        kind: [value for name, value in reference.values.items() if name.kind == kind and value.numel() > 1]
        for kind in ("returned", "grads")
    }
    return "grads" in reference.touched and any(
        one.shape == value.shape and torch.equal(one, value) for one in held["returned"] for value in held["grads"]
    )


def _account(first: ObservedRun) -> dict[str, torch.Tensor]:
    """Return the gradients or parameters that the step returns, by parameter; empty if it returns neither.

    The step returns tensors under the names of parameters, or one flat tensor of all parameters in order.
    """
    parameters = {name.of: value for name, value in first.values.items() if name.kind == "params"}
    # Later entries overwrite earlier ones, so the last step counts.
    returned = {name.of: value for name, value in first.values.items() if name.kind == "returned"}
    named = {name: returned[name] for name in parameters if name in returned}
    if named:
        return named
    total = sum(value.numel() for value in parameters.values())
    flat = next((value for value in returned.values() if value.dim() == 1 and value.numel() == total > 1), None)
    if flat is None:
        return {}
    pieces = flat.split([value.numel() for value in parameters.values()])
    return {name: piece.view_as(parameters[name]) for name, piece in zip(parameters, pieces, strict=True)}


def _tells(told: Mapping[str, torch.Tensor], values: Sequence[torch.Tensor | None]) -> bool:
    """Return whether the returned tensors equal the values in the model bit for bit."""
    return all(
        value is not None and value.shape == one.shape and torch.equal(value, one)
        for one, value in zip(told.values(), values, strict=True)
    )


def allowed_for(expected: Expected, name: Result, given: float | Mapping[str, float] | None) -> torch.Tensor | float:
    exact = expected.exact.get(name)
    if exact is None:
        return 0.0
    relative = given.get(str(name)) if isinstance(given, Mapping) else given
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
    relations: Relations, expected: Expected, seen: Sequence[ObservedRun], name: Result, allowed: torch.Tensor | float
) -> bool | None:
    first = seen[0]
    if name not in expected.single.values or name in expected.undetermined:
        return None
    right = expected.exact.get(name, expected.single.values[name])
    if name not in first.values:
        relations.wrong[name] = list(range(len(seen)))
        relations.details[name] = "missing on rank 0"
        return False
    if name in first.gaps:
        relations.wrong[name] = list(range(len(seen)))
        relations.details[name] = f"no rank holds {first.gaps[name]}"
        return False
    found: dict[int, str] = {}
    for rank, one in enumerate(seen):
        if rank and one.digests.get(name) == first.digests[name] and name not in one.own:
            if 0 in found:
                found[rank] = found[0]
            continue
        value = one.values.get(name)
        if value is None:
            continue  # `_agreement` reports that it differs from rank 0
        if name in one.own and value.shape == right.shape:
            value = torch.where(one.own[name], value, right.to(value.dtype))  # judge only elements that the rank holds
        if value.shape != right.shape:
            found[rank] = f"has shape {list(value.shape)}, expected {list(right.shape)}"
        elif (off := difference(value, right, allowed)) is not None:
            found[rank] = _describe(off)
    if not found:
        return True
    relations.wrong[name] = sorted(found)
    some = next(iter(found))
    ranks = "" if len(found) == len(seen) else f", {named(found)}"
    relations.details[name] = found[some] + ranks
    return False


def _agreement(
    relations: Relations, seen: Sequence[ObservedRun], name: Result, allowed: torch.Tensor | float
) -> bool | None:
    if len(seen) == 1:
        return None
    if len({one.digests.get(name) for one in seen}) == 1:
        return True
    if name in seen[0].broadcast:
        return None  # the next forward pass broadcasts rank 0's buffers, so only they count
    values = [one.values.get(name) for one in seen]
    if all(close(value, values[0], allowed) for value in values):
        if name.kind not in ("params", "optimizer") or not _has_equal_gradients(seen, name):
            return True
        histories = {run.histories.get(name.parameter) for run in seen}
        if histories == {None}:
            relations.drifting.append(name)
            return True
        if len(histories) > 1 or None in histories:
            return True
        first = values[0]
        assert first is not None
        apart = torch.stack([torch.ne(value, first) for value in values if value is not None]).any(0)
        relations.details[name] = (
            f"{int(apart.sum())} of {apart.numel()} elements differ between ranks, though all ranks began with equal "
            "values and applied equal gradients"
        )
    relations.split.append(name)
    if name not in relations.details:
        others = [rank for rank, value in enumerate(values) if not close(value, values[0], allowed)]
        relations.details[name] = f"other values than on rank 0 on {named(others)}"
    return False


def _has_equal_gradients(seen: Sequence[ObservedRun], name: Result) -> bool:
    """Return whether the last gradient of a parameter of the model has the same bits on all ranks."""
    if name in seen[0].outside or any(name in run.own for run in seen):
        return False
    gradients = {run.digests.get(Result("grads", name.parameter)) for run in seen}
    return len(gradients) == 1 and None not in gradients


def _finite(expected: Expected, seen: Sequence[ObservedRun], name: Result) -> bool | None:
    value = expected.exact.get(name)
    if value is None:
        return None
    if all(name not in one.values or all_finite(one.values[name]) for one in seen):
        return True
    for one in seen:
        got = one.values.get(name)
        if got is not None and got.shape == value.shape and bool((value.isfinite() & ~got.isfinite()).any()):
            return False
    return True


def _describe(off: Difference) -> str:
    if not off.expected:
        return str(off)
    return f"{off} (ratio {show(off.got / off.expected, torch.float32)})"
