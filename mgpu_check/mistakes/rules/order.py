"""All rules, in the order in which they are believed.

Each rule looks at the evidence, and names a mistake or says nothing. What is named first is the likeliest cause. The order
is the whole weighing: what shows a mistake by itself goes before what is merely explained by one, that before what fits it
among others, and last goes what nothing speaks against. Within a group the more special goes first, because the more
general would explain what it explains, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from mgpu_check.mistakes.evidence import Calls, Evidence
from mgpu_check.mistakes.report import Finding
from mgpu_check.mistakes.rules import calls, collectives, data, decisions, factors, gradients, steps

if TYPE_CHECKING:
    from mgpu_check.mistakes.tensors import Tensors

__all__ = ["RULES", "RULES_OF_CALLS", "judged", "judged_calls"]

Rule = Callable[[Evidence], Finding | None]


def _of_tensors(rule: Callable[[Tensors], Finding | None]) -> Rule:
    """Make a rule about whole tensors one about evidence: without them it says nothing."""

    def judge(evidence: Evidence) -> Finding | None:
        return None if evidence.tensors is None else rule(evidence.tensors)

    return judge


def _broadcasts(*, from_rank_0: bool) -> Rule:
    return _of_tensors(lambda tensors: decisions.broadcasts_what_is_wrong(tensors, from_rank_0=from_rank_0))


RULES: tuple[Rule, ...] = (
    # A call that is a mistake whatever comes of it. What it leaves is undefined, so no number after it tells anything.
    _of_tensors(collectives.not_waited),
    _of_tensors(collectives.aliased_list),
    _of_tensors(collectives.strided_view),
    _of_tensors(collectives.uneven_tensors),
    # Ranks do other things than each other, as calls show. All that they compute differs then; this is why. A checkpoint
    # on some ranks goes before another initialization, which it looks like.
    decisions.restores_on_some,
    data.epochs_alike,
    _of_tensors(data.split_by_own_seeds),
    decisions.decides_by_rank,
    _of_tensors(collectives.overflows),
    _of_tensors(data.seeds_of_samplers),
    decisions.starts_apart,
    # Which samples ranks have seen, by the samples, or by the loader and what it counts.
    data.all_see_the_same,
    _of_tensors(data.whole_dataset),
    # Calls together with values that they explain: neither alone would say as much.
    _of_tensors(collectives.result_discarded),
    decisions.restores_later_on_some,
    _of_tensors(collectives.read_too_early),
    data.surplus_samples,
    _of_tensors(data.pads_a_metric),
    # One device gives the very result for another batch, or leaves other parameters as they were.
    _of_tensors(data.drops_last),
    _of_tensors(data.truncates),
    _of_tensors(data.pads_the_batch),
    _of_tensors(decisions.updates_on_some),
    _of_tensors(decisions.decides_for_its_parameters),
    # Ranks that change parameters unlike, or draw random numbers: beside it nothing about sums can be told.
    decisions.updates_apart,
    decisions.draws_by_rank,
    _of_tensors(data.first_shard_for_all),
    decisions.decides_by_own_values,
    _of_tensors(data.other_order),
    # How gradients were put together, the special before the general: clipped parts are a mean of parts, statistics of
    # parts make the gradients those of parts, and all of these leave factors.
    gradients.clips_by_other_norms,
    _of_tensors(gradients.clips_first),
    _of_tensors(gradients.clips_parts),
    _of_tensors(collectives.delivers_to_one_rank),
    gradients.statistics_of_parts,
    _of_tensors(steps.adds_what_was_left),
    _of_tensors(collectives.off_by_number_of_groups),
    _of_tensors(gradients.added_on_every_rank),
    _of_tensors(collectives.parted_by_group),
    _of_tensors(factors.first_step_off_by_world_size),
    _of_tensors(factors.first_step_off_by_micro_batches),
    _of_tensors(data.repeated_rows),
    gradients.gradients_apart,
    _of_tensors(gradients.each_rank_its_own),
    _of_tensors(steps.counts_windows_unlike),
    _of_tensors(data.missing_rows),
    factors.off_by_world_size,
    _of_tensors(gradients.mean_of_metrics),
    _of_tensors(data.pads),
    _of_tensors(data.counted_by_every_rank),
    factors.off_by_micro_batches,
    _of_tensors(data.samples_several_times),
    _of_tensors(gradients.mean_of_parts),
    # What fits a mistake, and others, too.
    _of_tensors(decisions.buffers_alone_drift),
    _of_tensors(collectives.gradient_cut),
    _of_tensors(data.of_rank_0_alone),
    _of_tensors(decisions.right_on_one_rank),
    gradients.normalizes_parts,
    _of_tensors(decisions.steps_unlike_one_device),
    _of_tensors(collectives.other_reduction),
    _of_tensors(gradients.differs_from_rank_to_rank),
    _of_tensors(gradients.limits_another_norm),
    _of_tensors(gradients.wrong_where_uneven),
    # What nothing speaks against: it is said where nothing better is known.
    factors.grows_with_world_size,
    _broadcasts(from_rank_0=False),
    decisions.may_draw_by_rank,
    gradients.uneven_parts,
    _of_tensors(collectives.computes_in_narrow_dtype),
    _of_tensors(collectives.narrow_operand),
    _of_tensors(decisions.buffers_drift),
    _broadcasts(from_rank_0=True),
    _of_tensors(collectives.reduces_by_other_operation),
)


RULES_OF_CALLS: tuple[Callable[[Calls], Finding | None], ...] = (
    # Sizes before decisions: ranks that wait in one collective have decided alike. Uneven samples before decisions: they
    # are why ranks decide otherwise.
    calls.other_sizes,
    calls.uneven_steps,
    calls.enter_other_collectives,
    calls.wait_for_one,
    # What torch says comes last: once ranks have parted ways, most of it is an echo of that.
    calls.known_words,
    calls.aborted_in_gather,
)
"""Those about ranks that did not return."""


def judged(evidence: Evidence, most: int) -> list[Finding]:
    """Return the likeliest mistakes, each once, `most` of them at most."""
    return _first((rule(evidence) for rule in RULES), most)


def judged_calls(evidence: Calls, most: int) -> list[Finding]:
    """Return the same of ranks that did not return."""
    return _first((rule(evidence) for rule in RULES_OF_CALLS), most)


def _first(findings: Iterable[Finding | None], most: int) -> list[Finding]:
    found: dict[str, Finding] = {}
    for finding in findings:
        if finding is not None:
            found.setdefault(finding.mistake, finding)
        if len(found) == most:
            break
    return list(found.values())
