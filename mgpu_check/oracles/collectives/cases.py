"""Specs of collective calls, messages and programs of collectives; the calls that a backend does not support; and the
wrong results, with the attributes that the wrong calls have in common.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mgpu_check.errors import CollectiveMismatch
from mgpu_check.processes.rank_lists import named
from mgpu_check.torch_hooks.collective_table import COLLECTIVES, TRANSFERS, Collective

if TYPE_CHECKING:
    import torch

    from mgpu_check.engine.rank_side.rank import Rank


FLOATING = ("float32", "float64", "float16", "bfloat16")
INTEGERS = ("int64", "int32", "int8", "uint8")
_COMPLEX = ("complex64", "complex128")

REDUCED = (*FLOATING, *INTEGERS, "bool", *_COMPLEX)
"""The dtypes that NCCL and gloo reduce.

Both lack int16 and unsigned integers above uint8; torch refuses to reduce float8.
"""

COPIED = (*REDUCED, "float8_e4m3fn", "float8_e5m2")

OPERATIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")

_NEWER = "another name of a function that is called, by both names"
_COALESCED = "deprecated: a coalescing manager takes its place, and is called"
NOT_CALLED: Mapping[str, str] = {
    **dict.fromkeys((row.newer for row in COLLECTIVES.values() if row.newer), _NEWER),
    **dict.fromkeys(("all_reduce_coalesced", "all_gather_coalesced"), _COALESCED),
    **dict.fromkeys(("gather_single", "gather_into_tensor"), "torch 2.13 lacks it"),
}
"""Collectives of tensors that no `CollectiveCall` calls, and why."""

FUNCTIONS: Mapping[str, Collective] = {
    name: row for name, row in COLLECTIVES.items() if row.given and name not in NOT_CALLED
}
"""Name of each collective that a `CollectiveCall` may call -> its row."""

REDUCING = tuple(name for name, row in FUNCTIONS.items() if row.reduces)
COALESCED = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor")
"""The functions that torch puts together in a coalescing manager."""
COPYING = tuple(name for name, row in FUNCTIONS.items() if not row.reduces)
ROOTED = tuple(name for name, transfer in TRANSFERS.items() if transfer.root)


def form_of(transfer: str) -> str:
    """Return the function for a transfer, the form without lists if there is one."""
    return next((name for name, row in FUNCTIONS.items() if row.does == transfer and not row.lists), transfer)


@dataclass(frozen=True)
class CollectiveCall:
    """One call of a collective, equal on all members of its group."""

    function: str  # a name in `FUNCTIONS`
    dtype: str
    # number of elements in one rank's part of the result; None for the number that `values` has
    elements: int | None = None
    op: str = "SUM"
    # the inputs of the ranks. For reductions: "exact" has the same result in every order; "extremes" pairs all limits
    # of the dtype, from each rank; "borders" is both of these; "special" pairs NaN, infinities, zeros of both signs and
    # subnormals; "random" uses all bits. For copies: "bits" has arbitrary bits.
    values: str = "exact"
    place: str = "device"  # "device" or "cpu"
    members: tuple[int, ...] = ()  # ranks of the group, in its order; empty for all ranks
    root: int = 0  # position in the group of the rank that sends or receives
    root_by: str = "global"  # "global" or "group": the numbering in which the call names the root
    asynchronous: bool = False  # whether the call returns a work that is waited for later
    # "dense" is a vector; "scalar" has no dimensions; in "in place" the input is a part of the output, or vice versa;
    # in "stacked" the tensor of all parts has a dimension for the ranks; "uneven" has parts of different sizes;
    # "matrix"; "channels_last"; "transposed" has no gaps; "gaps" has. A backend may refuse the last two.
    layout: str = "dense"
    seed: int = 0
    coalesced: bool = False  # whether the call is made in a coalescing manager, which the functions `COALESCED` allow

    def __str__(self) -> str:
        phrases = [f"{self.function} {self.op}" if self.function in REDUCING else self.function, self.dtype]
        if self.elements is not None:
            phrases.append(f"{self.elements} elements")
        phrases += [f"{self.values} values", f"{self.place} tensors"]
        if self.layout != "dense":
            phrases.append(self.layout)
        if self.function in ROOTED:
            by_group = self.root_by == "group" or not self.members
            root = self.root if by_group else self.members[self.root % len(self.members)]
            phrases.append(f"root {root} by {self.root_by} rank")
        if self.members:
            phrases.append(f"group {list(self.members)}")
        if self.asynchronous:
            phrases.append("async")
        if self.coalesced:
            phrases.append("coalesced")
        return ", ".join((*phrases, f"seed {self.seed}"))


_BITWISE = ("BAND", "BOR", "BXOR")
_LAYOUTS_WITHOUT_GLOO = {
    ("all_to_all", "uneven"): "gloo takes lists of tensors of one size only",
    ("all_gather", "uneven"): "gloo takes lists of tensors of one size only",
    ("reduce_scatter", "uneven"): "gloo takes lists of tensors of one size only",
    ("all_gather_into_tensor", "stacked"): "gloo takes the concatenation only",
    ("all_gather_into_tensor", "scalar"): "gloo needs an input with dimensions",
    ("reduce_scatter_tensor", "scalar"): "gloo ends the process with a signal 11: a defect of torch",
}


def left_out(call: CollectiveCall) -> str | None:
    """Return why the tests omit a call; None if its result must be correct."""
    dtype, op = call.dtype, call.op
    if call.layout == "channels_last" and dtype in _COMPLEX:
        return "torch passes them as real numbers in five dimensions, which are not contiguous"
    if reason := (_no_device_takes if call.place == "device" else _gloo_does_not_take)(call):
        return reason
    if call.function in COPYING:
        if call.function == "gather" and dtype in _COMPLEX:
            return "torch does not view complex numbers as real ones for gather"
        return None
    if dtype not in REDUCED:
        return "torch refuses to reduce it"
    if op in _BITWISE and dtype not in (*INTEGERS, "bool"):
        return "bitwise operations need integers or bool"
    if op in ("AVG", "PREMUL_SUM") and dtype in _COMPLEX and call.values == "special":
        return "infinity times a complex factor is not defined"
    if op in ("AVG", "PREMUL_SUM") and dtype in (*INTEGERS, "bool"):
        return "a fraction of integers is not defined"
    if op in ("PRODUCT", "MIN", "MAX") and dtype in _COMPLEX:
        return "torch reduces complex numbers as pairs of real ones, by sums only"
    return None


def _gloo_does_not_take(call: CollectiveCall) -> str | None:
    if reason := _LAYOUTS_WITHOUT_GLOO.get((call.function, call.layout)):
        return reason
    if call.function in COPYING:
        return "gloo has no float8" if call.dtype not in REDUCED else None
    return "gloo has no PREMUL_SUM" if call.op == "PREMUL_SUM" else None


def _no_device_takes(call: CollectiveCall) -> str | None:
    if call.function == "scatter" and call.layout == "gaps":  # pytorch/pytorch#107352
        return "the scatter of views with gaps silently ignores the gaps: a defect of torch"
    if call.function.startswith("reduce_scatter") and call.dtype in _COMPLEX:
        return "torch does not view complex numbers as real ones for NCCL's reduce_scatter"
    if call.function in COPYING:
        return None
    if call.op in _BITWISE:
        return "NCCL has no bitwise operations"
    if call.op == "PREMUL_SUM" and call.dtype == "bfloat16":
        return "torch passes NCCL the factor as float32, and NCCL reads only the half that is zero: pytorch#190745"
    return None


@dataclass(frozen=True)
class Message:
    # source, target: ranks of the world; source -1 for any
    source: int
    target: int
    tag: int
    dtype: str
    elements: int
    number: int  # of the message; determines its content

    def between_ranks(self, size: int) -> Message:
        """Return the message with its ranks modulo the world size; it goes to the next rank if they are one."""
        source, target = self.source % size, self.target % size
        return replace(self, source=source, target=target if target != source else (source + 1) % size)

    def __str__(self) -> str:
        source = f"rank {self.source}" if self.source >= 0 else "any rank"
        content = f"tag {self.tag}, {self.elements} x {self.dtype}"
        return f"message {self.number} of {source} to rank {self.target}, {content}"


def messages_between(
    size: int, seed: int, placement: str, *, tags: bool = True, alike: bool = False, own: bool = False
) -> list[Message]:
    """Return messages between all pairs of ranks: two in each direction, of any dtype, with 0 to 65,537 elements.

    If `alike`, the two messages of a direction have the same dtype and size, and differ only by their tags. With `own`
    each rank also sends messages to itself, which NCCL takes in batches.
    """
    messages: list[Message] = []
    dtypes = COPIED if placement == "device" else REDUCED
    sizes = (1, 0, 4097, 33, 65537, 700)
    for source, target, turn in itertools.product(range(size), range(size), range(2)):
        if source != target or own:
            number = len(messages) + 2 * seed
            tag = (number * 7 + turn) % 5 if tags else 0
            selector = number // 2 + seed if alike else number
            dtype, elements = dtypes[selector * 5 % len(dtypes)], sizes[selector % len(sizes)]
            messages.append(Message(source, target, tag, dtype, elements, number))
    return messages


BUFFERS = 4
LENGTH = 5  # each rank holds BUFFERS tensors, of LENGTH elements per rank
GROUPS = 2  # Largest number of groups at a time, besides the world. Groups are numbered from 1.

STEPS = ("add", *TRANSFERS, "shift")
OF_GROUPS = ("new_group", "destroy_group")


@dataclass(frozen=True)
class CollectiveStep:
    # a name in `STEPS` or `OF_GROUPS`. "add" adds the source, times a number of the rank, to the target. "shift" sends
    # from each rank to the rank `root` places further on.
    operation: str
    # target, source: numbers of tensors
    target: int = 0
    source: int = 1
    root: int = 0  # a member of the group, modulo its size; for "shift", the distance
    op: str = "SUM"  # "SUM", "MIN" or "MAX", for a reduction
    # whether the call returns before it is done. It is waited for when one of its tensors is next used, or its group is
    # destroyed.
    asynchronous: bool = False
    group: int = 0  # number of the group that takes the step, or is created or destroyed; 0 for all ranks
    members: tuple[int, ...] = ()  # ranks of a new group, modulo the world size

    def __str__(self) -> str:
        if self.operation in OF_GROUPS:
            return f"{self.operation}({self.group}{''.join(f', {member}' for member in self.members)})"
        late = ", async" if self.asynchronous else ""
        suffix = f", group {self.group}" if self.group else ""
        return f"{self.operation}(t{self.target} from t{self.source}, {self.root}, {self.op}{late}{suffix})"


_SHOWN = 3
_COMMON = ("function", "dtype", "op", "values", "place", "layout", "elements", "asynchronous", "members", "root")


@dataclass(frozen=True)
class WrongResult:
    """A wrong result on this rank; `call` is a call or its description."""

    call: object
    text: str

    @classmethod
    def of(
        cls,
        call: object,
        got: torch.Tensor,
        expected: torch.Tensor,
        mismatches: torch.Tensor,
        looks: str = "",
        label: str | None = None,
    ) -> WrongResult:
        """Describe the wrong elements of a vector; `mismatches` is their mask."""
        index = int(mismatches.nonzero()[0])
        text = f"element {index}: got {got[index].item()!r}, expected {expected[index].item()!r}"
        dtype = str(got.dtype).removeprefix("torch.")
        count = f"{int(mismatches.sum())} of {got.numel()} elements of {dtype} are wrong"
        description = "; ".join(filter(None, (text, count, looks)))
        return cls(call, f"{label}: {description}" if label else description)


def raise_findings(findings: Sequence[WrongResult], calls: int, rank: Rank) -> None:
    """Raise one error for all findings of this rank, with their common attributes; return if there are no findings."""
    if not findings:
        return
    failed_calls = {id(finding.call): finding.call for finding in findings}
    leading, *others = findings[:_SHOWN]
    head = f"{leading.call} is wrong on {named([rank.index])} of {rank.size} ({rank.device}): {leading.text}"
    count = f"  {len(failed_calls)} of {calls} collectives are wrong"
    if len(failed_calls) > 1 and (common := _common(list(failed_calls.values()))):
        count += f"; all of them: {common}"
    lines = [f"  {finding.call}: {finding.text}" for finding in others]
    if len(findings) > _SHOWN:
        lines.append(f"  and {len(findings) - _SHOWN} more")
    raise CollectiveMismatch("\n".join([head, count, *lines]), ranks=[rank.index])


def _common(calls: Sequence[object]) -> str:
    attributes = []
    for name in _COMMON:
        values = {getattr(call, name, None) for call in calls}
        if len(values) == 1 and (value := values.pop()) not in (None, (), False):
            attributes.append("async" if value is True else f"{name} {value}")
    return ", ".join(attributes)


def assert_shared(checksums: Sequence[Sequence[tuple[str, str]]] | Mapping[int, Sequence[tuple[str, str]]]) -> None:
    """Assert that all ranks hold the same bits of the results that they share.

    Args:
        checksums: the return value of `assert_collectives_match` on each rank.

    Raises:
        CollectiveMismatch: `.ranks` has the ranks that differ from the majority; all ranks if there is no majority.
    """
    __tracebackhide__ = True
    by_rank = dict(checksums) if isinstance(checksums, Mapping) else dict(enumerate(checksums))
    holders: dict[str, dict[str, list[int]]] = {}
    for rank, entries in by_rank.items():
        for label, checksum in entries:
            holders.setdefault(label, {}).setdefault(checksum, []).append(rank)
    for label, ranks in holders.items():
        if len(ranks) > 1:
            most = max(ranks.values(), key=len)
            tied = sum(len(same) == len(most) for same in ranks.values()) > 1
            others = sorted(rank for same in ranks.values() if same is not most for rank in same)
            text = f"{label}: ranks disagree about the bits of the result: {named(others)} against {named(most)}"
            raise CollectiveMismatch(text, ranks=sorted([*most, *others]) if tied else others)
