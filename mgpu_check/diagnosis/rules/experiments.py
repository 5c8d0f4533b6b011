"""Detect mistakes in a single call: a run with that call changed gives the right results."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mgpu_check.diagnosis.registry import Precedence, mistake, on_tensors
from mgpu_check.diagnosis.report import Finding
from mgpu_check.processes.rank_lists import few, intervals

if TYPE_CHECKING:
    from mgpu_check.diagnosis.tensors import Tensors

mistake(
    "loss-term-factor",
    "one term of the loss counts once for each rank, or one over the number of ranks, and the others do not",
    "scale all terms alike: if gradients are summed over ranks, divide an auxiliary loss or a penalty by the "
    "number of ranks, too; if they are averaged, multiply each term that is divided by a global count",
    of_ranks=True,
)
mistake(
    "positions-restart",
    "positions start again on each rank's part of a sequence",
    "add the offset of the rank's part: torch.arange(length) + index * length",
)


@on_tensors(Precedence.EXPERIMENTS + 10)
def right_in_another_group(tensors: Tensors) -> Finding | None:
    """Detect a collective that runs over the wrong ranks."""
    change = tensors.right_with("group")
    if change is None:
        return None
    told = f"{change.where} runs over {_groups(change.was)}; over {_groups(change.now)} the step is right"
    return Finding("wrong-process-group", told, site=change.site)


@on_tensors(Precedence.AMBIGUOUS + 170)
def right_by_the_size_of_a_group(tensors: Tensors) -> Finding | None:
    """Detect a result of a collective that is off by the size of the group."""
    change = tensors.right_with("divide", "multiply")
    if change is None:
        return None
    how = "divided" if change.kind == "divide" else "multiplied"
    told = f"with the result of {change.where} {how} by {change.size}, the size of its group, the step is right"
    return Finding("world-size-factor", told, site=change.site)


@on_tensors(Precedence.EXPERIMENTS + 50)
def right_by_another_operation(tensors: Tensors) -> Finding | None:
    """Detect a reduction with the wrong operation."""
    change = tensors.right_with("op")
    if change is None:
        return None
    told = f"{change.where} with {str(change.value).upper()} makes the step right"
    return Finding("wrong-reduction", told, site=change.site)


@on_tensors(Precedence.EXPERIMENTS + 60)
def right_without_a_collective(tensors: Tensors) -> Finding | None:
    """Detect a superfluous reduction: of a value that was reduced already, or that each rank needs unreduced."""
    change = tensors.right_with("skip", "new")
    if change is None:
        return None
    if change.kind == "new":
        told = (
            f"{change.where} reduces its earlier results again; with only new values reduced each time, the step is "
            "right"
        )
        return Finding("reduced-again", told, site=change.site)
    # If all ranks hold the same value, dividing the sum has the same effect as skipping it, and was tried first.
    told = f"without {change.where} the step is right: each rank needs its own value, not the combined one"
    return Finding("wrong-reduction", told, site=change.site)


@on_tensors(Precedence.EXPERIMENTS + 30)
def right_in_another_order(tensors: Tensors) -> Finding | None:
    """Detect gathered rows that are in the wrong order."""
    change = tensors.right_with("reorder")
    if change is None:
        return None
    told = (
        f"{change.where} returns the rows rank by rank; with the rows of each rank in {change.value} pieces, and the "
        "first pieces of all ranks before the next ones, the step is right"
    )
    return Finding("gathered-in-other-order", told, site=change.site)


@on_tensors(Precedence.EXPERIMENTS + 40)
def right_with_a_term_scaled(tensors: Tensors) -> Finding | None:
    """Detect one term of the loss that is off by the size of a group; the other terms are right."""
    change = tensors.right_with("term")
    if change is None:
        return None
    term, times = change.value
    what = f"the term that {term.line or term.backward} computes" if term.paths[0] else f"the loss of {term.backward}"
    how = "multiplied" if times > 1 else "divided"
    of = "the number of ranks" if change.size == tensors.size else "the size of a group"
    depends = f"; it affects the gradients of {few(list(term.parameters))}" if term.parameters else ""
    told = f"with {what} {how} by {change.size}, {of}, and nothing else, gradients are right{depends}"
    return Finding("loss-term-factor", told, site=(term.paths[0] and term.line) or term.backward)


@on_tensors(Precedence.EXPERIMENTS + 20)
def right_where_positions_go_on(tensors: Tensors) -> Finding | None:
    """Detect positions that start at 0 on each rank."""
    change = tensors.right_with("shift")
    if change is None:
        return None
    begins = "counts" if change.name == "arange" else "takes the rows of a parameter"
    told = (
        f"{change.where} {begins} from 0 on each rank; if it continues over the {change.size} parts, the step is right"
    )
    return Finding("positions-restart", told, site=change.site)


def _groups(groups: tuple[tuple[int, ...], ...]) -> str:
    return few([f"ranks {intervals(ranks)}" for ranks in groups], 2)
