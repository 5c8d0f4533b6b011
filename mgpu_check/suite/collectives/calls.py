"""Call collectives with guarded tensors, and compare the memory afterwards with a model on the CPU."""

from __future__ import annotations

import functools
import operator
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from mgpu_check.asserts.known_defects import is_known
from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.errors import CollectiveMismatch
from mgpu_check.suite.collectives.buffers import CallMemory
from mgpu_check.suite.collectives.cases import FUNCTIONS, CollectiveCall, left_out
from mgpu_check.suite.collectives.exact import groups_of
from mgpu_check.suite.collectives.findings import WrongResult, raise_findings
from mgpu_check.suite.collectives.pieces import STEP, Laid, Piece, ReducedPiece
from mgpu_check.suite.collectives.runner import called, coalescing
from mgpu_check.suite.collectives.values import differing, factor_of, stretched
from mgpu_check.torch_hooks.table import TRANSFERS
from mgpu_check.torch_hooks.tensors import as_bits, digest_of

_IN_FLIGHT = 6
_REFUSALS = ("must be contiguous", "non-overlapping and dense", "ensors must be", "must be dense")

_NO_LISTS = "does not support alltoall"


def _may_refuse(call: CollectiveCall, words: str) -> bool:
    """Return whether a backend may refuse a call with these words.

    Backends may refuse views with gaps, and older gloo refuses lists for all_to_all.
    """
    if call.layout in ("gaps", "transposed") and any(text in words for text in _REFUSALS):
        return True
    return (call.function, call.place) == ("all_to_all", "cpu") and _NO_LISTS in words


def assert_collectives_match(rank: Rank, calls: Sequence[CollectiveCall]) -> list[tuple[str, str]]:
    """Assert that each call gives the results of its model on this rank, and changes nothing else.

    Compares the results, the inputs, and the memory around them. Results are compared bit for bit if there is one right
    result. Calls that no backend supports are left out. Up to six asynchronous calls run at once; they are waited for
    in an order that a checksum of each call determines.

    Returns:
        (call, checksum) of each result that all members of the group must share. Compare them among ranks with
        `mgpu_check.suite.collectives.findings.assert_shared`.

    Raises:
        CollectiveMismatch: with all wrong calls of this rank. It is raised after the last call, so that ranks stay in
            step.
    """
    everybody = tuple(range(rank.size))
    calls = [
        replace(call, root=call.root % len(call.members or everybody))  # messages name the root that there is
        for call in calls
        if not left_out(call) and set(call.members) <= set(everybody)
    ]
    findings: list[WrongResult] = []
    shared: list[tuple[str, str]] = []
    flying: list[Started] = []

    def land() -> None:
        for started in sorted(flying, key=lambda one: zlib.crc32(str(one.call).encode())):
            started.wait()
        for started in flying:
            findings.extend(started.findings())
            shared.extend(started.shared())
        flying.clear()

    with groups_of(rank, (call.members for call in calls)) as groups:
        for call in calls:
            members = call.members or everybody
            if not call.asynchronous:
                land()
            if rank.index in members:
                flying.append(Started(rank, call, members, groups[call.members]))
            else:
                findings.extend(_outside(rank, call, groups[call.members]))
            if not call.asynchronous or len(flying) >= _IN_FLIGHT:
                land()
        land()
    raise_findings(findings, len(calls), rank)
    return shared


def operation_of(call: CollectiveCall) -> Any:
    """Return the `dist.ReduceOp` of a call."""
    if call.op == "PREMUL_SUM":
        return dist._make_nccl_premul_sum(factor_of(call.seed))  # type: ignore[attr-defined]
    return getattr(dist.ReduceOp, call.op)


