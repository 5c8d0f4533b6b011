"""What is made of traces: each class of mistakes from traces that show it, and not from those that do not."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType

import pytest
import torch

from mgpu_check.compare import diagnosis, evidence
from mgpu_check.compare.alignment import Aligned, deviation
from mgpu_check.compare.batches import others_from_the_start
from mgpu_check.compare.obstacles import FLOAT32, NUMBERS, OTHER_START, standing
from mgpu_check.compare.processes import Ended, ScriptRun
from mgpu_check.compare.rounding import Repeat, Rounding, repeatability, roundoff
from mgpu_check.compare.summaries import summaries
from mgpu_check.compare.trace import Parameter, Step, TensorSummary, Trace, chunk_sizes
from mgpu_check.compare.verdict import ComparisonVerdict, verdict_of, without_steps
from mgpu_check.diagnosis.attempts import RAISE

NAMES = ("net.weight", "net.bias")
RATE = 0.1


def summary(tensor: torch.Tensor) -> TensorSummary:
    (numbers,) = summaries([tensor])
    assert numbers is not None
    return TensorSummary.of(numbers)


def start() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(6, 5, generator=generator), torch.randn(6, generator=generator)]


def gradients(number: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + number)
    return [torch.randn(6, 5, generator=generator), torch.randn(6, generator=generator)]


class Training:
    """A run of plain gradient descent on gradients that depend on the step alone, and what is changed of it."""

    def __init__(self, rank: int = 0, world: int = 1, steps: int = 3) -> None:
        self.rank, self.world, self.steps = rank, world, steps
        self.begin = start()
        self.rate = RATE
        self.samples = lambda number: [8 * number + i for i in range(rank, 8, world)]
        self.columns: Callable[[int], list] = lambda number: []
        self.loss = lambda number: 1.0 / (1 + number)
        self.gradient = gradients
        self.after = self.gradient
        self.events: list[dict] = []
        self.micro = 1
        self.change = lambda made: None

    def trace(self) -> Trace:
        made = Trace(self.rank, self.world, events=self.events)
        values = [value.clone() for value in self.begin]
        for order, (name, value) in enumerate(zip(NAMES, values, strict=True)):
            made.parameters[name] = Parameter(name, tuple(value.shape), "float32", "cpu", order)
        for number in range(self.steps):
            before = {n: summary(v) for n, v in zip(NAMES, values, strict=True)} if not number else {}
            found = self.gradient(number)
            values = [v - self.rate * g for v, g in zip(values, found, strict=True)]
            made.steps.append(
                Step(
                    0,
                    [self.loss(number) / self.micro] * self.micro,
                    [self.samples(number)],
                    [self.columns(number)],
                    before,
                    {n: summary(g) for n, g in zip(NAMES, found, strict=True)},
                    {n: summary(v) for n, v in zip(NAMES, values, strict=True)},
                )
            )
        self.change(made)
        return made


def verdict(change=lambda training: None, world: int = 2, one=lambda training: None, unjudged=MappingProxyType({})):
    """Of a training whose ranks are as `change` makes them."""
    single, moved = Training(), Training()
    one(single), one(moved)
    moved.gradient = lambda number: [g * (1 + 4e-7) for g in single.gradient(number)]
    ranks = [Training(rank, world) for rank in range(world)]
    for training in ranks:
        one(training)
        change(training)
    reference = single.trace()
    rounding = Rounding(reference, [moved.trace()])
    return verdict_of(Aligned(reference, [t.trace() for t in ranks]), rounding, None, unjudged)


def mistakes(change, **options) -> tuple[str, ...]:
    return verdict(change, **options).report.mistakes


def test_equal():
    found = verdict()
    assert (found.kind, found.compared, found.report.remarks) == ("equal", 3, [])


def test_rounding_is_no_difference_and_ten_times_as_much_is():
    def rounded(size):
        def change(training):
            training.gradient = lambda number: [g * (1 + size) for g in gradients(number)]

        return change

    assert verdict(rounded(3e-7)).kind == "equal"
    assert verdict(rounded(3e-5)).kind == "differs"


@pytest.mark.parametrize(("factor", "world"), [(2.0, 2), (0.25, 4)])
def test_a_factor_of_the_world_size(factor, world):
    def change(training):
        training.gradient = lambda number: [factor * g for g in gradients(number)]

    found = verdict(change, world=world)
    assert found.report.mistakes == ("world-size-factor",)
    assert (found.step, found.tensor, found.ranks) == (1, "gradient", tuple(range(world)))
    assert found.ratio == pytest.approx(factor)


@pytest.mark.parametrize("piece", ["_norms", "_factor", "_uneven", "evidence_of", "_obstacles"])
def test_a_piece_of_evidence_that_fails_leaves_the_verdict(monkeypatch, piece):
    def fails(*arguments):
        raise IndexError("no such step")

    def change(training):
        training.gradient = lambda number: [2 * g for g in gradients(number)]

    fails.__name__ = piece
    monkeypatch.delenv(RAISE)
    monkeypatch.setattr(evidence if hasattr(evidence, piece) and piece != "evidence_of" else diagnosis, piece, fails)
    found = verdict(change)
    assert (found.kind, found.step, found.ranks) == ("differs", 1, (0, 1))
    assert found.report.mistakes == (() if piece in ("_factor", "evidence_of") else ("world-size-factor",))
    assert sum("failed with IndexError: no such step" in remark for remark in found.report.remarks) == 1
    monkeypatch.setenv(RAISE, "1")
    with pytest.raises(IndexError):
        verdict(change)


def test_a_factor_that_nothing_explains_has_no_name():
    def change(training):
        training.gradient = lambda number: [1.7 * g for g in gradients(number)]

    found = verdict(change)
    assert found.report.mistakes == () and "no known mistake explains this" in str(found.report)


def test_the_number_of_micro_batches():
    def change(training):
        training.micro = 3
        training.gradient = lambda number: [3 * g for g in gradients(number)]

    assert mistakes(change) == ("accumulation-factor",)


def test_a_learning_rate_by_world_size():
    def change(training):
        training.rate = RATE * training.world

    found = verdict(change, world=4)
    assert found.report.mistakes == ("world-size-factor",)
    assert found.tensor == "parameter"


def test_a_rate_of_each_rank():
    def change(training):
        training.rate = RATE * (1 + training.rank)

    assert mistakes(change) == ("decision-per-rank",)


def test_gradients_that_stay_on_each_rank_from_the_second_step_on():
    def change(training):
        def own(number):
            found = gradients(number)
            return [found[0], found[1] * (1 + training.rank if number else 1)]

        training.gradient = own

    found = verdict(change)
    assert found.report.mistakes == ("gradients-not-synchronized",)
    assert (found.step, found.parameter, found.ranks) == (2, "net.bias", (1,))


def test_ranks_that_start_elsewhere():
    def change(training):
        if training.rank:
            training.begin = [value + 1 for value in start()]

    assert mistakes(change) == ("different-initialization",)


def test_a_checkpoint_on_one_rank():
    def change(training):
        if training.rank:
            training.begin = [value + 1 for value in start()]
        else:
            training.events = [{"event": "restore", "after": 0, "of": "Linear"}]

    assert mistakes(change) == ("restored-on-one-rank",)


def test_all_ranks_start_elsewhere():
    def change(training):
        training.begin = [value + 1 for value in start()]

    found = verdict(change)
    assert (found.kind, found.report.mistakes) == ("not comparable", ())
    assert "start from other parameters than one device" in found.report.headline


def other(training):
    training.gradient = lambda number: [g + 0.1 * g.flip(0) for g in gradients(number)]


def test_uneven_shards():
    def change(training):
        other(training)
        training.samples = lambda number: [8 * number + i for i in (range(5) if training.rank else range(5, 8))]

    assert mistakes(change) == ("mean-of-means",)


def test_losses_that_are_divided_by_counts_of_their_own():
    def change(training):
        other(training)
        training.loss = lambda number: 1.2 / (1 + number)

    assert mistakes(change) == ("mean-of-means",)


def clip(*norms):
    return [{"event": "clip", "after": 0, "norm": norm, "most": 1.0} for norm in norms]


def test_clipping_of_gradients_that_differ():
    def change(training):
        other(training)
        training.events = clip(2.0 + training.rank)

    assert mistakes(change) == ("clipped-before-synchronization",)


def test_two_models_that_are_clipped_rightly():
    def change(training):
        other(training)
        training.events = clip(2.0, 7.0)

    assert mistakes(change) == ()


def module(norms=(), dropouts=()):
    return [
        {"event": "module", "after": 0, "model": "Net", "wrapper": None, "batch_norms": norms, "dropouts": dropouts}
    ]


def test_batch_norm():
    def change(training):
        other(training)
        training.events = module(norms=["BatchNorm2d"])

    assert mistakes(change) == ("batch-statistics-per-rank",)


def test_random_numbers_that_forward_draws_are_no_dropout():
    def noisy(training):
        training.gradient = lambda number: [g + 1 for g in gradients(number)]
        training.events = [{"event": "random", "after": 0, "what": "Net.forward", "line": "model.py:12"}]

    found = verdict(noisy)
    assert found.kind == "not comparable"
    assert found.report.headline.endswith(
        "step 1: Net.forward (model.py:12) draws random numbers, which differ between ranks and one device"
    )
    assert f"do: {NUMBERS}" in found.report.remarks and "dropout" not in str(found.report.remarks)


def test_losses_that_are_not_divided_by_the_micro_batches_are_no_remark():
    def one(training):
        training.micro = 2
        training.loss = lambda number: 4.0 if training.world == 1 else 2.0

    def change(training):
        training.micro = 1

    found = verdict(change, one=one)
    assert (found.kind, found.report.remarks) == ("equal", [])


def test_dropout():
    def change(training):
        other(training)
        training.events = module(dropouts=["Dropout(p=0.5, inplace=False)"])

    found = verdict(change)
    assert (found.kind, found.report.mistakes) == ("not comparable", ("random-numbers-per-rank",))


def test_the_same_part_of_the_data_on_each_rank():
    def change(training):
        other(training)
        training.samples = lambda number: [8 * number + i for i in range(4)]

    assert mistakes(change) == ("dataset-not-split",)


def whole_batch(training):
    training.samples = lambda number: [8 * number + i for i in range(8)]


def test_all_data_on_each_rank_is_found_though_nothing_differs():
    found = verdict(whole_batch)
    assert (found.kind, found.report.mistakes, found.parameter) == ("differs", ("dataset-not-split",), None)


def test_ranks_that_hold_parts_of_the_model_see_all_data_rightly():
    def change(training):
        whole_batch(training)
        training.change = lambda made: made.parameters.update(
            {name: dataclasses.replace(p, sharded=True) for name, p in made.parameters.items()}
        )

    assert verdict(change).kind == "equal"


def test_ranks_that_share_the_work_out_within_the_model_see_all_data_rightly():
    def change(training):
        whole_batch(training)
        training.loss = lambda number: 0.4 + 0.2 * training.rank

    assert verdict(change).kind == "equal"


def a_stage(made):
    """Leave one parameter to the ranks that see samples, and the other one to those that see what was computed."""
    other = "net.bias" if made.steps[0].samples[0][0] < 10**6 else "net.weight"
    for part in (made.parameters, *(p for s in made.steps for p in (s.before, s.gradients, s.parameters))):
        part.pop(other, None)


def divided(change):
    """Return the verdict on ranks that hold parts of the model."""
    single = Training()
    ranks = [Training(rank, 4) for rank in range(4)]
    for training in ranks:
        change(training)
    made = single.trace()
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

    def wrong(training):
        right(training)
        training.gradient = lambda number: [3 * g for g in gradients(number)]

    assert divided(wrong).kind == "differs"


def test_a_divided_model_that_is_given_more_samples_is_not_comparable():
    def more(training):
        other(training)
        training.samples = lambda number: [16 * number + 8 * (training.rank // 2) + i for i in range(8)]

    found = divided(more)
    assert found.kind == "not comparable" and "the ranks together saw 16 samples" in found.report.headline


def one_part(training):
    def flatten(made):
        made.parameters["net.weight"] = dataclasses.replace(made.parameters["net.weight"], shape=(15,))

    training.change = flatten


def test_parameters_that_no_rank_holds_whole_are_not_called_equal():
    found = verdict(one_part)
    assert (found.kind, found.compared) == ("undecided", 3)
    assert "1 of 2 trained parameters were not compared" in found.report.headline
    assert found.not_compared == {"net.weight": "its shape is [15] on ranks, and [6, 5] on one device"}
    assert found.report.remarks[0] == "not compared: net.weight: its shape is [15] on ranks, and [6, 5] on one device"

    def renamed(training):
        training.change = lambda made: made.parameters.update(
            {f"flat{i}": made.parameters.pop(name) for i, name in enumerate(NAMES)}
        )

    found = verdict(renamed)
    assert found.kind == "not comparable"
    assert "one device trains net.weight, net.bias; rank 0 trains flat0, flat1" in found.report.remarks[0]


def test_a_parameter_that_one_side_alone_trains_is_not_called_equal():
    def without_bias(made):
        del made.parameters["net.bias"]
        for step in made.steps:
            for part in (step.before, step.gradients, step.parameters):
                part.pop("net.bias", None)

    def change(training):
        training.change = without_bias

    found = verdict(change)
    assert found.kind == "undecided"
    assert found.not_compared == {"net.bias": "no rank trains a parameter of its name and shape"}

    def on_ranks(training):
        training.change = with_a_third

    found = verdict(on_ranks)
    assert found.kind == "undecided"
    assert found.not_compared == {"net.third (ranks 0-1)": "one device trains no parameter of its name and shape"}


def test_what_need_not_be_compared_is_repeated():
    found = verdict(one_part, unjudged={"*.weight": "a buffer of its own"})
    assert found.kind == "equal" and "train the same 1 of 2 parameters" in found.report.headline
    assert found.report.remarks[0] == "not compared, accepted by --unjudged: net.weight: a buffer of its own"
    found = verdict(one_part, unjudged={"*.weight": "a buffer of its own", "head.*": "not there"})
    assert (
        found.report.headline == "undecided: --unjudged has 'head.*', which matches no parameter that was not compared"
    )


def test_steps_that_a_scaler_skips():
    def on_all(training):
        other(training)
        training.events = [{"event": "skipped", "after": 0}]

    found = verdict(on_all)
    assert (found.kind, found.report.mistakes) == ("not comparable", ())
    assert "GradScaler skipped 0 steps on one device, and 1 on each rank" in found.report.headline

    def on_one(training):
        other(training)
        training.events = [{"event": "skipped", "after": 0}] * training.rank

    assert mistakes(on_one) == ("decision-per-rank",)


def test_padding():
    def change(training):
        other(training)
        whole = [*range(8), 0, 1]
        training.samples = lambda number: [8 * number + i for i in whole[training.rank :: 2]]
        training.events = [
            {"event": "sampler", "after": 0, "sampler": 0, "iteration": 1, "set_epoch": True, "shuffle": True}
            | {"replicas": 2, "length": 23, "drop_last": False}
        ]

    found = verdict(change)
    assert (found.kind, found.report.mistakes) == ("not comparable", ("padding-counted",))
    assert "the ranks together saw 10 samples; 8 of them are among the 8 samples of one device" in found.report.headline


def test_other_samples():
    def change(training):
        other(training)
        training.samples = lambda number: [1000 + 8 * number + i for i in range(training.rank, 8, 2)]

    found = verdict(change)
    assert found.kind == "not comparable"
    assert "the ranks together saw 8 samples; 0 of them are among the 8 samples of one device" in found.report.headline


def test_a_batch_in_another_dimension():
    """The rows of sequences are time steps, of which each rank has another part of each."""

    def batch(training):
        training.columns = training.samples
        training.samples = lambda number: [1000 * (training.rank + training.world) + i for i in range(5)]

    found = verdict(one=batch)
    assert (found.kind, found.report.remarks) == ("equal", [])


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        (
            lambda rank: range(rank * 8, rank * 8 + 8),
            "16 samples; 8 of them are among the 8 samples of one device",
        ),  # 8 for each rank
        (
            lambda rank: [rank, 90 + rank, 80 + rank, 70 + rank],
            "8 samples; 2 of them are among the 8 samples of one device",
        ),
        (lambda rank: [rank, 2 + rank, 4 + rank, 90], None),  # most are shared: what follows has to tell
        (lambda rank: range(8), None),  # a difference
        (lambda rank: range(rank, 8, 2), None),
    ],
)
def test_other_samples_from_the_start(samples, words):
    def aligned(elsewhere=0.0):
        ranks = [Training(rank, 2) for rank in range(2)]
        for training in ranks:
            training.samples = lambda number, rank=training.rank: list(samples(rank))
            training.begin = [value + elsewhere * training.rank for value in start()]
        return Aligned(Training().trace(), [training.trace() for training in ranks])

    found = others_from_the_start(aligned())
    assert bool(found) == (words is not None)
    assert not found or words in found[0].why
    assert others_from_the_start(aligned(elsewhere=1.0)) == []  # a mistake, whatever the samples


def test_another_start_and_other_samples_are_named_at_once():
    def change(training):
        training.begin = [value + 1 for value in start()]
        training.samples = lambda number: [90 + 4 * training.rank + i for i in range(4)]

    ranks = [Training(rank, 2) for rank in range(2)]
    for training in ranks:
        change(training)
    found = others_from_the_start(Aligned(Training().trace(), [training.trace() for training in ranks]))
    assert "the ranks together saw 8 samples; 0 of them" in found[0].why and found[-1] is OTHER_START

    later = verdict(change)
    assert later.kind == "not comparable" and later.report.headline.count(" and step 1: the ranks together saw 8") == 1
    assert "start from other parameters than one device" in later.report.headline


def test_samples_that_came_again_are_counted():
    def change(training):
        other(training)
        training.samples = lambda number: [8 * number + i for i in (0, 1, 2 + training.rank, 5)]

    headline = verdict(change).report.headline
    assert "5 of them are among the 8 samples of one device; 3 came a second time" in headline
    assert "3 are on no rank" in headline


def test_agreement_on_other_samples_is_none():
    def change(training):
        training.samples = lambda number: [8 * number, *(1000 * (training.rank + 1) + i for i in range(3))]

    found = verdict(change)
    assert (found.kind, found.compared) == ("not comparable", 3)
    assert "the ranks together saw 8 samples; 1 of them are among the 8 samples of one device" in found.report.headline


def test_a_sample_that_is_padded_otherwise_is_a_remark():
    def change(training):
        own = training.samples
        training.samples = lambda number: [*own(number)[:3], 1000 + training.rank]

    found = verdict(change)
    assert found.kind == "equal"
    assert any("6 of the 8 samples of one device are also on the ranks" in remark for remark in found.report.remarks)


def test_agreement_without_gradients_is_none():
    def nothing(training):
        training.gradient = lambda number: [0 * g for g in gradients(number)]

    found = verdict(nothing, one=nothing)
    assert found.kind == "not comparable"
    assert "the gradients of all parameters are zero in all 3 steps" in found.report.headline


def test_what_stands_in_the_way():
    def said(change=lambda training: None, fresh=False):
        one, ranks = Training(), [Training(rank, 2) for rank in range(2)]
        for training in (one, *ranks):
            training.events = [{"event": "seed", "after": 0}]
            change(training)
        return [entry.why.partition(" ")[0] for entry in standing(one.trace(), [t.trace() for t in ranks], fresh)]

    def flawed(training):
        training.gradient = lambda number: [0 * g for g in gradients(number)]
        training.events = [
            {"event": "random", "after": 0, "what": "noise", "line": ""},
            {"event": "narrow", "after": 0, "module": "Linear", "dtype": "bfloat16"},
            {"event": "save", "after": 3, "file": "/last.pt", "missed": True},
        ]
        whole_batch(training)

    assert said() == []
    assert said(flawed) == ["noise", "Linear", "the", "torch.manual_seed", "the", "each"]
    assert said(flawed, fresh=True) == ["noise", "Linear", "the", "torch.manual_seed", "each"]

    def in_parts(training):
        whole_batch(training)
        training.change = lambda made: made.parameters.update(
            {name: dataclasses.replace(p, sharded=True) for name, p in made.parameters.items()}
        )

    assert said(in_parts) == []


def test_bfloat16_is_refused_with_advice():
    def rough(training):
        training.events = [{"event": "narrow", "after": 0, "module": "Linear", "dtype": "bfloat16"}]

    single, moved, rank = Training(), Training(), Training()
    moved.gradient = lambda number: [g * 1.3 for g in gradients(number)]
    rough(single)
    reference = single.trace()
    found = verdict_of(Aligned(reference, [rank.trace()]), Rounding(reference, [moved.trace()]), None)
    assert found.kind == "not comparable" and found.report.headline.endswith(
        "hide even a factor of two: Linear returns bfloat16"
    )
    assert found.report.remarks == [f"do: {FLOAT32}"]


def test_several_devices_of_one_process():
    def replicas(factor):
        one, moved, two = Training(), Training(), Training()
        moved.gradient = lambda number: [g * (1 + 4e-7) for g in gradients(number)]
        two.gradient = lambda number: [g * factor for g in gradients(number)]
        two.events = module(norms=["BatchNorm1d"]) if factor == 1.5 else []
        reference = one.trace()
        return verdict_of(Aligned(reference, [two.trace()], 2), Rounding(reference, [moved.trace()]), None)

    assert "equal: 3 steps on 2 GPUs of one process train the same 2 parameters" in replicas(1.0).report.headline
    doubled = replicas(2.0)
    assert doubled.report.mistakes == ("world-size-factor",)
    assert "2 times as large on 2 GPUs of one process" in doubled.report.headline
    (finding,) = replicas(1.5).report.findings
    assert finding.mistake == "batch-statistics-per-rank" and "over the samples of each GPU" in finding.evidence


def test_a_loss_that_is_logged_otherwise_is_a_remark():
    def change(training):
        training.loss = lambda number: 2.0

    found = verdict(change)
    assert found.kind == "equal" and "the logged loss is scaled differently" in found.report.remarks[0]


def test_another_number_of_steps():
    def change(training):
        training.steps = 2

    found = verdict(change)
    assert (found.kind, found.step, found.compared) == ("differs", 3, 2)


def test_no_number_hides():
    def change(training):
        training.gradient = lambda number: [g * (math.nan if number == 2 else 1) for g in gradients(number)]

    found = verdict(change)
    assert (found.kind, found.step) == ("differs", 3)


def no_numbers(first, value=math.nan):
    """From that step on, counted from 0, on one device and on the ranks."""

    def one(training):
        training.gradient = lambda number: [g * (value if number >= first else 1) for g in gradients(number)]

    return one


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_where_numbers_end_equality_ends(value):
    found = verdict(one=no_numbers(2, value))
    assert (found.kind, found.compared) == ("equal", 2)
    assert found.report.headline.startswith("equal: steps 1 to 2 on 2 ranks")
    assert found.report.headline.endswith("; later values are not finite")
    assert "at step 3, on one device, the gradient of net.weight is not finite" in found.report.remarks[0]


def test_no_numbers_from_the_first_step_on():
    found = verdict(one=no_numbers(0))
    assert (found.kind, found.compared) == ("not comparable", 0)
    assert "not a number from the first step on: on one device the gradient of net.weight" in found.report.headline


def test_a_difference_before_numbers_end():
    def change(training):
        training.gradient = lambda number: [g * ((1, 1.7, math.nan)[number]) for g in gradients(number)]

    found = verdict(change, one=no_numbers(2))
    assert (found.kind, found.step) == ("differs", 2)


def test_numbers_that_ranks_have_where_one_device_has_none():
    single, moved = Training(), Training()
    no_numbers(2)(single)
    no_numbers(2)(moved)
    reference, ranks = single.trace(), [Training(rank, 2).trace() for rank in range(2)]
    found = verdict_of(Aligned(reference, ranks), Rounding(reference, [moved.trace()]), None)
    assert (found.kind, found.step, found.tensor, found.ranks) == ("differs", 3, "gradient", (0, 1))
    # Where rounding makes numbers of them, too, that tells nothing.
    found = verdict_of(Aligned(reference, ranks), Rounding(reference, [Training().trace()]), None)
    assert (found.kind, found.compared) == ("equal", 2)


def test_gradients_that_lead_to_no_numbers_are_compared():
    def overflow(training):
        training.change = lambda made: made.steps[2].parameters.update(
            {"net.bias": summary(torch.full((6,), math.inf))}
        )

    def change(training):
        training.gradient = lambda number: [g * (2 if number == 2 else 1) for g in gradients(number)]

    found = verdict(one=overflow)
    assert (found.kind, found.compared) == ("equal", 2)
    found = verdict(change, one=overflow)
    assert (found.kind, found.step, found.tensor) == ("differs", 3, "gradient")
    assert found.report.mistakes == ("world-size-factor",)


def test_what_follows_the_last_numbers_is_not_asked_to_repeat_itself():
    runs = [Training(), Training(0, 2), Training(1, 2)]
    for training in runs:
        no_numbers(2)(training)
    reference, *ranks = (training.trace() for training in runs)
    aligned, rounding = Aligned(reference, ranks), Rounding(reference, [reference])
    assert verdict_of(aligned, rounding, Repeat(2, "")).kind == "equal"
    assert verdict_of(aligned, rounding, Repeat(1, "")).kind == "not comparable"


def test_another_number_of_steps_after_the_last_numbers():
    def change(training):
        training.steps = 3 if training.world == 1 else 2

    found = verdict(change, one=no_numbers(1))
    assert (found.kind, found.compared) == ("differs", 1)
    assert "the first 1 common steps are equal, and later values are not finite" in found.report.headline


def test_a_start_without_numbers_repeats_itself():
    def trace():
        training = Training()
        training.begin = [value * math.nan for value in start()]
        return training.trace()

    assert repeatability(trace(), trace()) is None


def test_a_gradient_that_is_missing_on_a_rank():
    def drop(training):
        if training.rank:
            training.change = lambda made: made.steps[1].gradients.update({"net.bias": None})

    found = verdict(drop)
    assert (found.step, found.parameter, found.ranks) == (2, "net.bias", (1,))
    assert found.report.mistakes == ("gradients-not-synchronized",)


def test_repeatability():
    first, again = Training(), Training()
    assert repeatability(first.trace(), again.trace()) is None
    again.gradient = lambda number: [g * (1 + (1e-6 if number else 0)) for g in gradients(number)]
    assert repeatability(first.trace(), again.trace()) is None  # kernels that add up in no fixed order
    again.gradient = lambda number: [g * (1.01 if number == 1 else 1) for g in gradients(number)]
    assert repeatability(first.trace(), again.trace()).step == 1
    again = Training()
    again.samples = lambda number: [7 - i for i in range(8)]
    assert "different samples" in repeatability(first.trace(), again.trace()).what


def test_where_rounding_has_taken_over():
    single, moved = Training(steps=6), Training(steps=6)
    moved.gradient = lambda number: [
        g + (0.5 * g.flip(0) if number > 3 else 0) for g in gradients(number)
    ]  # fmt: skip
    reference = single.trace()
    # The first eight steps are taken together, so that the small numbers of a small model cannot be right by chance.
    rounding = Rounding(reference, [moved.trace()])
    found = verdict_of(Aligned(reference, [Training(r, 2, 6).trace() for r in range(2)]), rounding, None)
    assert found.kind == "not comparable" and "rounding alone" in found.report.headline


def with_a_third(made: Trace) -> None:
    made.parameters["net.third"] = dataclasses.replace(made.parameters["net.weight"], name="net.third", order=2)
    for step in made.steps:
        for part in (step.before, step.gradients, step.parameters):
            if part:
                part["net.third"] = part["net.weight"]


def of_three(drown) -> ComparisonVerdict:
    """Of right ranks, and a moved run whose trace is as `drown` makes it."""
    traces = [Training().trace(), Training().trace(), *(Training(rank, 2).trace() for rank in range(2))]
    for trace in traces:
        with_a_third(trace)
    drown(traces[1])
    return verdict_of(Aligned(traces[0], traces[2:]), Rounding(traces[0], [traces[1]]), None)


@pytest.mark.parametrize("value", [math.nan, 0.3])
def test_a_tensor_that_rounding_alone_hides_does_not_count_as_equal(value):
    def drown(made):
        made.steps[1].parameters["net.bias"] = summary(torch.full((6,), value))

    found = of_three(drown)
    assert found.kind == "equal"
    assert "train the same 2 of 3 parameters" in found.report.headline
    assert any("the updated values of net.bias (from step " in remark for remark in found.report.remarks)
    right = of_three(lambda made: None)
    assert "train the same 3 parameters" in right.report.headline and right.report.remarks == []


def test_a_gradient_that_rounding_alone_hides_is_named():
    """Its parameter is compared all the same."""

    def drown(made):
        made.steps[0].gradients["net.bias"] = summary(torch.ones(6))

    found = of_three(drown)
    assert "train the same 3 parameters" in found.report.headline
    assert any("the gradients of net.bias (from step 1 on)" in remark for remark in found.report.remarks)


def test_parameters_that_rounding_alone_hides_are_not_called_equal():
    def drown(made):
        for step in made.steps:
            step.parameters.update({name: summary(torch.ones(6)) for name in step.parameters})
            for name in ("net.weight", "net.third"):
                step.parameters[name] = summary(torch.ones(6, 5))

    found = of_three(drown)
    assert found.kind == "not comparable" and "rounding alone changes every parameter" in found.report.headline


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [
        ("float64", 53),
        ("float32", 24),
        ("float16", 11),
        ("bfloat16", 8),
        ("complex128", 53),
        ("complex64", 24),
        ("complex32", 11),
        ("int64", 24),
    ],
)
def test_the_roundoff_of_a_dtype(dtype, bits):
    assert roundoff(dtype) == 2.0**-bits


def test_the_element_that_is_named():
    expected = torch.arange(1.0, 31).reshape(5, 6)
    got = expected.clone()
    got[4, 5] = -30
    found = deviation(summary(got), summary(expected), (5, 6))
    assert (found.what, found.got, found.expected) == ("element [4, 5]", -30, 30)


def test_the_sum_that_is_named_has_its_elements():
    expected = torch.ones(1000)
    got = expected.clone()
    got[998] = -1.0  # its norm is the same, and this element is not stored
    first = 1000 - chunk_sizes(1000)[-1]
    assert deviation(summary(got), summary(expected), (1000,)).what == f"sum of elements {first} to 999 of 1000"


def test_a_script_that_goes_on_where_another_has_ended_is_told_which_file_to_remove():
    def todo(*files: str | None) -> str:
        trace = Trace(0, 1, events=[{"event": "load", "after": 0, "file": file} for file in files])
        ended = Ended(0, 0, "finished", trace, "going on after epoch 2", "")
        return "\n".join(without_steps(ScriptRun("one device", [ended], 1.0, None), [ended]).report.remarks)

    advice = "do: the script has loaded /runs/last.pt: if it is a checkpoint of a finished training, remove it"
    assert f"  going on after epoch 2\n{advice}" in todo("/runs/last.pt")
    assert "do: the script has loaded a, b:" in todo("a", "b", "a", None)
    assert "has loaded" not in todo() and "has loaded" not in todo(None)
    run = ScriptRun("one device", [], 1.0, None, Path("/tmp/own"))
    assert [run.shown(file) for file in ("/tmp/own/runs/last.pt", "/tmp/other.pt")] == ["runs/last.pt", "/tmp/other.pt"]
