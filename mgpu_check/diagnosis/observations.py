"""The observations of a gate: results and calls of the ranks, and results of one device. Imports no torch.

A `Result` names a result of a step, as data for comparisons and as text that users read and write. Recorded values are
recognized by their sums and norms.
"""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from mgpu_check.processes.rank_lists import few, named

if TYPE_CHECKING:
    import torch

    from mgpu_check.numerics.placement import Slice, Unplaced

Kind = Literal["grads", "params", "buffers", "optimizer", "returned", "rng"]

KINDS: tuple[Kind, ...] = ("grads", "params", "buffers", "optimizer", "returned", "rng")
"""The kinds of results that a gate can compare."""

_TEXTS: dict[Kind, str] = {"grads": "gradient of {}", "buffers": "buffer {}", "returned": "returned {}"}


@dataclass(frozen=True)
class Result:
    """The name of one result of a step."""

    kind: Kind
    # For gradients, parameters and buffers the name in the model. For a returned value its keys, "head.loss", or "" for
    # the whole. For the optimizer the state and its owner, "exp_avg of head.weight".
    of: str
    # For a returned value the number of the call that returned it, from 1; None if there was one call only.
    step: int | None = None

    @property
    def label(self) -> str:
        return self.of if self.step is None else f"{self.of}, step {self.step}"

    @property
    def parameter(self) -> str:
        """The name of the parameter or buffer; for a state of the optimizer, the parameter that has the state."""
        if self.kind != "optimizer":
            return self.of
        return self.of.partition(" of ")[2].partition(" of optimizer ")[0]

    @property
    def owner(self) -> str | None:
        """The name of a parameter, or of a value that the only call returned; None for other results."""
        return self.of if self.kind in ("params", "returned") and self.step is None else None

    def __str__(self) -> str:
        """Return the text that users read, such as "gradient of head.weight" or "returned loss"."""
        if self.kind == "returned" and not self.of:
            return f"returned{self.label}"
        return _TEXTS.get(self.kind, "{}").format(self.label)


PARITY, AGREE, FINITE, REPEATS = "one device", "ranks agree", "finite", "repeats"  # relations between results


@dataclass(frozen=True)
class HeldPiece:
    """A slice of a result that a rank holds."""

    name: Result  # name of the whole result
    slice: Slice  # the place of the slice in the whole result
    value: torch.Tensor  # the local tensor with the slice


@dataclass(frozen=True)
class Outside:
    """How a tensor was trained that is not part of the model."""

    history: str  # a checksum of its first value and of the gradients that its optimizer applied, in order
    replica: bool  # it is a replica of a part of the model, and the model itself changes too
    late: bool  # its optimizer was made for a later step than the first


