"""Match the parameters of a rank with those of one device by initial values, by gradients, and by names."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from mgpu_check.compare.alignment import deviation
from mgpu_check.compare.trace import Parameter, TensorSummary, Trace

AMBIGUOUS = "its initial values match several parameters of one device"

_SAME = 1e-9
"""Relative deviation of summaries of equal tensors: kernels may add the elements in another order."""

_NEAR = 1e-3
"""Relative deviation of gradients of the same parameter: rounding causes less."""


def matched(one: Trace, rank: Trace) -> dict[str, str | None]:
    """Return name on the rank -> name on one device, for each parameter; None if unknown, or for a slice.

    Values that are unique on both sides decide, and they also match the names of the modules around them. Values of
    constants and copied layers are not unique: there gradients decide, then the names of modules. A parameter whose
    values are unknown matches the parameter of the same name and shape: the rank started from other values.
    """
    whole = {label: parameter for label, parameter in rank.parameters.items() if parameter.held is None}
    found: dict[str, str | None] = dict.fromkeys(rank.parameters)
    candidates = _candidates(one, rank, whole)
    claims = Counter(names[0] for names in candidates.values() if len(names) == 1)
    found |= {label: names[0] for label, names in candidates.items() if len(names) == 1 and claims[names[0]] == 1}
    taken = {name for name in found.values() if name is not None}
    modules = prefixes(found)
    for label, names in candidates.items():
        if found[label] is not None or not names:
            continue
        name = _by_gradient(label, names, one, rank) or beside(label, modules) or label
        if name in names and name not in taken:
            found[label] = name
            taken.add(name)
    for label, parameter in whole.items():
        namesake = _namesake(label, one)
        free = found[label] is None and not candidates[label] and namesake not in taken
        if free and namesake is not None and one.parameters[namesake].shape == parameter.shape:
            found[label] = namesake
            taken.add(namesake)
    return found


def _namesake(label: str, one: Trace) -> str | None:
    """Return the parameter of one device with the same name, or with the only name that differs by a prefix.

    A wrapper, such as a strategy of Lightning, puts a prefix before the names.
    """
    if label in one.parameters:
        return label
    names = [name for name in one.parameters if name.endswith(f".{label}") or label.endswith(f".{name}")]
    return names[0] if len(names) == 1 else None


def matched_in_order(one: Trace, ranks: Sequence[Trace], found: Sequence[dict[str, str | None]]) -> None:
    """Match the layers of pipeline stages that started from other values with the next layers of one device.

    Stages may number their layers from 0, so the same name means another layer. Nothing is changed if the ranks
    together have each parameter of one device, or if the shapes do not follow in order.

    Args:
        found: for each rank, the names from `matched`, which this function changes.
    """
    other = [_started_elsewhere(one, trace) for trace in ranks]
    pairs = list(zip(found, other, strict=True))
    same = {name for names, some in pairs for label, name in names.items() if label not in some}
    free = [own for own in sorted(one.parameters.values(), key=lambda own: own.order) if own.name not in same]
    if {own.name for own in free} <= {name for names in found for name in names.values()}:
        return
    stages: dict[tuple[int, ...], list[str]] = {}  # replicas of a stage have the same values
    for trace, some in zip(ranks, other, strict=True):
        if (values := tuple(some.values())) not in stages:
            rest = iter(free)
            layers = [next((o for o in rest if o.shape == trace.parameters[label].shape), None) for label in some]
            if None in layers or len(trace.parameters) >= len(one.parameters):
                return
            stages[values] = [own.name for own in layers if own is not None]
            free = [own for own in free if own not in layers]
    for names, some in pairs:
        names.update(zip(some, stages[tuple(some.values())], strict=True))


def _started_elsewhere(one: Trace, rank: Trace) -> dict[str, int]:
    """Return the bits of each whole parameter of a rank that no parameter of one device started from, in order."""
    here = _starts(rank)
    ordered = sorted(rank.parameters.values(), key=lambda own: own.order)
    whole = {own.name: own for own in ordered if own.held is None and own.name in here}
    return {label: _bits(here[label]) for label, names in _candidates(one, rank, whole).items() if not names}


def _candidates(one: Trace, rank: Trace, whole: Mapping[str, Parameter]) -> dict[str, list[str]]:
    """Return, for each parameter of the rank, the parameters of one device with the same initial values."""
    here, there = _starts(rank), _starts(one)
    by_bits: dict[tuple[tuple[int, ...], int], list[str]] = defaultdict(list)
    for name, summary in there.items():
        by_bits[one.parameters[name].shape, _bits(summary)].append(name)
    found: dict[str, list[str]] = {}
    for label, own in whole.items():
        start = here.get(label)
        names = by_bits.get((own.shape, _bits(start)), []) if start is not None else []
        found[label] = [name for name in names if not deviation(start, there[name], own.shape).size > _SAME]
    return found


def _bits(summary: TensorSummary) -> int:
    """Return the sum of the bits; 0 for zeros, which may be negative: 0 * torch.randn(8) has either sign."""
    return summary.bits if summary.norm else 0


def _by_gradient(label: str, names: Sequence[str], one: Trace, rank: Trace) -> str | None:
    """Return the name whose gradient equals the first gradient of a parameter; None if no or several names match."""
    for here, there in zip(rank.steps, one.steps, strict=False):
        own = here.gradients.get(label)
        if own is None or not own.norm:
            continue
        shape = rank.parameters[label].shape
        near = [name for name in names if deviation(own, there.gradients.get(name), shape).size <= _NEAR]
        return near[0] if len(near) == 1 else None
    return None


def _starts(trace: Trace) -> dict[str, TensorSummary]:
    found: dict[str, TensorSummary] = {}
    for step in trace.steps:
        for name, summary in step.before.items():
            found.setdefault(name, summary)
    return found


def prefixes(found: Mapping[str, str | None]) -> dict[str, set[str]]:
    """Return prefix of a name on the rank -> prefixes on one device, for matched names with a common rest."""
    known: dict[str, set[str]] = defaultdict(set)
    for label, name in found.items():
        if name is None:
            continue
        mine, theirs = label.split("."), name.split(".")
        while mine and theirs and mine[-1] == theirs[-1]:
            mine, theirs = mine[:-1], theirs[:-1]
            known[".".join(mine)].add(".".join(theirs))
    return known


def beside(label: str, modules: Mapping[str, set[str]]) -> str | None:
    """Return a parameter's name on one device, by the names of its modules; None if ambiguous or unknown."""
    parts = label.split(".")
    for count in range(len(parts) - 1, -1, -1):
        names = modules.get(".".join(parts[:count]), set())
        if names:
            rest = parts[count:]
            return ".".join([*filter(None, [next(iter(names))]), *rest]) if len(names) == 1 else None
    return None


def modules_of(one: Trace, rank: Trace, found: Mapping[str, str | None]) -> dict[str, str]:
    """Return module on a rank -> its name on one device.

    A module without all parameters that it has on one device is left out: a stage of a pipeline is no whole model.

    Args:
        rank: the rank, with the parameters that it holds under their names on one device.
        found: name on the rank -> name on one device, for each parameter.
    """
    known = prefixes(found)
    modules = {}
    for label in rank.modules:
        name = beside(f"{label}.", known)
        if name is not None and all(key in rank.parameters for key in one.parameters if key.startswith(name)):
            modules[label] = name.removesuffix(".")
    return modules
