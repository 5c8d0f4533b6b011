"""Mistakes in which samples a rank takes, and what it makes of them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from mgpu_check.gates.evidence import Evidence
from mgpu_check.gates.results import Result
from mgpu_check.mistakes.report import Finding

__all__ = ["causes"]


def causes(evidence: Evidence) -> Iterator[tuple[float, Finding]]:
    """Likely causes, each with how telling the evidence is, 0 to 100."""
    yield from _epochs(evidence)
    yield from _split(evidence)
    yield from _irregular(evidence)
    yield from _not_split(evidence)
    yield from _padding(evidence)
    yield from _other_batch(evidence)
    yield from _order(evidence)


def _epochs(evidence: Evidence) -> Iterator[tuple[float, Finding]]:
    iterated = [event for rank, event in evidence.events("iterate") if rank == 0 and event.details["shuffle"]]
    if len(iterated) > 1 and len({event.details["epoch"] for event in iterated}) == 1:
        yield (
            91,
            Finding(
                "epochs-not-reshuffled",
                f"a DistributedSampler that shuffles was gone through {len(iterated)} times ({iterated[0].site}), each time as "
                f"epoch {iterated[0].details['epoch']}",
            ),
        )


def _split(evidence: Evidence) -> Iterator[tuple[float, Finding]]:
    shared = [event for _, event in evidence.events("split") if not event.details["own_generator"]]
    seeds = {rank: event.details["seed"] for rank, event in evidence.events("seed")}
    if shared and len(set(seeds.values())) > 1:
        told = ", ".join(f"rank {rank}: {seed}" for rank, seed in sorted(seeds.items()))
        yield (
            91,
            Finding(
                "split-differs-between-ranks",
                f"random_split ({shared[0].site}) draws from the global generator, which ranks have seeded differently ({told})",
            ),
        )


def _irregular(evidence: Evidence) -> Iterator[tuple[float, Finding]]:
    """Ranks order, or divide, the samples by seeds of their own."""
    seeds = {rank: event.details["seed"] for rank, event in evidence.events("sampler")}
    if len(set(seeds.values())) > 1:
        event = evidence.first("sampler")
        assert event is not None
        told = ", ".join(f"rank {rank}: {seed}" for rank, seed in sorted(seeds.items()))
        yield (
            90,
            Finding(
                "split-differs-between-ranks",
                f"DistributedSampler ({event.site}) has another seed on each rank ({told})",
            ),
        )
        return
    for name in evidence.wrong("returned"):
        right, got = evidence.expected.single.values.get(name), evidence.seen[0].values.get(name)
        if right is None or got is None or right.shape != got.shape or right.dim() != 1 or len(right) < 2:
            continue
        if bool((right == right[0]).all()) and bool((got > right).any()) and bool((got < right).any()):
            yield (
                76,
                Finding(
                    "split-differs-between-ranks", f"{name}: some samples are on several ranks, and others on none"
                ),
            )
            return


def _not_split(evidence: Evidence) -> Iterator[tuple[float, Finding]]:
    """Counts that are as many times too large as there are ranks, and a loader that knows nothing of ranks."""
    loader = evidence.first("loader")
    sampled = evidence.first("sampler")
    size = evidence.size
    counts = [name for name in evidence.wrong("returned") if _is_multiple(evidence, name, size)]
    if loader is not None and sampled is None and counts:
        what = "an IterableDataset" if loader.details["streams"] else f"a {loader.details['sampler']}"
        yield (
            89,
            Finding(
                "dataset-not-split",
                f"{counts[0]} is {size} times that of one device, and the DataLoader ({loader.site}) has {what}, which does "
                "not know of ranks",
            ),
        )
    elif counts and all(not evidence.seen[0].values[name].is_floating_point() for name in counts):
        yield 77.5, Finding("dataset-not-split", f"{counts[0]} counts {size} times as many as one device does")


def _is_multiple(evidence: Evidence, name: Result, size: int) -> bool:
    right, got = evidence.expected.single.values.get(name), evidence.seen[0].values.get(name)
    if right is None or got is None or right.shape != got.shape or not bool((right != 0).any()):
        return False
    return bool(torch.allclose(got.double(), size * right.double(), rtol=1e-5))


def _padding(evidence: Evidence) -> Iterator[tuple[float, Finding]]:
    for _, event in evidence.events("sampler"):
        samples, replicas = event.details["samples"], event.details["replicas"]
        if samples % replicas and not event.details["drop_last"]:
            extra = -samples % replicas
            yield (
                87 if evidence.wrong("returned") and not evidence.wrong("grads") else 78,
                Finding(
                    "padding-counted",
                    f"DistributedSampler ({event.site}) makes {samples + extra} of {samples} samples, so that all of "
                    f"{replicas} ranks get as many: {extra} {'is' if extra == 1 else 'are'} counted twice",
                ),
            )
            return
        if samples % replicas and event.details["drop_last"]:
            yield (
                86,
                Finding(
                    "samples-missed",
                    f"DistributedSampler ({event.site}) with drop_last drops {samples % replicas} of {samples} samples",
                ),
            )
            return
    samples = evidence.scenario.samples
    for name in evidence.wrong("returned"):
        right, got = evidence.expected.single.values.get(name), evidence.seen[0].values.get(name)
        if right is not None and got is not None and right.dim() and got.dim() and right.shape[1:] == got.shape[1:]:
            if len(got) > len(right) == samples:
                yield 80, Finding("padding-counted", f"{name} has {len(got)} rows for {samples} samples")
            elif len(got) < len(right) == samples:
                yield 79, Finding("samples-missed", f"{name} has {len(got)} rows for {samples} samples")


def _other_batch(evidence: Evidence) -> Iterator[tuple[float, Finding]]:
    """The result is that of one device, for another batch."""
    size, samples = evidence.size, evidence.scenario.samples
    for alternative in evidence.hypotheses.alternatives:
        if not evidence.is_alternative(alternative):
            continue
        name = evidence.names[0]
        if alternative.kind == "truncated":
            yield (
                86,
                Finding(
                    "samples-missed",
                    f"{name} is what one device gives without the last {samples % size} of {samples} samples",
                ),
            )
        elif alternative.kind == "padded":
            yield (
                86,
                Finding(
                    "padding-counted",
                    f"{name} is what one device gives when the first {-samples % size} of {samples} samples are taken twice",
                ),
            )
        elif alternative.kind == "first part of a tensor":
            if any(True for _ in evidence.events("collective", "wrap")):
                continue  # what DataParallel does not scatter; here are ranks
            yield (
                85,
                Finding(
                    "not-scattered",
                    f"{name} is what one device gives when every shard has the first shard's values of tensor "
                    f"{alternative.place} of the batch",
                ),
            )
        else:
            yield (
                70,
                Finding(
                    "value-of-one-rank", f"{name} is what one device gives for rank 0's samples alone, on all ranks"
                ),
            )


def _order(evidence: Evidence) -> Iterator[tuple[float, Finding]]:
    for name in evidence.wrong("returned"):
        right = evidence.expected.exact.get(name)
        if right is None:
            right = evidence.expected.single.values[name].double()
        got = evidence.seen[evidence.verdict.wrong[name][0]].values.get(name)
        if got is None or right.shape != got.shape or not right.dim() or len(right) < 2:
            continue
        if _same_rows(got.double(), right):
            yield 84, Finding("gathered-in-other-order", f"{name} has the rows that one device has, in another order")
            return


def _same_rows(got: torch.Tensor, right: torch.Tensor) -> bool:
    rows, others = got.reshape(len(got), -1), right.reshape(len(right), -1)
    distance = (rows[:, None] - others[None]).abs().amax(-1)
    slack = 1e-5 * float(others.abs().max())
    nearest = distance.argmin(1)
    places = nearest.tolist()
    return bool((distance.amin(1) <= slack).all()) and sorted(places) == list(range(len(rows))) != places
