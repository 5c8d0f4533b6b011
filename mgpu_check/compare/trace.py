"""Read and write the trace of a script's run: a file of JSON lines for each rank, one line for each event.

The first line is ``{"event": "start", "format": "mgpu-check trace", "version": 1, …}``. A line of another event carries the
number of optimizer steps that were complete when it happened as ``"after"``. A tensor is kept as a *summary*, a list of
numbers: see `Summary`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

__all__ = [
    "FORMAT",
    "VERSION",
    "Held",
    "Parameter",
    "State",
    "Step",
    "Summary",
    "Trace",
    "TraceError",
    "Writer",
    "joined",
    "named_state",
    "read",
]

FORMAT = "mgpu-check trace"
VERSION = 1

CHUNKS = 4
"""Parts of a flattened tensor that are summed on their own."""
SAMPLES = 8
"""Elements of a tensor that are kept."""


class TraceError(ValueError):
    """A file is no trace, or one of another version."""


def positions(count: int) -> list[int]:
    """Return the elements of a flattened tensor of `count` that are kept: the first, the last, and some between."""
    kept = min(SAMPLES, count)
    return [i * (count - 1) // max(kept - 1, 1) for i in range(kept)]


def chunk_sizes(count: int) -> list[int]:
    """Return how many elements each part has, as `torch.tensor_split` cuts them."""
    parts = min(CHUNKS, count)
    return [count // parts + (i < count % parts) for i in range(parts)]


@dataclass(frozen=True)
class Summary:
    """The numbers that are kept of a tensor.

    Attributes:
        bits: the sum of its elements' bits as integers, modulo 2^64: equal tensors have equal ones.
        norm: the 2-norm, summed up in float64.
        sums: of `chunk_sizes` consecutive elements each, in float64.
        samples: the elements at `positions`.

    Of complex numbers, real and imaginary parts count as elements. The summary of a slice has its share of each number: a sum
    over the elements that are there, and None for elements at `positions` that are not. So summaries of slices add up.
    """

    bits: int
    norm: float
    sums: tuple[float, ...]
    samples: tuple[float, ...]
    """None in place of an element that a slice does not have."""

    @property
    def finite(self) -> bool:
        """True if all of its elements are finite, and their norm: that of float64 overflows beyond 1e154."""
        return math.isfinite(self.norm)

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Summary:
        """Read it from its form in the file: bits, norm, sums, samples, one after the other."""
        parts = _parts(len(numbers) - 2)
        return cls(int(numbers[0]), numbers[1], tuple(numbers[2 : 2 + parts]), tuple(numbers[2 + parts :]))

    def entries(self, count: int) -> list[tuple[float, float]]:
        """Return each number that is compared, with the size that it has in a tensor of `count` elements of this norm.

        Rounding errors are in proportion to that, and not to the number itself, which may have cancelled.
        """
        sizes = [self.norm]
        sizes += [self.norm * math.sqrt(part / count) for part in chunk_sizes(count)]
        sizes += [self.norm / math.sqrt(count)] * len(self.samples)
        values = [self.norm, *self.sums, *self.samples]
        return [(value, max(abs(value), size)) for value, size in zip(values, sizes, strict=True)]


def joined(parts: Sequence[Summary]) -> Summary:
    """Return the summary of a whole tensor, from those of slices that cover it once."""
    bits = (sum(part.bits for part in parts) + 2**63) % 2**64 - 2**63
    sums = tuple(
        math.fsum(some) if all(map(math.isfinite, some)) else sum(some)
        for some in zip(*(p.sums for p in parts), strict=True)
    )
    samples = (next((x for x in some if x is not None), 0.0) for some in zip(*(p.samples for p in parts), strict=True))
    return Summary(bits, math.hypot(*(part.norm for part in parts)), sums, tuple(samples))


def _parts(numbers: int) -> int:
    """Return how many of so many numbers are sums: n elements have min(n, CHUNKS) sums and min(n, SAMPLES) samples."""
    for count in range(1, SAMPLES + 1):
        if min(count, CHUNKS) + min(count, SAMPLES) == numbers:
            return min(count, CHUNKS)
    raise TraceError(f"a summary of {numbers + 2} numbers cannot be")


@dataclass(frozen=True)
class Held:
    """The slice of a whole tensor that a rank holds.

    Attributes:
        whole: name of the tensor on one device.
        count: number of elements.
        mark: a sum over the positions of the elements, modulo 2^64: slices that cover a tensor once add up to `all`.
        told: words for the slice: "dim 0: 4 to 7 of 16".
    """

    whole: str
    count: int
    mark: int
    all: int
    told: str

    @property
    def key(self) -> tuple[int, int]:
        """The same for the same elements."""
        return self.count, self.mark


@dataclass(frozen=True)
class Parameter:
    """A parameter that an optimizer has.

    Attributes:
        shape: of the whole; of complex numbers with a last dimension of 2, their real and imaginary parts.
        order: its place among those of the model.
        sharded: it is a DTensor, of which each rank may hold a part.
        held: the slice that the trace summarizes; None for the whole.
        unplaced: why its slice is not known, if it was looked for.
        same_elsewhere: the reason is that its values are in several places.
        over: the axes of the mesh that divide a DTensor.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    device: str
    order: int
    sharded: bool = False
    held: Held | None = None
    unplaced: str = ""
    same_elsewhere: bool = False
    over: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class State(Parameter):
    """Something that training changes beside parameters: a state of an optimizer, or a buffer.

    Attributes:
        of: name of the parameter that has the state, or of the buffer.
        key: the optimizer's name of the state; "" for a buffer.
        constant: it has the same value after each step as before the first call of its model.
    """

    of: str = ""
    key: str = ""
    constant: bool = False

    def moved_to(self, of: str, order: int) -> State:
        """Return the same of another owner."""
        return replace(self, name=named_state(self.key, of), of=of, order=order)


