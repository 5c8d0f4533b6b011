"""Call collectives with guarded tensors, and compare what they leave with a model on the CPU of this rank."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from mgpu_check.checks.collective_buffers import Memory, Shape, shaped
from mgpu_check.checks.collective_findings import Finding, raise_findings
from mgpu_check.checks.collective_values import Right, as_bits, factor_of, given_blocks, right_block, stretched
from mgpu_check.checks.collectives import groups_of
from mgpu_check.rank_side.rank import Rank
from mgpu_check.specs.collective_calls import REDUCING, CollectiveCall, left_out
from mgpu_check.torch_hooks.tensors import digest_of

__all__ = ["Started", "assert_collectives_match", "operation_of", "part_length"]

_STEP = 13
"""By so many elements of their block the parts of a tensor are apart."""
_IN_FLIGHT = 6
_REFUSALS = ("must be contiguous", "non-overlapping and dense", "ensors must be", "must be dense")


def assert_collectives_match(rank: Rank, calls: Sequence[CollectiveCall]) -> list[tuple[str, str]]:
    """Assert that each call leaves what a model of it leaves, on this rank, and nothing else changed.

    Compared are the results, bit for bit where there is one right result, the inputs, and the memory around them all. Calls that no
    backend takes are left out. Asynchronous ones are waited for in the order of a seed, several at a time.

    Returns:
        A checksum of each result that all members of the group must share, by what the call is: compare them among ranks with
        `mgpu_check.checks.collective_findings.assert_shared`.

    Raises:
        CollectiveMismatch: with all calls that went wrong on this rank; after the last of them, so that ranks stay in step.
    """
    __tracebackhide__ = True
    everybody = tuple(range(rank.size))
    calls = [call for call in calls if not left_out(call) and set(call.members) <= set(everybody)]
    groups = groups_of(sorted({call.members or everybody for call in calls}), everybody)
    findings: list[Finding] = []
    shared: list[tuple[str, str]] = []
    flying: list[Started] = []

    def land() -> None:
        for started in sorted(flying, key=lambda one: zlib.crc32(str(one.call).encode())):
            started.wait()
        for started in flying:
            findings.extend(started.findings())
            shared.extend(started.shared())
        flying.clear()

    for call in calls:
        members = call.members or everybody
        if not call.asynchronous:
            land()
        if rank.index in members:
            flying.append(Started(rank, call, members, groups[members]))
        elif call.members:
            findings.extend(_outside(rank, call, groups[members]))
        if not call.asynchronous or len(flying) >= _IN_FLIGHT:
            land()
    land()
    for members, group in groups.items():
        if group is not None and rank.index in members:
            dist.destroy_process_group(group)
    raise_findings(findings, len(calls), rank)
    return shared


def part_length(call: CollectiveCall, giver: int, getter: int) -> int:
    """Return how many elements one member gives another, of parts of different sizes."""
    length = call.elements if call.elements is not None else 29
    return max(0, length - 3) + (giver * 3 + getter * 5 + call.seed) % 7


def operation_of(call: CollectiveCall) -> Any:
    """Return the `dist.ReduceOp` of a call."""
    if call.op == "PREMUL_SUM":
        return dist._make_nccl_premul_sum(factor_of(call.seed))  # type: ignore[attr-defined]
    return getattr(dist.ReduceOp, call.op)


def _outside(rank: Rank, call: CollectiveCall, group: Any) -> Iterator[Finding]:
    """Call a collective on a rank that is not in its group: torch says so, and nothing happens."""
    if call.function not in ("all_reduce", "broadcast"):
        return
    tensor = torch.full((5,), 3, device=rank.device if call.place == "device" else "cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if call.function == "all_reduce":
            dist.all_reduce(tensor, group=group)
        else:
            # Not by its number in the world: torch looks that up in the last group made that this rank is not in.
            dist.broadcast(tensor, group_src=call.root % len(call.members), group=group)
    if not bool((tensor == 3).all()):
        text = f"this rank is not in the group, yet its tensor became {tensor.tolist()}"
        yield Finding(call, text)


@dataclass
class _Piece:
    """A tensor of a call: what it holds before, and after.

    Attributes:
        before: None where the collective is to write it.
        after: None where it must hold what it held before; "anything" where it need not.
    """

    shape: Shape
    before: torch.Tensor | None = None
    after: torch.Tensor | str | None = None
    right: list[tuple[Right, int, int]] = field(default_factory=list)
    """Of a reduction: what it may hold, at which element of the block it begins, and how long it is."""


class Started:
    """A call that has been made, and may have to be waited for."""

    def __init__(self, rank: Rank, call: CollectiveCall, members: tuple[int, ...], group: Any) -> None:
        self.rank, self.call, self.members, self.group = rank, call, members, group
        self.count, self.place = len(members), members.index(rank.index)
        self.root = call.root % self.count
        self.dtype: torch.dtype = getattr(torch, call.dtype)
        self.reduces = call.function in REDUCING
        self.values = call.values if self.reduces else "bits"
        op = call.op if self.reduces else ""
        self.blocks = given_blocks(self.values, op, self.dtype, self.count, call.seed)
        self.right = right_block(self.values, op, self.dtype, self.count, call.seed) if self.reduces else None
        self.length = len(self.blocks[0]) if call.elements is None else call.elements
        self.pieces: list[_Piece] = []
        self.given: list[int] = []
        self.taken: list[int] = []
        self.splits: tuple[list[int] | None, list[int] | None] = (None, None)
        self._lay_out()
        self.memory = Memory(self.dtype)
        for piece in self.pieces:
            self.memory.add(piece.shape)
        device = rank.device if call.place == "device" else torch.device("cpu")
        self.whole = self.memory.filled([piece.before for piece in self.pieces]).to(device)
        self.refused = ""
        self.work: Any = None
        try:
            self.work = self._call()
        except (RuntimeError, ValueError) as refusal:
            if call.layout not in ("gaps", "transposed") or not any(text in str(refusal) for text in _REFUSALS):
                raise
            self.refused = str(refusal)

    # What there is before and after

    def _part(self, member: int, start: int, length: int) -> torch.Tensor:
        return stretched(self.blocks[member], start, length)

    def _add(self, piece: _Piece, *roles: list[int]) -> None:
        for role in roles:
            role.append(len(self.pieces))
        self.pieces.append(piece)

    def _lay_out(self) -> None:
        call = self.call
        layout = "dense" if call.layout in ("in place", "uneven") else call.layout
        shape = shaped(layout, self.length)
        if call.function in ("all_reduce", "reduce", "broadcast"):
            self._add(self._in_place(shape), self.given)
        elif call.function in ("all_gather", "gather"):
            self._lay_out_gather(shape)
        elif call.function == "all_gather_into_tensor":
            self._lay_out_joined_gather(shape)
        elif call.function == "scatter":
            if self.place == self.root:
                for part in range(self.count):
                    self._add(_Piece(shape, self._part(self.place, part * _STEP, self.length)), self.given)
            self._add(_Piece(shape, None, self._part(self.root, self.place * _STEP, self.length)), self.taken)
        elif call.function.startswith("reduce_scatter"):
            self._lay_out_reduce_scatter(shape)
        else:
            self._lay_out_exchange(layout if call.function == "all_to_all" else "dense")

    def _in_place(self, shape: Shape) -> _Piece:
        piece = _Piece(shape, self._part(self.place, 0, self.length))
        if self.call.function == "broadcast":
            piece.after = self._part(self.root, 0, self.length)
        elif self.call.function == "all_reduce" or self.place == self.root:
            self._reduced(piece, [(0, self.length)])
        else:
            piece.after = "anything"
        return piece

    def _lay_out_gather(self, shape: Shape) -> None:
        self._add(_Piece(shape, self._part(self.place, 0, self.length)), self.given)
        if self.call.function == "all_gather" or self.place == self.root:
            for member in range(self.count):
                self._add(_Piece(shape, None, self._part(member, 0, self.length)), self.taken)

    def _lay_out_joined_gather(self, shape: Shape) -> None:
        parts = [self._part(member, 0, self.length) for member in range(self.count)]
        before = None
        if self.call.layout == "in place":
            before = torch.cat(
                [part if member == self.place else torch.zeros_like(part) for member, part in enumerate(parts)]
            )
        else:
            self._add(_Piece(shape, parts[self.place]), self.given)
        self._add(_Piece(shaped("dense", self.length * self.count), before, torch.cat(parts)), self.taken)

    def _lay_out_reduce_scatter(self, shape: Shape) -> None:
        parts = [self._part(self.place, part * _STEP, self.length) for part in range(self.count)]
        mine, whole = self.place * _STEP, shaped("dense", self.length * self.count)
        if self.call.layout == "in place" and self.call.function == "reduce_scatter_tensor":
            piece = _Piece(whole, torch.cat(parts), "anything")
            piece.right = [(self._right(), mine, self.length)]
            self._add(piece, self.given)
            return
        if self.call.function == "reduce_scatter":
            for part in parts:
                self._add(_Piece(shape, part), self.given)
        else:
            self._add(_Piece(whole, torch.cat(parts)), self.given)
        self._add(self._reduced(_Piece(shape), [(mine, self.length)]), self.taken)

    def _lay_out_exchange(self, layout: str) -> None:
        call, place, others = self.call, self.place, range(self.count)
        uneven = call.layout == "uneven"
        to = [part_length(call, place, other) if uneven else self.length for other in others]
        of = [part_length(call, other, place) if uneven else self.length for other in others]
        gives = [self._part(place, other * _STEP, to[other]) for other in others]
        gets = [self._part(other, place * _STEP, of[other]) for other in others]
        if uneven:
            self.splits = (of, to)
        if call.function == "all_to_all_single":
            gives, gets = [torch.cat(gives)], [torch.cat(gets)]
        for part in gives:
            self._add(_Piece(shaped(layout, len(part)), part), self.given)
        for part in gets:
            self._add(_Piece(shaped(layout, len(part)), None, part), self.taken)

    def _right(self) -> Right:
        assert self.right is not None
        return self.right

    def _reduced(self, piece: _Piece, parts: Sequence[tuple[int, int]]) -> _Piece:
        right = self._right()
        piece.right = [(right, start, length) for start, length in parts]
        piece.after = torch.cat([stretched(right.value, start, length) for start, length in parts])
        return piece

    # The call

    def _call(self) -> Any:
        call, group = self.call, self.group
        views = [self.memory.view(self.whole, number) for number in range(len(self.pieces))]
        given, taken = [views[n] for n in self.given], [views[n] for n in self.taken]
        late: dict[str, Any] = {"group": group, "async_op": call.asynchronous}
        op = operation_of(call) if self.reduces else None
        src: dict[str, Any]
        dst: dict[str, Any]
        if call.root_by == "group":
            src, dst = {"group_src": self.root}, {"group_dst": self.root}
        else:
            src, dst = {"src": self.members[self.root]}, {"dst": self.members[self.root]}
        mine = slice(self.place * self.length, (self.place + 1) * self.length)
        calls: Mapping[str, Callable[[], Any]] = {
            "all_reduce": lambda: dist.all_reduce(given[0], op, **late),
            "reduce": lambda: dist.reduce(given[0], op=op, **dst, **late),
            "broadcast": lambda: dist.broadcast(given[0], **src, **late),
            "all_gather": lambda: dist.all_gather(taken, given[0], **late),
            "all_gather_into_tensor": lambda: _named("all_gather")(taken[0], given[0] if given else taken[0][mine], **late),
            "gather": lambda: dist.gather(given[0], taken or None, **dst, **late),
            "scatter": lambda: dist.scatter(taken[0], given or None, **src, **late),
            "reduce_scatter": lambda: dist.reduce_scatter(taken[0], given, op, **late),
            "reduce_scatter_tensor": lambda: _named("reduce_scatter")(taken[0] if taken else given[0][mine], given[0], op, **late),
            "all_to_all": lambda: dist.all_to_all(taken, given, **late),
            "all_to_all_single": lambda: dist.all_to_all_single(taken[0], given[0], *self.splits, **late),
        }  # fmt: skip
        return calls[call.function]()

    def wait(self) -> None:
        """Wait for the end of the collective."""
        if self.work is not None:
            self.work.wait()

    # What it has left

    def findings(self) -> Iterator[Finding]:
        """Compare all memory of the call with what it should be."""
        whole = self.whole.cpu()
        self._after = whole
        loose = [piece.after == "anything" if isinstance(piece.after, str) else False for piece in self.pieces]
        should = self.memory.filled([self._should(piece) for piece in self.pieces])
        for number, piece in enumerate(self.pieces):
            if loose[number] or self._tolerated(piece):
                got = self.memory.view(whole, number)
                yield from self._judged(piece, got)
                _bytes(self.memory.view(should, number)).copy_(_bytes(got))
        if torch.equal(as_bits(whole), as_bits(should)):
            return
        yield from self._differences(whole, should)

    def _should(self, piece: _Piece) -> torch.Tensor | None:
        if self.refused or piece.after is None or isinstance(piece.after, str):
            return piece.before
        return piece.after

    def _tolerated(self, piece: _Piece) -> bool:
        return bool(piece.right) and not self.refused

    def _judged(self, piece: _Piece, got: torch.Tensor) -> Iterator[Finding]:
        flat = got.reshape(-1)
        at = (
            self.place * self.length
            if self.call.layout == "in place" and self.call.function.startswith("reduce_s")
            else 0
        )
        for right, start, length in piece.right:
            part = flat[at : at + length].contiguous()
            expected = stretched(right.value, start, length)
            if torch.equal(as_bits(part), as_bits(expected)):
                continue
            index = (torch.arange(length) + start) % len(right.value)
            wrong = right.wrong(part, index)
            if bool(wrong.any()):
                yield Finding.of(self.call, part, expected, wrong, self._looks(part, index, wrong))

    def _looks(self, got: torch.Tensor, index: torch.Tensor, wrong: torch.Tensor) -> str:
        """Say whose values a wrong result has, if it has those of one rank."""
        places = wrong.nonzero().flatten()
        some, where = as_bits(got[places]), index[places]
        for member, block in zip(self.members, self.blocks, strict=True):
            if torch.equal(some, as_bits(block[where])):
                return f"these are the values of rank {member} alone"
        return ""

    def _differences(self, whole: torch.Tensor, should: torch.Tensor) -> Iterator[Finding]:
        clean = whole.clone()
        for number, piece in enumerate(self.pieces):
            got, right = (self.memory.view(one, number) for one in (whole, should))
            got, right = got.reshape(-1).contiguous(), right.reshape(-1).contiguous()
            wrong = as_bits(got) != as_bits(right)
            wrong = wrong.any(-1) if got.is_complex() else wrong
            if bool(wrong.any()):
                if number in self.taken or piece.after is not None:
                    label = f"output {self.taken.index(number)}" if len(self.taken) > 1 and number in self.taken else ""
                else:
                    label = "the input was changed"
                yield Finding.of(self.call, got, right, wrong, self._origin(got, wrong), label)
            _bytes(self.memory.view(clean, number)).copy_(_bytes(self.memory.view(should, number)))
        outside = as_bits(clean) != as_bits(should)
        if bool(outside.any()):
            beyond = int(outside.sum())
            yield Finding(self.call, f"{beyond} elements of memory before, between or behind its tensors were changed")

    def _origin(self, got: torch.Tensor, wrong: torch.Tensor) -> str:
        places = wrong.nonzero().flatten()
        if self.reduces or len(places) < 4:
            return ""
        bits = as_bits(got[places])
        for member, block in zip(self.members, self.blocks, strict=True):
            for part in range(self.count):
                if torch.equal(bits, as_bits(block[(places + part * _STEP) % len(block)])):
                    return f"these are values of rank {member}" + (
                        f", its part for rank {self.members[part]}" if part else ""
                    )
        return ""

    def shared(self) -> Iterator[tuple[str, str]]:
        """Yield a checksum of a result that all members must share, bit for bit."""
        if self.call.function == "all_reduce" and not self.refused:
            yield f"{self.call}", digest_of(self.memory.view(self._after, 0))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View booleans as bytes, which copying would make 0 or 1."""
    return tensor.view(torch.uint8) if tensor.dtype is torch.bool else tensor


def _named(operation: str) -> Callable[..., Any]:
    """Return the function of one tensor by the name that this version of torch does not warn of."""
    older = {"reduce_scatter": "reduce_scatter_tensor", "all_gather": "all_gather_into_tensor"}
    found: Callable[..., Any] = getattr(dist, f"{operation}_single", None) or getattr(dist, older[operation])
    return found
