"""List the tensors of a collective call on one rank, with their contents before and after."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mgpu_check.suite.collectives.buffers import Shape, shaped, stacked
from mgpu_check.suite.collectives.cases import FUNCTIONS, CollectiveCall
from mgpu_check.suite.collectives.values import Right, given_blocks, right_block, stretched
from mgpu_check.torch_hooks.table import TRANSFERS, is_list

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
        self.row = FUNCTIONS[call.function]
        self.transfer, self.reduces = TRANSFERS[self.row.does], self.row.reduces
        self.values = call.values if self.reduces else "bits"
        op = call.op if self.reduces else ""
        self.blocks = given_blocks(self.values, op, self.dtype, self.count, call.seed)
        self.right = right_block(self.values, op, self.dtype, self.count, call.seed) if self.reduces else None
        self.length = len(self.blocks[0]) if call.elements is None else call.elements
        self.pieces: list[Piece] = []
        self.given: list[int] = []
        self.taken: list[int] = []
        self.splits: tuple[list[int], ...] = ()
        self._lay_out()

    def _part(self, member: int, start: int, length: int) -> torch.Tensor:
        return stretched(self.blocks[member], start, length)

    def _add(self, piece: Piece, *roles: list[int]) -> None:
        for role in roles:
            role.append(len(self.pieces))
        self.pieces.append(piece)

    def _lay_out(self) -> None:
        call, row, transfer, place = self.call, self.row, self.transfer, self.place
        gets = [
            self._part(giver, place * STEP if transfer.divides else 0, self._length(giver, place))
            for giver in transfer.sources(place, self.count, self.root)
        ]
        if row.in_place:
            self._lay_in_place(gets)
            return
        takers = range(self.count) if transfer.divides else (0,)
        gives = [self._part(place, taker * STEP, self._length(place, taker)) for taker in takers]
        if call.layout == "in place":
            self._lay_joined(gives, gets)
            return
        if call.layout == "uneven":
            lengths = [[len(part) for part in parts] for parts in (gets, gives)]
            self.splits = () if row.lists else tuple(lengths)
        if transfer.gives(place, self.root):
            for shape, part in self._tensors(row.given, gives, divided=transfer.divides):
                self._add(Piece(shape, part), self.given)
        if self.reduces:
            length = self._length(place, place)
            start = place * STEP if transfer.divides else 0
            self._add(self._reduce(Piece(shaped(self._layout, length)), start, length), self.taken)
        else:
            for shape, part in self._tensors(row.taken, gets, divided=transfer.joins):
                self._add(Piece(shape, None, part), self.taken)

    @property
    def _layout(self) -> str:
        return "dense" if self.call.layout in ("in place", "uneven") else self.call.layout

    def _length(self, giver: int, getter: int) -> int:
        """Return the number of elements that pass from one member to another."""
        if self.call.layout != "uneven":
            return self.length
        if not self.transfer.divides:
            getter = giver  # all get the same
        elif self.reduces:
            giver = getter  # the parts that are combined are alike
        return _part_length(self.call, giver, getter)

    def _tensors(self, parameter: str, parts: list[torch.Tensor], *, divided: bool) -> list[tuple[Shape, torch.Tensor]]:
        """Return the tensors of a parameter for some parts, with their shapes."""
        if divided and parts and not is_list(parameter):
            whole = torch.cat(parts)
            in_rows = self.call.layout == "stacked"
            return [(stacked(len(parts), len(parts[0])) if in_rows else shaped("dense", len(whole)), whole)]
        return [(shaped(self._layout, len(part)), part) for part in parts]

    def _lay_in_place(self, gets: list[torch.Tensor]) -> None:
        """Lay out a collective whose result replaces the input."""
        piece = Piece(shaped(self._layout, self.length), self._part(self.place, 0, self.length), "anything")
        if gets and self.reduces:
            self._reduce(piece, 0)
        elif gets:
            piece.after = gets[0]
        self._add(piece, self.given)

    def _lay_joined(self, gives: list[torch.Tensor], gets: list[torch.Tensor]) -> None:
        """Lay out a collective whose smaller tensor is a part of the larger one."""
        shape = shaped("dense", self.length * self.count)
        if self.reduces:
            reduced = ReducedPiece(self._right(), self.place * STEP, self.length, at=self.place * self.length)
            self._add(Piece(shape, torch.cat(gives), "anything", reduced), self.given)
        else:
            before = [part if giver == self.place else torch.zeros_like(part) for giver, part in enumerate(gets)]
            self._add(Piece(shape, torch.cat(before), torch.cat(gets)), self.taken)

    def _right(self) -> Right:
        assert self.right is not None
        return self.right

    def _reduce(self, piece: Piece, start: int, length: int | None = None) -> Piece:
        piece.reduced = ReducedPiece(self._right(), start, self.length if length is None else length)
        piece.after = piece.reduced.value
        return piece
