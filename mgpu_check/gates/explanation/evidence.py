"""Convert the observations of a gate to evidence for the rules of mistakes: clauses and values by rank."""

from __future__ import annotations

import dataclasses
import itertools
import signal
from collections.abc import Mapping, Sequence
from typing import Any

from mgpu_check.diagnosis.evidence import ByRank, Evidence, Factor, Sampler, Start, UnfinishedCall
from mgpu_check.diagnosis.observations import CallEvent, RankTrace, Result
from mgpu_check.diagnosis.report import Attempts
from mgpu_check.diagnosis.tensors import Tensors
from mgpu_check.engine.failures import Account, different_collectives
from mgpu_check.gates.search.scenarios import Scenario
from mgpu_check.processes.rank_lists import few, grouped, named

_NEAR = 2e-3  # relative tolerance of a factor: no element is further from it


def evidence_of(tensors: Tensors, attempts: Attempts) -> Evidence:
    """Return the evidence for the rules of mistakes: the results and calls of ranks, and facts derived from them."""
    return Evidence(
        tensors.size,
        tensors=tensors,
        start=attempts.piece(_start, tensors, None),
        loads=attempts.piece(_loads, tensors, ByRank()),
        parted=attempts.piece(_parted, tensors, ""),
        decisions=[attempts.piece(read, tensors, ByRank()) for read in (_steps, _rates, _scales, _trained)],
        grounds=[attempts.piece(_metrics, tensors, ByRank())],
        factor=attempts.piece(_factor, tensors, None),
        micro_batches=attempts.piece(_micro_batches, tensors, 1.0),
        normalizes=attempts.piece(_normalizes, tensors, ""),
        draws=attempts.piece(_draws, tensors, ""),
        may_draw=attempts.piece(_may_draw, tensors, ""),
        repeated_epoch=attempts.piece(_repeated_epoch, tensors, ""),
        samplers=attempts.piece(_samplers, tensors, []),
    )


def calls_of(account: Account | None, scenario: Scenario, lines: Sequence[str], *, hung: bool) -> UnfinishedCall:
    """Return the evidence on a call that did not return on all ranks; only its error is known without an account."""
    calls = UnfinishedCall(scenario.world_size, scenario.samples, " ".join(lines), hung=lines[0] if hung else "")
    if account is None:
        return calls
    raised = [(account.raised[ranks[0]].failure.headline, line) for ranks, line in account.told_of_raised()]
    raised += [(line, line) for end in account.raised.values() for line in end.failure.text.splitlines()]
    return dataclasses.replace(
        calls,
        unmatched=account.unmatched or "",
        parted=account.parted,
        parting=different_collectives(account.parted, account.who) or "",
        last=account.last,
        messages={
            rank: call
            for rank, record in account.records.items()
            if (call := record.last) is not None and not call.number and call.unfinished
        },
        some_finished=0 < len(account.finished) < len(account.endings),
        finished=account.finished,
        waiting=account.places.waiting,
        elsewhere=[*account.places.elsewhere],
        raised=raised,
        aborted=[end.last_words for end in account.died.values() if end.exit_code == -signal.SIGABRT],
    )


def _held(tensors: Tensors) -> list[dict[str, float]]:
    """Return the parameters that each rank holds at its first backward; empty if some rank holds none."""
    firsts = [trace.of("backward")[0].details["parameters"] for trace in tensors.traces if trace.of("backward")]
    if not len(firsts) == len(tensors.traces) > 1:
        return []
    # Some rank may have replaced a parameter by a tensor of another shape, such as a shard.
    replaced = {
        name.of
        for run in tensors.seen
        for name, value in run.values.items()
        if name.kind == "params" and name.of in run.initial and run.initial[name.of].shape != value.shape
    }
    return [{name: value for name, value in own.items() if name not in replaced} for own in firsts]


def _parted(tensors: Tensors) -> str:
    return "ranks part ways later" if tensors.relations.split and _held(tensors) else ""


def _samplers(tensors: Tensors) -> list[Sampler]:
    details = [event.details for _, event in tensors.events("sampler")]
    return [Sampler(each["samples"], each["replicas"], each["drop_last"]) for each in details]


def _start(tensors: Tensors) -> Start | None:
    location = "at the first backward"
    different = [name for name in unlike(_held(tensors)) if tensors.is_whole(name)]
    if not different:
        different, location = _different_in_own_model(tensors)
    if not different:
        return None
    seeds = {rank: event.details["seed"] for rank, event in reversed(list(tensors.events("seed", "generator")))}
    seeds |= {rank: run.built[-1].details["seed"] for rank, run in enumerate(tensors.seen) if run.built}
    each = ", ".join(f"{seed} on rank {rank}" for rank, seed in sorted(seeds.items()))
    summary = f"; the seed set last is {each}" if len(set(seeds.values())) > 1 else ""
    briefly = f"{different[0]} differs between ranks {location}"
    return Start(f"{briefly} already{summary}", briefly)


