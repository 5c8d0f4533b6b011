"""Mistakes that lie in what ranks decide, start from, or draw."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from mgpu_check.gates.evidence import Evidence
from mgpu_check.gates.results import Result
from mgpu_check.mistakes.report import Finding
from mgpu_check.processes.rank_lists import named

__all__ = ["causes"]


def causes(evidence: Evidence) -> Iterator[tuple[float, Finding]]:
    """Likely causes, each with how telling the evidence is, 0 to 100."""
    yield from _started_differently(evidence)
    yield from _decided(evidence)
    yield from _right_on_some(evidence)
    yield from _from_one_rank(evidence)
    yield from _skipped_in_part(evidence)
    yield from _buffers(evidence)
    yield from _drawn(evidence)
    yield from _narrow(evidence)


def _started_differently(evidence: Evidence) -> Iterator[tuple[float, Finding]]:
    """Ranks hold different parameters when they first compute gradients."""
    firsts = [next(iter(trace.of("backward")), None) for trace in evidence.traces]
    held = [event.details["parameters"] for event in firsts if event is not None]
    if len(held) < 2 or len(held) < len(evidence.traces):
        return
    different = [name for name, value in held[0].items() if any(other.get(name) != value for other in held)]
    loads = [len(trace.of("load")) for trace in evidence.traces]
    rank = loads.index(max(loads))
    if not different:
        if len(set(loads)) > 1 and evidence.verdict.split:
            event = evidence.traces[rank].of("load")[0]
            yield (
                88,
                Finding(
                    "restored-on-one-rank", f"{event.name} ({event.site}) ran on rank {rank}, and not on all ranks"
                ),
            )
        return
    if len(set(loads)) > 1:
        event = evidence.traces[rank].of("load")[0]
        yield (
            92,
            Finding(
                "restored-on-one-rank",
                f"{event.name} ({event.site}) ran on rank {rank} and not on all, and {different[0]} differs between ranks at the "
                "first backward",
            ),
        )
        return
    seeds = {rank: event.details["seed"] for rank, event in reversed(list(evidence.events("seed")))}
    told = ""
    if len(set(seeds.values())) > 1:
        told = "; manual_seed was given " + ", ".join(f"{seed} on rank {rank}" for rank, seed in sorted(seeds.items()))
    yield (
        90,
        Finding(
            "different-initialization", f"{different[0]} differs between ranks at the first backward already{told}"
        ),
    )


def _decided(evidence: Evidence) -> Iterator[tuple[float, Finding]]:
    steps = [one.optimizer_steps for one in evidence.seen]
    if len(set(steps)) > 1:
        told = ", ".join(f"rank {rank}: {count}" for rank, count in enumerate(steps))
        yield (
            91,
            Finding("decision-per-rank", f"the optimizer has stepped another number of times on each rank ({told})"),
        )
        return
    rates = [[event.details["rates"] for event in trace.of("step")] for trace in evidence.traces]
    if any(rate != rates[0] for rate in rates):
        metrics = {
            rank: event.details["metric"] for rank, event in evidence.events("schedule") if "metric" in event.details
        }
        schedule = evidence.first("schedule")
        by = ""
        if schedule is not None and len(set(metrics.values())) > 1:
            by = f": {schedule.name} ({schedule.site}) is given each rank's own value"
        yield 91, Finding("decision-per-rank", f"ranks have stepped with different learning rates{by}")
        return
    scheduled = [[event.details.get("metric") for event in trace.of("schedule")] for trace in evidence.traces]
    if any(values != scheduled[0] for values in scheduled):
        event = evidence.first("schedule")
        assert event is not None
        yield 85, Finding("decision-per-rank", f"{event.name} ({event.site}) is given another value on each rank")
    if steps and steps[0] != evidence.expected.single.optimizer_steps and evidence.expected.single.optimizer_steps:
        yield (
            64,
            Finding(
                "decision-per-rank",
                f"the optimizer has stepped {steps[0]} times on {evidence.size} ranks, {evidence.expected.single.optimizer_steps} "
                "times on one device",
            ),
        )


def _right_on_some(evidence: Evidence) -> Iterator[tuple[float, Finding]]:
    for name in evidence.verdict.split:
        wrong = evidence.verdict.wrong.get(name, [])
        right = [rank for rank in range(evidence.size) if rank not in wrong]
        if right and wrong and len(right) == 1:
            yield 70, Finding("value-of-one-rank", f"{name} is right on rank {right[0]}, and not on the other ranks")
            return


def _from_one_rank(evidence: Evidence) -> Iterator[tuple[float, Finding]]:
    """Ranks agree on something wrong that they have from a broadcast."""
    sent = [event for _, event in evidence.events("collective") if event.name == "broadcast"]
    wrong = [name for name in evidence.wrong() if name not in evidence.verdict.split]
    if sent and wrong:
        source = sent[0].details.get("src", 0)
        yield (
            44 if source else 34,
            Finding(
                "value-of-one-rank",
                f"broadcast ({sent[0].site}) sends what rank {source} has, and {wrong[0]} is the same on all ranks, but not that "
                "of one device",
            ),
        )


def _skipped_in_part(evidence: Evidence) -> Iterator[tuple[float, Finding]]:
    """One device has left all parameters as they were, ranks only some; or the other way round."""
    initial = evidence.expected.single.initial
    moved: dict[Result, bool] = {}
    should: dict[Result, bool] = {}
    for name, before in initial.items():
        returned = Result("returned", name)
        for label in (Result("params", name), returned):
            got, right = evidence.seen[0].values.get(label), evidence.expected.single.values.get(label)
            if got is not None and right is not None and got.shape == before.shape == right.shape:
                if label != returned and returned in evidence.seen[0].values:
                    continue
                moved[label] = not torch.equal(got.to(before.dtype), before)
                should[label] = not torch.equal(right.to(before.dtype), before)
    odd = [name for name in moved if moved[name] != should[name]]
    if odd and odd[0] in evidence.verdict.split:
        before = initial[odd[0].of]
        updated = [
            rank
            for rank, one in enumerate(evidence.seen)
            if odd[0] in one.values and not torch.equal(one.values[odd[0]].to(before.dtype), before)
        ]
        if 0 < len(updated) < evidence.size:
            yield (
                86,
                Finding(
                    "value-of-one-rank",
                    f"{odd[0]} was updated on {named(updated)} only, and nothing gives it to the others",
                ),
            )
            return
    if odd and len(set(should.values())) == 1 and len(set(moved.values())) == 2:
        all_stay = not next(iter(should.values()))
        yield (
            86,
            Finding(
                "decision-per-rank",
                f"{odd[0]} was {'updated' if all_stay else 'left as it was'} and other parameters were not, where one device "
                f"{'skips the step' if all_stay else 'updates all'}: its owner has decided for itself",
            ),
        )


def _buffers(evidence: Evidence) -> Iterator[tuple[float, Finding]]:
    drifted = [name for name in evidence.verdict.split if name.kind == "buffers"]
    others = [name for name in evidence.wrong() if name.kind != "buffers"]
    if drifted:
        yield (75 if not others else 35), Finding("buffers-drift", f"{drifted[0]} differs between ranks")


def _drawn(evidence: Evidence) -> Iterator[tuple[float, Finding]]:
    drawn = [trace.drawn for trace in evidence.traces]
    if any(shapes != evidence.expected.drawn for shapes in drawn):
        yield (
            86,
            Finding(
                "random-numbers-per-rank",
                "each rank draws random numbers for its own part of the batch, as dropout and noise do: nothing else can be "
                "told from that",
            ),
        )
    elif evidence.expected.single.draws or evidence.seen[0].draws:
        yield (
            42,
            Finding(
                "random-numbers-per-rank",
                "the step draws random numbers, and each rank draws those of its own part of the batch",
            ),
        )


def _narrow(evidence: Evidence) -> Iterator[tuple[float, Finding]]:
    for _, event in evidence.events("collective"):
        narrow = [
            tensor["dtype"] for tensor in event.details.get("tensors", []) if tensor["dtype"] in ("float16", "bfloat16")
        ]
        if narrow:
            yield (
                38,
                Finding("low-precision-arithmetic", f"{event.name} ({event.site}) communicates {narrow[0]} tensors"),
            )
            return
