"""All rules, in the order in which they are believed.

Each rule looks at the evidence, and names a mistake or says nothing. What is named first is the likeliest cause. The order
is the whole weighing: what shows a mistake by itself goes before what is merely explained by one, that before what fits it
among others, and last goes what nothing speaks against. Within a group the more special goes first, because the more
general would explain what it explains, too.

There is a list for each kind of evidence. A rule that needs whole tensors is listed by `_of_tensors`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, TypeVar

from mgpu_check.mistakes.attempts import Attempts
from mgpu_check.mistakes.evidence import Calls, Evidence, HashSeeds, Restored
from mgpu_check.mistakes.report import Finding
from mgpu_check.mistakes.rules import (
    calls,
    checkpoints,
    collectives,
    data,
    decisions,
    evaluation,
    experiments,
    factors,
    gradients,
    optimizers,
    outcomes,
    samples,
    scales,
    sequences,
    shards,
    steps,
)
from mgpu_check.mistakes.samples import EpochSamples, Loader

if TYPE_CHECKING:
    from mgpu_check.mistakes.tensors import Tensors

__all__ = [
    "RULES",
    "RULES_OF_CALLS",
    "RULES_OF_CHECKPOINTS",
    "RULES_OF_EPOCHS",
    "RULES_OF_HASH_SEEDS",
    "distinct",
    "findings_of",
    "findings_of_calls",
    "findings_of_checkpoint",
    "findings_of_hash_seeds",
    "findings_of_loader",
]

_Evidence = TypeVar("_Evidence")
RuleOf = Callable[[_Evidence], Finding | None]


def _of_tensors(rule: RuleOf[Tensors]) -> RuleOf[Evidence]:
    """Return a rule about evidence from a rule about its tensors; it says nothing where there are none."""

    @functools.wraps(rule)
    def judge(evidence: Evidence) -> Finding | None:
        return None if evidence.tensors is None else rule(evidence.tensors)

    return judge


RULES: tuple[RuleOf[Evidence], ...] = (
    # A call that is a mistake whatever comes of it. What it leaves is undefined, so no number after it tells anything.
    _of_tensors(collectives.not_waited),
    _of_tensors(collectives.aliased_list),
    _of_tensors(collectives.strided_view),
    _of_tensors(collectives.uneven_tensors),
    _of_tensors(collectives.other_layouts),
    # Ranks do other things than each other, as calls show. All that they compute differs then; this is why. A checkpoint
    # on some ranks goes before another initialization, which it looks like.
    decisions.restores_on_some,
    data.epochs_alike,
    _of_tensors(data.split_by_own_seeds),
    decisions.decides_by_rank,
    _of_tensors(collectives.overflows),
    _of_tensors(data.seeds_of_samplers),
    decisions.starts_apart,
    # Which samples and labels ranks have seen, by these themselves, or by the loader and what it counts.
    data.all_see_the_same,
    _of_tensors(data.models_miss_samples),
    _of_tensors(data.whole_dataset),
    _of_tensors(sequences.labels_shifted_after_split),
    # Calls together with values that they explain: neither alone would say as much.
    _of_tensors(collectives.result_discarded),
    decisions.restores_later_on_some,
    _of_tensors(collectives.read_too_early),
    _of_tensors(outcomes.reduces_again),
    data.surplus_samples,
    _of_tensors(data.pads_a_metric),
    # One device gives the very result for another batch, or leaves other parameters as they were.
    _of_tensors(data.counts_too_few),
    _of_tensors(data.drops_last),
    _of_tensors(data.loader_drops_last),
    _of_tensors(data.truncates),
    _of_tensors(data.pads_the_batch),
    _of_tensors(decisions.updates_on_some),
    _of_tensors(decisions.kept_on_some),
    _of_tensors(decisions.calls_models_apart),
    _of_tensors(decisions.decides_for_its_parameters),
    # An optimizer that has nothing to do with the model.
    _of_tensors(optimizers.steps_other_tensors),
    # A change to one call makes the step right.
    _of_tensors(experiments.right_in_another_group),
    _of_tensors(experiments.right_where_positions_go_on),
    _of_tensors(experiments.right_in_another_order),
    _of_tensors(experiments.right_with_a_term_scaled),
    _of_tensors(experiments.right_by_another_operation),
    _of_tensors(experiments.right_without_a_collective),
    # Ranks that draw random numbers, or decide by values of their own: beside it nothing about sums can be told.
    decisions.draws_by_rank,
    _of_tensors(data.first_shard_for_all),
    decisions.decides_by_own_values,
    _of_tensors(data.other_order),
    # How gradients were put together, the special before the general: clipped parts are a mean of parts, statistics of
    # parts make the gradients those of parts, and all of these leave factors.
    gradients.clips_by_other_norms,
    _of_tensors(gradients.clips_first),
    _of_tensors(gradients.clips_parts),
    _of_tensors(scales.clips_each_part),
    _of_tensors(scales.limits_by_a_norm_of_parts),
    # Ranks that scale by numbers of their own, and counts without their fraction; before sums of parts that count alike.
    _of_tensors(scales.unscales_by_its_own),
    _of_tensors(scales.steps_by_its_own_factor),
    _of_tensors(scales.counts_parts_unlike),
    _of_tensors(scales.rounds_to_integers),
    _of_tensors(scales.divides_a_count),
    _of_tensors(collectives.delivers_to_one_rank),
    gradients.statistics_of_parts,
    _of_tensors(steps.adds_what_was_left),
    _of_tensors(collectives.off_by_number_of_groups),
    _of_tensors(gradients.added_on_every_rank),
    _of_tensors(collectives.parted_by_group),
    _of_tensors(factors.experts_off_by_their_group),  # a factor of the world size, too, and of some gradients
    _of_tensors(factors.first_step_off_by_world_size),
    factors.clips_a_multiple,
    _of_tensors(factors.first_step_off_by_micro_batches),
    _of_tensors(data.repeated_rows),
    gradients.gradients_apart,
    _of_tensors(gradients.each_rank_its_own),
    _of_tensors(gradients.stays_as_backward_left_it),
    _of_tensors(outcomes.written_over),
    _of_tensors(steps.counts_windows_unlike),
    _of_tensors(data.missing_rows),
    factors.off_by_world_size,
    _of_tensors(gradients.mean_of_metrics),
    _of_tensors(data.pads),
    _of_tensors(data.counted_by_every_rank),
    factors.off_by_micro_batches,
    _of_tensors(data.samples_several_times),
    _of_tensors(gradients.optimizes_its_own),  # the mean of what it has made is one of parts, too
    _of_tensors(gradients.takes_parts_for_the_batch),
    _of_tensors(gradients.mean_of_parts),
    # Gradients that are right, in the step after which parameters first are not.
    _of_tensors(optimizers.makes_something_else),
    optimizers.updates_otherwise,
    # What fits a mistake, and others, too. Buffers go before answers that they may explain; those of one rank, asked
    # twice, before those of several.
    _of_tensors(shards.norm_of_shards),
    _of_tensors(shards.buffers_of_one_part),
    _of_tensors(decisions.buffers_alone_drift),
    evaluation.buffers_apart,
    evaluation.answers_change,
    evaluation.answers_apart,
    _of_tensors(collectives.gradient_cut),
    _of_tensors(data.of_rank_0_alone),
    _of_tensors(decisions.right_on_one_rank),
    gradients.normalizes_parts,
    _of_tensors(decisions.steps_unlike_one_device),
    _of_tensors(collectives.other_reduction),
    _of_tensors(gradients.outside_of_the_wrapper),
    _of_tensors(collectives.parameters_of_other_layouts),
    _of_tensors(gradients.limits_another_norm),
    _of_tensors(gradients.wrong_where_uneven),
    _of_tensors(experiments.right_by_the_size_of_a_group),
    # What nothing speaks against: it is said where nothing better is known.
    decisions.draws_other_numbers,
    factors.grows_with_world_size,
    _of_tensors(decisions.broadcast_of_another_rank),
    decisions.may_draw_by_rank,
    gradients.uneven_parts,
    _of_tensors(collectives.computes_in_narrow_dtype),
    _of_tensors(collectives.narrow_operand),
    _of_tensors(decisions.buffers_drift),
    _of_tensors(decisions.broadcast_of_rank_0),
    _of_tensors(collectives.reduces_by_other_operation),
)
"""Those about what ranks have left, and how they have come to it."""


RULES_OF_CALLS: tuple[RuleOf[Calls], ...] = (
    # Sizes before decisions: ranks that wait in one collective have decided alike. Uneven samples before decisions: they
    # are why ranks decide otherwise.
    calls.other_sizes,
    calls.uneven_steps,
    calls.waits_for_its_own_group,  # before: ranks that decide otherwise do not wait for each other
    calls.part_ways,
    # What torch says comes last: once ranks have parted ways, most of it is an echo of that.
    calls.known_words,
    calls.aborted_in_gather,
)
"""Those about ranks that did not return."""


RULES_OF_EPOCHS: tuple[RuleOf[EpochSamples], ...] = (
    # Of an epoch, one mistake is named: the first explains all that is too many or too few. Too many before too few: who
    # reads all of it misses none.
    samples.read_by_each_worker,
    samples.read_by_each_rank,
    samples.repeated_to_fill,
    # Ranks that see the very same, before samples that come again: that is why they do.
    samples.same_on_some,
    samples.shared_out_unlike,
    samples.on_no_rank,
    # Where each sample is on one rank, numbers of batches may still differ.
    samples.uneven_batches,
)
"""Those about the samples that a loader gives in one epoch."""


RULES_OF_CHECKPOINTS: tuple[RuleOf[Restored], ...] = (
    # What was lost right after loading goes before what has come of it. Ranks that are unlike go first: who loads on some
    # ranks only finds as much missing on the others. What all have as rank 0 had it may do no harm, and goes last.
    checkpoints.loaded_on_some,
    checkpoints.goes_on_in_another_epoch,
    checkpoints.loaded_on_none,
    checkpoints.numbers_of_rank_0,
    checkpoints.state_of_rank_0,
    # Nothing was lost, or none could see it: what differs at the end.
    checkpoints.ranks_part_ways,
    checkpoints.not_in_the_state,
    checkpoints.differs_at_the_end,
)
"""Those about a run that was resumed."""


RULES_OF_HASH_SEEDS: tuple[RuleOf[HashSeeds], ...] = (calls.set_order,)
"""Those about ranks that fail only with different hash seeds."""


def findings_of(evidence: Evidence, most: int, attempts: Attempts) -> list[Finding]:
    """Return the likeliest mistakes, each once, `most` of them at most.

    Args:
        attempts: keeps the rules that have failed.
    """
    return distinct(_found(evidence, attempts), most)


def findings_of_calls(evidence: Calls, most: int, attempts: Attempts) -> list[Finding]:
    """Return the same of ranks that did not return."""
    return distinct((_attempted(rule, evidence, attempts) for rule in RULES_OF_CALLS), most)


def findings_of_checkpoint(evidence: Restored, attempts: Attempts) -> list[Finding]:
    """Return the mistakes that a resumed run shows, each once."""
    return distinct(_attempted(rule, evidence, attempts) for rule in RULES_OF_CHECKPOINTS)


def findings_of_hash_seeds(evidence: HashSeeds) -> list[Finding]:
    """Return the mistake that shows only where hash seeds differ."""
    return distinct(rule(evidence) for rule in RULES_OF_HASH_SEEDS)


def findings_of_loader(evidence: Loader, attempts: Attempts) -> list[Finding]:
    """Return the mistake of each epoch that shows one, and that of their order, the likeliest first; some may come again."""
    of_epochs = [
        finding
        for epoch in evidence.epochs
        for finding in distinct((_attempted(rule, epoch, attempts) for rule in RULES_OF_EPOCHS), 1)
    ]
    of_order = distinct([_attempted(samples.order_repeats, evidence, attempts)])
    # Where the epochs of some ranks differ and of others do not, that is why the ranks' shares do not fit together.
    on_some = bool(evidence.epochs) and 0 < len(evidence.repeating) < len(evidence.epochs[0].counts)
    return [*of_order, *of_epochs] if on_some else [*of_epochs, *of_order]


def distinct(named: Iterable[Finding | None], most: int | None = None) -> list[Finding]:
    """Return the first finding of each mistake, in their order, `most` of them at most."""
    found: dict[str, Finding] = {}
    for finding in named:
        if finding is not None:
            found.setdefault(finding.mistake, finding)
        if len(found) == most:
            break
    return list(found.values())


def _found(evidence: Evidence, attempts: Attempts) -> Iterator[Finding | None]:
    return (_attempted(rule, evidence, attempts) for rule in RULES)


def _attempted(rule: RuleOf[_Evidence], evidence: _Evidence, attempts: Attempts) -> Finding | None:
    where = f"{rule.__module__.rpartition('.')[2]}.{rule.__name__}"
    return attempts.of(f"the rule {where}", None, rule, evidence)