@dataclass
class ObservedRun:
    """The results of one run on one rank. Tensors are on the CPU."""

    values: dict[Result, torch.Tensor] = field(default_factory=dict)
    digests: dict[Result, str] = field(default_factory=dict)
    initial: dict[str, torch.Tensor] = field(default_factory=dict)  # name in the model -> initial parameter or buffer
    # Returned values that are neither numbers nor tensors, as text.
    others: dict[Result, str] = field(default_factory=dict)
    batch: str = ""  # checksum of the batches
    rng: str = ""  # checksum of the state of torch's CPU generator at the end
    draws: bool = False  # the step drew random numbers from this generator
    optimizer_steps: int = 0
    optimizers: int = 0  # number of optimizers that made a step
    keeps_gradients: bool = False  # some tensor that this rank holds has a gradient at the end
    nonlinear: bool = False  # some optimizer is not known to be linear in the gradient: any but SGD
    touched: set[str] = field(default_factory=set)  # the kinds of results that the run changed
    # Buffers that DistributedDataParallel takes from rank 0 before each forward.
    broadcast: set[Result] = field(default_factory=set)
    normalized: list[str] = field(default_factory=list)  # modules that normalize by statistics of the batch
    # Gradients and parameters after each optimizer step, if requested.
    snapshots: list[dict[Result, torch.Tensor]] = field(default_factory=list)
    # Parameter -> checksums of its value and of its gradient before the first optimizer step. It covers parameters
    # outside of the model. It covers all parameters if a reference may not cover them, or if a failure is investigated.
    stepped: dict[str, tuple[str, str]] = field(default_factory=dict)
    built: list[CallEvent] = field(default_factory=list)  # the seeds set while the model was built, if that was traced
    trained: set[str] = field(default_factory=set)  # names of the parameters that have a gradient or have changed
    # Parameter -> the numbers and texts of its optimizer group, such as learning rate and weight decay.
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    group_of: dict[str, str] = field(default_factory=dict)  # parameter -> its "group 0", or "group 0 of optimizer 1"
    groups: int = 0  # number of parameter groups of all optimizers that made a step
    # Slices of results that this rank holds, if the model is divided; `gates.shards` assembles them.
    pieces: list[HeldPiece] = field(default_factory=list)
    # The same after each optimizer step, if requested.
    pieces_of_steps: list[list[HeldPiece]] = field(default_factory=list)
    unplaced: dict[str, Unplaced] = field(default_factory=dict)  # parameter with unknown placement -> the reason
    unused: set[str] = field(default_factory=set)  # parameters and buffers that the run did not use
    # Parameters that no optimizer of this rank updates, although optimizers update others.
    idle: set[str] = field(default_factory=set)
    # Assembled result -> the elements that this rank holds, bool, in the shape of the whole result.
    own: dict[Result, torch.Tensor] = field(default_factory=dict)
    # Parameters that are DTensors, and that ranks divide among themselves.
    sharded: set[str] = field(default_factory=set)
    # Assembled result -> the slices of each rank in words: "rank 0 dim 0: 0 to 3 of 8; …".
    placements: dict[Result, str] = field(default_factory=dict)
    # Assembled result -> the elements that no rank holds, in words.
    gaps: dict[Result, str] = field(default_factory=dict)
    rewritten: bool = False  # an optimizer that is not torch's own has written into gradients
    # Result of a tensor that is not part of the model -> how it was trained.
    outside: dict[Result, Outside] = field(default_factory=dict)
    # Parameter -> a checksum of its first value and of the gradients that were applied to it, in order, if requested.
    histories: dict[str, str] = field(default_factory=dict)
    located: dict[str, Any] = field(default_factory=dict)  # see `Holdings`; it stays in the rank
    calls: int = 0  # number of calls of the step
    backwards: int = 0  # number of backward passes
    losses: list[float] = field(default_factory=list)  # on several ranks, the scalars that backward passes began with
    # Whether all samples have as many valid positions; None if samples have no positions.
    equal_lengths: bool | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"values": Parcel(self.values), "initial": Parcel(self.initial), "located": {}}


