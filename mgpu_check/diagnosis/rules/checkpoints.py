"""Detect why a resumed run differs from an uninterrupted one."""

from __future__ import annotations

from mgpu_check.diagnosis.evidence import Restored
from mgpu_check.diagnosis.registry import mistake, on_checkpoint
from mgpu_check.diagnosis.report import Finding
from mgpu_check.processes.rank_lists import by_ranks, few, grouped

_SHOWN = 4
_UNSAID = "what train does not return (the optimizer, the schedule, the position in the data) was not restored"

mistake(
    "state-not-restored",
    "something is not saved, or not loaded, with a checkpoint",
    "save and load optimizer, scheduler, scaler, sampler position and RNG states beside the parameters",
)
mistake(
    "restored-on-one-rank",
    "a checkpoint is loaded on some ranks only",
    "load on every rank (map_location to its own device), or broadcast what one rank has loaded, the optimizer "
    "included",
)
mistake(
    "resharded-wrongly",
    "parts of a checkpoint go to the wrong ranks when another number of ranks loads it",
    "join the parts of all ranks in order, without their padding, and divide the whole for the new number of ranks",
)

mistake(
    "steps-mixed",
    "a checkpoint has parts of different steps",
    "save everything at the same step: copy tensors before a thread writes them, write the step number with the "
    "weights, and rename the file when it is complete",
)


# State that is lost right after loading comes before its consequences.
@on_checkpoint
def resharded_wrongly(restored: Restored) -> Finding | None:
    """Detect saved parts that other ranks hold in wrong places after loading."""
    summary = next(iter(restored.resharded.values()), "")
    return Finding("resharded-wrongly", summary) if summary else None


@on_checkpoint
def has_parts_of_other_steps(restored: Restored) -> Finding | None:
    """Detect entries that are right after loading, on all ranks, as an uninterrupted run has them at another step."""
    if not restored.of_other_steps:
        return None
    by_step = grouped((step, str(name)) for name, step in restored.of_other_steps.items())
    clauses = [f"{few(names, _SHOWN)} {'is' if len(names) == 1 else 'are'} as after step {s}" for s, names in by_step]
    return Finding("steps-mixed", f"right after loading, {'; '.join(clauses)}")


@on_checkpoint
def loaded_on_some(restored: Restored) -> Finding | None:
    """Detect a checkpoint that only some ranks loaded: entries are right after loading on those ranks only."""
    if not restored.on_some:
        return None
    return Finding("restored-on-one-rank", f"right after loading, not as saved: {by_ranks(restored.on_some, _SHOWN)}")


@on_checkpoint
def goes_on_in_another_epoch(restored: Restored) -> Finding | None:
    """Detect a sampler that continues in the wrong epoch: all its batches differ, even if generators are restored."""
    summary = f"{restored.epochs}: call set_epoch with the epoch where training continues"
    return Finding("state-not-restored", summary) if restored.epochs else None


@on_checkpoint
def loaded_on_none(restored: Restored) -> Finding | None:
    """Detect entries that differ from the saved ones on every rank after loading."""
    if not restored.nowhere:
        return None
    summary = f"right after loading, on no rank as saved: {few(list(restored.nowhere), _SHOWN)}"
    return Finding("state-not-restored", summary)


@on_checkpoint
def numbers_of_rank_0(restored: Restored) -> Finding | None:
    """Detect generators that every rank restored from the state of rank 0."""
    if not restored.numbers_of_rank_0:
        return None
    summary = f"{by_ranks(restored.numbers_of_rank_0, _SHOWN)}: what rank 0 had; each rank must save and load its own"
    return Finding("state-not-restored", summary)


@on_checkpoint
def state_of_rank_0(restored: Restored) -> Finding | None:
    """Detect entries that every rank restored from rank 0, if no other entry is lost."""
    if restored.on_some or not restored.of_rank_0:
        return None
    # DistributedDataParallel broadcasts buffers when it is constructed: they look the same here, and are harmless.
    summary = (
        f"{by_ranks(restored.of_rank_0, _SHOWN)}: what rank 0 had, where each rank had saved its own; or {_UNSAID}"
    )
    return Finding("state-not-restored", summary)


@on_checkpoint
def ranks_part_ways(restored: Restored) -> Finding | None:
    """Detect a checkpoint that only some ranks loaded, by the results that differ between ranks at the end."""
    if restored.parted:
        parted = by_ranks(restored.parted, _SHOWN)
        summary = f"ranks agree after an uninterrupted run, and not after the resumed one: {parted}"
    elif restored.right_on_rank_0:
        summary = f"right on rank 0 only: {by_ranks(restored.right_on_rank_0, _SHOWN)} are wrong"
    else:
        return None
    return Finding("restored-on-one-rank", summary)


@on_checkpoint
def not_in_the_state(restored: Restored) -> Finding | None:
    """Detect state that the checkpoint lacks: every entry that train returns is restored, and the run still differs."""
    if not restored.seen or restored.lost:
        return None
    summary = f"every entry that train returns is restored, so {_UNSAID}"
    return Finding("state-not-restored", summary)


@on_checkpoint
def differs_at_the_end(restored: Restored) -> Finding | None:
    """Report the entries that differ at the end, if the state right after loading was not observed."""
    if restored.seen:
        return None
    return Finding("state-not-restored", f"at the end differ {few(list(restored.at_the_end), _SHOWN)}")
