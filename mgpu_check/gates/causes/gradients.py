"""Mistakes in how gradients, and metrics, of parts are put together."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from mgpu_check.gates.causes.values import same_values
from mgpu_check.gates.evidence import Evidence
from mgpu_check.gates.results import Result
from mgpu_check.mistakes.report import Finding
from mgpu_check.processes.rank_lists import few

__all__ = ["causes"]

_NEAR = 2e-3


def causes(evidence: Evidence) -> Iterator[tuple[float, Finding]]:
    """Likely causes, each with how telling the evidence is, 0 to 100."""
    yield from _clipped(evidence)
    yield from _statistics(evidence)
    yield from _combined(evidence)
    yield from _not_synchronized(evidence)
    yield from _off_by_a_factor(evidence)
    yield from _added_on_every_rank(evidence)
    yield from _limited(evidence)
    yield from _uneven_only(evidence)


def _clipped(evidence: Evidence) -> Iterator[tuple[float, Finding]]:
    """Clipping, and after it a collective on a gradient, with no new backward between them."""
    if not evidence.traces or not evidence.names:
        return
    clip = None
    for event in evidence.traces[0].events:
        if event.kind == "clip":
            clip = event
        elif event.kind in ("backward", "step"):
            clip = None
        elif event.kind == "collective" and clip is not None and evidence.gradient_like:
            large = any(len(tensor["shape"]) and "value" not in tensor for tensor in event.tensors)
            on_gradient = any(_is_gradient(tensor["result"]) for tensor in event.tensors)
            if event.name.startswith(("all_reduce", "reduce", "all_gather")) and (on_gradient or large):
                yield (
                    84,
                    Finding(
                        "clipped-before-synchronization",
                        f"{clip.name} ({clip.site}) runs before {event.name} of the gradients ({event.site})",
                    ),
                )
                return


def _is_gradient(operand: Result | None) -> bool:
    return operand is not None and operand.kind == "grads"


def _statistics(evidence: Evidence) -> Iterator[tuple[float, Finding]]:
    modules = evidence.seen[0].normalized
    if not modules or evidence.shardwise:
        return
    of_shards = any(evidence.is_combined(division, "mean") for division in evidence.hypotheses.divisions)
    yield (
        83 if of_shards else 66,
        Finding(
            "batch-statistics-per-rank",
            f"{modules[0]} is a BatchNorm in training mode: it normalizes each rank's samples by their own mean and variance"
            + (", and the gradients are the mean of those of the shards" if of_shards else ""),
        ),
    )


def _combined(evidence: Evidence) -> Iterator[tuple[float, Finding]]:
    """The plain mean over ranks of each one's own mean."""
    for division in evidence.hypotheses.divisions:
        for factor, also in (
            (1.0, ""),
            (1.0 / evidence.size, ", divided by the world size"),
            (float(evidence.size), ", times the world size"),
        ):
            if not evidence.is_combined(division, "mean", factor):
                continue
            name = evidence.names[0]
            windows = f", of {division.windows} micro-batches each" if division.windows > 1 else ""
            counts = ", ".join(map(str, division.counts))
            even = len(set(division.counts)) == 1
            if even and evidence.gradient_like and division.along == 0 and evidence.right_when_small:
                yield (
                    84,
                    Finding(
                        "clipped-before-synchronization",
                        f"{name} is the mean over ranks of what each has for its own part, and right for a batch that is scaled "
                        "down: a limit on the norm is applied before the mean",
                    ),
                )
                return
            if even and not evidence.gradient_like and division.along == 0:
                yield (
                    78.5,
                    Finding(
                        "mean-of-means" if evidence.hypotheses.padded else "wrong-reduction",
                        f"{name} is the mean over ranks of each rank's own{also}, which it is not for all samples together",
                    ),
                )
                return
            yield (
                76,
                Finding(
                    "mean-of-means",
                    f"{name} is the plain mean over ranks of what each has for its own part ({division.name}: {counts}{windows}"
                    f"){also}, however much of the parts counts",
                ),
            )
            return


def _not_synchronized(evidence: Evidence) -> Iterator[tuple[float, Finding]]:
    """Each rank holds what it has computed from its own part."""
    local: list[Result] = []
    for division in evidence.hypotheses.divisions:
        for factor in (1.0, 1.0 / evidence.size):
            local = [
                name
                for name in evidence.names
                if name in evidence.verdict.split and evidence.is_combined(division, "own", factor, [name])
            ]
            if local:
                break
        if local:
            break
    if not local:
        local = [
            name
            for name in evidence.verdict.split
            if name.kind == "grads" or (evidence.account and name.kind == "returned")
        ]
        if not local:
            return
        certainty, told = 60.0, f"{few(local)} differ from rank to rank"
    else:
        certainty, told = (
            80.0,
            f"{few(local)} {'is' if len(local) == 1 else 'are'} each rank's own, of {division.name}",
        )
    if all(_is_buffer(evidence, name) for name in local):
        yield certainty, Finding("buffers-drift", told + ": nothing synchronizes them")
        return
    if not evidence.gradient_like:
        yield certainty, Finding("value-of-one-rank", f"{told}: nothing has combined them")
        return
    yield certainty, Finding("gradients-not-synchronized", told + _why_local(evidence, local))


def _is_buffer(evidence: Evidence, name: Result) -> bool:
    """Whether it is a buffer, or a returned copy of one on each rank."""
    if name.kind == "buffers":
        return True
    of_buffers = [other for other in evidence.seen[0].values if other.kind == "buffers"]
    return any(
        all(
            other in one.values and name in one.values and torch.equal(one.values[other], one.values[name])
            for one in evidence.seen
        )
        for other in of_buffers
    )


