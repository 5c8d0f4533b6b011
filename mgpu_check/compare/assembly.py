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
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mgpu_check.compare.alignment import FIELDS, QUANTITIES, PlacedParts, Quantity, deviation, of_quantity
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

_SAME = 1e-9  # relative deviation of summaries of equal tensors: kernels may add the elements in another order

_NEAR_GRADIENT = 1e-3  # relative deviation of gradients of the same parameter: rounding causes less


def matched(reference: Trace, rank: Trace) -> dict[str, str | None]:
    """Return name on the rank -> name on one device, for each parameter; None if unknown, or for a slice.

    Values that are unique on both sides decide, and they also match the names of the modules around them. Values of
    constants and copied layers are not unique: there gradients decide, then the names of modules. A parameter whose
    values are unknown matches the parameter of the same name and shape: the rank started from other values.
    """
    full_parameters = {label: parameter for label, parameter in rank.parameters.items() if parameter.held is None}
    matches: dict[str, str | None] = dict.fromkeys(rank.parameters)
    candidates = _candidates(reference, rank, full_parameters)
    alone = {label: options[0] for label, options in candidates.items() if len(options) == 1}
    claims = Counter(alone.values())
    matches |= {label: name for label, name in alone.items() if claims[name] == 1}
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
    A wrapper, such as a strategy of Lightning, puts a prefix before the names."""
    if label in reference.parameters:
        return label
    namesakes = [name for name in reference.parameters if name.endswith(f".{label}") or label.endswith(f".{name}")]
    return namesakes[0] if len(namesakes) == 1 else None


def matched_in_order(reference: Trace, ranks: Sequence[Trace], matches: Sequence[dict[str, str | None]]) -> None:
    """Match the layers of pipeline stages that started from other values with the next layers of one device.

    Stages may number their layers from 0, so the same name means another layer. Nothing is changed if the ranks
    together have each parameter of one device, or if the shapes do not follow in order.

    `matches`: for each rank, the names from `matched`, which this function changes.
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
    candidates = _candidates(reference, rank, full_parameters)
    return {label: _bits(starts[label]) for label, namesakes in candidates.items() if not namesakes}


def _candidates(reference: Trace, rank: Trace, full_parameters: Mapping[str, Parameter]) -> dict[str, list[str]]:
    """Return, for each parameter of the rank, the parameters of one device with the same initial values."""
    starts, reference_starts = _starts(rank), _starts(reference)
    by_bits: dict[tuple[tuple[int, ...], int], list[str]] = defaultdict(list)
    for name, summary in reference_starts.items():
        by_bits[reference.parameters[name].shape, _bits(summary)].append(name)
    candidates: dict[str, list[str]] = {}
    for label, own in full_parameters.items():
        start = starts.get(label)
        near = by_bits.get((own.shape, _bits(start)), []) if start is not None else []
        candidates[label] = [n for n in near if not deviation(start, reference_starts[n], own.shape).size > _SAME]
    return candidates


def _bits(summary: TensorSummary) -> int:
    """Return the sum of the bits; 0 for zeros, which may be negative: 0 * torch.randn(8) has either sign."""
    return summary.bits if summary.norm else 0


def _by_gradient(label: str, candidates: Sequence[str], reference: Trace, rank: Trace) -> str | None:
    """Return the name whose gradient equals the first gradient of a parameter; None if no or several names match."""
    shape = rank.parameters[label].shape
    for step, reference_step in zip(rank.steps, reference.steps, strict=False):
        own, gradients = step.gradients.get(label), reference_step.gradients
        if own is not None and own.norm:
            near = [n for n in candidates if deviation(own, gradients.get(n), shape).size <= _NEAR_GRADIENT]
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

    `rank`: the rank, with the parameters that it holds under their names on one device. `matches`: name on the rank ->
    name on one device, for each parameter.
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


_Value = tuple[HeldSlice, TensorSummary]
_Values = Collection[_Value]


def together(slices: _Values, expected: TensorSummary | None) -> TensorSummary | None:
    """Return the whole tensor from all of its parts; None without parts.
    `expected`: the tensor on one device. The norm of a mean is unknown without its elements, so its norm is taken."""
    if not slices:
        return None
    pieces = []
    for own in _by_place(slices):
        values, shares = [value for _, value in own], [held_slice.share for held_slice, _ in own]
        # Equal parts of a statistic are the mean themselves.
        pieces.append(mean_of(values, shares) if _is_mean(own) else values[0])
    tensor = joined(pieces)
    return replace(tensor, norm=expected.norm) if math.isnan(tensor.norm) and expected is not None else tensor