def _outside(rank: Rank, call: CollectiveCall, group: Any) -> Iterator[WrongResult]:
    """Call a collective on a rank outside its group; torch warns, and must leave the tensor unchanged."""
    row = FUNCTIONS[call.function]
    if not row.in_place or TRANSFERS[row.does].takers == "root":
        return
    tensor = torch.full((5,), 3, device=rank.device if call.place == "device" else "cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Not `src`: torch would look it up in the group that was made last without this rank.
        root: dict[str, Any] = {"group_src": call.root % len(call.members)} if TRANSFERS[row.does].root else {}
        called(call.function, [tensor], [tensor], group=group, **root)
    if not bool((tensor == 3).all()):
        text = f"this rank is not in the group, yet its tensor became {tensor.tolist()}"
        yield WrongResult(call, text)


class Started(Laid):
    """A collective that was called, and that may still run."""

    def __init__(self, rank: Rank, call: CollectiveCall, members: tuple[int, ...], group: Any) -> None:
        super().__init__(call, members, members.index(rank.index))
        self.rank, self.group = rank, group
        self.digest = zlib.crc32(str(call).encode())
        self.memory = CallMemory(self.dtype)
        self.memory.lay([piece.shape for piece in self.pieces], backwards=bool(self.digest & 1))
        device = rank.device if call.place == "device" else torch.device("cpu")
        self.whole = self.memory.filled([piece.before for piece in self.pieces]).to(device)
        self.refused = ""
        self.work: Any = None
        try:
            self.work = self._call()
        except (RuntimeError, ValueError, TypeError) as refusal:
            if not _may_refuse(call, str(refusal)):
                raise CollectiveMismatch(
                    f"{call} on {device} raised {type(refusal).__name__}: {refusal}", ranks=[rank.index]
                ) from refusal
            self.refused = str(refusal)

    # The call

    def _call(self) -> Any:
        call, group = self.call, self.group
        views = [self.memory.view(self.whole, number) for number in range(len(self.pieces))]
        given, taken = [views[n] for n in self.given], [views[n] for n in self.taken]
        options: dict[str, Any] = {"group": group, "async_op": call.asynchronous}
        if self.reduces:
            options["op"] = operation_of(call)
        if role := self.transfer.root:
            by_group = call.root_by == "group"
            options[f"group_{role}" if by_group else role] = self.root if by_group else self.members[self.root]
        if call.layout == "in place":
            mine = slice(self.place * self.length, (self.place + 1) * self.length)
            given, taken = given or [taken[0][mine]], taken or [given[0][mine]]
        taken = given if self.row.in_place else taken
        if not call.coalesced:
            return called(call.function, given, taken, *self.splits, older=bool(self.digest & 2), **options)
        with coalescing(group, self.whole.device, asynchronous=options.pop("async_op")) as managed:
            called(call.function, given, taken, **options)
        return managed if call.asynchronous else None

    def wait(self) -> None:
        """Wait until the collective has ended."""
        if self.work is not None:
            self.work.wait()

    # What it has left

    def findings(self) -> list[WrongResult]:
        """Compare all memory of the call with the model, except for an error that a known defect explains."""
        found = list(self._compared())
        if self.dtype is torch.bool and (not found or self._added_as_bytes()):
            call = self.call
            facts = {
                "function": call.function,
                "dtype": call.dtype,
                "op": call.op if self.reduces else "",
                "place": call.place,
                "size": self.count,
            }
            if is_known("gloo-adds-booleans-as-bytes", failed=bool(found), **facts):
                return []
        if found and self._only_copied():
            facts = {"function": self.call.function, "op": self.call.op, "place": self.call.place, "size": self.count}
            contiguous = all(self.memory.view(self.whole, number).is_contiguous() for number in self.taken)
            if is_known("nccl-reduce-scatter-alone", failed=True, contiguous=contiguous, **facts):
                return []
        return found

    def _only_copied(self) -> bool:
        """Return whether the memory is right if the first rank's values are copied, to contiguous tensors only."""
        return self._explained_by(self.blocks[0], lambda view: view.is_contiguous())

    def _added_as_bytes(self) -> bool:
        """Return whether the memory is right if the backend adds booleans as bytes."""
        return self._explained_by(
            functools.reduce(operator.add, (block.view(torch.uint8) for block in self.blocks)), lambda view: True
        )

    def _explained_by(self, block: torch.Tensor, writes: Callable[[torch.Tensor], bool]) -> bool:
        """Return whether the memory is as it should be, with results from `block` in the tensors that `writes`
        selects."""
        written = [writes(self.memory.view(self.whole, number)) for number in range(len(self.pieces))]
        should = self.memory.filled(
            [
                piece.before if piece.reduced is not None and not is_written else self._should(piece)
                for piece, is_written in zip(self.pieces, written, strict=True)
            ]
        )
        for number, piece in enumerate(self.pieces):
            view = _bytes(self.memory.view(should, number))
            if isinstance(piece.after, str):
                view.copy_(_bytes(self.memory.view(self._after, number)))
            elif piece.reduced is not None and written[number]:
                view.copy_(stretched(block, piece.reduced.start, piece.reduced.length).view(view.shape))
        return torch.equal(as_bits(should), as_bits(self._after))

    def _compared(self) -> Iterator[WrongResult]:
        whole = self.whole.cpu()
        self._after = whole
        should = self.memory.filled([self._should(piece) for piece in self.pieces])
        for number, piece in enumerate(self.pieces):
            if isinstance(piece.after, str) or (piece.reduced is not None and not self.refused):
                got = self.memory.view(whole, number)
                if piece.reduced is not None:
                    yield from self._judged(piece.reduced, got)
                _bytes(self.memory.view(should, number)).copy_(_bytes(got))
        if torch.equal(as_bits(whole), as_bits(should)):
            return
        yield from self._differences(whole, should)

    def _should(self, piece: Piece) -> torch.Tensor | None:
        if self.refused or piece.after is None or isinstance(piece.after, str):
            return piece.before
        return piece.after

    def _judged(self, reduced: ReducedPiece, got: torch.Tensor) -> Iterator[WrongResult]:
        part = got.reshape(-1)[reduced.at : reduced.at + reduced.length].contiguous()
        expected = reduced.value
        if torch.equal(as_bits(part), as_bits(expected)):
            return
        index = (torch.arange(reduced.length) + reduced.start) % len(reduced.right.value)
        wrong = reduced.right.wrong(part, index)
        if bool(wrong.any()):
            yield WrongResult.of(self.call, part, expected, wrong, self._looks(part, index, wrong))

    def _looks(self, got: torch.Tensor, index: torch.Tensor, wrong: torch.Tensor) -> str:
        """Name the rank whose values a wrong result has; "" if it has those of no single rank."""
        places = wrong.nonzero().flatten()
        some, where = as_bits(got[places]), index[places]
        for member, block in zip(self.members, self.blocks, strict=True):
            if torch.equal(some, as_bits(block[where])):
                return f"these are the values of rank {member} alone"
        return ""

    def _differences(self, whole: torch.Tensor, should: torch.Tensor) -> Iterator[WrongResult]:
        clean = whole.clone()
        for number, piece in enumerate(self.pieces):
            got, right = (self.memory.view(one, number) for one in (whole, should))
            got, right = got.reshape(-1).contiguous(), right.reshape(-1).contiguous()
            wrong = differing(got, right)
            if bool(wrong.any()):
                if number in self.taken or piece.after is not None:
                    label = f"output {self.taken.index(number)}" if len(self.taken) > 1 and number in self.taken else ""
                else:
                    label = "the input was changed"
                yield WrongResult.of(self.call, got, right, wrong, self._origin(got, wrong), label)
            _bytes(self.memory.view(clean, number)).copy_(_bytes(self.memory.view(should, number)))
        outside = as_bits(clean) != as_bits(should)
        if bool(outside.any()):
            beyond = int(outside.sum())
            yield WrongResult(
                self.call, f"{beyond} elements of memory before, between or behind its tensors were changed"
            )

    def _origin(self, got: torch.Tensor, wrong: torch.Tensor) -> str:
        places = wrong.nonzero().flatten()
        if self.reduces or len(places) < 4:
            return ""
        bits = as_bits(got[places])
        for member, block in zip(self.members, self.blocks, strict=True):
            for part in range(self.count):
                if torch.equal(bits, as_bits(block[(places + part * STEP) % len(block)])):
                    return f"these are values of rank {member}" + (
                        f", its part for rank {self.members[part]}" if part else ""
                    )
        return ""

    def shared(self) -> Iterator[tuple[str, str]]:
        """Yield the call and the checksum of a result that all members must share bit for bit."""
        if self.call.function == "all_reduce" and not self.refused:
            yield f"{self.call}", digest_of(self.memory.view(self._after, 0))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View booleans as bytes, because copies of booleans turn other bytes into 0 or 1."""
    return tensor.view(torch.uint8) if tensor.dtype is torch.bool else tensor
