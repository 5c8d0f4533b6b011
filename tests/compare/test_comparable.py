"""What can be compared at all: the same samples, start, and parameters on both sides."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from mgpu_check.compare import reports
from mgpu_check.compare.alignment import Aligned
from mgpu_check.compare.comparability import FLOAT32, OTHER_START, standing
from mgpu_check.compare.diagnosis import others_from_the_start
from mgpu_check.compare.processes import ProcessResult, ScriptRun
from mgpu_check.compare.rounding import Rounding
from mgpu_check.compare.trace import Trace
from mgpu_check.compare.verdict import verdict_of
from tests.compare.training import (
    NAMES,
    Training,
    case,
    checks,
    having,
    module,
    one_part,
    other,
    own,
    start,
    times,
    verdict,
    whole_batch,
    with_a_third,
)


def shard(made):
    made.parameters.update({name: dataclasses.replace(p, sharded=True) for name, p in made.parameters.items()})


def samples_of(rows):
    """A training that sees rows by rank and step."""
    return own(samples=lambda of: lambda number: rows(of.rank, number))


def rename(made):
    made.parameters.update({f"flat{i}": made.parameters.pop(name) for i, name in enumerate(NAMES)})


def without_bias(made):
    for part in (made.parameters, *(p for step in made.steps for p in (step.before, step.gradients, step.parameters))):
        part.pop("net.bias", None)


def of_sequences(training):
    """The rows of sequences are time steps, of which each rank has another part of each."""
    training.columns = training.samples
    training.samples = lambda number: [1000 * (training.rank + training.world) + i for i in range(5)]


def padded_otherwise(training):
    samples = training.samples
    training.samples = lambda number: [*samples(number)[:3], 1000 + training.rank]


SKIPPED = [{"event": "skipped", "after": 0}]
SHAPES = "its shape is [15] on ranks, and [6, 5] on one device"
NOT_THERE = {"*.weight": "a buffer of its own", "head.*": "not there"}
ONE_OF_8 = "the ranks together saw 8 samples; 1 of them are among the 8 samples of one device"
LACKS = {"net.third (ranks 0-1)": "one device trains no parameter of its name and shape"}


@checks(
    parts_of_the_model=case(having(whole_batch, change=shard), "equal"),
    work_that_is_shared_out_within_the_model=case(
        having(whole_batch, own(loss=lambda of: lambda number: 0.4 + 0.2 * of.rank)), "equal"
    ),
    another_shape=case(
        one_part, "undecided", headline="1 of 2 trained parameters were not compared", compared=3,
        not_compared={"net.weight": SHAPES}, first=f"not compared: net.weight: {SHAPES}",
    ),
    other_names=case(
        having(change=rename), "not comparable",
        remark="one device trains net.weight, net.bias; rank 0 trains flat0, flat1",
    ),
    parameter_of_one_device=case(
        having(change=without_bias), "undecided",
        not_compared={"net.bias": "no rank trains a parameter of its name and shape"},
    ),
    parameter_of_ranks=case(having(change=with_a_third), "undecided", not_compared=LACKS),
    unjudged=case(
        one_part, "equal", unjudged={"*.weight": "a buffer of its own"}, headline="train the same 1 of 2 parameters",
        first="not compared, accepted by --unjudged: net.weight: a buffer of its own",
    ),
    steps_that_a_scaler_skips=case(
        having(other, events=SKIPPED), "not comparable",
        headline="GradScaler skipped 0 steps on one device, and 1 on each rank",
    ),
    steps_that_a_rank_skips=case(
        having(other, own(events=lambda of: SKIPPED * of.rank)), "differs", "decision-per-rank"
    ),
    batch_in_another_dimension=case(kind="equal", one=of_sequences, remarks=[]),
    samples_that_came_again=case(
        having(other, samples_of(lambda rank, number: [8 * number + i for i in (0, 1, 2 + rank, 5)])),
        "not comparable", headline="5 of them are among the 8 samples of one device; 3 came a second time",
        said="3 are on no rank",
    ),
    other_samples=case(
        samples_of(lambda rank, number: [8 * number, *(1000 * (rank + 1) + i for i in range(3))]),
        "not comparable", headline=ONE_OF_8, compared=3,
    ),
    sample_that_is_padded_otherwise=case(
        padded_otherwise, "equal", remark="6 of the 8 samples of one device are also on the ranks"
    ),
    no_gradients=case(
        times(0), "not comparable", one=times(0),
        headline="the gradients of all parameters are zero in all 3 steps",
    ),
)  # fmt: skip
def test_the_verdict_on(check):
    check()


def test_a_pattern_of_unjudged_that_matches_nothing():
    assert (
        verdict(one_part, unjudged=NOT_THERE).report.headline
        == "undecided: --unjudged has 'head.*', which matches no parameter that was not compared"
    )


def a_stage(made):
    """Leave one parameter to the ranks that see samples, and the other one to those that see what was computed."""
    other = "net.bias" if made.steps[0].samples[0][0] < 10**6 else "net.weight"
    for part in (made.parameters, *(p for s in made.steps for p in (s.before, s.gradients, s.parameters))):
        part.pop(other, None)


def divided(change):
    """Return the verdict on ranks that hold parts of the model."""
    made = Training().trace()
    ranks = [Training(rank, 4) for rank in range(4)]
    for training in ranks:
        change(training)
    return verdict_of(Aligned(made, [t.trace() for t in ranks], divided=True), Rounding(made, [made]), None)


@pytest.mark.parametrize(
    "samples",
    [
        lambda rank, number: [8 * number + i for i in range(8)],  # tensor parallelism
        lambda rank, number: [8 * number + i for i in range(rank // 2, 8, 2)],  # over pairs of ranks
        lambda rank, number: [8 * number + i for i in range(8)] if not rank else [10**6 + number],  # stages
        lambda rank, number: [8 * number + i for i in range(4)] if not rank else [10**6 + number],  # of micro-batches
        lambda rank, number: [8 * number + 7 + rank] if rank < 2 else [10**6 + number],  # and copies of stages
    ],
)
def test_samples_of_a_divided_model(samples):
    def right(training):
        training.samples = lambda number: samples(training.rank, number)
        if len(samples(3, 0)) == 1:
            training.change = a_stage

    assert divided(right).kind == "equal"

    assert divided(having(right, times(3))).kind == "differs"


def test_a_divided_model_that_is_given_more_samples_is_not_comparable():
    rows = samples_of(lambda rank, number: [16 * number + 8 * (rank // 2) + i for i in range(8)])
    found = divided(having(other, rows))
    assert found.kind == "not comparable" and "the ranks together saw 16 samples" in found.report.headline


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        (lambda rank: range(rank * 8, rank * 8 + 8), "16 samples; 8 of them are among the 8 samples"),
        (lambda rank: [rank, 90 + rank, 80 + rank, 70 + rank], "8 samples; 2 of them are among the 8 samples"),
        (lambda rank: [rank, 2 + rank, 4 + rank, 90], None),  # most are shared: what follows has to tell
        (lambda rank: range(8), None),  # a difference
        (lambda rank: range(rank, 8, 2), None),
    ],
)
def test_other_samples_from_the_start(samples, words):
    def aligned(elsewhere=0.0):
        ranks = [Training(rank, 2) for rank in range(2)]
        for training in ranks:
            right = training.samples  # of the later steps, which do not count
            training.samples = lambda n, rank=training.rank, right=right: right(n) if n else list(samples(rank))  # type: ignore[misc]
            training.begin = [value + elsewhere * training.rank for value in start()]
        return Aligned(Training().trace(), [training.trace() for training in ranks])

    found = others_from_the_start(aligned())
    assert bool(found) == (words is not None)
    assert not found or words in found[0].reason
    assert others_from_the_start(aligned(elsewhere=1.0)) == []  # a mistake, whatever the samples


def test_another_start_and_other_samples_are_named_at_once():
    def change(training):
        training.begin = [value + 1 for value in start()]
        training.samples = lambda number: [90 + 4 * training.rank + i for i in range(4)]

    ranks = [Training(rank, 2) for rank in range(2)]
    for training in ranks:
        change(training)
    found = others_from_the_start(Aligned(Training().trace(), [training.trace() for training in ranks]))
    assert "the ranks together saw 8 samples; 0 of them" in found[0].reason and found[-1] is OTHER_START

    later = verdict(change)
    assert later.kind == "not comparable" and later.report.headline.count(" and step 1: the ranks together saw 8") == 1
    assert "start from other parameters than one device" in later.report.headline


def test_what_stands_in_the_way():
    def said(change=lambda training: None, own=None):
        one, ranks = Training(), [Training(rank, 2) for rank in range(2)]
        for training in (one, *ranks):
            training.events = [{"event": "seed", "after": 0}]
            change(training)
        return [entry.reason.partition(" ")[0] for entry in standing(one.trace(), [t.trace() for t in ranks], own)]

    def flawed(training):
        times(0)(training)
        training.events = [
            {"event": "random", "after": 0, "what": "noise", "line": ""},
            {"event": "narrow", "after": 0, "module": "Linear", "dtype": "bfloat16"},
            {"event": "save", "after": 3, "file": "/own/last.pt", "missed": True},
        ]
        whole_batch(training)

    assert said() == []
    assert said(flawed) == ["noise", "Linear", "the", "torch.manual_seed", "the", "each"]
    assert said(flawed, Path("/own")) == ["noise", "Linear", "the", "torch.manual_seed", "each"]
    assert said(flawed, Path("/other")) == said(flawed)  # a fresh directory does not keep this file apart

    assert said(having(whole_batch, change=shard)) == []


def test_bfloat16_is_refused_with_advice():
    single, moved, rank = Training(), Training(), Training()
    times(1.3)(moved)
    single.events = [{"event": "narrow", "after": 0, "module": "Linear", "dtype": "bfloat16"}]
    reference = single.trace()
    found = verdict_of(Aligned(reference, [rank.trace()]), Rounding(reference, [moved.trace()]), None)
    assert found.kind == "not comparable" and found.report.headline.endswith(
        "hide even a factor of two: Linear returns bfloat16"
    )
    assert found.report.remarks == [f"do: {FLOAT32}"]


def test_several_devices_of_one_process():
    def replicas(factor):
        one, moved, two = Training(), Training(), Training()
        times(1 + 4e-7)(moved), times(factor)(two)
        two.events = module(norms=["BatchNorm1d"]) if factor == 1.5 else []
        reference = one.trace()
        return verdict_of(Aligned(reference, [two.trace()], 2), Rounding(reference, [moved.trace()]), None)

    assert "equal: 3 steps on 2 GPUs of one process train the same 2 parameters" in replicas(1.0).report.headline
    doubled = replicas(2.0)
    assert doubled.report.mistakes == ("world-size-factor",)
    assert "2 times as large on 2 GPUs of one process" in doubled.report.headline
    (finding,) = replicas(1.5).report.findings
    assert finding.mistake == "batch-statistics-per-rank" and "over the samples of each GPU" in finding.evidence


def test_a_script_that_goes_on_where_another_has_ended_is_told_which_file_to_remove():
    def todo(*files: str | None) -> str:
        trace = Trace(0, 1, events=[{"event": "load", "after": 0, "file": file} for file in files])
        ended = ProcessResult(0, 0, "finished", trace, "going on after epoch 2", "")
        return "\n".join(reports.no_steps(ScriptRun("one device", [ended], 1.0, None), [ended]).remarks)

    advice = "do: the script has loaded /runs/last.pt: if it is a checkpoint of a finished training, remove it"
    assert f"  going on after epoch 2\n{advice}" in todo("/runs/last.pt")
    assert "do: the script has loaded a, b:" in todo("a", "b", "a", None)
    assert "has loaded" not in todo() and "has loaded" not in todo(None)
    run = ScriptRun("one device", [], 1.0, None, Path("/tmp/own"))
    assert [run.shown(file) for file in ("/tmp/own/runs/last.pt", "/tmp/other.pt")] == ["runs/last.pt", "/tmp/other.pt"]
