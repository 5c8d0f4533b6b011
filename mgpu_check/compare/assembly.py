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

from mgpu_check.compare.alignment import QUANTITIES, Quantity, deviation, of_quantity
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


def matched(reference: Trace, rank: Trace) -> dict[str, str | None]:
    """Return name on the rank -> name on one device, for each parameter; None if unknown, or for a slice.

    Values that are unique on both sides decide, and they also match the names of the modules around them. Values of
    constants and copied layers are not unique: there gradients decide, then the names of modules. A parameter whose
    values are unknown matches the parameter of the same name and shape: the rank started from other values.
    """
    full_parameters = {label: parameter for label, parameter in rank.parameters.items() if parameter.held is None}
    matches: dict[str, str | None] = dict.fromkeys(rank.parameters)
    candidates = _candidates(reference, rank, full_parameters)
    claims = Counter(options[0] for options in candidates.values() if len(options) == 1)
    matches |= {
        label: options[0] for label, options in candidates.items() if len(options) == 1 and claims[options[0]] == 1
    }
    matched_names = {name for name in matches.values() if name is not None}
    modules = prefixes(matches)
    for label, options in candidates.items():
        if matches[label] is not None or not options:
            continue
        name = _by_gradient(label, options, reference, rank) or beside(label, modules) or label
        if name in options and name not in matched_names:
            matches[label] = name
            matched_names.add(name)
    for label, parameter in full_parameters.items():
        namesake = _namesake(label, reference)
        free = matches[label] is None and not candidates[label] and namesake not in matched_names
        if free and namesake is not None and reference.parameters[namesake].shape == parameter.shape:
            matches[label] = namesake
            matched_names.add(namesake)
    return matches


def _namesake(label: str, reference: Trace) -> str | None:
    """Return the parameter of one device with the same name, or with the only name that differs by a prefix.

    A wrapper, such as a strategy of Lightning, puts a prefix before the names.
    """
    if label in reference.parameters:
        return label
    namesakes = [name for name in reference.parameters if name.endswith(f".{label}") or label.endswith(f".{name}")]
    return namesakes[0] if len(namesakes) == 1 else None


def matched_in_order(reference: Trace, ranks: Sequence[Trace], matches: Sequence[dict[str, str | None]]) -> None:
    """Match the layers of pipeline stages that started from other values with the next layers of one device.

    Stages may number their layers from 0, so the same name means another layer. Nothing is changed if the ranks
    together have each parameter of one device, or if the shapes do not follow in order.

    Args:
        matches: for each rank, the names from `matched`, which this function changes.
    """
    moved_starts = [_started_elsewhere(reference, trace) for trace in ranks]
    pairs = list(zip(matches, moved_starts, strict=True))
    same = {name for match, moved in pairs for label, name in match.items() if label not in moved}
    free = [own for own in sorted(reference.parameters.values(), key=lambda own: own.order) if own.name not in same]
    if {own.name for own in free} <= {name for match in matches for name in match.values()}:
        return
    stages: dict[tuple[int, ...], list[str]] = {}  # replicas of a stage have the same values
    for trace, moved in zip(ranks, moved_starts, strict=True):
        if (values := tuple(moved.values())) not in stages:
            rest = iter(free)
            layers = [next((o for o in rest if o.shape == trace.parameters[label].shape), None) for label in moved]
            if None in layers or len(trace.parameters) >= len(reference.parameters):
                return
            stages[values] = [own.name for own in layers if own is not None]
            free = [own for own in free if own not in layers]
    for match, moved in pairs:
        match.update(zip(moved, stages[tuple(moved.values())], strict=True))


def _started_elsewhere(reference: Trace, rank: Trace) -> dict[str, int]:
    """Return the bits of each whole parameter of a rank that no parameter of one device started from, in order."""
    starts = _starts(rank)
    ordered = sorted(rank.parameters.values(), key=lambda own: own.order)
    full_parameters = {own.name: own for own in ordered if own.held is None and own.name in starts}
    return {
        label: _bits(starts[label])
        for label, namesakes in _candidates(reference, rank, full_parameters).items()
        if not namesakes
    }


