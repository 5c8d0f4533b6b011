"""List all rules, the most reliable first.

Each rule reads the evidence and returns a finding or None. The first finding is the likeliest cause: the order of the
rules is their only weight. Rules come in four groups. First, evidence that proves a mistake by itself. Second, results
that a mistake explains. Third, results that several mistakes explain. Last, mistakes that the evidence does not rule
out. Within a group, special rules come before general ones, because a general rule would also fire on what a special
rule explains.

There is one list per kind of evidence. `_of_tensors` wraps a rule that needs whole tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, TypeVar

from mgpu_check.diagnosis.attempts import Attempts
from mgpu_check.diagnosis.evidence import Evidence, HashSeeds, Restored, UnfinishedCall
from mgpu_check.diagnosis.report import Finding
from mgpu_check.diagnosis.rules import (
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
from mgpu_check.diagnosis.samples import EpochSamples, Loader

if TYPE_CHECKING:
    from mgpu_check.diagnosis.tensors import Tensors

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
    """Return a rule about evidence from a rule about its tensors; without tensors it returns None."""

    @functools.wraps(rule)
    def judge(evidence: Evidence) -> Finding | None:
        return None if evidence.tensors is None else rule(evidence.tensors)

    return judge


RULES: tuple[RuleOf[Evidence], ...] = (
    # Calls that are always mistakes. Their results are undefined, so later numbers are no evidence.
    _of_tensors(collectives.not_waited),
    _of_tensors(collectives.aliased_list),
    _of_tensors(collectives.strided_view),
    _of_tensors(collectives.uneven_tensors),
    _of_tensors(collectives.other_layouts),
    # Calls show that ranks act differently, which explains every other difference. A checkpoint that some ranks load
    # also looks like a different initialization, so it comes first.
    decisions.restores_on_some,
    data.epochs_alike,
    _of_tensors(data.split_by_own_seeds),
    decisions.decides_by_rank,
    _of_tensors(collectives.overflows),
    _of_tensors(data.seeds_of_samplers),
    decisions.starts_apart,
    # Samples and labels that ranks saw, observed directly, or inferred from the loader and from counts.
    data.all_see_the_same,
    _of_tensors(data.models_miss_samples),
    _of_tensors(data.whole_dataset),
    _of_tensors(sequences.labels_shifted_after_split),
    # Calls together with the values that they explain: either alone would be weaker evidence.
    _of_tensors(collectives.result_discarded),
    decisions.restores_later_on_some,
    _of_tensors(collectives.read_too_early),
    _of_tensors(outcomes.reduces_again),
    data.surplus_samples,
    _of_tensors(data.pads_a_metric),
    # One device gives exactly this result for another batch, or updates other parameters.
    _of_tensors(data.counts_too_few),
    _of_tensors(data.drops_last),
    _of_tensors(data.loader_drops_last),
    _of_tensors(data.truncates),
    _of_tensors(data.pads_the_batch),
    _of_tensors(decisions.updates_on_some),
    _of_tensors(decisions.kept_on_some),
    _of_tensors(decisions.calls_models_apart),
    _of_tensors(decisions.decides_for_its_parameters),
    # The optimizer holds no parameter of the model.
    _of_tensors(optimizers.steps_other_tensors),
    # A change to one call makes the step right.
    _of_tensors(experiments.right_in_another_group),
    _of_tensors(experiments.right_where_positions_go_on),
    _of_tensors(experiments.right_in_another_order),
    _of_tensors(experiments.right_with_a_term_scaled),
    _of_tensors(experiments.right_by_another_operation),
    _of_tensors(experiments.right_without_a_collective),
    # Ranks draw random numbers, or decide by values of their own. Either invalidates the rules on sums below.
    decisions.draws_by_rank,
    _of_tensors(data.first_shard_for_all),
    decisions.decides_by_own_values,
    _of_tensors(data.other_order),
    # How gradients were combined, special before general: a mean of clipped parts is also a mean of parts, batch
    # statistics of parts also give gradients of parts, and all of these also leave factors.
    gradients.clips_by_other_norms,
    _of_tensors(gradients.clips_first),
    _of_tensors(gradients.clips_parts),
    _of_tensors(scales.clips_each_part),
    _of_tensors(scales.limits_by_a_norm_of_parts),
    # Factors that differ between ranks, and rounded counts, before sums of parts with equal weights.
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
    _of_tensors(factors.experts_off_by_their_group),  # before the world size, which the factor also fits
    _of_tensors(factors.first_step_off_by_world_size),
    factors.clips_a_multiple,
    _of_tensors(factors.first_step_off_by_micro_batches),
    _of_tensors(data.repeated_rows),
    _of_tensors(gradients.adds_up_no_parts_of_an_activation),  # before gradients that differ, which follow from it
    _of_tensors(gradients.adds_up_to_the_whole),
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
    _of_tensors(gradients.optimizes_its_own),  # before a mean of parts, which averaged parameters also fit
    _of_tensors(gradients.takes_parts_for_the_batch),
    _of_tensors(gradients.mean_of_parts),
    # The gradients of the first step with wrong parameters are right.
    _of_tensors(optimizers.makes_something_else),
    optimizers.updates_otherwise,
    # Evidence that several mistakes explain. Buffers come before answers, which they may explain; answers of one rank
    # that change come before answers that differ between ranks.
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
    # Mistakes that the evidence does not rule out, as a last resort.
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
"""The rules on the results of ranks, and on the calls that led to them."""


RULES_OF_CALLS: tuple[RuleOf[UnfinishedCall], ...] = (
    # Sizes before decisions: ranks that wait in one collective decided alike. Uneven samples before decisions: they are
    # the reason why ranks decide differently.
    calls.other_sizes,
    calls.uneven_steps,
    calls.waits_for_its_own_group,  # before decisions: ranks that decide differently do not wait for each other
    calls.part_ways,
    # Errors of torch last: once ranks part ways, most errors are consequences.
    calls.known_words,
    calls.aborted_in_gather,
)
"""The rules on ranks that did not return."""


RULES_OF_EPOCHS: tuple[RuleOf[EpochSamples], ...] = (
    # Only one mistake is reported per epoch: the first explains all surplus and missing samples. Surplus before
    # missing: a rank that reads all samples misses none.
    samples.read_by_each_worker,
    samples.read_by_each_rank,
    samples.repeated_to_fill,
    # Ranks that see the same samples, before repeated samples, which they explain.
    samples.same_on_some,
    samples.shared_out_unlike,
    samples.on_no_rank,
    # Numbers of batches may differ even if each sample is on exactly one rank.
    samples.uneven_batches,
)
"""The rules on the samples that a loader gives in one epoch."""


RULES_OF_CHECKPOINTS: tuple[RuleOf[Restored], ...] = (
    # State that is lost right after loading comes before its consequences. Differences between ranks come first: after
    # a load on some ranks, the same entries are lost on the others. State of rank 0 on all ranks may be harmless, so it
    # is last.
    checkpoints.loaded_on_some,
    checkpoints.goes_on_in_another_epoch,
    checkpoints.loaded_on_none,
    checkpoints.numbers_of_rank_0,
    checkpoints.state_of_rank_0,
    # Nothing was lost, or it was not observed: compare the end of the run.
    checkpoints.ranks_part_ways,
    checkpoints.not_in_the_state,
    checkpoints.differs_at_the_end,
)
"""The rules on a resumed run."""


RULES_OF_HASH_SEEDS: tuple[RuleOf[HashSeeds], ...] = (calls.set_order,)
"""The rules on ranks that fail only with different hash seeds."""


def findings_of(evidence: Evidence, most: int, attempts: Attempts) -> list[Finding]:
    """Return at most `most` mistakes, the likeliest first, without repetition.

    Args:
        attempts: collects the rules that fail.
    """
    return distinct(_found(evidence, attempts), most)


def findings_of_calls(evidence: UnfinishedCall, most: int, attempts: Attempts) -> list[Finding]:
    """Return at most `most` mistakes that explain why ranks did not return, the likeliest first."""
    return distinct((_attempted(rule, evidence, attempts) for rule in RULES_OF_CALLS), most)


def findings_of_checkpoint(evidence: Restored, attempts: Attempts) -> list[Finding]:
    """Return the mistakes that explain why a resumed run differs, without repetition."""
    return distinct(_attempted(rule, evidence, attempts) for rule in RULES_OF_CHECKPOINTS)


def findings_of_hash_seeds(evidence: HashSeeds) -> list[Finding]:
    """Return the mistake that shows only if hash seeds differ between ranks."""
    return distinct(rule(evidence) for rule in RULES_OF_HASH_SEEDS)


def findings_of_loader(evidence: Loader, attempts: Attempts) -> list[Finding]:
    """Return at most one mistake per epoch and one of their order, the likeliest first; a mistake may be repeated."""
    of_epochs = [
        finding
        for epoch in evidence.epochs
        for finding in distinct((_attempted(rule, epoch, attempts) for rule in RULES_OF_EPOCHS), 1)
    ]
    of_order = distinct([_attempted(samples.order_repeats, evidence, attempts)])
    # If only some ranks reshuffle, the shares of the ranks do not fit together, so the order is the cause.
    on_some = bool(evidence.epochs) and 0 < len(evidence.repeating) < len(evidence.epochs[0].counts)
    return [*of_order, *of_epochs] if on_some else [*of_epochs, *of_order]


def distinct(named: Iterable[Finding | None], most: int | None = None) -> list[Finding]:
    """Return the first finding of each mistake, in order, and at most `most` findings."""
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
