"""The order of the rules, and the judgement by them: the first finding is the likeliest cause.

Special rules come before general ones, because a general rule also fires on what a special rule explains. A comment
says what a rule must come before, and why.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from mgpu_check.diagnosis.evidence import Evidence, HashSeeds, Loader, Restored, UnfinishedCall
from mgpu_check.diagnosis.report import (
    Attempts,
    Finding,
    RuleOf,
    known_mistake,
    on_calls,
    on_checkpoint,
    on_epoch,
    on_evidence,
    on_hash_seeds,
    on_loader,
)
from mgpu_check.diagnosis.rules import (
    clause,
    collectives,
    data,
    decisions,
    factors,
    gradients,
    training_state,
)

_Evidence = TypeVar("_Evidence")

RULES = on_evidence.in_order(
    # Calls that are always mistakes. Their results are undefined, so later numbers are no evidence.
    collectives.not_waited,
    collectives.aliased_list,
    collectives.strided_view,
    collectives.uneven_tensors,
    collectives.other_layouts,
    # A change makes the step right that right calls do not need. Changes of scale may undo other mistakes; see below.
    gradients.recomputes_something_else,
    gradients.written_several_times,
    gradients.right_if_always_synchronized,
    gradients.counts_micro_batches_alike,
    collectives.right_in_another_group,
    collectives.right_where_positions_go_on,
    collectives.right_in_another_order,
    # Calls show that ranks act differently, which explains every other difference.
    decisions.restores_on_some,  # a checkpoint that some ranks load also looks like a different initialization
    clause("epochs-not-reshuffled", "repeated_epoch"),
    data.split_by_own_seeds,
    decisions.decides_by_rank,
    factors.overflows,
    data.seeds_of_samplers,
    decisions.starts_apart,
    # Samples and labels that ranks saw, observed directly, or inferred from the loader and from counts.
    clause("dataset-not-split", "same_samples"),
    data.models_miss_samples,
    data.whole_dataset,
    data.labels_shifted_after_split,
    # Calls together with the values that they explain: either alone would be weaker evidence.
    collectives.result_discarded,
    decisions.restores_later_on_some,
    decisions.steps_unlike_one_device,
    collectives.reduces_again,
    collectives.combines_other_values,
    data.surplus_samples,
    data.pads_a_metric,
    # One device gives exactly this result for another batch, or updates other parameters.
    data.counts_too_few,
    data.drops_last,
    data.loader_drops_last,
    data.truncates,
    data.pads_the_batch,
    decisions.updates_on_some,
    decisions.kept_on_some,
    decisions.calls_models_apart,
    decisions.decides_for_its_parameters,
    training_state.steps_other_tensors,
    # A change to one call makes the step right.
    decisions.right_with_numbers_of_rank_0,
    collectives.right_with_a_term_scaled,
    collectives.right_by_another_operation,
    collectives.right_without_a_collective,
    # Ranks draw random numbers, or decide by values of their own. Either invalidates the rules on sums.
    clause("random-numbers-per-rank", "draws"),
    data.first_shard_for_all,
    decisions.decides_by_own_values,
    data.other_order,
    # How gradients were clipped. A mean of clipped parts is also a mean of parts, and leaves factors.
    gradients.clips_by_other_norms,
    gradients.clips_first,
    gradients.clips_parts,
    factors.clips_each_part,
    # How gradients were combined: factors that differ between ranks, and rounded counts, before equal weights. Batch
    # statistics of parts also give gradients of parts. All of these also leave factors.
    factors.unscales_by_its_own,
    factors.steps_by_its_own_factor,
    factors.counts_parts_unlike,
    factors.rounds_to_integers,
    factors.divides_a_count,
    collectives.delivers_to_one_rank,
    gradients.statistics_of_parts,
    gradients.adds_what_was_left,
    collectives.off_by_number_of_groups,
    gradients.added_on_every_rank,
    gradients.right_with_an_addend_once,
    data.counts_a_tensor_several_times,
    data.blocks_in_other_order,
    collectives.parted_by_group,
    factors.experts_off_by_their_group,  # before the world size, which the factor also fits
    factors.first_step_off_by_world_size,
    factors.clips_a_multiple,
    factors.first_step_off_by_micro_batches,
    data.repeated_rows,
    gradients.adds_up_no_parts_of_an_activation,  # before gradients that differ, which follow from it
    gradients.adds_up_to_the_whole,
    clause("gradients-not-synchronized", "gradients_apart"),
    gradients.each_rank_its_own,
    gradients.stays_as_backward_left_it,
    collectives.written_over,
    gradients.counts_windows_unlike,
    data.missing_rows,
    factors.not_divided_by_micro_batches,  # before the world size, which may be this ratio
    factors.off_by_world_size,
    factors.off_by_a_sign,
    gradients.mean_of_metrics,
    data.pads,
    data.counted_by_every_rank,
    factors.off_by_micro_batches,
    data.samples_several_times,
    training_state.optimizes_its_own,  # before a mean of parts, which averaged parameters also fit
    gradients.takes_parts_for_the_batch,
    gradients.mean_of_parts,
    # The gradients of the first step with wrong parameters are right.
    training_state.starts_anew,
    training_state.makes_something_else,
    clause("optimizer-differs", "updates"),
    # Several mistakes explain this evidence.
    gradients.norm_of_shards,
    gradients.buffers_of_one_part,
    decisions.buffers_alone_drift,
    clause("buffers-drift", "buffers_apart"),  # before answers, which buffers may explain
    clause("evaluation-differs", "answers_change"),  # before answers that differ, as those of one rank that change do
    clause("evaluation-differs", "answers_apart"),
    collectives.gradient_cut,
    data.of_rank_0_alone,
    decisions.right_on_one_rank,
    clause("batch-statistics-per-rank", "normalizes"),
    collectives.other_reduction,
    gradients.outside_of_the_wrapper,
    collectives.parameters_of_other_layouts,
    factors.limits_by_a_norm_of_parts,
    gradients.limits_another_norm,
    collectives.right_by_the_size_of_a_group,
    # The evidence does not rule these mistakes out; they are a last resort.
    factors.grows_with_world_size,
    clause("random-numbers-per-rank", "may_draw"),
    clause("mean-of-means", "uneven"),
    factors.narrow_operand,
    decisions.buffers_drift,
)
"""The rules on the results of ranks, and on the calls that led to them."""

RULES_OF_CALLS = on_calls.in_order(
    collectives.other_sizes,  # before decisions: ranks that wait in one collective decided alike
    collectives.uneven_steps,  # before decisions: uneven samples are the reason why ranks decide differently
    collectives.waits_for_its_own_group,  # before decisions: ranks that decide differently do not wait for each other
    collectives.part_ways,
    collectives.known_words,  # errors of torch last: once ranks part ways, most errors are consequences
    collectives.aborted_in_gather,
)
"""The rules on ranks that did not return."""

RULES_OF_EPOCHS = on_epoch.in_order(
    data.read_by_each_worker,
    data.read_by_each_rank,
    data.repeated_to_fill,
    data.same_on_some,  # before repeated samples, which it explains
    data.shared_out_unlike,
    data.on_no_rank,
    data.uneven_batches,  # numbers of batches may differ even if each sample is on exactly one rank
)
"""The rules on the samples that a loader gives in one epoch."""

RULES_OF_LOADERS = on_loader.in_order(
    data.order_repeats,
)
"""The rules on the order of samples in all epochs of a loader."""

RULES_OF_CHECKPOINTS = on_checkpoint.in_order(
    training_state.resharded_wrongly,  # before lost entries: the values are there, and in the wrong places
    training_state.has_parts_of_other_steps,
    # Before lost entries: after a load on some ranks, the same entries are lost on the others.
    training_state.loaded_on_some,
    training_state.goes_on_in_another_epoch,
    training_state.loaded_on_none,
    training_state.numbers_of_rank_0,
    training_state.state_of_rank_0,  # after other lost state: state of rank 0 on all ranks may be harmless
    training_state.ranks_part_ways,  # from here on nothing was lost, or it was not observed: the end of the run decides
    training_state.not_in_the_state,
    training_state.differs_at_the_end,
)
"""The rules on a resumed run."""

RULES_OF_HASH_SEEDS = on_hash_seeds.in_order(
    collectives.set_order,
)
"""The rules on ranks that fail only with different hash seeds."""


def findings_of(
    evidence: Evidence, most: int, attempts: Attempts, controls: Sequence[Evidence] | None = None
) -> list[Finding]:
    """Return at most `most` mistakes, the likeliest first, without repetition.

    Args:
        evidence: of the case that failed.
        most: the largest number of mistakes.
        attempts: collects the rules that fail.
        controls: the evidence of further cases that fail, with other data. A mistake is left out unless it is among
            those of each of them that shows any, or unless an experiment has confirmed it. None if the comparison has
            no such cases.
    """
    return distinct(_confirmed(evidence, controls, attempts), most)


def _confirmed(evidence: Evidence, controls: Sequence[Evidence] | None, attempts: Attempts) -> Iterator[Finding | None]:
    shown: list[set[str]] | None = None  # the mistakes of each control that shows any
    for _, finding in judged(evidence, attempts):
        if controls is not None and not finding.confirmed:
            if shown is None:
                mistakes = ({other.mistake for _, other in judged(control, attempts)} for control in controls)
                shown = [names for names in mistakes if names]
            if not shown or any(finding.mistake not in names for names in shown):
                continue
        yield finding


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
    of_epochs: list[Finding] = []
    for epoch in evidence.epochs:
        of_epochs += distinct((_attempted(rule, epoch, attempts) for rule in RULES_OF_EPOCHS), 1)
    of_order = distinct(_attempted(rule, evidence, attempts) for rule in RULES_OF_LOADERS)
    # If only some ranks reshuffle, the shares of the ranks do not fit together, so the order is the cause.
    on_some = bool(evidence.epochs) and 0 < len(evidence.repeating) < len(evidence.epochs[0].counts)
    return [*of_order, *of_epochs] if on_some else [*of_epochs, *of_order]


def distinct(named: Iterable[Finding | None], most: int | None = None) -> list[Finding]:
    """Return the first finding of each mistake, in order, and at most `most` findings."""
    findings: dict[str, Finding] = {}
    for finding in named:
        if finding is not None:
            findings.setdefault(finding.mistake, finding)
        if len(findings) == most:
            break
    return list(findings.values())


def judged(evidence: Evidence, attempts: Attempts) -> Iterator[tuple[RuleOf[Evidence], Finding]]:
    """Yield each rule that finds a mistake, and its finding, without those that a failure at world size 1 refutes."""
    wrong_alone = evidence.tensors is not None and evidence.tensors.wrong_alone
    for rule in RULES:
        finding = _attempted(rule, evidence, attempts)
        if finding is not None and not (wrong_alone and known_mistake(finding.mistake).of_ranks):
            yield rule, finding


def _attempted(rule: RuleOf[_Evidence], evidence: _Evidence, attempts: Attempts) -> Finding | None:
    label = f"{rule.__module__.rpartition('.')[2]}.{rule.__name__}"
    return attempts.of(f"the rule {label}", None, rule, evidence)