def unlike(by_rank: Sequence[Mapping[str, object]]) -> list[str]:
    """Return what differs between ranks, of what all of them have: stages of a pipeline have their own parameters."""
    common = [name for name in by_rank[0] if all(name in own for own in by_rank)] if by_rank else []
    return [name for name in common if any(own[name] != by_rank[0][name] for own in by_rank)]


def _different_in_own_model(tensors: Tensors) -> tuple[list[str], str]:
    """Return the parameters that differ in a model that the step built itself, and where the model is first called."""
    seeded = {tuple(event.details["seed"] for event in trace.of("seed", "generator")) for trace in tensors.traces}
    copies = any(name.kind == "params" and name in tensors.relations.held for name in tensors.relations.split)
    if tensors.alone is None or len(tensors.traces) < 2 or not (len(seeded) > 1 or copies):
        return [], ""
    for alone, *same in zip(*map(_first_calls, (tensors.alone, *tensors.traces)), strict=False):
        parameters_by_rank = [event.details["parameters"] for event in same]
        matches_one_rank = alone.details["parameters"] in parameters_by_rank
        if not matches_one_rank or len({(event.name, event.site) for event in same}) > 1:
            break
        # Only parameters that every rank holds whole must agree: a part, or another pipeline stage, may differ.
        if different := [name for name in unlike(parameters_by_rank) if tensors.is_whole(name)]:
            return different, f"when {same[0].name} is first called ({same[0].site})"
    return [], ""


def _first_calls(trace: RankTrace) -> list[CallEvent]:
    """Return the calls of models before the first backward pass, or step of an optimizer."""
    before = itertools.takewhile(lambda event: event.kind not in ("backward", "step"), trace.events)
    return [event for event in before if event.kind == "model"]


def _loads(tensors: Tensors) -> ByRank:
    if not _held(tensors):
        return ByRank()
    lines = [[event.where for event in trace.of("load")] for trace in tensors.traces]
    if len(set(map(len, lines))) == 1:
        return ByRank(list(map(len, lines)))
    everywhere = itertools.chain.from_iterable(lines)
    odd = next(line for line in everywhere if len({of_rank.count(line) for of_rank in lines}) > 1)
    counts = [lines_of_rank.count(odd) for lines_of_rank in lines]
    groups = grouped((count, rank) for rank, count in enumerate(counts))
    summary = ", ".join(f"{count} time{'' if count == 1 else 's'} on {named(ranks)}" for count, ranks in groups)
    return ByRank(counts, f"{odd} ran {summary}")


def _steps(tensors: Tensors) -> ByRank:
    steps = [run.optimizer_steps for run in tensors.seen]
    # A rank may have several optimizers; or none, and leave the steps and the gradients to others.
    stepping = [run for run in tensors.seen if run.optimizer_steps or run.keeps_gradients]
    each = {run.optimizer_steps / max(1, run.optimizers) for run in stepping}
    relations = tensors.relations
    if len(each) < 2 or not (relations.split or any(len(ranks) < tensors.size for ranks in relations.wrong.values())):
        return ByRank()  # ranks end alike: one of them may step for all
    summary = ", ".join(f"rank {rank}: {count}" for rank, count in enumerate(steps))
    return ByRank(steps, f"the optimizer has stepped a different number of times on each rank ({summary})")


def _trained(tensors: Tensors) -> ByRank:
    passes = [trace.of("backward") for trace in tensors.traces]
    common = min(map(len, passes), default=0)
    trained = [[event.details.get("trained", ()) for event in events[:common]] for events in passes]
    for number in range(common):
        sets = [set(passes_of_rank[number]) for passes_of_rank in trained]
        existing = [set(events[number].details.get("layouts", sets[0])) for events in passes]
        if odd := sorted((set.union(*sets) - set.intersection(*sets)) & set.intersection(*existing)):
            ranks = [rank for rank, trained_names in enumerate(sets) if odd[0] in trained_names]
            summary = f"{few(odd)} requires gradients on {named(ranks)} only, in backward ({passes[0][number].site})"
            return ByRank(trained, summary)
    return ByRank()


def _rates(tensors: Tensors) -> ByRank:
    rates = [[event.details["rates"] for event in trace.of("step")] for trace in tensors.traces]
    of_its_own = any(run.own for run in tensors.seen) or len({run.groups for run in tensors.seen}) > 1
    settings = grouped((name, own.get("lr")) for run in tensors.seen for name, own in run.settings.items())
    differ = any(len(set(of_ranks)) > 1 for _, of_ranks in settings)
    if (of_its_own and not differ) or len(set(map(len, rates))) > 1:
        return ByRank()  # each rank steps parameters of its own, in groups of its own, or another number of times
    metrics = {rank: event.details["metric"] for rank, event in tensors.events("schedule") if "metric" in event.details}
    schedule, by = tensors.first("schedule"), ""
    if schedule is not None and len(set(metrics.values())) > 1:
        by = f": {schedule.where} is given each rank's own value"
    return ByRank(rates, f"ranks have stepped with different learning rates{by}")


def _scales(tensors: Tensors) -> ByRank:
    location, scales = _first_apart(tensors, "scale", "scale")
    summary = ", ".join(f"{scale:g} on rank {rank}" for rank, scale in enumerate(scales))
    return ByRank(scales, f"{location} has a scale of each rank's own: {summary}")