def _candidates(reference: Trace, rank: Trace, full_parameters: Mapping[str, Parameter]) -> dict[str, list[str]]:
    """Return, for each parameter of the rank, the parameters of one device with the same initial values."""
    starts, reference_starts = _starts(rank), _starts(reference)
    by_bits: dict[tuple[tuple[int, ...], int], list[str]] = defaultdict(list)
    for name, summary in reference_starts.items():
        by_bits[reference.parameters[name].shape, _bits(summary)].append(name)
    candidates: dict[str, list[str]] = {}
    for label, own in full_parameters.items():
        start = starts.get(label)
        options = by_bits.get((own.shape, _bits(start)), []) if start is not None else []
        candidates[label] = [
            name for name in options if not deviation(start, reference_starts[name], own.shape).size > _SAME
        ]
    return candidates


def _bits(summary: TensorSummary) -> int:
    """Return the sum of the bits; 0 for zeros, which may be negative: 0 * torch.randn(8) has either sign."""
    return summary.bits if summary.norm else 0


def _by_gradient(label: str, candidates: Sequence[str], reference: Trace, rank: Trace) -> str | None:
    """Return the name whose gradient equals the first gradient of a parameter; None if no or several names match."""
    for step, reference_step in zip(rank.steps, reference.steps, strict=False):
        own = step.gradients.get(label)
        if own is None or not own.norm:
            continue
        shape = rank.parameters[label].shape
        near = [
            name
            for name in candidates
            if deviation(own, reference_step.gradients.get(name), shape).size <= _NEAR_GRADIENT
        ]
        return near[0] if len(near) == 1 else None
    return None


def _starts(trace: Trace) -> dict[str, TensorSummary]:
    starts: dict[str, TensorSummary] = {}
    for step in trace.steps:
        for name, summary in step.before.items():
            starts.setdefault(name, summary)
    return starts


def prefixes(matches: Mapping[str, str | None]) -> dict[str, set[str]]:
    """Return prefix of a name on the rank -> prefixes on one device, for matched names with a common rest."""
    counterparts: dict[str, set[str]] = defaultdict(set)
    for label, name in matches.items():
        if name is None:
            continue
        mine, theirs = label.split("."), name.split(".")
        while mine and theirs and mine[-1] == theirs[-1]:
            mine, theirs = mine[:-1], theirs[:-1]
            counterparts[".".join(mine)].add(".".join(theirs))
    return counterparts


def beside(label: str, modules: Mapping[str, set[str]]) -> str | None:
    """Return a parameter's name on one device, by the names of its modules; None if ambiguous or unknown."""
    components = label.split(".")
    for count in range(len(components) - 1, -1, -1):
        prefixes = modules.get(".".join(components[:count]), set())
        if prefixes:
            rest = components[count:]
            return ".".join([*filter(None, [next(iter(prefixes))]), *rest]) if len(prefixes) == 1 else None
    return None


def modules_of(reference: Trace, rank: Trace, matches: Mapping[str, str | None]) -> dict[str, str]:
    """Return module on a rank -> its name on one device.

    A module without all parameters that it has on one device is left out: a stage of a pipeline is no whole model.

    Args:
        rank: the rank, with the parameters that it holds under their names on one device.
        matches: name on the rank -> name on one device, for each parameter.
    """
    counterparts = prefixes(matches)
    modules = {}
    for label in rank.modules:
        name = beside(f"{label}.", counterparts)
        if name is not None and all(key in rank.parameters for key in reference.parameters if key.startswith(name)):
            modules[label] = name.removesuffix(".")
    return modules


_NEAR = 1e-2
"""Relative deviation from one device: rounding causes less, and another reduction than the mean almost always more."""
_SHARE = 1e-6
"""Deviation of a sum of shares from 1: more than floating-point numbers cause, and less than one of a million rows."""


def together(
    slices: Collection[tuple[HeldSlice, TensorSummary]], expected: TensorSummary | None
) -> TensorSummary | None:
    """Return the whole tensor from all of its parts; None without parts.

    Args:
        expected: the tensor on one device. The norm of a mean is unknown without its elements, so its norm is taken.
    """
    if not slices:
        return None
    full_tensor = joined([_mean(own) for own in _by_place(slices)])
    return (
        replace(full_tensor, norm=expected.norm)
        if math.isnan(full_tensor.norm) and expected is not None
        else full_tensor
    )


def is_partial(slices: Iterable[tuple[HeldSlice, TensorSummary]]) -> bool:
    """Return whether ranks have different values of a statistic for the same place."""
    return any(_is_mean(own) for own in _by_place(slices))


