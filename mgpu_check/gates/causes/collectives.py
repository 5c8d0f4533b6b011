"""Mistakes in calls of collectives, which the calls themselves show."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from mgpu_check.gates.events import Event, Trace
from mgpu_check.gates.evidence import Evidence
from mgpu_check.gates.results import Result
from mgpu_check.mistakes.report import Finding
from mgpu_check.processes.rank_lists import grouped, named

__all__ = ["causes"]

_FILLING = ("all_gather", "gather", "scatter", "all_to_all", "reduce_scatter")


def causes(evidence: Evidence) -> Iterator[tuple[float, Finding]]:
    """Likely causes, each with how telling the evidence is, 0 to 100."""
    for rank, event in evidence.events("collective"):
        yield from _of_one(rank, event)
    yield from _uneven(evidence)
    yield from _to_one_rank(evidence)
    yield from _of_groups(evidence)
    yield from _overflow(evidence)
    yield from _discarded(evidence)
    yield from _cut(evidence)
    yield from _late(evidence)
    yield from _other_operation(evidence)


def _of_one(rank: int, event: Event) -> Iterator[tuple[float, Finding]]:
    where = f"{event.name} ({event.site})"
    if event.details.get("asynchronous") and not event.details.get("waited"):
        yield 95, Finding("not-waited", f"{where} was called with async_op=True, and nothing has waited for it")
    elif event.details.get("touched"):
        yield 95, Finding("not-waited", f"the tensor given to {where} with async_op=True was written to before wait()")
    if event.details.get("aliased"):
        count = len(event.details["list"])
        yield 94, Finding("aliased-gather-list", f"the {count} tensors of the list given to {where} share memory")
    for tensor in event.tensors:
        if tensor["gaps"]:
            of = tensor["result"] or f"{tensor['dtype']}{list(tensor['shape'])}"
            yield 93, Finding("strided-view", f"{where} was given a view with gaps in memory, of {of}")


def _uneven(evidence: Evidence) -> Iterator[tuple[float, Finding]]:
    """Tensors of other shapes on other ranks, in the same call."""
    calls = [trace.of("collective") for trace in evidence.traces]
    for same in zip(*calls, strict=False):
        # The lists that a collective fills or deals out are those of one rank only.
        shapes = [[tensor["shape"] for tensor in event.details.get("tensors", [])] for event in same]
        name = same[0].name
        if any(shape != shapes[0] for shape in shapes) and name.startswith(_FILLING) and "object" not in name:
            told = ", ".join(str(list(shape[0])) if shape else "none" for shape in shapes)
            yield (
                92,
                Finding("uneven-gather", f"{name} ({same[0].site}) was given tensors of shapes {told}, rank by rank"),
            )
            return


def _to_one_rank(evidence: Evidence) -> Iterator[tuple[float, Finding]]:
    if not evidence.verdict.split:
        return
    for _, event in evidence.events("collective"):
        if event.name not in ("reduce", "gather", "gather_object") or "dst" not in event.details:
            continue
        right = event.details["dst"]
        for name in evidence.verdict.split:
            if right not in evidence.verdict.wrong.get(name, []):
                yield (
                    83,
                    Finding(
                        "value-of-one-rank",
                        f"{event.name} ({event.site}) delivers to rank {right} only: {name} is right there, and not elsewhere",
                    ),
                )
                return


def _of_groups(evidence: Evidence) -> Iterator[tuple[float, Finding]]:
    sizes = {len(event.details["group"]) for _, event in evidence.events("collective") if "group" in event.details}
    yield from _parted_by_group(evidence)
    made = evidence.first("group")
    if made is None or not sizes:
        return
    factor = evidence.factor()
    if factor is None:
        factors = {name: evidence.factor([name]) for name in evidence.names}
    else:
        factors = dict.fromkeys(evidence.names, factor)
    possible = {size for size in range(1, evidence.size) if evidence.size % size == 0}
    for name, ratio in factors.items():
        for size in possible if ratio else ():
            replicas = evidence.size / size
            for power, root in ((1.0, ""), (0.5, "the root of ")):
                for exponent in (power, -power):
                    if ratio and abs(ratio - replicas**exponent) < 2e-3 * replicas**exponent:
                        inverse = "1 / " if exponent < 0 else ""
                        yield (
                            82,
                            Finding(
                                "wrong-process-group",
                                f"groups were made ({made.site}), collectives ran over {_sizes(sizes)} ranks, and {name} is "
                                f"{ratio:.4g} times what it should be: {inverse}{root}{replicas:g}, the number of groups of {size}",
                            ),
                        )
                        return


def _parted_by_group(evidence: Evidence) -> Iterator[tuple[float, Finding]]:
    """Ranks agree with each other in groups of one size, and not with those of another group."""
    split = evidence.verdict.split
    if not split or evidence.size < 4:
        return
    parts = [grouped((one.digests.get(name), rank) for rank, one in enumerate(evidence.seen)) for name in split]
    groups = [ranks for _, ranks in parts[0]]
    sizes = {len(ranks) for ranks in groups}
    same = all([ranks for _, ranks in part] == groups for part in parts)
    # A metric of few values is the same on some ranks by chance; not on the same ones in other cases.
    always = all(
        len({other.seen[rank].digests.get(name) for rank in ranks}) == 1
        for other in evidence.further
        for name in split
        for ranks in groups
    )
    if len(sizes) == 1 and 1 < min(sizes) < evidence.size and same and always:
        yield (
            81,
            Finding(
                "wrong-process-group",
                f"{split[0]} is the same within each of {' and '.join(named(ranks) for ranks in groups)}, and another in the "
                "others",
            ),
        )


def _sizes(sizes: set[int]) -> str:
    return " and ".join(str(size) for size in sorted(sizes))


def _overflow(evidence: Evidence) -> Iterator[tuple[float, Finding]]:
    broken = evidence.broken
    for _, event in evidence.events("collective") if broken else ():
        narrow = [tensor["dtype"] for tensor in event.tensors if tensor["dtype"] in ("float16", "bfloat16")]
        if narrow and event.details.get("op", "sum") == "sum":
            yield (
                90,
                Finding(
                    "low-precision-overflow",
                    f"{event.name} ({event.site}) adds up {narrow[0]} tensors, and {broken[0]} is not finite on "
                    f"{evidence.size} ranks, where it is on one device",
                ),
            )
            return
    for name in evidence.wrong("returned"):
        right, got = evidence.expected.single.values.get(name), evidence.seen[0].values.get(name)
        if right is None or got is None or right.shape != got.shape or right.dtype.is_floating_point:
            continue
        for bits in (8, 16, 32):
            off = got.long() - right.long()
            if bool((off != 0).any()) and bool((off % 2**bits == 0).all()):
                yield (
                    90,
                    Finding(
                        "low-precision-overflow",
                        f"{name} is off by a multiple of 2^{bits}, as an int{bits} that overflows",
                    ),
                )
                return
    if broken and evidence.expected.narrow:
        yield (
            40,
            Finding(
                "low-precision-overflow",
                f"the step computes in {', '.join(evidence.expected.narrow)}, and {broken[0]} is not finite",
            ),
        )


def _discarded(evidence: Evidence) -> Iterator[tuple[float, Finding]]:
    """A rank has kept its own part although there was a collective on just as many numbers."""
    own = [
        name
        for name in evidence.names
        if name in evidence.verdict.split and name.kind != "buffers" and _is_own(evidence, name)
    ]
    if not own or not evidence.traces:
        return
    sizes = {tuple(evidence.expected.exact[name].shape) for name in own}
    total = sum(evidence.expected.exact[name].numel() for name in own)
    for event in evidence.traces[0].of("collective"):
        for tensor in event.tensors if event.name == "all_reduce" else ():
            operand: Result | None = tensor["result"]
            if (operand is not None and operand.of in {name.of for name in own}) or not tensor["shape"]:
                continue
            if tensor["shape"] in sizes or math.prod(tensor["shape"]) == total:
                yield (
                    88,
                    Finding(
                        "result-discarded",
                        f"{event.name} ({event.site}) ran on {tensor['dtype']}{list(tensor['shape'])}, in other memory than "
                        f"{own[0]}, which is still each rank's own",
                    ),
                )
                return


def _is_own(evidence: Evidence, name: Result) -> bool:
    return any(
        evidence.is_combined(division, "own", factor, [name])
        for division in evidence.hypotheses.divisions
        for factor in (1.0, 1.0 / evidence.size)
    )


def _cut(evidence: Evidence) -> Iterator[tuple[float, Finding]]:
    """A collective that autograd does not see, on what gradients were to flow through."""
    if not evidence.wrong("grads") and not evidence.gradient_like:
        return
    for event in (event for trace in evidence.traces for event in _before_backward(trace)):
        if event.name == "sync_params_and_buffers":
            continue
        if any(tensor.get("differentiable") and not tensor["result"] for tensor in event.tensors):
            yield (
                73,
                Finding(
                    "gradient-cut-by-collective",
                    f"{event.name} ({event.site}) was given a tensor that requires gradients, and what it gives has none",
                ),
            )
            return


def _before_backward(trace: Trace) -> list[Event]:
    """Collectives of the first forward pass: all, where nothing tells when it ends."""
    forward = itertools.takewhile(lambda event: event.kind != "backward", trace.events)
    return [event for event in forward if event.kind == "collective"]


def _late(evidence: Evidence) -> Iterator[tuple[float, Finding]]:
    """Not finite, as the simulated node makes what is read before the wait."""
    broken = evidence.broken
    waited = [event for _, event in evidence.events("collective") if event.details.get("asynchronous")]
    unsteady = [name for name, relations in evidence.verdict.relations.items() if relations.get("repeats") is False]
    if waited and (broken or unsteady):
        yield (
            87,
            Finding(
                "not-waited",
                f"{waited[0].name} ({waited[0].site}) was called with async_op=True, and {(broken or unsteady)[0]} is "
                + ("not finite, as what is read before wait()" if broken else "another in a second run"),
            ),
        )


def _other_operation(evidence: Evidence) -> Iterator[tuple[float, Finding]]:
    for division in evidence.hypotheses.divisions:
        for how in ("max", "min", "root of sum of squares"):
            if evidence.is_combined(division, how):
                yield (
                    62,
                    Finding(
                        "wrong-reduction",
                        f"{evidence.names[0]} is the {how} of what ranks have for {division.name}",
                    ),
                )
                return
    reduced = [
        event for _, event in evidence.events("collective") if event.details.get("op") in ("max", "min", "product")
    ]
    if reduced:
        event = reduced[0]
        yield 30, Finding("wrong-reduction", f"{event.name} ({event.site}) combines by {event.details['op']}")
