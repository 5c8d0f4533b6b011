"""Detect mistakes that keep ranks from returning: the ranks hang, raise or die.

The evidence is the collectives they entered.
"""

from __future__ import annotations

from mgpu_check.diagnosis.evidence import HashSeeds, UnfinishedCall
from mgpu_check.diagnosis.registry import mistake, on_calls, on_hash_seeds
from mgpu_check.diagnosis.report import Finding
from mgpu_check.processes.collective_records import fewest
from mgpu_check.processes.rank_lists import grouped, named
from mgpu_check.torch_hooks.collective_table import COLLECTIVES

_LONGEST = 240  # characters of a quoted error: about three lines of a terminal
_WORDS_OF_TORCH = (
    ("Expected to have finished reduction in the prior iteration", "gradients-not-synchronized"),
    ("Expected to mark a variable ready only once", "gradients-not-synchronized"),
    ("must be contiguous", "strided-view"),
    ("Tensors must be contiguous", "strided-view"),
    ("op.preamble.length <= op.nbytes", "uneven-gather"),
    ("Expected more than 1 value per channel when training", "batch-statistics-per-rank"),
    ("same number of elements", "uneven-gather"),
    ("Sizes of tensors must match", "uneven-gather"),
    ("Default process group has not been initialized", "wrong-process-group"),
)
"""Parts of error messages of torch, with the only class of mistakes that causes each."""

mistake(
    "uneven-steps",
    "ranks take different numbers of steps, and wait for each other in the last",
    "give every rank as many batches: a sampler that pads or drops, or DistributedDataParallel's join() context",
)
mistake(
    "set-order",
    "ranks go through a set, each in an order of its own",
    "iterate over sorted(names), or over a list or dict, which keep the order of insertion",
)


@on_calls
def other_sizes(calls: UnfinishedCall) -> Finding | None:
    """Detect tensors of different sizes that ranks gave to one collective."""
    if calls.unmatched:
        return None
    if calls.parted:
        collectives = {entered.name for entered in calls.parted.values()}
        if len(collectives) > 1 or len({entered.operand for entered in calls.parted.values()}) < 2:
            return None
        fills = any(name in COLLECTIVES and COLLECTIVES[name].kind == "parts" for name in collectives)
        return Finding("uneven-gather", calls.parting) if fills else None
    same = {(call.name, call.group_name, call.number, call.file, call.line) for call in calls.last.values()}
    if len(same) == 1 and len({entered.operand for entered in calls.last.values()}) > 1:
        return Finding("uneven-gather", "ranks gave tensors of different sizes: " + _short(calls.told))
    return None


@on_calls
def uneven_steps(calls: UnfinishedCall) -> Finding | None:
    """Detect uneven numbers of steps: ranks part ways, and the world size does not divide the number of samples."""
    parted = part_ways(calls)
    if parted is None or calls.samples % calls.size == 0:
        return None
    uneven = f"{calls.samples} samples are not divisible by {calls.size} ranks"
    also = "; with divisible numbers the step terminates" if calls.hung else f"; {parted.evidence}"
    return Finding("uneven-steps", uneven + also)


@on_calls
def waits_for_its_own_group(calls: UnfinishedCall) -> Finding | None:
    """Detect a too wide group: a member waits for a message from a rank in the group's collective."""
    for rank, collective in calls.last.items():
        if not collective.unfinished or collective.cut:
            continue
        members = set(map(int, collective.group.split(","))) if collective.group else set(range(calls.size))
        for peer, message in calls.messages.items():
            if peer in members and message.options == f"src={rank}":
                return Finding(
                    "wrong-process-group",
                    f"rank {rank} waits in {collective} for rank {peer}, and rank {peer} waits in {message} for "
                    f"what rank {rank} sends after it: does the collective run over more ranks than call it?",
                )
    return None


@on_calls
def part_ways(calls: UnfinishedCall) -> Finding | None:
    """Detect a decision of each rank's own: ranks entered different collectives, or some entered fewer."""
    if other_sizes(calls):
        return None
    if calls.unmatched:
        return Finding("decision-per-rank", calls.unmatched)
    sites = {(entered.name, entered.file, entered.line) for entered in calls.last.values()}
    if calls.parted or len(sites) > 1 or (sites and calls.some_finished):
        summary = calls.parting or "ranks do not take part in the same collectives: " + _short(calls.told)
    elif waits := _waits(calls):
        summary = f"{calls.hung}: {waits}"
    else:
        return None
    return Finding("decision-per-rank", summary)


def _waits(calls: UnfinishedCall) -> str:
    """Return which ranks of a hang wait, and which ranks are elsewhere or finished; "" if that is unknown."""
    waiting = grouped((call, rank) for rank, call in calls.waiting.items())
    clauses = [f"{named(ranks)} {'waits' if len(ranks) == 1 else 'wait'} {call}" for call, ranks in waiting]
    if waiting and (calls.elsewhere or calls.finished):
        if calls.elsewhere:
            clauses.append(f"{named(calls.elsewhere)} {'is' if len(calls.elsewhere) == 1 else 'are'} elsewhere")
        if calls.finished:
            clauses.append(f"{named(calls.finished)} finished")
        return "; ".join(clauses)
    if len(waiting) > 1 and calls.last:
        return f"all of them wait, in different calls; {'; '.join(clauses)}"
    # A collective on a device returns at once, so no rank is seen to wait in it.
    counts = {rank: entered.number for rank, entered in calls.last.items()}
    groups = {entered.group_name for entered in calls.last.values()}
    if not waiting and len(groups) == 1 < len(set(counts.values())):
        return f"{named(fewest(counts))} entered fewer collectives than others"
    return ""


@on_calls
def known_words(calls: UnfinishedCall) -> Finding | None:
    """Detect a mistake by an error of torch that only this mistake causes."""
    for words, name in _WORDS_OF_TORCH:
        for of_torch, line in calls.raised:
            if words in of_torch:
                return Finding(name, _short(line))
    return None


@on_calls
def aborted_in_gather(calls: UnfinishedCall) -> Finding | None:
    """Detect tensors of different sizes: gloo aborted a rank inside all_gather."""
    entered = any(call.name.startswith("all_gather") for call in calls.last.values())
    if not any(entered or "all_gather" in stacks for stacks in calls.aborted):
        return None
    return Finding("uneven-gather", "a rank was aborted inside all_gather, as by tensors of different sizes")


@on_hash_seeds
def set_order(seeds: HashSeeds) -> Finding | None:
    """Detect iteration over a set: the case fails only if ranks have different hash seeds."""
    return Finding("set-order", seeds.told)


def _short(text: str) -> str:
    return " ".join(text.split())[:_LONGEST]