def named_state(key: str, of: str) -> str:
    """Return the name of a state or buffer: "exp_avg of net.weight", "buffer norm.running_mean"."""
    return f"{key} of {of}" if key else f"buffer {of}"


@dataclass
class Step:
    """One step of an optimizer.

    Attributes:
        optimizer: 0 for the first that has made a step, and so on.
        losses: what `backward` was called on since the step before, where it was one number.
        samples: a digest of each sample that went into the model, for each of those calls of `backward`.
        columns: the same along the second dimension of its inputs, where a batch may lie, too.
        before: the parameters before this step; of an optimizer's first step only.
        gradients: before this step, by parameter; None where it has none.
        parameters: after this step.
        idle: parameters without a gradient, whose modules were not called so far.
        options: of each parameter those of its group, such as "lr"; and "optimizer", the class of the optimizer.
        states: states of the optimizer, and all buffers, after this step.
        calls: backward and reductions before this step, each with its line, and the norms of the gradients that it leaves.
    """

    optimizer: int
    losses: list[float]
    samples: list[list[int]]
    columns: list[list[int]]
    before: dict[str, Summary]
    gradients: dict[str, Summary | None]
    parameters: dict[str, Summary]
    idle: frozenset[str] = frozenset()
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    states: dict[str, Summary] = field(default_factory=dict)
    calls: Sequence[tuple[str, Mapping[str, float]]] = ()

    @property
    def loss(self) -> float | None:
        """The sum over the step's micro-batches."""
        return math.fsum(self.losses) if self.losses and all(map(math.isfinite, self.losses)) else None

    @property
    def finite(self) -> bool:
        """True if all of its tensors are finite."""
        found = (*self.before.values(), *self.gradients.values(), *self.parameters.values())
        return all(summary is None or summary.finite for summary in found)

    @property
    def seen(self) -> list[int]:
        """The samples of all micro-batches."""
        return [digest for part in self.samples for digest in part]

    @property
    def seen_columns(self) -> list[int]:
        return [digest for part in self.columns for digest in part]


@dataclass
class Trace:
    """The trace of one rank."""

    rank: int
    world: int
    parameters: dict[str, Parameter] = field(default_factory=dict)
    states: dict[str, State] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    """All else: "clip", "load", "restore", "save", "sampler", "seed", "module", "narrow", "random", "led", "group", "starts",
    "alone", "skipped", "stopped", "ended"."""

    @property
    def finite_steps(self) -> int:
        """Number of steps that it made before the first that has to do with a tensor that is not finite."""
        return next((number for number, step in enumerate(self.steps) if not step.finite), len(self.steps))

    def entry(self, name: str) -> Parameter | None:
        """Return the parameter, state or buffer of this name; None if there is none."""
        return self.parameters.get(name) or self.states.get(name)

    def of(self, kind: str) -> list[dict[str, Any]]:
        """Return the events of that kind, in order."""
        return [event for event in self.events if event["event"] == kind]