def is_partial(slices: _Values) -> bool:
    """Return whether ranks have different values of a statistic for the same place."""
    return any(_is_mean(own) for own in _by_place(slices))


def why_not_together(slices: _Values, expected: TensorSummary | None, shape: Sequence[int]) -> str | None:
    """Return why parts of a statistic are not the statistic of one device; None if they are."""
    coverage = "; ".join(dict.fromkeys(held_slice.covers for held_slice, _ in slices))
    if any(abs(math.fsum(held_slice.share for held_slice, _ in own) - 1) > _SHARE for own in _by_place(slices)):
        return f"the slices that it is computed from do not cover the parameter once: {coverage}"
    if expected is None or deviation(together(slices, expected), expected, shape).size <= _NEAR:
        return None
    return f"each rank may keep a statistic of its own slice ({coverage}), and their mean is not that of one device"


def _by_place(slices: _Values) -> list[list[_Value]]:
    groups: dict[tuple[int, int], list[_Value]] = defaultdict(list)
    for held_slice, value in slices:
        groups[held_slice.key].append((held_slice, value))
    return list(groups.values())


def _is_mean(slices: _Values) -> bool:
    return len({value for _, value in slices}) > 1


def mean_of(values: Sequence[TensorSummary], shares: Sequence[float]) -> TensorSummary:
    """Return the weighted mean; its norm is not a number, since it is unknown."""

    def mean(numbers: Sequence[float]) -> float:
        if None in numbers:  # an element that no rank has at this place
            return numbers[0]
        return sum(share * value for share, value in zip(shares, numbers, strict=True))

    sums, samples = (
        tuple(map(mean, zip(*numbers, strict=True)))
        for numbers in ([value.sums for value in values], [value.samples for value in values])
    )
    return TensorSummary(0, math.nan if all(value.finite for value in values) else math.inf, sums, samples)


@dataclass
class Assembly(PlacedParts):
    """Traces of ranks as if each rank held whole tensors with the names of one device.
    `assembled` makes it from the traces of a finished run; an `Aligned` takes over its fields."""

    ranks: list[Trace]
    may_hold_slices: bool  # a rank may hold a slice that is not placed yet. Its values may show the place.
    same_elsewhere: bool  # a rank holds values that occur in several places. Distinct values may show the place.


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


