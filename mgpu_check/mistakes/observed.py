"""Record what a gate has seen: what runs have left and called, and what one device gives.

Plain data, without torch of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from mgpu_check.mistakes.results import Result
from mgpu_check.torch_hooks.parcels import Parcel

if TYPE_CHECKING:
    import torch

    from mgpu_check.numerics.placement.slices import Slice, Unplaced

    Values = dict[Result, torch.Tensor]

PARITY, AGREE, FINITE, REPEATS = "one device", "ranks agree", "finite", "repeats"
"""Relations between results."""

__all__ = [
    "AGREE",
    "FINITE",
    "PARITY",
    "REPEATS",
    "Alternative",
    "Change",
    "Division",
    "Event",
    "Expected",
    "Hypotheses",
    "Labels",
    "Observation",
    "Other",
    "Piece",
    "Relations",
    "Term",
    "Trace",
]


@dataclass(frozen=True)
class Piece:
    """A result of which a rank holds a slice.

    Attributes:
        name: of the whole result.
        value: the local tensor that has it.
    """

    name: Result
    slice: Slice
    value: torch.Tensor


@dataclass
class Observation:
    """The results that one run leaves on one rank. Tensors are on the CPU.

    Attributes:
        digests: checksums of the values.
        initial: parameters and buffers as they were built, by their names in the model.
        others: what was returned and is no number or tensor, in text.
        batch: checksum of the batches.
        rng: checksum of the state of torch's CPU generator at the end; and whether the step has drawn from it.
        optimizer_steps: how often an optimizer has stepped.
        optimizers: how many have.
        nonlinear: one has whose step is not linear in the gradient, as far as is known: any but SGD.
        touched: kinds of which something was changed.
        broadcast: buffers that DistributedDataParallel takes from rank 0 before each forward.
        normalized: modules that normalize by statistics of the batch.
        snapshots: after each optimizer step, gradients and parameters, where asked for.
        stepped: what an optimizer found when it first stepped, by the name of the parameter: checksums of its values and of
            the gradient. Of parameters that are not the model's own, and of all where a reference may say nothing of them, or a failure is looked into.
        built: the seeds that were set while the model was built, where that was traced.
        settings: of each parameter that an optimizer steps, the numbers and texts of its group: learning rate, weight decay.
        groups: parameter groups of all optimizers that have stepped.
        trained: names of the parameters that have a gradient, or have changed.
        pieces: slices of results that this rank holds, where the model is divided; `gates.assembly` makes wholes of them.
        pieces_of_steps: the same after each optimizer step, where asked for.
        unplaced: parameters whose placement is not known, and why.
        unused: parameters and buffers that the run did not use.
        idle: parameters that no optimizer of this rank steps, where they step others.
        own: of results that were assembled, which elements this rank holds, bool, in the shape of the whole.
        placements: of the same, the slices of each rank in words: "rank 0 dim 0: 0 to 3 of 8; …".
        gaps: of the same, the elements that no rank holds, in words.
    """

    values: dict[Result, torch.Tensor] = field(default_factory=dict)
    digests: dict[Result, str] = field(default_factory=dict)
    initial: dict[str, torch.Tensor] = field(default_factory=dict)
    others: dict[Result, str] = field(default_factory=dict)
    batch: str = ""
    rng: str = ""
    draws: bool = False
    optimizer_steps: int = 0
    optimizers: int = 0
    nonlinear: bool = False
    touched: set[str] = field(default_factory=set)
    broadcast: set[Result] = field(default_factory=set)
    normalized: list[str] = field(default_factory=list)
    snapshots: list[dict[Result, torch.Tensor]] = field(default_factory=list)
    stepped: dict[str, tuple[str, str]] = field(default_factory=dict)
    built: list[Event] = field(default_factory=list)
    trained: set[str] = field(default_factory=set)
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: int = 0
    pieces: list[Piece] = field(default_factory=list)
    pieces_of_steps: list[list[Piece]] = field(default_factory=list)
    unplaced: dict[str, Unplaced] = field(default_factory=dict)
    unused: set[str] = field(default_factory=set)
    idle: set[str] = field(default_factory=set)
    own: dict[Result, torch.Tensor] = field(default_factory=dict)
    placements: dict[Result, str] = field(default_factory=dict)
    gaps: dict[Result, str] = field(default_factory=dict)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"values": Parcel(self.values), "initial": Parcel(self.initial)}


@dataclass
class Expected:
    """The results of one device.

    Attributes:
        single: the run in the precision of the step: of the reference, or of the step itself.
        own: that of the step, where `single` is that of a reference; None if the step cannot run alone.
        by_reference: whether `single` is that of a reference.
        exact: floating-point results, in float64.
        tolerance: for each element of `exact`.
        undetermined: names of results that rounding changes in a way that is not to be measured.
        narrow: the narrow dtypes in which the step computes.
        drawn: the shapes in which the step draws random numbers.
        snapshots, allowances: exact values and tolerances after each optimizer step, where asked for.
        remarks: what could not be measured.
        provisional: `exact` are the results of `single`, and `tolerance` is what is granted at the least: what is within it
            is right, and what is not is to be measured in full.
        widened: and what rounding within operators brings, too.
    """

    single: Observation
    own: Observation | None
    by_reference: bool = False
    exact: dict[Result, torch.Tensor] = field(default_factory=dict)
    tolerance: dict[Result, torch.Tensor] = field(default_factory=dict)
    undetermined: set[Result] = field(default_factory=set)
    narrow: tuple[str, ...] = ()
    drawn: tuple[tuple[int, ...], ...] = ()
    snapshots: list[dict[Result, torch.Tensor]] = field(default_factory=list)
    allowances: list[dict[Result, torch.Tensor]] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    provisional: bool = False
    widened: bool = False

    def __getstate__(self) -> dict[str, Any]:
        # What is provisional has no exact values of its own to send.
        exact = None if self.provisional else Parcel(self.exact)
        return self.__dict__ | {"exact": exact, "tolerance": Parcel(self.tolerance)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if state["exact"] is None:
            self.exact = {name: self.single.values[name] for name in self.tolerance}

    @property
    def finite(self) -> bool:
        """True if all results are finite."""
        return all(bool(value.isfinite().all()) for value in self.single.values.values())


@dataclass
class Relations:
    """The relations that hold for each observable.

    Attributes:
        held: result -> relation -> whether it holds; None where it does not apply or cannot be told.
        details: result -> element, values and ratio, of what is wrong.
        wrong: result -> the ranks whose value is not that of one device.
        split: what ranks do not agree on.
        skipped: result -> why it is not judged.
        left_out: kind of which nothing is judged -> why.
        unjudged: parameter that is trained -> why neither its gradient nor its value is judged.
        placements: divided parameter -> the slices of each rank in words.
        streams: the ranks whose CPU generators end in the same state, each group of them.
    """

    held: dict[Result, dict[str, bool | None]] = field(default_factory=dict)
    details: dict[Result, str] = field(default_factory=dict)
    wrong: dict[Result, list[int]] = field(default_factory=dict)
    split: list[Result] = field(default_factory=list)
    skipped: dict[Result, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    unjudged: dict[str, str] = field(default_factory=dict)
    placements: dict[Result, str] = field(default_factory=dict)
    streams: list[list[int]] = field(default_factory=list)

    @property
    def broken(self) -> list[Result]:
        """The results that are wrong or not the same on all ranks; where there are none, those that do not repeat."""
        return [name for name in self.held if name in self.wrong or name in self.split] or [
            name for name, held in self.held.items() if False in held.values()
        ]

    @property
    def holds(self) -> bool:
        return all(value is not False for held in self.held.values() for value in held.values())


@dataclass
class Event:
    """One call.

    Attributes:
        kind: "collective", "group", "clip", "scale", "model", "backward", "step", "seed", "generator", "sampler", "epoch",
            "iterate", "split", "loader", "schedule", "wrap", "forward", "no_sync", "load".
        name: of the function or class.
        site: "train.py:40", where the code under test called it.
        details: what it was given, in plain values.
    """

    kind: str
    name: str
    site: str
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def where(self) -> str:
        """What was called, and where: "all_reduce (train.py:40)"."""
        return f"{self.name} ({self.site})"

    @property
    def tensors(self) -> list[dict[str, Any]]:
        """The facts about each tensor that a collective was given, one by one and in lists."""
        return [*self.details.get("tensors", []), *self.details.get("list", [])]


@dataclass(frozen=True)
class Labels:
    """The labels that a loss was computed from.

    Attributes:
        site: the line that computes it: "train.py:40".
        values: one after the other, sample by sample.
        ignored: the label that does not count; None where all do.
    """

    site: str
    values: tuple[int, ...]
    ignored: int | None


@dataclass
class Trace:
    """All events of one rank, in order, and the shapes in which it has drawn random numbers.

    Attributes:
        labels: those of each loss, in order.
        numbers: the sum of what was drawn each time; None where it depends on more than the generator.
        groups: the ranks of each group that this rank is in, in the order in which they were made; the world first.
        outputs, gradients: of each module by name, its first output, and the gradient of that.
    """

    events: list[Event] = field(default_factory=list)
    drawn: tuple[tuple[int, ...], ...] = ()
    numbers: tuple[float | None, ...] = ()
    groups: tuple[tuple[int, ...], ...] = ()
    outputs: dict[str, torch.Tensor] = field(default_factory=dict)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    labels: list[Labels] = field(default_factory=list)

    def of(self, *kinds: str) -> list[Event]:
        return [event for event in self.events if event.kind in kinds]


@dataclass(frozen=True)
class Term:
    """A term of a loss.

    Attributes:
        backward: the line that goes back from the loss: "train.py:42".
        paths: of operands, from the loss through the graph of autograd; several of a term that layers add in several places.
        line: which computes it, "" where that is not known.
        parameters: those that it depends on.
    """

    backward: str
    paths: tuple[tuple[int, ...], ...]
    line: str
    parameters: tuple[str, ...]


@dataclass(frozen=True)
class Change:
    """A change to the calls of one line, tried on a step that is wrong.

    Attributes:
        kind: the collective runs in another "group", with another "op", its result is divided or multiplied by the size of
            the group ("divide", "multiply"), it is left out ("skip"), gets only what is new since its last call ("new"), or
            gives its rows in another order ("reorder"); a range of numbers goes on where that of the ranks before ends
            ("shift"); or a term of the loss is divided or multiplied by the size of a group ("term").
        name: of the collective; "arange" for a range; "backward" for a term.
        site: "train.py:40".
        value: index of the group; name of the operation; how many calls come before the same one again; into how many parts
            each rank's rows are cut; into how many parts the range is divided, and whether neighbours have parts that follow
            each other ("inner") or not ("outer"); the term, and by what it is multiplied.
        was, now: ranks of each group before and after, where the group is changed.
        holds: whether the step is right with it.
    """

    kind: Literal["group", "op", "divide", "multiply", "skip", "new", "reorder", "shift", "term"]
    name: str
    site: str
    value: Any = None
    was: tuple[tuple[int, ...], ...] = ()
    now: tuple[tuple[int, ...], ...] = ()
    size: int = 0
    holds: bool = False

    @property
    def where(self) -> str:
        """The call, and its line: "all_reduce (train.py:40)"."""
        return f"{self.name} ({self.site})"


Other = Literal[
    "truncated", "padded", "first-shard-only", "first-block-only", "first-part-of-a-tensor", "biases-several-times"
]
"""What mistakes make of a batch: without the last samples, with the first ones again, the first part alone, or one of its
tensors with its first part in place of every part; and of a model: some biases times the world size."""


@dataclass(frozen=True)
class Division:
    """One way to divide the batch over ranks, and what one device gives for each part alone.

    Attributes:
        name: "every 2nd sample", …
        along: the dimension that is divided.
        windows: into how many micro-batches each part is divided again; 1 for none.
        parts: for each rank, for each of its windows, the results; not a number where a part cannot be computed.
        counts: samples (or positions) in the part of each rank.
    """

    name: str
    along: int
    windows: int
    parts: list[list[Values]]
    counts: list[int]

    @property
    def even(self) -> bool:
        """True if all ranks have as many."""
        return len(set(self.counts)) == 1


@dataclass(frozen=True)
class Alternative:
    """Another batch, or model, that ranks may have taken together, and what one device gives for it.

    Attributes:
        index: of "first-part-of-a-tensor": which tensor of the batch that is; of "biases-several-times": which of the groups.
        names: of the parameters.
    """

    kind: Other
    values: Values
    index: int = 0
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Hypotheses:
    """Hypotheses about what ranks have done with the batch; and whether it has padding, so that parts of one size may
    count unlike.
    """

    divisions: list[Division]
    alternatives: list[Alternative]
    padded: bool = False