def why_not_together(
    slices: Collection[tuple[HeldSlice, TensorSummary]], expected: TensorSummary | None, shape: Sequence[int]
) -> str:
    """Return why parts of a statistic are not the statistic of one device; "" if they are."""
    coverage = "; ".join(dict.fromkeys(held_slice.covers for held_slice, _ in slices))
    if any(abs(math.fsum(held_slice.share for held_slice, _ in own) - 1) > _SHARE for own in _by_place(slices)):
        return f"the slices that it is computed from do not cover the parameter once: {coverage}"
    if expected is None or deviation(together(slices, expected), expected, shape).size <= _NEAR:
        return ""
    return f"each rank may keep a statistic of its own slice ({coverage}), and their mean is not that of one device"


def _by_place(slices: Iterable[tuple[HeldSlice, TensorSummary]]) -> list[list[tuple[HeldSlice, TensorSummary]]]:
    groups: dict[tuple[int, int], list[tuple[HeldSlice, TensorSummary]]] = defaultdict(list)
    for held_slice, value in slices:
        groups[held_slice.key].append((held_slice, value))
    return list(groups.values())


def _is_mean(slices: Sequence[tuple[HeldSlice, TensorSummary]]) -> bool:
    return any(value != slices[0][1] for _, value in slices)


def _mean(slices: Sequence[tuple[HeldSlice, TensorSummary]]) -> TensorSummary:
    """Return the mean of partial statistics. Equal parts are the mean themselves."""
    if not _is_mean(slices):
        return slices[0][1]
    return mean_of([value for _, value in slices], [held_slice.share for held_slice, _ in slices])