_Slices = Sequence[_LabelledSlice]


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
            shown = name or label
            namesake = reference.parameters.get(label)
            if not name and namesake is not None and (namesake.shape == parameter.shape or label in own.values()):
                shown = f"{label} of rank {trace.rank}"  # another parameter has its name
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
    complete = _complete(reference, pieces, ranks, reasons)
    for name, slices in complete.items():
        for index in dict.fromkeys(piece.rank for piece in slices):
            local = ranks[index].entry(next(piece.label for piece in slices if piece.rank == index))
            if local is not None:
                _put(reference, name, local, traces[index])
    new_names = [{**own, **pieces_on_rank} for own, pieces_on_rank in zip(matches, pieces_of, strict=True)]
    modules = [modules_of(reference, new, own) for new, own in zip(traces, new_names, strict=True)]
    for new, module_names in zip(traces, modules, strict=True):
        new.modules = {module_names[label]: dtype for label, dtype in new.modules.items() if label in module_names}
    users = _users(traces, ranks, matches)
    for number in range(max((len(trace.steps) for trace in ranks), default=0)):
        at = [trace.steps[number] if number < len(trace.steps) else None for trace in ranks]
        reference_step = reference.steps[number] if number < len(reference.steps) else None
        views = {quantity: _views(complete, at, reference_step, quantity) for quantity in QUANTITIES}
        for index, step in enumerate(at):
            if step is not None:
                renamed = _step(step, matches[index], pieces_of[index], users, index, views)
                outputs = {name: step.outputs[label] for label, name in modules[index].items() if label in step.outputs}
                traces[index].steps.append(replace(renamed, outputs=outputs))
    divided = any(name in reference.parameters for name in pieces) or any(
        name in reference.parameters and 0 < sum(name in trace.parameters for trace in traces) < len(traces)
        for trace in traces
        for name in trace.parameters
    )
    return Assembly(
        traces,
        unmatched,
        any(
            entry.same_elsewhere and (entry.held is not None or own.get(label) in reasons)
            for trace, own in zip(ranks, matches, strict=True)
            for label, entry in (*trace.parameters.items(), *trace.states.items())
        ),
        divided=divided or any(parameter.sharded for trace in ranks for parameter in trace.parameters.values()),
        reasons=reasons,
        holders={name: _holders(reference, name, slices, ranks) for name, slices in complete.items()},
        shard_keys={name: _shard_keys(slices, ranks) for name, slices in complete.items()},
        partial={
            name: _by_ranks((piece.held.covers, ranks[piece.rank].rank) for piece in own)
            for name, own in pieces.items()
            if any(piece.held.covers for piece in own) and is_partial(_first(own, ranks)[1])
        },
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
    Return whether the rank may hold slices of buffers."""
    open_ = False
    modules = prefixes({**matches, **pieces_of})
    for label, state in trace.states.items():
        if state.held is not None and state.held.whole in reference.states:
            pieces[state.held.whole].append(_LabelledSlice(index, label, state.held))
            pieces_of[label] = state.held.whole
            continue
        owner = state.of
        if state.key:
            owner = pieces_of.get(owner) or matches.get(owner) or owner
        elif name := beside(owner, modules):
            counterpart = reference.states.get(named_state("", name))
            owner = name if counterpart is not None and counterpart.shape == state.shape else owner
        order = reference.parameters[owner].order if owner in reference.parameters else state.order
        name = matches[label] = named_state(state.key, owner)
        assembled_trace.states[name] = replace(state, name=name, of=owner, order=order)
        reference_state = reference.states.get(name)
        if reference_state is None or reference_state.shape != state.shape:
            if state.unplaced:
                reasons[name] = state.unplaced
            open_ |= not state.key and not state.constant
    return open_


def _put(reference: Trace, name: str, local: Parameter, trace: Trace) -> None:
    own: dict[str, Any] = {"dtype": local.dtype, "device": local.device}
    if name in reference.states:
        constant = isinstance(local, State) and local.constant
        trace.states[name] = replace(reference.states[name], **own, constant=constant)
    else:
        trace.parameters[name] = replace(reference.parameters[name], **own)


def _complete(
    reference: Trace, pieces: Mapping[str, list[_LabelledSlice]], ranks: Sequence[Trace], reasons: dict[str, str]
) -> dict[str, list[_LabelledSlice]]:
    complete: dict[str, list[_LabelledSlice]] = {}
    for name, slices in pieces.items():
        full_tensor = reference.parameters.get(name) or reference.states[name]
        reason = _gap(full_tensor, slices) or _apart(slices, ranks) or _unlike(name, reference, slices, ranks)
        if reason:
            reasons[name] = reason
        else:
            complete[name] = slices
    return complete


def _gap(reference: Parameter, slices: _Slices) -> str | None:
    """Return why slices do not cover a whole tensor exactly once; None if they do."""
    distinct = {piece.held.key: piece.held for piece in slices}.values()
    count = sum(held_slice.count for held_slice in distinct)
    marks = sum(held_slice.mark for held_slice in distinct) - slices[0].held.all
    if count == reference.count and marks % 2**64 == 0:
        return None
    description = "; ".join(dict.fromkeys(held_slice.told for held_slice in distinct))
    many = "more than once" if count >= reference.count else f"by {count} of {reference.count} elements"
    return f"the slices of the ranks cover it {many}: {description}"


def _apart(slices: _Slices, ranks: Sequence[Trace]) -> str | None:
    """Return that ranks hold a slice with different initial values; None if they do not."""
    starts: dict[tuple[int, int], set[int]] = defaultdict(set)
    for piece in slices:
        before = next((s.before[piece.label] for s in ranks[piece.rank].steps if piece.label in s.before), None)
        if before is not None:
            starts[piece.held.key].add(before.bits)
    differ = any(len(bits) > 1 for bits in starts.values())
    return "ranks that hold the same slice of it start with different values" if differ else None


def _first(slices: _Slices, ranks: Sequence[Trace]) -> tuple[int, list[_Value]]:
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


def _unlike(name: str, reference: Trace, slices: _Slices, ranks: Sequence[Trace]) -> str | None:
    """Return why statistics of slices cannot be put together; None if they can."""
    if not any(piece.held.covers for piece in slices):
        return None
    number, statistics = _first(slices, ranks)
    expected = reference.steps[number].states.get(name) if number < len(reference.steps) else None
    return why_not_together(statistics, expected, reference.states[name].shape)


def _users(
    traces: Sequence[Trace], ranks: Sequence[Trace], matches: Sequence[Mapping[str, str | None]]
) -> dict[str, set[int]]:
    """Return the ranks that use a parameter, for each that only some of its ranks use, and take it from the others.
    These never had its gradient, and never called its module. States of the parameter go with it."""
    idle: list[set[str]] = []
    for trace in ranks:
        active = {name for step in trace.steps for name in step.gradients.keys() - step.idle}
        idle.append({name for step in trace.steps for name in step.idle} - active)
    users: dict[str, set[int]] = {}
    for name in {own[label] for own, labels in zip(matches, idle, strict=True) for label in labels}:
        holders = {index for index, trace in enumerate(traces) if name in trace.parameters}
        using = {i for i in holders if not any(matches[i][label] == name for label in idle[i])}
        if name is not None and 0 < len(using) < len(holders):
            users[name] = using
    owned = [state for trace in traces for state in trace.states.values() if state.of in users]
    users |= {state.name: users[state.of] for state in owned}
    for index, trace in enumerate(traces):
        for name in (name for name, using in users.items() if index not in using):
            trace.parameters.pop(name, None)
            trace.states.pop(name, None)
    return users


def _views(
    complete: Mapping[str, _Slices], at: Sequence[Step | None], reference: Step | None, quantity: Quantity
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
    def renamed(quantity: Quantity) -> dict[str, TensorSummary | None]:
        tensors = {}
        for label, value in of_quantity(step, quantity).items():
            name = matches.get(label)
            if name is not None and index in users.get(name, (index,)):
                tensors[name] = value
        tensors |= {name: view[index] for name, view in views[quantity].items() if index in view}
        return {name: value for name, value in tensors.items() if value is not None or quantity == "gradient"}

    def scale(label: str) -> float:
        """Return the final norm of the whole gradient relative to that of a slice; 1 if unknown."""
        own, full_gradient = step.gradients.get(label), views["gradient"].get(pieces.get(label, ""), {}).get(index)
        return full_gradient.norm / own.norm if full_gradient is not None and own is not None and own.norm else 1.0

    def named(label: str) -> str:
        return pieces.get(label) or matches.get(label) or label

    fields: dict[str, Any] = {FIELDS[quantity]: renamed(quantity) for quantity in QUANTITIES}
    return replace(
        step,
        **fields,
        calls=[(call, {named(k): norm * scale(k) for k, norm in norms.items()}) for call, norms in step.calls],
        options={named(label): options for label, options in step.options.items()},
    )


def _by_ranks(descriptions: Iterable[tuple[str, int]]) -> str:
    ranks_by_text: dict[str, list[int]] = defaultdict(list)
    for text, rank in descriptions:
        ranks_by_text[text].append(rank)
    return "; ".join(f"{text} on {named(sorted(set(ranks)))}" for text, ranks in ranks_by_text.items())


def _holders(reference: Trace, name: str, slices: _Slices, ranks: Sequence[Trace]) -> list[tuple[int, ...]]:
    full_tensor = reference.entry(name)
    holders: list[set[int]] = [set() for _ in positions(full_tensor.count if full_tensor else 0)]
    for piece in slices:
        after = [{**step.parameters, **step.states} for step in ranks[piece.rank].steps]
        own = next((values[piece.label] for values in after if piece.label in values), None)
        for owners, value in zip(holders, own.samples if own else (), strict=False):
            if value is not None:
                owners.add(ranks[piece.rank].rank)
    return [tuple(sorted(owners)) for owners in holders]


def _shard_keys(slices: _Slices, ranks: Sequence[Trace]) -> dict[int, frozenset[tuple[int, int]]]:
    keys_by_rank: dict[int, set[tuple[int, int]]] = defaultdict(set)
    for piece in slices:
        keys_by_rank[ranks[piece.rank].rank].add(piece.held.key)
    return {rank: frozenset(keys) for rank, keys in keys_by_rank.items()}