def _metrics(tensors: Tensors) -> ByRank:
    location, metrics = _first_apart(tensors, "schedule", "metric")
    return ByRank(metrics, f"{location} is given a different value on each rank")


def _first_apart(tensors: Tensors, event_kind: str, detail: str) -> tuple[str, tuple[Any, ...]]:
    """Return the first call that all ranks make with another detail, and the details; ("", ()) if there is none."""
    for same in zip(*(trace.of(event_kind) for trace in tensors.traces), strict=False):
        details = tuple(event.details.get(detail) for event in same)
        if len({event.site for event in same}) == 1 < len(set(details)):
            return same[0].where, details
    return "", ()


def _factor(tensors: Tensors) -> Factor | None:
    ratio, subject = tensors.factor(), ""
    if ratio is None:
        ratio, subject = tensors.factor_of_updates(), "the update of "
    if ratio is None:
        return None
    fixed = not subject and _is_refuted_elsewhere(tensors, ratio)
    verb = "is" if len(tensors.names) == 1 or subject else "are"
    return Factor(ratio, _NEAR, f"{subject}{few(tensors.names)} {verb}", () if fixed else (1, -1, 2, -2))


def _is_refuted_elsewhere(tensors: Tensors, ratio: float) -> bool:
    """Return whether another world size shows that a factor is not the world size, though the two may be equal here."""
    # The factor is the same there, or none fits the results that differ here. If some ranks have no sample there, they
    # add nothing, so the world size may still be the cause; so it may with parts of unlike size, and in later steps. A
    # factor that is the same there may be the size of a group that ranks have made.
    elsewhere, ratio_elsewhere = tensors.elsewhere, tensors.factor_elsewhere()
    if elsewhere is None or 0 < elsewhere.samples < elsewhere.size:
        return False
    if ratio_elsewhere is None:
        return elsewhere.steps == 1 and elsewhere.samples % elsewhere.size == 0
    sizes = {len(group) for trace in tensors.traces for group in trace.groups[1:]}  # the first is the world
    if any(abs(ratio - power) <= _NEAR * power for size in sizes for power in (size, 1 / size)):
        return False
    return abs(ratio_elsewhere - ratio) <= _NEAR * abs(ratio)


def _micro_batches(tensors: Tensors) -> float:
    return max((len(trace.of("backward")) for trace in tensors.traces), default=0) / max(1, tensors.steps)


def _normalizes(tensors: Tensors) -> str:
    modules = tensors.seen[0].normalized
    if not modules or tensors.shardwise:
        return ""
    return (
        f"{modules[0]} is a BatchNorm in training mode: it normalizes each rank's samples by their own mean and "
        "variance"
    )


def _draws(tensors: Tensors) -> str:
    if all(_drawn(trace) == tensors.expected.drawn for trace in tensors.traces):
        return ""
    mismatches = tensors.names or _off(tensors)
    if not mismatches or not set(mismatches) <= set(tensors.by_draws):
        return ""  # something else is wrong, too
    return (
        "each rank draws random numbers for its own part of the batch, as dropout and noise do: the comparison with "
        "one device says nothing more"
    )


def _off(tensors: Tensors) -> list[Result]:
    return list(dict.fromkeys((*tensors.relations.wrong, *tensors.relations.split)))


def _may_draw(tensors: Tensors) -> str:
    """Describe random numbers that change wrong results, unless all ranks draw the numbers of one device."""
    changed = [name for name in _off(tensors) if name in tensors.by_draws]
    drawn = [(trace.drawn, trace.numbers) for trace in (tensors.alone, *tensors.traces) if trace is not None]
    alike = tensors.alone is not None and all(draws == drawn[0] and None not in draws[1] for draws in drawn)
    location, seeds = _first_apart(tensors, "generator", "seed")
    if not changed or (alike and not seeds):
        return ""
    summary = ", ".join(f"{seed} on rank {rank}" for rank, seed in enumerate(seeds))
    cause = f"{location} is given another seed on each rank: {summary}" if seeds else "the step draws random numbers"
    return f"{cause}; other random numbers change {few(changed)}"


def _drawn(trace: RankTrace) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of random numbers, without the seed that a DataLoader draws for its workers."""
    # Each iterator draws one, a scalar (torch/utils/data/dataloader.py, _BaseDataLoaderIter._base_seed, torch 2.13).
    shapes = list(trace.drawn)
    for _ in trace.of("loader"):
        if () in shapes:
            shapes.remove(())
    return tuple(shapes)


def _repeated_epoch(tensors: Tensors) -> str:
    iterated = [event for rank, event in tensors.events("iterate") if rank == 0 and event.details["shuffle"]]
    if len(iterated) < 2 or len({event.details["epoch"] for event in iterated}) > 1:
        return ""
    return (
        f"a DistributedSampler that shuffles was iterated {len(iterated)} times ({iterated[0].site}), each time as "
        f"epoch {iterated[0].details['epoch']}"
    )