class Writer:
    """Writes a trace to a file descriptor, a line at once, so that whoever reads sees how far the run has come."""

    def __init__(self, fd: int) -> None:
        self.fd, self.pid = fd, os.getpid()

    def write(self, event: str, **what: object) -> None:
        """Append a line; do nothing in a process that was forked from the recorded one."""
        if os.getpid() == self.pid:
            os.write(self.fd, json.dumps({"event": event, **what}, separators=(",", ":")).encode() + b"\n")


def read(data: bytes) -> Trace:
    """Return the trace in `data`; a last line that was not finished is left out.

    Raises:
        TraceError: it is no trace, or of another version.
    """
    lines = data.split(b"\n")[:-1]
    try:
        head = json.loads(lines[0]) if lines else {}
    except ValueError:
        head = {}
    if head.get("format") != FORMAT:
        raise TraceError(f"no {FORMAT}: it does not start with the line that one starts with")
    if head["version"] != VERSION:
        raise TraceError(f"a {FORMAT} of version {head['version']}; this is version {VERSION}")
    trace = Trace(head["rank"], head["world"])
    names: list[str] = []
    states = _States(trace)
    options: dict[int, dict[str, Mapping[str, Any]]] = {}
    for line in lines[1:]:
        event = json.loads(line)
        if event["event"] == "parameter":
            trace.parameters[event["name"]] = Parameter(**_described(event))
            names.append(event["name"])
        elif event["event"] == "state":
            states.add(event)
        elif event["event"] == "step":
            after = states.after(event["states"])
            trace.steps.append(_step(event, names, options.get(event["optimizer"], {}), after))
        elif event["event"] == "groups":
            options[event["optimizer"]] = {
                names[number]: {"optimizer": event["rule"], **group["options"]}
                for group in event["groups"]
                for number in group["members"]
            }
        else:
            trace.events.append(event)
    states.finish()
    return trace


class _States:
    """The states and buffers of a trace, as it is read."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._names: list[str] = []
        self._starts: dict[str, Summary | None] = {}
        self._buffers: dict[str, Summary] = {}

    def add(self, event: Mapping[str, Any]) -> None:
        made = State(**_described(event), of=event["of"], key=event["key"])
        self._trace.states[made.name] = made
        self._names.append(made.name)
        if not made.key:
            self._starts[made.name] = event["start"] and Summary.of(event["start"])

    def after(self, numbers: Mapping[str, Any]) -> dict[str, Summary]:
        """Return states and buffers after a step: a buffer that is not among `numbers` is as it was."""
        found = {self._names[int(index)]: Summary.of(own) for index, own in numbers.items()}
        self._buffers.update((name, summary) for name, summary in found.items() if name in self._starts)
        return found | self._buffers

    def finish(self) -> None:
        """Know which buffers never change."""
        for name, start in self._starts.items():
            after = [step.states[name] for step in self._trace.steps if name in step.states]
            constant = start is None or all(summary.bits == start.bits for summary in after)
            self._trace.states[name] = replace(self._trace.states[name], constant=constant)


def _described(event: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a `Parameter` that an event has."""
    keys = "name", "dtype", "device", "order", "sharded", "unplaced", "same_elsewhere"
    held = Held(**event["held"]) if event["held"] else None
    return {
        **{key: event[key] for key in keys},
        "shape": tuple(event["shape"]),
        "held": held,
        "over": tuple(event["over"]),
    }


def _step(
    event: Mapping[str, Any],
    names: Sequence[str],
    options: Mapping[str, Mapping[str, Any]],
    states: dict[str, Summary],
) -> Step:
    def named(part: Mapping[str, Any]) -> dict[str, Any]:
        return {names[int(index)]: numbers and Summary.of(numbers) for index, numbers in part.items()}

    return Step(
        event["optimizer"],
        event["losses"],
        event["samples"],
        event["columns"],
        named(event["before"]),
        named(event["gradients"]),
        named(event["parameters"]),
        frozenset(names[index] for index in event.get("idle", ())),
        options,
        states,
        [(told, {names[int(index)]: norm for index, norm in norms.items()}) for told, norms in event.get("calls", ())],
    )
