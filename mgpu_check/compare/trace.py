"""Read and write the trace of a script's run: a file of JSON lines for each rank, one line for each event.

The first line is ``{"event": "start", "format": "mgpu-check trace", "version": 1, …}``. In the line of another event,
``"after"`` is the number of optimizer steps before it. A tensor is stored as a *summary*, a list of numbers: see
`TensorSummary`. A model's inputs are stored as hashes, which are combined into hashes of samples. Outputs of modules
are summed over the ranks that have divided them.

Tensors beside the batch, such as a mask for all samples, have as many rows on a rank as on one device.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from mgpu_check.processes.rank_lists import grouped


class Inputs(NamedTuple):
    """The tensors that a module received, as hashes of their slices along the first and the second dimension."""

    module: str
    rows: list[list[int]]
    columns: list[list[int]]


def samples_of(tensors: Sequence[list[int]], chosen: Sequence[int] | None = None) -> list[int]:
    """Return a hash of each sample, which consists of its slices in several tensors.
    `chosen`: positions of these tensors; None: the first tensor that has slices, and all with as many."""
    if chosen is None:
        count = next((len(rows) for rows in tensors if rows), 0)
        chosen = [position for position, rows in enumerate(tensors) if len(rows) == count]
    slices = [tensors[position] for position in chosen if position < len(tensors)]
    sums = (sum(digest * (2 * n + 1) for n, digest in enumerate(sample)) for sample in zip(*slices, strict=False))
    return [(total + 2**63) % 2**64 - 2**63 for total in sums]


def divided_tensors(runs: Sequence[Sequence[list[int]]]) -> list[int] | None:
    """Return the positions of the tensors that have a slice for each sample; None if the runs have other tensors.
    `runs`: the tensors on one device, then those on each rank."""
    if len({len(tensors) for tensors in runs}) > 1:
        return None
    counts = [tuple(map(len, tensors)) for tensors in zip(*runs, strict=True)]
    full = [count for count in counts if all(count)]
    split = [c for c in full if len(set(c)) > 1] or [c for c in full if c[0] > 1] or full
    return [position for position, count in enumerate(counts) if count == split[0]] if split else None


@dataclass(frozen=True)
class OutputSummary:
    """All outputs of a module in a step, by numbers that parts add up to, no matter how they were cut."""

    bits: int  # the sum of the bits of the elements in float64 as integers, modulo 2^64
    norm: float  # the 2-norm, computed in float64
    sum: float  # the sum of the elements, computed in float64
    count: int  # number of elements

    @property
    def entries(self) -> list[tuple[float, float]]:
        """The norm and the sum, each with its typical size: the rounding error of a sum is proportional to the norm."""
        return [(self.norm, self.norm), (self.sum, max(abs(self.sum), self.norm))]


def joined_bits(sums: Iterable[int]) -> int:
    """Return the sum of sums of bits, modulo 2^64, as a signed integer."""
    return (sum(sums) + 2**63) % 2**64 - 2**63


def joined_outputs(pieces: Collection[OutputSummary]) -> OutputSummary:
    """Return the summary of all parts together."""
    return OutputSummary(
        joined_bits(piece.bits for piece in pieces),
        math.hypot(*(piece.norm for piece in pieces)),
        total(piece.sum for piece in pieces),
        sum(piece.count for piece in pieces),
    )


def total(numbers: Iterable[float]) -> float:
    """Return the sum of numbers, exact for finite ones in any order."""
    terms = list(numbers)
    return math.fsum(terms) if all(map(math.isfinite, terms)) else sum(terms)


def views(
    outputs: Mapping[int, OutputSummary], sample_keys: Mapping[int, Hashable]
) -> list[Mapping[int, OutputSummary]]:
    """Return the whole outputs from the view of each rank, for each possible division among ranks.

    Each rank has the whole; or the ranks have disjoint parts; or ranks with the same samples have copies of a part.

    `outputs`: rank -> the outputs that it has. `sample_keys`: rank -> a key of its samples.
    """
    copies = [ranks for _, ranks in grouped((sample_keys[rank], rank) for rank in outputs)]
    by_samples = {}
    for rank, own in outputs.items():
        by_samples[rank] = joined_outputs([own, *(outputs[ranks[0]] for ranks in copies if rank not in ranks)])
    return [outputs, dict.fromkeys(outputs, joined_outputs(list(outputs.values()))), by_samples]


def whole_output(outputs: Mapping[int, OutputSummary], sample_keys: Mapping[int, Hashable]) -> OutputSummary:
    """Return the whole outputs if nothing shows how many elements they have: ranks with equal parts have copies."""
    each, together, by_samples = (list(view.values()) for view in views(outputs, sample_keys))
    return next((view[0] for view in (each, by_samples) if view.count(view[0]) == len(view)), together[0])


FORMAT = "mgpu-check trace"
VERSION = 1

CHUNKS = 4  # number of parts of a flattened tensor with separate sums: a wrong region shows in one of them
SAMPLES = 8  # number of elements of a tensor that are stored


HEAD = 65536  # bytes of a trace before its first steps: they say which process writes it


class TraceError(ValueError):
    """A file is not a trace, or has another version."""


def positions(count: int) -> list[int]:
    """Return the positions of stored elements in a flattened tensor: the first, the last, some between."""
    kept = min(SAMPLES, count)
    return [i * (count - 1) // max(kept - 1, 1) for i in range(kept)]


def chunk_sizes(count: int) -> list[int]:
    """Return the sizes of the parts that `torch.tensor_split` makes."""
    chunks = min(CHUNKS, count)
    return [count // chunks + (i < count % chunks) for i in range(chunks)]


@dataclass(frozen=True)
class TensorSummary:
    """The numbers that a trace stores for a tensor.
    In complex tensors, real and imaginary parts count as elements. The summary of a slice has sums over its own
    elements, and None for elements at `positions` that it does not have. So summaries of slices can be added."""

    bits: int  # the sum of the bits of the elements in float64 as integers, modulo 2^64: the same for equal tensors
    norm: float  # the 2-norm, computed in float64
    sums: tuple[float, ...]  # the sums of `chunk_sizes` consecutive elements, in float64
    samples: tuple[float, ...]  # the elements at `positions`

    @property
    def finite(self) -> bool:
        """True if all elements are finite, and so is the norm, which overflows in float64 beyond 1e154."""
        return math.isfinite(self.norm)

    @classmethod
    def of(cls, numbers: Sequence[float]) -> TensorSummary:
        """Make a summary from its numbers in the file: bits, norm, sums, samples."""
        # n elements have min(n, CHUNKS) sums and min(n, SAMPLES) samples.
        sizes = {min(count, CHUNKS) + min(count, SAMPLES): min(count, CHUNKS) for count in range(1, SAMPLES + 1)}
        if (count := sizes.get(len(numbers) - 2)) is None:
            raise TraceError(f"a summary cannot have {len(numbers)} numbers")
        return cls(int(numbers[0]), numbers[1], tuple(numbers[2 : 2 + count]), tuple(numbers[2 + count :]))

    def entries(self, count: int) -> list[tuple[float, float]]:
        """Return each compared number with its typical size in a tensor of `count` elements and this norm.
        Rounding errors are proportional to that size, not to the number itself, which may be small by cancellation."""
        sizes = [self.norm]
        sizes += [self.norm * math.sqrt(chunk / count) for chunk in chunk_sizes(count)]
        sizes += [self.norm / math.sqrt(count)] * len(self.samples)
        values = [self.norm, *self.sums, *self.samples]
        return [(value, max(abs(value), size)) for value, size in zip(values, sizes, strict=True)]


def joined(slices: Sequence[TensorSummary]) -> TensorSummary:
    """Return the summary of a whole tensor from the summaries of slices that cover it exactly once."""
    bits = joined_bits(piece.bits for piece in slices)
    sums = tuple(map(total, zip(*(piece.sums for piece in slices), strict=True)))
    samples = (
        next((x for x in elements if x is not None), 0.0) for elements in zip(*(p.samples for p in slices), strict=True)
    )
    return TensorSummary(bits, math.hypot(*(piece.norm for piece in slices)), sums, tuple(samples))


@dataclass(frozen=True)
class HeldSlice:
    """The slice of a whole tensor that a rank holds."""

    whole: str  # name of the tensor on one device
    count: int  # number of elements
    mark: int  # a hash of the positions, modulo 2^64: the marks of slices that cover a tensor once add up to `all`
    all: int
    told: str  # the slice in words: "dim 0: 4 to 7 of 16"
    covers: str = ""  # of a statistic over dimensions that ranks divide: the part of them that the rank has
    share: float = 1.0  # the size of this part, relative to the whole dimensions

    @property
    def key(self) -> tuple[int, int]:
        """A key that is equal for slices with the same elements."""
        return self.count, self.mark


@dataclass(frozen=True)
class Parameter:
    """A parameter of an optimizer."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor; complex numbers have a last dimension of 2
    dtype: str
    device: str
    order: int  # its place among the parameters of the model
    sharded: bool = False  # it is a DTensor, and each rank may hold a part
    held: HeldSlice | None = None  # the slice that the trace summarizes; None for the whole tensor
    unplaced: str | None = None  # why its slice is unknown, if a place was searched for; None otherwise
    same_elsewhere: bool = False  # its values occur in several places
    over: tuple[str, ...] = ()  # the axes of the mesh that divide a DTensor

    @property
    def count(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class State(Parameter):
    """A state of an optimizer, or a buffer: training changes them besides parameters."""

    of: str = ""  # name of the parameter that has the state, or of the buffer
    key: str = ""  # the optimizer's name of the state; "" for a buffer
    constant: bool = False  # it has the same value after each step as before the first call of its model


def named_state(key: str, owner: str) -> str:
    """Return the name of a state or buffer: "exp_avg of net.weight", "buffer norm.running_mean"."""
    return f"{key} of {owner}" if key else f"buffer {owner}"


@dataclass
class Step:
    """One step of an optimizer."""

    optimizer: int  # number of the optimizer, in the order of their first steps
    losses: list[float]  # the scalars that `backward` was called on since the previous step
    samples: list[list[int]]  # for each of these calls of `backward`, a hash of each sample that the model received
    columns: list[list[int]]  # the same along the second dimension of the inputs, which may also be the batch dimension
    before: dict[str, TensorSummary]  # parameter -> its value before the first step of the optimizer; else empty
    gradients: dict[str, TensorSummary | None]  # parameter -> its gradient before this step; None if it has no gradient
    parameters: dict[str, TensorSummary]  # parameter -> its value after this step
    idle: frozenset[str] = frozenset()  # parameters without a gradient whose modules have not been called so far
    # parameter -> the options of its group, such as "lr", and "optimizer", the class of the optimizer
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    states: dict[str, TensorSummary] = field(default_factory=dict)  # of the optimizer, and buffers, after this step
    # backward and reductions before this step, each with its line and the norms of the gradients after it
    calls: Sequence[tuple[str, Mapping[str, float]]] = ()
    outputs: dict[str, OutputSummary] = field(default_factory=dict)  # module -> its outputs before this step
    inputs: Sequence[Sequence[Inputs]] = ()  # for each micro-batch, of the first model, and of modules within it
    labels: Sequence[float] = ()  # the number of labels that each cross-entropy since the previous step divides by

    @property
    def loss(self) -> float | None:
        """The sum over the micro-batches of the step; None if there are no losses, or one is not finite."""
        return math.fsum(self.losses) if self.losses and all(map(math.isfinite, self.losses)) else None

    @property
    def finite(self) -> bool:
        """True if all parameters and gradients of the step are finite."""
        summaries = (*self.before.values(), *self.gradients.values(), *self.parameters.values())
        return all(summary is None or summary.finite for summary in summaries)

    @property
    def seen(self) -> list[int]:
        """The samples of all micro-batches."""
        return [digest for batch in self.samples for digest in batch]

    @property
    def seen_columns(self) -> list[int]:
        return [digest for batch in self.columns for digest in batch]


@dataclass
class Trace:
    """The trace of one rank: `read` makes it from the file of a finished process; `assembly` renames its tensors."""

    rank: int
    world: int
    parameters: dict[str, Parameter] = field(default_factory=dict)
    states: dict[str, State] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    modules: dict[str, str] = field(default_factory=dict)
    """Module -> the dtype of its outputs, in the order of the first calls."""
    events: list[dict[str, Any]] = field(default_factory=list)  # of other kinds, such as "clip", "load" or "module"

    @property
    def finite_steps(self) -> int:
        """Number of steps before the first step with a parameter or gradient that is not finite."""
        return next((number for number, step in enumerate(self.steps) if not step.finite), len(self.steps))

    def entry(self, name: str) -> Parameter | None:
        """Return the parameter, state or buffer with this name; None if it does not exist."""
        return self.parameters.get(name) or self.states.get(name)

    def of(self, event_type: str) -> list[dict[str, Any]]:
        """Return the events of one kind, in order."""
        return [event for event in self.events if event["event"] == event_type]

    def clips(self, step: int) -> list[dict[str, Any]]:
        """Return the calls of `clip_grad_norm_` in a step, counted from 0."""
        return [event for event in self.of("clip") if event["after"] == step]


def write_all(fd: int, *chunks: bytes | memoryview) -> None:
    """Append all bytes of the parts to a file."""
    for chunk in chunks:
        rest = memoryview(chunk)
        while rest:
            rest = rest[os.write(fd, rest) :]


class Writer:
    """Writes a trace to a file descriptor, each line in one write, so that the runner can follow the progress.
    The recorder of a process makes it, and writes until the process ends. A process that the script has started writes
    nothing before it is the one that trains.

    `held`: this is such a process, so it keeps its lines until then.
    """

    def __init__(self, fd: int, held: bool = False) -> None:
        self.fd, self.pid = fd, None if held else os.getpid()
        self._held: list[bytes] = []
        self._by: dict[str, int] = {}  # marks the lines of a process that the script has started
        self._size = 0  # bytes that this process has written
        self._reclaimed = False

    def write(self, event: str, **fields: object) -> None:
        """Append a line; in a process that the script has started, keep it for `take_over`."""
        line = json.dumps({"event": event, **fields, **self._by}, separators=(",", ":")).encode() + b"\n"
        if os.getpid() != self.pid:
            self._held.append(line)
            return
        self._size += os.write(self.fd, line)

    def take_over(self) -> None:
        """Let this process write the trace from now on, and the lines first that it has kept."""
        self.pid, held = os.getpid(), self._held
        self._held, self._by = [], {"by": self.pid}
        os.write(self.fd, b"".join(held))
        self.write("started", pid=self.pid, after=0)

    def taken_over(self) -> bool:
        """Return whether a process that this one has started writes the trace instead."""
        return not (self._by or self._reclaimed) and os.fstat(self.fd).st_size > self._size

    def reclaim(self) -> None:
        """Discard what other processes have written and will write: this one trains, too."""
        self._reclaimed = True
        self.write("reclaimed", after=0)


def read(data: bytes) -> Trace:
    """Return the trace in `data`, without an incomplete last line.

    Raises:
        TraceError: `data` is not a trace, or has another version.
    """
    lines = data.split(b"\n")[:-1]
    try:
        head = json.loads(lines[0]) if lines else {}
    except ValueError:
        head = {}
    if head.get("format") != FORMAT:
        raise TraceError(f"the data is not an {FORMAT}: its first line is not the start event of this format")
    if head["version"] != VERSION:
        raise TraceError(f"the {FORMAT} has version {head['version']}, but only version {VERSION} can be read")
    reader = _Reader(Trace(head["rank"], head["world"]))
    events = list(map(json.loads, lines[1:]))
    own = any(event["event"] == "reclaimed" for event in events)
    for event in events:
        if event.pop("by", None) is None or not own:
            reader.add(event)
    return reader.finished()


class _Reader:
    """Collects the events of a trace."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._parameters: list[str] = []  # names in the order of their numbers; so are states
        self._states: list[str] = []
        self._options: dict[int, dict[str, Mapping[str, Any]]] = {}
        self._starts: dict[str, TensorSummary | None] = {}
        self._buffers: dict[str, TensorSummary] = {}

    def add(self, event: dict[str, Any]) -> None:
        trace, name = self._trace, event.get("name", "")
        if event["event"] == "parameter":
            trace.parameters[name] = Parameter(**_described(event))
            self._parameters.append(name)
        elif event["event"] == "state":
            trace.states[name] = State(**_described(event), of=event["of"], key=event["key"])
            self._states.append(name)
            if not event["key"]:
                self._starts[name] = event["start"] and TensorSummary.of(event["start"])
        elif event["event"] == "output":
            trace.modules[name] = event["dtype"]
        elif event["event"] == "step":
            trace.steps.append(self._step(event))
        elif event["event"] == "groups":
            self._options[event["optimizer"]] = {
                self._parameters[number]: {"optimizer": event["rule"], **group["options"]}
                for group in event["groups"]
                for number in group["members"]
            }
        elif event["event"] != "start":  # a second one is that of a process which the script has started
            trace.events.append(event)

    def _step(self, event: Mapping[str, Any]) -> Step:
        def named(labels: Sequence[str], values: Mapping[str, Any]) -> dict[str, Any]:
            return {labels[int(index)]: numbers and TensorSummary.of(numbers) for index, numbers in values.items()}

        parameters, modules = self._parameters, list(self._trace.modules)
        states = named(self._states, event["states"])
        # A buffer that is missing has not changed.
        self._buffers.update((name, summary) for name, summary in states.items() if name in self._starts)
        inputs = [[Inputs(*call) for call in calls] for calls in event["inputs"]]
        return Step(
            event["optimizer"],
            event["losses"],
            [samples_of(calls[0].rows) for calls in inputs],
            [samples_of(calls[0].columns) for calls in inputs],
            named(parameters, event["before"]),
            named(parameters, event["gradients"]),
            named(parameters, event["parameters"]),
            frozenset(parameters[index] for index in event.get("idle", ())),
            self._options.get(event["optimizer"], {}),
            states | self._buffers,
            [(call, {parameters[int(i)]: norm for i, norm in norms.items()}) for call, norms in event.get("calls", ())],
            {modules[int(i)]: OutputSummary(*numbers) for i, numbers in event.get("outputs", {}).items()},
            inputs,
            event.get("labels", ()),
        )

    def finished(self) -> Trace:
        """Return the trace, with the buffers that never changed marked as constant."""
        for name, start in self._starts.items():
            after = [step.states[name] for step in self._trace.steps if name in step.states]
            constant = start is None or all(summary.bits == start.bits for summary in after)
            self._trace.states[name] = replace(self._trace.states[name], constant=constant)
        return self._trace


def _described(event: Mapping[str, Any]) -> dict[str, Any]:
    keys = "name", "dtype", "device", "order", "sharded", "unplaced", "same_elsewhere"
    held_slice = HeldSlice(**event["held"]) if event["held"] else None
    own = {key: event[key] for key in keys}
    return {**own, "shape": tuple(event["shape"]), "held": held_slice, "over": tuple(event["over"])}