def mean_of(values: Sequence[TensorSummary], shares: Sequence[float]) -> TensorSummary:
    """Return the weighted mean; its norm is not a number, since it is unknown."""

    def mean(numbers: Sequence[float]) -> float:
        return sum(share * value for share, value in zip(shares, numbers, strict=True))

    return TensorSummary(
        0,
        math.nan if all(value.finite for value in values) else math.inf,
        tuple(map(mean, zip(*(value.sums for value in values), strict=True))),
        # None is an element that no rank has at this place.
        tuple(
            numbers[0] if None in numbers else mean(numbers)
            for numbers in zip(*(v.samples for v in values), strict=True)
        ),
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


def assembled(reference: Trace, ranks: Sequence[Trace]) -> Assembly:
    """Assemble the traces of ranks."""
    matches = [matched(reference, trace) for trace in ranks]
    matched_in_order(reference, ranks, matches)
    reasons: dict[str, str] = {}
    pieces: dict[str, list[_LabelledSlice]] = defaultdict(list)
    traces = [Trace(trace.rank, trace.world, modules=trace.modules, events=trace.events) for trace in ranks]
    pieces_of: list[dict[str, str]] = [{} for _ in ranks]
    unmatched = False
    for index, (trace, own) in enumerate(zip(ranks, matches, strict=True)):
        for label, parameter in trace.parameters.items():
            name = own[label]
            if parameter.held is not None and parameter.held.whole in reference.parameters:
                pieces[parameter.held.whole].append(_LabelledSlice(index, label, parameter.held))
                pieces_of[index][label] = parameter.held.whole
                continue
            shown = name or _free(label, parameter, trace.rank, reference, own)
            order = reference.parameters[shown].order if shown in reference.parameters else parameter.order
            traces[index].parameters[shown] = replace(parameter, name=shown, order=order)
            if name is None and parameter.held is None:
                unmatched |= not parameter.sharded
                if parameter.unplaced or shown != label:
                    reasons[shown] = parameter.unplaced or AMBIGUOUS
            matches[index][label] = shown
        unmatched |= _add_states(
            index, reference, trace, matches[index], pieces_of[index], traces[index], pieces, reasons
        )
    complete = {
        name: slices
        for name, slices in pieces.items()
        if not _gap(name, reference, slices, reasons)
        and not _apart(name, slices, ranks, reasons)
        and not _unlike(name, reference, slices, ranks, reasons)
    }
    for name, slices in complete.items():
        for index in dict.fromkeys(piece.rank for piece in slices):
            local = ranks[index].entry(next(piece.label for piece in slices if piece.rank == index))
            if local is not None:
                _put(reference, name, local, traces[index])
    modules = [
        modules_of(reference, new, {**own, **piece_names})
        for new, own, piece_names in zip(traces, matches, pieces_of, strict=True)
    ]
    for new, module_names in zip(traces, modules, strict=True):
        new.modules = {module_names[label]: dtype for label, dtype in new.modules.items() if label in module_names}
    idle = [_idle(trace) for trace in ranks]
    users = _users(traces, matches, idle)
    for number in range(max((len(trace.steps) for trace in ranks), default=0)):
        at = [trace.steps[number] if number < len(trace.steps) else None for trace in ranks]
        reference_step = reference.steps[number] if number < len(reference.steps) else None
        views = {quantity: _views(complete, at, reference_step, quantity) for quantity in QUANTITIES}
        for index, step in enumerate(at):
            if step is not None:
                renamed = _step(step, matches[index], pieces_of[index], users, index, views)
                outputs = {name: step.outputs[label] for label, name in modules[index].items() if label in step.outputs}
                traces[index].steps.append(replace(renamed, outputs=outputs))
    _take_unused(users, traces)
    divided = any(name in reference.parameters for name in pieces) or any(
        name in reference.parameters and 0 < sum(name in trace.parameters for trace in traces) < len(traces)
        for trace in traces
        for name in trace.parameters
    )
    return Assembly(
        traces,
        divided or any(parameter.sharded for trace in ranks for parameter in trace.parameters.values()),
        reasons,
        {name: _placement(slices, ranks) for name, slices in pieces.items()},
        {name: _holders(reference, name, slices, ranks) for name, slices in complete.items()},
        {name: _parts(slices, ranks) for name, slices in complete.items()},
        unmatched,
        any(
            entry.same_elsewhere and (entry.held is not None or own.get(label) in reasons)
            for trace, own in zip(ranks, matches, strict=True)
            for label, entry in (*trace.parameters.items(), *trace.states.items())
        ),
        {name: description for name, slices in pieces.items() if (description := _own_parts(slices, ranks))},
    )


def _add_states(
    index: int,
    reference: Trace,
    trace: Trace,
    matches: dict[str, str | None],
    pieces_of: dict[str, str],
    assembled_trace: Trace,
    pieces: dict[str, list[_LabelledSlice]],
    reasons: dict[str, str],
) -> bool:
    """Add the states and buffers of a rank under the names of their parameters and modules on one device.

    Return whether the rank may hold slices of buffers.
    """
    open_ = False
    modules = prefixes({**matches, **pieces_of})
    for label, state in trace.states.items():
        if state.held is not None and state.held.whole in reference.states:
            pieces[state.held.whole].append(_LabelledSlice(index, label, state.held))
            pieces_of[label] = state.held.whole
            continue
        if state.key:
            owner = pieces_of.get(state.of) or matches.get(state.of) or state.of
        else:
            owner = _buffer(state, modules, reference)
        moved = state.moved_to(
            owner, reference.parameters[owner].order if owner in reference.parameters else state.order
        )
        reference_state = reference.states.get(moved.name)
        matches[label] = moved.name
        assembled_trace.states[moved.name] = moved
        if state.unplaced and (reference_state is None or reference_state.shape != state.shape):
            reasons[moved.name] = state.unplaced
        open_ |= (
            not state.key and not state.constant and (reference_state is None or reference_state.shape != state.shape)
        )
    return open_


def _buffer(state: State, modules: Mapping[str, set[str]], reference: Trace) -> str:
    """Return the name of a buffer on one device, from the modules around it; its own name if they do not match."""
    name = beside(state.of, modules)
    counterpart = reference.states.get(named_state("", name)) if name else None
    return name if name and counterpart is not None and counterpart.shape == state.shape else state.of


def _put(reference: Trace, name: str, local: Parameter, trace: Trace) -> None:
    """Add to a rank the description of a whole tensor that it holds a slice of."""
    if name in reference.states:
        trace.states[name] = replace(
            reference.states[name],
            dtype=local.dtype,
            device=local.device,
            constant=isinstance(local, State) and local.constant,
        )
    else:
        trace.parameters[name] = replace(reference.parameters[name], dtype=local.dtype, device=local.device)


def _free(label: str, parameter: Parameter, rank: int, reference: Trace, own: Mapping[str, str | None]) -> str:
    """Return a name for an unmatched parameter: its own, unless another parameter has this name."""
    namesake = reference.parameters.get(label)
    is_taken = namesake is not None and (namesake.shape == parameter.shape or label in own.values())
    return f"{label} of rank {rank}" if is_taken else label


def _gap(name: str, reference: Trace, slices: Sequence[_LabelledSlice], reasons: dict[str, str]) -> bool:
    """Return whether slices fail to cover a whole tensor exactly once, and record the reason."""
    distinct = {piece.held.key: piece.held for piece in slices}
    count = sum(held_slice.count for held_slice in distinct.values())
    full_tensor = reference.entry(name)
    assert full_tensor is not None
    head = slices[0].held
    if (
        count == full_tensor.count
        and (sum(held_slice.mark for held_slice in distinct.values()) - head.all) % 2**64 == 0
    ):
        return False
    description = "; ".join(dict.fromkeys(held_slice.told for held_slice in distinct.values()))
    many = "more than once" if count >= full_tensor.count else f"by {count} of {full_tensor.count} elements"
    reasons[name] = f"the slices of the ranks cover it {many}: {description}"
    return True


def _apart(name: str, slices: Sequence[_LabelledSlice], ranks: Sequence[Trace], reasons: dict[str, str]) -> bool:
    """Return whether ranks hold a slice with different initial values, and record that."""
    starts: dict[tuple[int, int], set[int]] = defaultdict(set)
    for piece in slices:
        before = next((s.before[piece.label] for s in ranks[piece.rank].steps if piece.label in s.before), None)
        if before is not None:
            starts[piece.held.key].add(before.bits)
    if all(len(bits) == 1 for bits in starts.values()):
        return False
    reasons[name] = "ranks that hold the same slice of it start with different values"
    return True


def _first(
    slices: Sequence[_LabelledSlice], ranks: Sequence[Trace]
) -> tuple[int, list[tuple[HeldSlice, TensorSummary]]]:
    """Return the first step with a value of each part of a statistic, and the values, if there is one."""
    wanted = {piece.place for piece in slices}
    for number in range(min(len(ranks[piece.rank].steps) for piece in slices)):
        values_by_place: dict[object, tuple[HeldSlice, TensorSummary]] = {}
        for piece in slices:
            value = ranks[piece.rank].steps[number].states.get(piece.label)
            if value is not None:
                values_by_place.setdefault(piece.place, (piece.held, value))
        if values_by_place.keys() == wanted:
            return number, list(values_by_place.values())
    return 0, []


def _unlike(
    name: str, reference: Trace, slices: Sequence[_LabelledSlice], ranks: Sequence[Trace], reasons: dict[str, str]
) -> bool:
    """Return whether statistics of slices cannot be put together, and record the reason."""
    if not any(piece.held.covers for piece in slices):
        return False
    number, statistics = _first(slices, ranks)
    expected = reference.steps[number].states.get(name) if number < len(reference.steps) else None
    reason = why_not_together(statistics, expected, reference.states[name].shape)
    if reason:
        reasons[name] = reason
    return bool(reason)


def _own_parts(slices: Sequence[_LabelledSlice], ranks: Sequence[Trace]) -> str:
    """Describe the parts that ranks compute a statistic from; "" if all ranks have the same value of it."""
    if not any(piece.held.covers for piece in slices) or not is_partial(_first(slices, ranks)[1]):
        return ""
    return _told((piece.held.covers, ranks[piece.rank].rank) for piece in slices)


def _idle(trace: Trace) -> set[str]:
    """Return the parameters that a rank never used: they had no gradient, and their modules were not called."""
    idle: set[str] | None = None
    active: set[str] = set()
    for step in trace.steps:
        active |= step.gradients.keys() - step.idle
        idle = (idle or set()) | step.idle
    return (idle or set()) - active


def _users(
    traces: Sequence[Trace], matches: Sequence[Mapping[str, str | None]], idle: Sequence[set[str]]
) -> dict[str, set[int]]:
    """Return the ranks that use a parameter, for each parameter that only some of its ranks use."""
    users: dict[str, set[int]] = {}
    for name in {own[label] for own, labels in zip(matches, idle, strict=True) for label in labels}:
        holders = {index for index, trace in enumerate(traces) if name in trace.parameters}
        using = {i for i in holders if not any(matches[i][label] == name for label in idle[i])}
        if name is not None and 0 < len(using) < len(holders):
            users[name] = using
    owned = [state for trace in traces for state in trace.states.values() if state.of in users]
    return users | {state.name: users[state.of] for state in owned}


def _take_unused(users: Mapping[str, set[int]], traces: Sequence[Trace]) -> None:
    """Remove parameters and their states from ranks that do not use them."""
    for name, using in users.items():
        for index, trace in enumerate(traces):
            if index not in using:
                trace.parameters.pop(name, None)
                trace.states.pop(name, None)


def _views(
    complete: Mapping[str, Sequence[_LabelledSlice]],
    at: Sequence[Step | None],
    reference: Step | None,
    quantity: Quantity,
) -> dict[str, dict[int, TensorSummary | None]]:
    """Return the whole tensors from the view of each rank: its own slices, completed with slices of other ranks."""
    views: dict[str, dict[int, TensorSummary | None]] = {}
    for name, slices in complete.items():
        values: list[tuple[_LabelledSlice, TensorSummary | None]] = []
        for piece in slices:
            step = at[piece.rank]
            tensors = {} if step is None else of_quantity(step, quantity)
            if piece.label in tensors:
                values.append((piece, tensors[piece.label]))
        if {piece.place for piece, _ in values} != {piece.place for piece in slices}:
            continue
        base = {piece.place: (piece.held, value) for piece, value in reversed(values)}
        expected = None if reference is None else of_quantity(reference, quantity).get(name)
        views[name] = {}
        for index in dict.fromkeys(piece.rank for piece in slices):
            view = base | {piece.place: (piece.held, value) for piece, value in values if piece.rank == index}
            available = [(held_slice, value) for held_slice, value in view.values() if value is not None]
            views[name][index] = together(available, expected)
    return views


def _step(
    step: Step,
    matches: Mapping[str, str | None],
    pieces: Mapping[str, str],
    users: Mapping[str, set[int]],
    index: int,
    views: Mapping[Quantity, Mapping[str, Mapping[int, TensorSummary | None]]],
) -> Step:
    def renamed(quantity: Quantity) -> Iterator[tuple[str, TensorSummary | None]]:
        for label, value in of_quantity(step, quantity).items():
            name = matches.get(label)
            if name is not None and index in users.get(name, (index,)):
                yield name, value
        for name, view in views[quantity].items():
            if index in view:
                yield name, view[index]

    def scale(label: str) -> float:
        """Return the final norm of the whole gradient relative to that of a slice; 1 if unknown."""
        own, full_gradient = step.gradients.get(label), views["gradient"].get(pieces.get(label, ""), {}).get(index)
        return full_gradient.norm / own.norm if full_gradient is not None and own is not None and own.norm else 1.0

    def there(quantity: Quantity) -> dict[str, TensorSummary]:
        return {name: value for name, value in renamed(quantity) if value is not None}

    return replace(
        step,
        before=there("before"),
        gradients=dict(renamed("gradient")),
        parameters=there("parameter"),
        states=there("state"),
        calls=[
            (
                description,
                {
                    pieces.get(label) or matches.get(label) or label: norm * scale(label)
                    for label, norm in norms.items()
                },
            )
            for description, norms in step.calls
        ],
        options={pieces.get(label) or matches[label] or label: options for label, options in step.options.items()},
    )


def _placement(slices: Sequence[_LabelledSlice], ranks: Sequence[Trace]) -> str:
    return _told((piece.held.told, ranks[piece.rank].rank) for piece in slices)


def _told(descriptions: Iterable[tuple[str, int]]) -> str:
    ranks_by_text: dict[str, list[int]] = defaultdict(list)
    for text, rank in descriptions:
        ranks_by_text[text].append(rank)
    return "; ".join(f"{text} on {named(sorted(set(ranks)))}" for text, ranks in ranks_by_text.items())


def _holders(
    reference: Trace, name: str, slices: Sequence[_LabelledSlice], ranks: Sequence[Trace]
) -> list[tuple[int, ...]]:
    full_tensor = reference.entry(name)
    holders: list[set[int]] = [set() for _ in positions(full_tensor.count if full_tensor else 0)]
    for piece in slices:
        after = [{**step.parameters, **step.states} for step in ranks[piece.rank].steps]
        own = next((values[piece.label] for values in after if piece.label in values), None)
        for owners, value in zip(holders, own.samples if own else (), strict=False):
            if value is not None:
                owners.add(ranks[piece.rank].rank)
    return [tuple(sorted(owners)) for owners in holders]


def _parts(slices: Sequence[_LabelledSlice], ranks: Sequence[Trace]) -> dict[int, frozenset[tuple[int, int]]]:
    keys_by_rank: dict[int, set[tuple[int, int]]] = defaultdict(set)
    for piece in slices:
        keys_by_rank[ranks[piece.rank].rank].add(piece.held.key)
    return {rank: frozenset(keys) for rank, keys in keys_by_rank.items()}