@dataclass
class Expected:
    """The results of one device."""

    single: ObservedRun  # the run of the reference, or else of the step itself, in the precision of the step
    # The run of the step on one device, if `single` is the run of a reference; None if the step cannot run alone.
    own: ObservedRun | None
    by_reference: bool = False  # `single` is the run of a reference
    exact: dict[Result, torch.Tensor] = field(default_factory=dict)  # the floating-point results, in float64
    tolerance: dict[Result, torch.Tensor] = field(default_factory=dict)  # the tolerance of each element of `exact`
    # Names of results that rounding changes by an amount that cannot be measured.
    undetermined: set[Result] = field(default_factory=set)
    narrow: tuple[str, ...] = ()  # the narrow dtypes that the step computes in
    drawn: tuple[tuple[int, ...], ...] = ()  # the shapes of the random numbers that the step draws
    # snapshots, allowances: exact values and tolerances after each optimizer step, if requested.
    snapshots: list[dict[Result, torch.Tensor]] = field(default_factory=list)
    allowances: list[dict[Result, torch.Tensor]] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)  # a line for each measurement that was not possible
    # `exact` has the results of `single`, and `tolerance` is a lower bound: a result within it is right, and any other
    # result needs the full measurement.
    provisional: bool = False
    widened: bool = False  # `tolerance` includes the rounding within operators

    def __getstate__(self) -> dict[str, Any]:
        # Provisional exact values are copies of `single`, so they are not sent twice.
        exact = None if self.provisional else Parcel(self.exact)
        return self.__dict__ | {"exact": exact, "tolerance": Parcel(self.tolerance)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if state["exact"] is None:
            self.exact = {name: self.single.values[name] for name in self.tolerance}

    @property
    def finite(self) -> bool:
        return all(bool(value.isfinite().all()) for value in self.single.values.values())


@dataclass
class Relations:
    """The relations that hold for each result."""

    # Result -> relation -> whether it holds; None if the relation does not apply or is unknown.
    held: dict[Result, dict[str, bool | None]] = field(default_factory=dict)
    details: dict[Result, str] = field(default_factory=dict)  # wrong result -> an element, its values and their ratio
    # Result -> the ranks whose value differs from one device.
    wrong: dict[Result, list[int]] = field(default_factory=dict)
    split: list[Result] = field(default_factory=list)  # the results that differ between ranks
    skipped: dict[Result, str] = field(default_factory=dict)  # result -> why it is not judged
    left_out: dict[str, str] = field(default_factory=dict)  # kind of result that is not judged at all -> the reason
    # Result of a tensor outside of the model that ranks need not have in common -> the reason.
    local: dict[Result, str] = field(default_factory=dict)
    # Results that differ between ranks by no more than rounding, although their last gradients are equal:
    # `ObservedRun.histories` decide about them.
    drifting: list[Result] = field(default_factory=list)
    # Trained parameter -> why neither its gradient nor its value is judged.
    unjudged: dict[str, str] = field(default_factory=dict)
    too_wide: set[str] = field(default_factory=set)  # those of them whose tolerances would accept large errors
    placements: dict[Result, str] = field(default_factory=dict)  # divided parameter -> the slices of each rank in words
    streams: list[list[int]] = field(default_factory=list)  # groups of ranks whose CPU generators end in the same state

    @property
    def broken(self) -> list[Result]:
        """The results that are wrong or split, or else the results with any broken relation."""
        return [name for name in self.held if name in self.wrong or name in self.split] or [
            name for name, relations in self.held.items() if False in relations.values()
        ]

    @property
    def holds(self) -> bool:
        return all(value is not False for relations in self.held.values() for value in relations.values())


@dataclass
class CallEvent:
    """One call."""

    # "collective", "group", "clip", "scale", "model", "backward", "step", "seed", "generator", "sampler", "epoch",
    # "iterate", "split", "loader", "schedule", "wrap", "forward", "no_sync", "recompute", "load".
    kind: str
    name: str
    site: str  # the line of the code under test that made the call: "train.py:40"
    details: dict[str, Any] = field(default_factory=dict)  # the arguments, as plain values

    @property
    def where(self) -> str:
        return f"{self.name} ({self.site})"

    @property
    def tensors(self) -> list[dict[str, Any]]:
        """The descriptions of all tensors among the arguments of a collective, and in lists among them."""
        return [*self.details.get("tensors", []), *self.details.get("list", [])]


@dataclass(frozen=True)
class Labels:
    """The labels that a loss was computed from."""

    site: str  # the line that computes the loss: "train.py:40"
    values: tuple[int, ...]  # the labels, sample by sample
    ignored: int | None  # the label that does not count; None if all count


@dataclass
class RankTrace:
    """All events of one rank, in order, and its random draws."""

    events: list[CallEvent] = field(default_factory=list)
    drawn: tuple[tuple[int, ...], ...] = ()  # the shapes of the random numbers drawn
    # The sum of the numbers of each draw; None if it depends on more than the generator.
    numbers: tuple[float | None, ...] = ()
    # The ranks of each group of this rank, in the order of creation; the world first.
    groups: tuple[tuple[int, ...], ...] = ()
    # outputs, gradients: name of a module -> its first output, and the gradient of this output.
    outputs: dict[str, torch.Tensor] = field(default_factory=dict)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    labels: list[Labels] = field(default_factory=list)  # the labels of each loss, in order
    # dtype of float8 -> the elements cast to it, those that became 0, and those that are beyond its largest number
    casts: dict[str, tuple[int, int, int]] = field(default_factory=dict)

    def of(self, *kinds: str) -> list[CallEvent]:
        return [event for event in self.events if event.kind in kinds]


@dataclass(frozen=True)
class Term:
    """A term of a loss."""

    backward: str  # the line that calls backward on the loss: "train.py:42"
    # The indices of operands from the loss to the term in autograd's graph; several if layers add parts of the term.
    paths: tuple[tuple[int, ...], ...]
    line: str  # the line that computes the term; "" if it is unknown
    parameters: tuple[str, ...]  # the parameters that the term depends on


@dataclass(frozen=True)
class Change:
    """A change to the calls of one line, tried on a wrong step."""

    # The change. The code waits for asynchronous collectives at once ("wait"). The collective uses another "group" or
    # another "op". Its result is divided or multiplied by the size of the group ("divide", "multiply"), or has its rows
    # in another order ("reorder"). It is left out ("skip"), gets only the part that is new since its last call ("new"),
    # or an addend of its operand on the first rank of the group only ("once"). A range continues the range of the
    # previous rank ("shift"). A term of the loss is divided or multiplied by the size of a group ("term"). Gradients
    # are combined over a group after each backward pass ("combine"), or wrappers synchronize them in each backward pass
    # ("synchronize"). All ranks draw the random numbers of rank 0 ("draw"). Activations are kept instead of computed
    # again ("keep"). Backward passes are weighed by their samples ("weigh"). Of several calls or writes of a line in a
    # step only the last happens ("last").
    # fmt: off
    kind: Literal[
        "wait", "group", "op", "divide", "multiply", "skip", "new", "reorder",
        "shift", "term", "combine", "synchronize", "draw", "keep", "last", "once", "weigh",
    ]
    # fmt: on
    # Name of the collective, or of the function that writes; "arange" or "slice" for a range; "backward" for a term, or
    # for gradients.
    name: str
    site: str  # the line: "train.py:40"
    # Index of the group; name of the operation; or the number of calls before the same call again. For "wait", name and
    # line of each collective. For "reorder", the number of pieces of each rank's rows. For "once", the index of the
    # addend. For "skip", the earlier reduction of the same values, if there is one. For "shift", the number of parts of
    # the range, and whether neighbours have consecutive parts ("inner") or not ("outer"). For "term", the term and its
    # factor. For "combine", the index of the group, the names of the parameters, and "mean" or "sum". For "last", how
    # often the line writes in a step; for a function of the code under test a tuple, which also has the file and line
    # that define it.
    value: Any = None
    # was, now: ranks of each group before and after the change, if it changes the group; for "combine", only `now`.
    was: tuple[tuple[int, ...], ...] = ()
    now: tuple[tuple[int, ...], ...] = ()
    size: int = 0
    holds: bool = False  # the step is right with the change

    @property
    def where(self) -> str:
        return f"{self.name} ({self.site})"

    @property
    def combination(self) -> str:
        """The combination of gradients, for "combine": "mean over ranks 0-1, ranks 2-3"."""
        return f"{self.value[-1]} over {few([named(ranks) for ranks in self.now])}"


# fmt: off
Other = Literal[
    "truncated", "padded", "first-shard-only", "first-block-only", "first-part-of-a-tensor",
    "tensor-several-times", "biases-several-times", "blocks-in-other-order",
]
# fmt: on
"""Wrong batches or models that mistakes lead to. A batch lacks its last samples, repeats its first samples, or consists
of its first part only; or one of its tensors repeats its first part, or has all positions once for each rank. A model
has some biases multiplied by the world size, or blocks of some parameters in another order."""


@dataclass(frozen=True)
class Division:
    """A division of the batch over ranks, and the results of one device for each part alone."""

    name: str  # name of the division: "every 2nd sample"
    along: int  # the divided dimension
    windows: int  # number of micro-batches of each part; 1 if a part is not divided again
    # For each rank and each of its micro-batches, the results; NaN if a part cannot be computed.
    parts: list[list[dict[Result, torch.Tensor]]]
    counts: list[int]  # number of samples (or positions) in the part of each rank

    @property
    def even(self) -> bool:
        return len(set(self.counts)) == 1


@dataclass(frozen=True)
class Alternative:
    """A wrong batch or model that the ranks together may have used, and the results of one device with it."""

    kind: Other
    values: dict[Result, torch.Tensor]
    # For "first-part-of-a-tensor" and "tensor-several-times", the index of the tensor; for the others with names, the
    # index of the group.
    index: int = 0
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Hypotheses:
    """Hypotheses about the division of the batch over ranks."""

    divisions: list[Division]
    alternatives: list[Alternative]
    padded: bool = False  # the batch has padding, so parts of the same size may have different weights


Left = Mapping[str, Mapping[str, float]]
"""The sum and the norm of each gradient after a backward pass, by the name of the parameter."""

_CLOSE = 1e-5  # tolerance, as a fraction of the norm, for sums that are computed in the same order
_NEAR = 1e-4  # tolerance, as a fraction of the norm, for values that were summed in another order since
_SHOWN = 4  # most ranks whose values a message lists, so that it stays one line


def is_left(name: Result, gradients: Sequence[Left], values: Sequence[torch.Tensor]) -> bool:
    """Return whether each rank holds the gradient of its own backward pass, unlike other ranks.

    `gradients`: the gradients after the backward pass, by rank. `values`: the gradients that ranks hold now, by rank.
    """
    sums = [(own[name.of]["sum"], own[name.of]["norm"]) for own in gradients if name.of in own]
    if not len(sums) == len(values) == len(gradients) or len(set(sums)) == 1:
        return False
    wide = [value.double() for value in values]
    return all(
        abs(float(value.sum()) - total) <= _CLOSE * norm and abs(float(value.norm()) - norm) <= _CLOSE * norm
        for value, (total, norm) in zip(wide, sums, strict=True)
    )


def norms_of(name: str, gradients: Sequence[Left]) -> str:
    """Return the norm of one gradient on the first ranks, in words: "0.5 on rank 0, 0.7 on rank 1"."""
    return ", ".join(f"{own[name]['norm']:.4g} on rank {rank}" for rank, own in enumerate(gradients[:_SHOWN]))


def is_clipped(by_rank: Sequence[Left], norms: Sequence[float | None]) -> bool:
    """Return whether each rank clips what its own backward pass left, unlike other ranks: clipping finds its norm."""
    own = [math.hypot(*(gradient["norm"] for gradient in gradients.values())) for gradients in by_rank]
    if len(set(own)) < 2 or len(own) != len(norms):
        return False
    return all(norm is not None and abs(norm - total) <= _NEAR * total for norm, total in zip(norms, own, strict=True))


def is_held(contents: Mapping[str, float], values: Sequence[torch.Tensor], size: int) -> bool:
    """Return whether a recorded tensor has these values, or `size` times these values."""
    if "norm" not in contents or any(not value.is_floating_point() for value in values):
        return False
    wide = [value.double() for value in values]
    total = math.fsum(float(value.sum()) for value in wide)
    norm = math.hypot(*(float(value.norm()) for value in wide))
    return bool(norm) and any(
        abs(contents["sum"] - factor * total) <= _NEAR * factor * norm
        and abs(contents["norm"] - factor * norm) <= _NEAR * factor * norm
        for factor in (1, size)
    )


class Parcel:
    """A dict with tensors, in a form for pickling. It is unpickled as a plain dict.

    torch's own pickling copies each tensor several times: it saves the storage to a file in memory, and pickles the
    content of that file (torch/storage.py, _StorageBase.__reduce__, torch 2.13). Here tensors are plain bytes. Dense
    tensors on the CPU arrive without autograd history, each with its own memory, even if they shared memory before.
    """

    def __init__(self, content: Mapping[Any, Any]) -> None:
        self._content = dict(content)

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpacked, (list(self._content), [_packed(value) for value in self._content.values()])

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[Any, Any]:
        return copy.deepcopy(self._content, memo)


class _Bytes:
    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.detach().contiguous()

    def __reduce__(self) -> tuple[Any, ...]:
        from mgpu_check.torch_hooks.tensors import memory_of

        tensor = self._tensor
        return _tensor, (pickle.PickleBuffer(memory_of(tensor)), tensor.dtype, tuple(tensor.shape))


def _packed(value: Any) -> Any:
    import torch

    if type(value) is not torch.Tensor or value.device.type != "cpu" or value.layout != torch.strided:
        return value
    if value.is_quantized or value.is_conj() or value.is_neg() or not value.numel():
        return value
    return _Bytes(value)


def _unpacked(keys: list[Hashable], values: list[Any]) -> dict[Hashable, Any]:
    return dict(zip(keys, values, strict=True))


def _tensor(content: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    import torch

    return torch.frombuffer(content, dtype=dtype).reshape(shape)