def _why_local(evidence: Evidence, local: list[Result]) -> str:
    wrap = evidence.first("wrap")
    if wrap is None:
        return "" if any(True for _ in evidence.events("collective")) else "; no collective was called"
    covered = {name for _, event in evidence.events("wrap") for name in event.details["parameters"]}
    outside = [name.of for name in local if name.of not in covered]
    if outside:
        return f"; {few(outside)} {'was' if len(outside) == 1 else 'were'} in no DistributedDataParallel when it was made ({wrap.site})"
    if evidence.first("no_sync") is not None:
        return "; backward ran under no_sync"
    if evidence.first("forward") is None:
        return "; DistributedDataParallel was made, but never called: the module inside was"
    unused = not wrap.details["find_unused"]
    return "; some parameters may be unused, and find_unused_parameters is False" if unused else ""


def _off_by_a_factor(evidence: Evidence) -> Iterator[tuple[float, Finding]]:
    ratio, of = evidence.factor(), ""
    if ratio is None:
        ratio, of = evidence.factor_of_updates(), "the update of "
    if ratio is None:
        return
    windows = max((len(trace.of("backward")) for trace in evidence.traces), default=0) / max(1, evidence.scenario.steps)
    what = of + few(evidence.names)
    verb = "is" if len(evidence.names) == 1 or of else "are"
    size = evidence.size
    elsewhere = evidence.factor_elsewhere()
    # What is the same factor at another world size does not come from the world size.
    fixed = not of and elsewhere is not None and abs(elsewhere[1] - ratio) <= _NEAR * abs(ratio)
    powers = [] if fixed else [(1, f"{size} times"), (-1, f"1/{size} of"), (2, f"{size}² times"), (-2, f"1/{size}² of")]
    of_windows = windows > 1 and any(_is_power(ratio, windows, power) for power in (1, -1))
    if of_windows:
        powers = powers[:2]  # four micro-batches on two ranks are likelier than the same mistake made twice
    of_size = [(power, told) for power, told in powers if _is_power(ratio, size, power)]
    if of_size:
        ((power, told),) = of_size
        twice = " (averaged twice?)" if power < 0 else " (summed, not averaged?)"
        yield (
            79,
            Finding("world-size-factor", f"{what} {verb} {told} what one device gives, on {size} ranks{twice}"),
        )
        return
    if of_windows:
        yield (
            77,
            Finding(
                "accumulation-factor",
                f"{what} {verb} {ratio:.4g} times what one device gives, with {windows:g} backward passes in each step",
            ),
        )
        return
    if not of and not _grows_with_size(evidence, ratio):
        return
    yield 45, Finding("world-size-factor", f"{what} {verb} {ratio:.6g} times what one device gives, on {size} ranks")


def _is_power(ratio: float, base: float, power: int) -> bool:
    return abs(ratio - base**power) <= _NEAR * base**power


def _grows_with_size(evidence: Evidence, ratio: float) -> bool:
    """Whether the factor is one power of the world size, here and at another one."""
    elsewhere = evidence.factor_elsewhere()
    if evidence.size < 2 or elsewhere is None or ratio <= 0 or elsewhere[1] <= 0:
        return False
    there, other = elsewhere
    return abs(math.log(ratio, evidence.size) - math.log(other, there)) <= 1e-2


def _limited(evidence: Evidence) -> Iterator[tuple[float, Finding]]:
    """All ranks agree on what is right for small batches only: the norm of something else than the whole is limited."""
    if evidence.right_when_small and evidence.gradient_like and not evidence.verdict.split and not evidence.wrong_alone:
        yield (
            55,
            Finding(
                "clipped-before-synchronization",
                f"{few(evidence.names)} is right for a batch that is scaled down: a limit is applied to another norm than that "
                "of the whole gradient",
            ),
        )


def _added_on_every_rank(evidence: Evidence) -> Iterator[tuple[float, Finding]]:
    """The result is too large by some parameter (a bias), once for each rank but one."""
    parameters = {
        name: value.double()
        for name, value in evidence.seen[0].initial.items()
        if value.is_floating_point() and value.dim()
    }
    for name in evidence.wrong("returned"):
        exact, got = evidence.expected.exact.get(name), evidence.seen[0].values.get(name)
        if exact is None or got is None or exact.shape != got.shape or not exact.dim():
            continue
        excess = (got.double() - exact) / (evidence.size - 1) if evidence.size > 1 else got.double() * 0
        for owner, value in parameters.items():
            if value.dim() == 1 and exact.shape[-1] == len(value) and same_values(excess, value.expand_as(excess), got):
                yield (
                    82,
                    Finding(
                        "partial-result-added-on-every-rank",
                        f"{name} is too large by {evidence.size - 1} times {owner}: each of {evidence.size} ranks adds it "
                        "before the sum",
                    ),
                )
                return


def _uneven_only(evidence: Evidence) -> Iterator[tuple[float, Finding]]:
    """Ranks agree on something that is wrong only where they have different numbers of samples."""
    samples, size = evidence.scenario.samples, evidence.size
    if not samples or samples % size == 0 or evidence.verdict.split or not evidence.names:
        return
    yield (
        50,
        Finding(
            "mean-of-means",
            f"{samples} samples do not divide by {size} ranks, which agree with each other on {few(evidence.names)}, but not "
            "with one device: as when each part counts as much as any other",
        ),
    )
