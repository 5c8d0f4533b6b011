"""List the tensors of a collective call on one rank, with their contents before and after."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mgpu_check.suite.collectives.buffers import Shape, shaped
from mgpu_check.suite.collectives.cases import REDUCING, CollectiveCall
from mgpu_check.suite.collectives.values import Right, given_blocks, right_block, stretched

__all__ = ["STEP", "Laid", "Piece", "ReducedPiece"]

STEP = 13
"""Distance between the parts of a tensor, in elements of their block."""


def _part_length(call: CollectiveCall, giver: int, getter: int) -> int:
    """Return how many elements one member gives another; parts differ in size.

    In a call of 0 elements every third giver gives nothing, and the others give nothing to every third getter.
    """
    length = call.elements if call.elements is not None else 29
    turn = (giver + call.seed) % 3
    if length == 0 and (turn == 0 or getter % 3 == turn - 1):
        return 0
    return max(0, length - 3) + (giver * 3 + getter * 5 + call.seed) % 7


@dataclass(frozen=True)
class ReducedPiece:
    """The result of a reduction in a tensor of a call.

    Attributes:
        right: the values that it may have.
        start: its first element in the block.
        length: its number of elements.
        at: its first element in the tensor.
    """

    right: Right
    start: int
    length: int
    at: int = 0

    @property
    def value(self) -> torch.Tensor:
        """The right result, or the value around which results may be off."""
        return stretched(self.right.value, self.start, self.length)


@dataclass
class Piece:
    """A tensor of a call, with its contents before and after.

    Attributes:
        before: None if the collective writes the tensor.
        after: None if the tensor must not change; "anything" if its contents are undefined.
        reduced: the result of a reduction in the tensor, if any.
    """

    shape: Shape
    before: torch.Tensor | None = None
    after: torch.Tensor | str | None = None
    reduced: ReducedPiece | None = None


class Laid:
    """The tensors of a call on the member at `place` of a group.

    `given` and `taken` have the positions of inputs and outputs in `pieces`.
    """

    def __init__(self, call: CollectiveCall, members: tuple[int, ...], place: int) -> None:
        self.call, self.members, self.count, self.place = call, members, len(members), place
        self.root = call.root % self.count
        self.dtype: torch.dtype = getattr(torch, call.dtype)
        self.reduces = call.function in REDUCING
        self.values = call.values if self.reduces else "bits"
        op = call.op if self.reduces else ""
        self.blocks = given_blocks(self.values, op, self.dtype, self.count, call.seed)
        self.right = right_block(self.values, op, self.dtype, self.count, call.seed) if self.reduces else None
        self.length = len(self.blocks[0]) if call.elements is None else call.elements
        self.pieces: list[Piece] = []
        self.given: list[int] = []
        self.taken: list[int] = []
        self.splits: tuple[list[int] | None, list[int] | None] = (None, None)
        self._lay_out()

    def _part(self, member: int, start: int, length: int) -> torch.Tensor:
        return stretched(self.blocks[member], start, length)

    def _add(self, piece: Piece, *roles: list[int]) -> None:
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
                    self._add(Piece(shape, self._part(self.place, part * STEP, self.length)), self.given)
            self._add(Piece(shape, None, self._part(self.root, self.place * STEP, self.length)), self.taken)
        elif call.function.startswith("reduce_scatter"):
            self._lay_out_reduce_scatter(shape)
        else:
            self._lay_out_exchange(layout if call.function == "all_to_all" else "dense")

    def _in_place(self, shape: Shape) -> Piece:
        piece = Piece(shape, self._part(self.place, 0, self.length))
        if self.call.function == "broadcast":
            piece.after = self._part(self.root, 0, self.length)
        elif self.call.function == "all_reduce" or self.place == self.root:
            self._reduce(piece, 0)
        else:
            piece.after = "anything"
        return piece

    def _lay_out_gather(self, shape: Shape) -> None:
        self._add(Piece(shape, self._part(self.place, 0, self.length)), self.given)
        if self.call.function == "all_gather" or self.place == self.root:
            for member in range(self.count):
                self._add(Piece(shape, None, self._part(member, 0, self.length)), self.taken)

    def _lay_out_joined_gather(self, shape: Shape) -> None:
        parts = [self._part(member, 0, self.length) for member in range(self.count)]
        before = None
        if self.call.layout == "in place":
            before = torch.cat(
                [part if member == self.place else torch.zeros_like(part) for member, part in enumerate(parts)]
            )
        else:
            self._add(Piece(shape, parts[self.place]), self.given)
        self._add(Piece(shaped("dense", self.length * self.count), before, torch.cat(parts)), self.taken)

    def _lay_out_reduce_scatter(self, shape: Shape) -> None:
        parts = [self._part(self.place, part * STEP, self.length) for part in range(self.count)]
        start, whole = self.place * STEP, shaped("dense", self.length * self.count)
        if self.call.layout == "in place" and self.call.function == "reduce_scatter_tensor":
            reduced = ReducedPiece(self._right(), start, self.length, at=self.place * self.length)
            self._add(Piece(whole, torch.cat(parts), "anything", reduced), self.given)
            return
        if self.call.function == "reduce_scatter":
            for part in parts:
                self._add(Piece(shape, part), self.given)
        else:
            self._add(Piece(whole, torch.cat(parts)), self.given)
        self._add(self._reduce(Piece(shape), start), self.taken)

    def _lay_out_exchange(self, layout: str) -> None:
        call, place, others = self.call, self.place, range(self.count)
        uneven = call.layout == "uneven"
        to = [_part_length(call, place, other) if uneven else self.length for other in others]
        of = [_part_length(call, other, place) if uneven else self.length for other in others]
        gives = [self._part(place, other * STEP, to[other]) for other in others]
        gets = [self._part(other, place * STEP, of[other]) for other in others]
        if uneven:
            self.splits = (of, to)
        if call.function == "all_to_all_single":
            gives, gets = [torch.cat(gives)], [torch.cat(gets)]
        for part in gives:
            self._add(Piece(shaped(layout, len(part)), part), self.given)
        for part in gets:
            self._add(Piece(shaped(layout, len(part)), None, part), self.taken)

    def _right(self) -> Right:
        assert self.right is not None
        return self.right

    def _reduce(self, piece: Piece, start: int) -> Piece:
        piece.reduced = ReducedPiece(self._right(), start, self.length)
        piece.after = piece.reduced.value
        return piece
