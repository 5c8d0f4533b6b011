"""Mistakes by which a resumed run does not go on as if it had not been interrupted."""

from __future__ import annotations

from mgpu_check.mistakes.evidence import Restored
from mgpu_check.mistakes.report import Finding
from mgpu_check.processes.rank_lists import by_ranks, few

__all__ = [
    "differs_at_the_end",
    "goes_on_in_another_epoch",
    "loaded_on_none",
    "loaded_on_some",
    "not_in_the_state",
    "numbers_of_rank_0",
    "ranks_part_ways",
    "state_of_rank_0",
]

_SHOWN = 4
_UNSAID = "what train does not return (the optimizer, the schedule, the position in the data) was not restored"


def loaded_on_some(restored: Restored) -> Finding | None:
    """Name what is right after loading on some ranks only."""
    if not restored.on_some:
        return None
    return Finding("restored-on-one-rank", f"right after loading, not as saved: {by_ranks(restored.on_some, _SHOWN)}")


def goes_on_in_another_epoch(restored: Restored) -> Finding | None:
    """Name the epoch of a sampler: each batch is another one then, whatever generators are at."""
    return (
        Finding("state-not-restored", f"{restored.epochs}: set_epoch was not told where training goes on")
        if restored.epochs
        else None
    )


def loaded_on_none(restored: Restored) -> Finding | None:
    """Name what no rank has loaded as it was saved."""
    if not restored.nowhere:
        return None
    told = f"right after loading, on no rank as saved: {few(list(restored.nowhere), _SHOWN)}"
    return Finding("state-not-restored", told)


def numbers_of_rank_0(restored: Restored) -> Finding | None:
    """Name generators that all ranks have as rank 0 had them."""
    if not restored.numbers_of_rank_0:
        return None
    told = f"{by_ranks(restored.numbers_of_rank_0, _SHOWN)}: what rank 0 had; each rank must save and load its own"
    return Finding("state-not-restored", told)


def state_of_rank_0(restored: Restored) -> Finding | None:
    """Name what all ranks have as rank 0 had it, where nothing else is lost."""
    if restored.on_some or not restored.of_rank_0:
        return None
    # Buffers that DistributedDataParallel broadcasts when it is made look like this, too, and do no harm.
    told = f"{by_ranks(restored.of_rank_0, _SHOWN)}: what rank 0 had, where each rank had saved its own; or {_UNSAID}"
    return Finding("state-not-restored", told)


def ranks_part_ways(restored: Restored) -> Finding | None:
    """Name a checkpoint that some ranks have loaded, by what differs between ranks in the end."""
    if restored.parted:
        told = f"ranks agree after an uninterrupted run, and not after the resumed one: {by_ranks(restored.parted, _SHOWN)}"
    elif restored.right_on_rank_0:
        told = f"right on rank 0 only: {by_ranks(restored.right_on_rank_0, _SHOWN)} are wrong"
    else:
        return None
    return Finding("restored-on-one-rank", told)


def not_in_the_state(restored: Restored) -> Finding | None:
    """Name what the state lacks, where all of it is loaded as it was saved."""
    if not restored.seen or restored.lost:
        return None
    told = f"all that train returns is loaded as it was saved, so {_UNSAID}"
    return Finding("state-not-restored", told)


def differs_at_the_end(restored: Restored) -> Finding | None:
    """Name what differs in the end, where it could not be seen what loading restores."""
    if restored.seen:
        return None
    return Finding("state-not-restored", f"at the end differ {few(list(restored.at_the_end), _SHOWN)}")
