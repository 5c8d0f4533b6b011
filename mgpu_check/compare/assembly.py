"""Assemble the parts of a model that ranks hold into whole tensors, to compare them with those of one device.

Ranks may hold slices of parameters, one of several stages, or some of the experts. Names may differ from those on one
device, so parameters are matched by initial values, by gradients, and by names.

Ranks may keep statistics of their own slices of a parameter, such as the column means of some rows. Equal values on all
ranks are a statistic that was reduced over the ranks. Of other values `compare` takes the mean, weighted by the size of
each slice: if the statistic is a mean, this is the statistic of the whole.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from mgpu_check.compare.alignment import KINDS, Kind, deviation, of_kind
from mgpu_check.compare.trace import (
    HeldSlice,
    Parameter,
    State,
    Step,
    TensorSummary,
    Trace,
    joined,
    named_state,
    positions,
)
from mgpu_check.processes.rank_lists import named

AMBIGUOUS = "its initial values match several parameters of one device"

_SAME = 1e-9
"""Relative deviation of summaries of equal tensors: kernels may add the elements in another order."""

_NEAR_GRADIENT = 1e-3
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
        near = [name for name in names if deviation(own, there.gradients.get(name), shape).size <= _NEAR_GRADIENT]
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


_NEAR = 1e-2
"""Relative deviation from one device: rounding causes less, and another reduction than the mean almost always more."""
_SHARE = 1e-6
"""Deviation of a sum of shares from 1: more than floating-point numbers cause, and less than one of a million rows."""


def together(
    parts: Collection[tuple[HeldSlice, TensorSummary]], expected: TensorSummary | None
) -> TensorSummary | None:
    """Return the whole tensor from all of its parts; None without parts.

    Args:
        expected: the tensor on one device. The norm of a mean is unknown without its elements, so its norm is taken.
    """
    if not parts:
        return None
    found = joined([_mean(own) for own in _by_place(parts)])
    return replace(found, norm=expected.norm) if math.isnan(found.norm) and expected is not None else found


def is_partial(parts: Iterable[tuple[HeldSlice, TensorSummary]]) -> bool:
    """Return whether ranks have different values of a statistic for the same place."""
    return any(_is_mean(own) for own in _by_place(parts))


def why_not_together(
    parts: Collection[tuple[HeldSlice, TensorSummary]], expected: TensorSummary | None, shape: Sequence[int]
) -> str:
    """Return why parts of a statistic are not the statistic of one device; "" if they are."""
    told = "; ".join(dict.fromkeys(held.covers for held, _ in parts))
    if any(abs(math.fsum(held.share for held, _ in own) - 1) > _SHARE for own in _by_place(parts)):
        return f"the slices that it is computed from do not cover the parameter once: {told}"
    if expected is None or deviation(together(parts, expected), expected, shape).size <= _NEAR:
        return ""
    return f"each rank may keep a statistic of its own slice ({told}), and their mean is not that of one device"


def _by_place(parts: Iterable[tuple[HeldSlice, TensorSummary]]) -> list[list[tuple[HeldSlice, TensorSummary]]]:
    found: dict[tuple[int, int], list[tuple[HeldSlice, TensorSummary]]] = defaultdict(list)
    for held, value in parts:
        found[held.key].append((held, value))
    return list(found.values())


def _is_mean(parts: Sequence[tuple[HeldSlice, TensorSummary]]) -> bool:
    return any(value != parts[0][1] for _, value in parts)


def _mean(parts: Sequence[tuple[HeldSlice, TensorSummary]]) -> TensorSummary:
    """Return the mean of partial statistics. Equal parts are the mean themselves."""
    if not _is_mean(parts):
        return parts[0][1]
    return mean_of([value for _, value in parts], [held.share for held, _ in parts])


def mean_of(values: Sequence[TensorSummary], shares: Sequence[float]) -> TensorSummary:
    """Return the weighted mean; its norm is not a number, since it is unknown."""

    def mean(some: Sequence[float]) -> float:
        return sum(share * value for share, value in zip(shares, some, strict=True))

    return TensorSummary(
        0,
        math.nan if all(value.finite for value in values) else math.inf,
        tuple(map(mean, zip(*(value.sums for value in values), strict=True))),
        # None is an element that no rank has at this place.
        tuple(some[0] if None in some else mean(some) for some in zip(*(v.samples for v in values), strict=True)),
    )


@dataclass(frozen=True)
class Assembly:
    """Traces of ranks as if each rank held whole tensors with the names of one device.

    Attributes:
        divided: ranks hold parts of the model.
        reasons: parameter -> why it could not be placed or assembled.
        placements: parameter -> the slices that ranks hold, in words.
        holders: sliced parameter -> for each element of `positions`, the ranks that hold it.
        parts: sliced parameter -> rank -> a key of its elements: ranks with the same elements have equal keys.
        open: a rank may hold a slice that is not placed yet, of a parameter or buffer. Its values may show the place.
        same_elsewhere: a rank holds values that occur in several places. Distinct values may show the place.
        partial: state of an optimizer -> the parts of a parameter that ranks compute their own values of it from, in
            words.
    """

    ranks: list[Trace]
    divided: bool
    reasons: Mapping[str, str]
    placements: Mapping[str, str]
    holders: Mapping[str, list[tuple[int, ...]]]
    parts: Mapping[str, Mapping[int, object]]
    open: bool
    same_elsewhere: bool
    partial: Mapping[str, str]


@dataclass
class _LabelledSlice:
    """A slice of a whole tensor on a rank; `label` is its name there."""

    rank: int
    label: str
    held: HeldSlice

    @property
    def place(self) -> tuple[tuple[int, int], str]:
        """A key that is equal for pieces with the same elements, computed from the same part of the model."""
        return self.held.key, self.held.covers


def assembled(one: Trace, ranks: Sequence[Trace]) -> Assembly:
    """Assemble the traces of ranks."""
    names = [matched(one, trace) for trace in ranks]
    matched_in_order(one, ranks, names)
    reasons: dict[str, str] = {}
    pieces: dict[str, list[_LabelledSlice]] = defaultdict(list)
    made = [Trace(trace.rank, trace.world, modules=trace.modules, events=trace.events) for trace in ranks]
    pieces_of: list[dict[str, str]] = [{} for _ in ranks]
    unmatched = False
    for index, (trace, own) in enumerate(zip(ranks, names, strict=True)):
        for label, parameter in trace.parameters.items():
            name = own[label]
            if parameter.held is not None and parameter.held.whole in one.parameters:
                pieces[parameter.held.whole].append(_LabelledSlice(index, label, parameter.held))
                pieces_of[index][label] = parameter.held.whole
                continue
            shown = name or _free(label, parameter, trace.rank, one, own)
            order = one.parameters[shown].order if shown in one.parameters else parameter.order
            made[index].parameters[shown] = replace(parameter, name=shown, order=order)
            if name is None and parameter.held is None:
                unmatched |= not parameter.sharded
                if parameter.unplaced or shown != label:
                    reasons[shown] = parameter.unplaced or AMBIGUOUS
            names[index][label] = shown
        unmatched |= _add_states(index, one, trace, names[index], pieces_of[index], made[index], pieces, reasons)
    complete = {
        name: some
        for name, some in pieces.items()
        if not _gap(name, one, some, reasons)
        and not _apart(name, some, ranks, reasons)
        and not _unlike(name, one, some, ranks, reasons)
    }
    for name, some in complete.items():
        for index in dict.fromkeys(piece.rank for piece in some):
            local = ranks[index].entry(next(piece.label for piece in some if piece.rank == index))
            if local is not None:
                _put(one, name, local, made[index])
    modules = [modules_of(one, new, {**own, **some}) for new, own, some in zip(made, names, pieces_of, strict=True)]
    for new, known in zip(made, modules, strict=True):
        new.modules = {known[label]: dtype for label, dtype in new.modules.items() if label in known}
    idle = [_idle(trace) for trace in ranks]
    users = _users(made, names, idle)
    for number in range(max((len(trace.steps) for trace in ranks), default=0)):
        at = [trace.steps[number] if number < len(trace.steps) else None for trace in ranks]
        there = one.steps[number] if number < len(one.steps) else None
        views = {kind: _views(complete, at, there, kind) for kind in KINDS}
        for index, step in enumerate(at):
            if step is not None:
                renamed = _step(step, names[index], pieces_of[index], users, index, views)
                outputs = {name: step.outputs[label] for label, name in modules[index].items() if label in step.outputs}
                made[index].steps.append(replace(renamed, outputs=outputs))
    _take_unused(users, made)
    divided = any(name in one.parameters for name in pieces) or any(
        name in one.parameters and 0 < sum(name in trace.parameters for trace in made) < len(made)
        for trace in made
        for name in trace.parameters
    )
    return Assembly(
        made,
        divided or any(parameter.sharded for trace in ranks for parameter in trace.parameters.values()),
        reasons,
        {name: _placement(some, ranks) for name, some in pieces.items()},
        {name: _holders(one, name, some, ranks) for name, some in complete.items()},
        {name: _parts(some, ranks) for name, some in complete.items()},
        unmatched,
        any(
            entry.same_elsewhere and (entry.held is not None or own.get(label) in reasons)
            for trace, own in zip(ranks, names, strict=True)
            for label, entry in (*trace.parameters.items(), *trace.states.items())
        ),
        {name: told for name, some in pieces.items() if (told := _own_parts(some, ranks))},
    )


def _add_states(
    index: int,
    one: Trace,
    trace: Trace,
    names: dict[str, str | None],
    pieces_of: dict[str, str],
    made: Trace,
    pieces: dict[str, list[_LabelledSlice]],
    reasons: dict[str, str],
) -> bool:
    """Add the states and buffers of a rank under the names of their parameters and modules on one device.

    Return whether the rank may hold slices of buffers.
    """
    open_ = False
    modules = prefixes({**names, **pieces_of})
    for label, state in trace.states.items():
        if state.held is not None and state.held.whole in one.states:
            pieces[state.held.whole].append(_LabelledSlice(index, label, state.held))
            pieces_of[label] = state.held.whole
            continue
        if state.key:
            owner = pieces_of.get(state.of) or names.get(state.of) or state.of
        else:
            owner = _buffer(state, modules, one)
        moved = state.moved_to(owner, one.parameters[owner].order if owner in one.parameters else state.order)
        there = one.states.get(moved.name)
        names[label] = moved.name
        made.states[moved.name] = moved
        if state.unplaced and (there is None or there.shape != state.shape):
            reasons[moved.name] = state.unplaced
        open_ |= not state.key and not state.constant and (there is None or there.shape != state.shape)
    return open_


def _buffer(state: State, modules: Mapping[str, set[str]], one: Trace) -> str:
    """Return the name of a buffer on one device, from the modules around it; its own name if they do not match."""
    name = beside(state.of, modules)
    there = one.states.get(named_state("", name)) if name else None
    return name if name and there is not None and there.shape == state.shape else state.of


def _put(one: Trace, name: str, local: Parameter, made: Trace) -> None:
    """Add to a rank the description of a whole tensor that it holds a slice of."""
    if name in one.states:
        made.states[name] = replace(
            one.states[name],
            dtype=local.dtype,
            device=local.device,
            constant=isinstance(local, State) and local.constant,
        )
    else:
        made.parameters[name] = replace(one.parameters[name], dtype=local.dtype, device=local.device)


def _free(label: str, parameter: Parameter, rank: int, one: Trace, own: Mapping[str, str | None]) -> str:
    """Return a name for an unmatched parameter: its own, unless another parameter has this name."""
    other = one.parameters.get(label)
    taken = other is not None and (other.shape == parameter.shape or label in own.values())
    return f"{label} of rank {rank}" if taken else label


def _gap(name: str, one: Trace, some: Sequence[_LabelledSlice], reasons: dict[str, str]) -> bool:
    """Return whether slices fail to cover a whole tensor exactly once, and record the reason."""
    distinct = {piece.held.key: piece.held for piece in some}
    count = sum(held.count for held in distinct.values())
    whole = one.entry(name)
    assert whole is not None
    first = some[0].held
    if count == whole.count and (sum(held.mark for held in distinct.values()) - first.all) % 2**64 == 0:
        return False
    told = "; ".join(dict.fromkeys(held.told for held in distinct.values()))
    many = "more than once" if count >= whole.count else f"by {count} of {whole.count} elements"
    reasons[name] = f"the slices of the ranks cover it {many}: {told}"
    return True


def _apart(name: str, some: Sequence[_LabelledSlice], ranks: Sequence[Trace], reasons: dict[str, str]) -> bool:
    """Return whether ranks hold a slice with different initial values, and record that."""
    starts: dict[tuple[int, int], set[int]] = defaultdict(set)
    for piece in some:
        before = next((s.before[piece.label] for s in ranks[piece.rank].steps if piece.label in s.before), None)
        if before is not None:
            starts[piece.held.key].add(before.bits)
    if all(len(bits) == 1 for bits in starts.values()):
        return False
    reasons[name] = "ranks that hold the same slice of it start with different values"
    return True


def _first(some: Sequence[_LabelledSlice], ranks: Sequence[Trace]) -> tuple[int, list[tuple[HeldSlice, TensorSummary]]]:
    """Return the first step with a value of each part of a statistic, and the values, if there is one."""
    wanted = {piece.place for piece in some}
    for number in range(min(len(ranks[piece.rank].steps) for piece in some)):
        found: dict[object, tuple[HeldSlice, TensorSummary]] = {}
        for piece in some:
            value = ranks[piece.rank].steps[number].states.get(piece.label)
            if value is not None:
                found.setdefault(piece.place, (piece.held, value))
        if found.keys() == wanted:
            return number, list(found.values())
    return 0, []


def _unlike(
    name: str, one: Trace, some: Sequence[_LabelledSlice], ranks: Sequence[Trace], reasons: dict[str, str]
) -> bool:
    """Return whether statistics of slices cannot be put together, and record the reason."""
    if not any(piece.held.covers for piece in some):
        return False
    number, parts = _first(some, ranks)
    expected = one.steps[number].states.get(name) if number < len(one.steps) else None
    reason = why_not_together(parts, expected, one.states[name].shape)
    if reason:
        reasons[name] = reason
    return bool(reason)


def _own_parts(some: Sequence[_LabelledSlice], ranks: Sequence[Trace]) -> str:
    """Describe the parts that ranks compute a statistic from; "" if all ranks have the same value of it."""
    if not any(piece.held.covers for piece in some) or not is_partial(_first(some, ranks)[1]):
        return ""
    return _told((piece.held.covers, ranks[piece.rank].rank) for piece in some)


def _idle(trace: Trace) -> set[str]:
    """Return the parameters that a rank never used: they had no gradient, and their modules were not called."""
    found: set[str] | None = None
    used: set[str] = set()
    for step in trace.steps:
        used |= step.gradients.keys() - step.idle
        found = (found or set()) | step.idle
    return (found or set()) - used


def _users(
    made: Sequence[Trace], names: Sequence[Mapping[str, str | None]], idle: Sequence[set[str]]
) -> dict[str, set[int]]:
    """Return the ranks that use a parameter, for each parameter that only some of its ranks use."""
    found: dict[str, set[int]] = {}
    for name in {own[label] for own, some in zip(names, idle, strict=True) for label in some}:
        there = {index for index, trace in enumerate(made) if name in trace.parameters}
        using = {i for i in there if not any(names[i][label] == name for label in idle[i])}
        if name is not None and 0 < len(using) < len(there):
            found[name] = using
    owned = [state for trace in made for state in trace.states.values() if state.of in found]
    return found | {state.name: found[state.of] for state in owned}


def _take_unused(users: Mapping[str, set[int]], made: Sequence[Trace]) -> None:
    """Remove parameters and their states from ranks that do not use them."""
    for name, using in users.items():
        for index, trace in enumerate(made):
            if index not in using:
                trace.parameters.pop(name, None)
                trace.states.pop(name, None)


def _views(
    complete: Mapping[str, Sequence[_LabelledSlice]], at: Sequence[Step | None], one: Step | None, kind: Kind
) -> dict[str, dict[int, TensorSummary | None]]:
    """Return the whole tensors from the view of each rank: its own slices, completed with slices of other ranks."""
    found: dict[str, dict[int, TensorSummary | None]] = {}
    for name, some in complete.items():
        values: list[tuple[_LabelledSlice, TensorSummary | None]] = []
        for piece in some:
            step = at[piece.rank]
            here = {} if step is None else of_kind(step, kind)
            if piece.label in here:
                values.append((piece, here[piece.label]))
        if {piece.place for piece, _ in values} != {piece.place for piece in some}:
            continue
        base = {piece.place: (piece.held, value) for piece, value in reversed(values)}
        expected = None if one is None else of_kind(one, kind).get(name)
        found[name] = {}
        for index in dict.fromkeys(piece.rank for piece in some):
            view = base | {piece.place: (piece.held, value) for piece, value in values if piece.rank == index}
            known = [(held, value) for held, value in view.values() if value is not None]
            found[name][index] = together(known, expected)
    return found


def _step(
    step: Step,
    names: Mapping[str, str | None],
    pieces: Mapping[str, str],
    users: Mapping[str, set[int]],
    index: int,
    views: Mapping[Kind, Mapping[str, Mapping[int, TensorSummary | None]]],
) -> Step:
    def renamed(kind: Kind) -> Iterator[tuple[str, TensorSummary | None]]:
        for label, value in of_kind(step, kind).items():
            name = names.get(label)
            if name is not None and index in users.get(name, (index,)):
                yield name, value
        for name, view in views[kind].items():
            if index in view:
                yield name, view[index]

    def scale(label: str) -> float:
        """Return the final norm of the whole gradient relative to that of a slice; 1 if unknown."""
        own, found = step.gradients.get(label), views["gradient"].get(pieces.get(label, ""), {}).get(index)
        return found.norm / own.norm if found is not None and own is not None and own.norm else 1.0

    def there(kind: Kind) -> dict[str, TensorSummary]:
        return {name: value for name, value in renamed(kind) if value is not None}

    return replace(
        step,
        before=there("before"),
        gradients=dict(renamed("gradient")),
        parameters=there("parameter"),
        states=there("state"),
        calls=[
            (
                told,
                {pieces.get(label) or names.get(label) or label: norm * scale(label) for label, norm in norms.items()},
            )
            for told, norms in step.calls
        ],
        options={pieces.get(label) or names[label] or label: options for label, options in step.options.items()},
    )


def _placement(some: Sequence[_LabelledSlice], ranks: Sequence[Trace]) -> str:
    return _told((piece.held.told, ranks[piece.rank].rank) for piece in some)


def _told(parts: Iterable[tuple[str, int]]) -> str:
    told: dict[str, list[int]] = defaultdict(list)
    for what, rank in parts:
        told[what].append(rank)
    return "; ".join(f"{what} on {named(sorted(set(where)))}" for what, where in told.items())


def _holders(one: Trace, name: str, some: Sequence[_LabelledSlice], ranks: Sequence[Trace]) -> list[tuple[int, ...]]:
    whole = one.entry(name)
    found: list[set[int]] = [set() for _ in positions(whole.count if whole else 0)]
    for piece in some:
        after = [{**step.parameters, **step.states} for step in ranks[piece.rank].steps]
        own = next((values[piece.label] for values in after if piece.label in values), None)
        for where, value in zip(found, own.samples if own else (), strict=False):
            if value is not None:
                where.add(ranks[piece.rank].rank)
    return [tuple(sorted(where)) for where in found]


def _parts(some: Sequence[_LabelledSlice], ranks: Sequence[Trace]) -> dict[int, frozenset[tuple[int, int]]]:
    found: dict[int, set[tuple[int, int]]] = defaultdict(set)
    for piece in some:
        found[ranks[piece.rank].rank].add(piece.held.key)
    return {rank: frozenset(keys) for rank, keys in found.items()}
