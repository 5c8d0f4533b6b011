"""Detect tensors whose memory a collective cannot use: shared, with gaps, or in another order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mgpu_check.diagnosis.registry import Precedence, mistake, on_tensors
from mgpu_check.diagnosis.report import Finding

if TYPE_CHECKING:
    from mgpu_check.diagnosis.tensors import Tensors

mistake(
    "aliased-gather-list",
    "the list that a collective fills holds one tensor several times",
    "allocate each entry: [torch.empty_like(x) for _ in range(world_size)]",
)
mistake(
    "strided-view", "a collective ran on a view with gaps", "communicate tensor.contiguous(), and copy the result back"
)
mistake(
    "memory-formats-differ",
    "ranks hand a collective tensors that lie in memory in another order of dimensions",
    "give all ranks one memory format, and communicate tensor.contiguous(): a collective combines elements by "
    "their places in memory, not by their indices",
)


@on_tensors(Precedence.UNDEFINED + 20)
def aliased_list(tensors: Tensors) -> Finding | None:
    """Detect a collective that fills a list whose tensors share memory."""
    for _, event in tensors.events("collective"):
        if event.details.get("aliased"):
            count = len(event.details["list"])
            told = f"the {count} tensors of the list given to {event.where} share memory"
            return Finding("aliased-gather-list", told, site=event.site)
    return None


@on_tensors(Precedence.UNDEFINED + 30)
def strided_view(tensors: Tensors) -> Finding | None:
    """Detect a collective on a view with gaps in memory."""
    for _, event in tensors.events("collective"):
        for tensor in event.tensors:
            if tensor["gaps"]:
                of = tensor["result"] or f"{tensor['dtype']}{list(tensor['shape'])}"
                told = f"{event.where} was given a view with gaps in memory, of {of}"
                return Finding("strided-view", told, site=event.site)
    return None


@on_tensors(Precedence.UNDEFINED + 50)
def other_layouts(tensors: Tensors) -> Finding | None:
    """Detect a collective whose tensors have other memory formats on some ranks, or in the list that it fills."""
    calls = [trace.of("collective") for trace in tensors.traces]
    for same in zip(*calls, strict=False):
        for given in zip(*(event.details.get("tensors", []) for event in same), strict=False):
            unlike = len({one["layout"] for one in given}) > 1 and len({one["shape"] for one in given}) == 1
            if unlike and len({event.name for event in same}) == 1:
                told = ", ".join(_in_memory(one["layout"], rank) for rank, one in enumerate(given))
                of = given[0]["result"] or f"{given[0]['dtype']}{list(given[0]['shape'])}"
                return Finding(
                    "memory-formats-differ",
                    f"{same[0].where} was given {of} with different memory orders of its dimensions on the ranks: "
                    f"{told}",
                    site=same[0].site,
                )
    for _, event in tensors.events("collective"):
        if event.details.get("arrived"):
            continue  # the backend copies element by element, so memory formats may differ
        parts, own = event.details.get("list", []), event.details.get("tensors", [])
        for one in own[:1]:
            odd = next(
                (part for part in parts if part["shape"] == one["shape"] and part["layout"] != one["layout"]), None
            )
            if odd is not None:
                return Finding(
                    "memory-formats-differ",
                    f"{event.where} was given {one['dtype']}{list(one['shape'])} with the dimensions "
                    f"{_order(one['layout'])} from the outermost in memory to the innermost, and a list of tensors "
                    f"with {_order(odd['layout'])}",
                    site=event.site,
                )
    return None


def _in_memory(layout: Sequence[int], rank: int) -> str:
    return f"{_order(layout)} on rank {rank}"


def _order(layout: Sequence[int]) -> str:
    return ">".join(map(str, layout)) or "any"


@on_tensors(Precedence.AMBIGUOUS + 140)
def parameters_of_other_layouts(tensors: Tensors) -> Finding | None:
    """Detect parameters whose memory formats differ between ranks, if the step communicates at all."""
    firsts = [next(iter(trace.of("backward")), None) for trace in tensors.traces]
    held = [event.details["layouts"] for event in firsts if event is not None and "layouts" in event.details]
    if len(held) < max(2, len(firsts)) or tensors.first("collective", "wrap") is None:
        return None
    for name, order in held[0].items():
        orders = [one[name] for one in held if name in one]  # a stage of a pipeline has parameters of its own
        if tensors.is_whole(name) and len(orders) == len(held) and any(one != order for one in orders):
            told = ", ".join(_in_memory(one, rank) for rank, one in enumerate(orders))
            return Finding(
                "memory-formats-differ", f"{name} has different memory orders of its dimensions on the ranks: {told}"
            )
    return None
