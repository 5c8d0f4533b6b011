"""What is made of traces: each class of mistakes from traces that show it, and not from those that do not."""

from __future__ import annotations

import pytest

from mgpu_check.compare import diagnosis
from mgpu_check.compare.comparability import NUMBERS
from mgpu_check.diagnosis.report import RAISE
from tests.compare.training import (
    RATE,
    elsewhere,
    gradients,
    having,
    mistakes,
    module,
    other,
    start,
    times,
    verdict,
    whole_batch,
)


def test_rounding_is_no_difference_and_ten_times_as_much_is():
    found = verdict(times(1 + 3e-7))
    assert (found.kind, found.compared, found.report.remarks) == ("equal", 3, [])
    assert verdict(times(1 + 3e-5)).kind == "differs"


@pytest.mark.parametrize(("factor", "world"), [(2.0, 2), (0.25, 4)])
def test_a_factor_of_the_world_size(factor, world):
    found = verdict(times(factor), world=world)
    assert found.report.mistakes == ("world-size-factor",)
    assert (found.step, found.tensor, found.ranks) == (1, "gradient", tuple(range(world)))
    assert found.ratio == pytest.approx(factor)


@pytest.mark.parametrize("piece", ["_norms", "_factor", "_uneven", "evidence_of", "_obstacles"])
def test_a_piece_of_evidence_that_fails_leaves_the_verdict(monkeypatch, piece):
    def fails(*arguments):
        raise IndexError("no such step")

    fails.__name__ = piece
    monkeypatch.delenv(RAISE)
    monkeypatch.setattr(diagnosis, piece, fails)
    found = verdict(times(2))
    assert (found.kind, found.step, found.ranks) == ("differs", 1, (0, 1))
    assert found.report.mistakes == (() if piece in ("_factor", "evidence_of") else ("world-size-factor",))
    assert sum("failed with IndexError: no such step" in remark for remark in found.report.remarks) == 1
    monkeypatch.setenv(RAISE, "1")
    with pytest.raises(IndexError):
        verdict(times(2))


def test_a_factor_that_nothing_explains_has_no_name():
    found = verdict(times(1.7))
    assert found.report.mistakes == () and "no known mistake explains this" in str(found.report)


def test_micro_batches():
    four = having(micro=4)
    undivided = having(times(0.5), micro=2, loss=lambda number: 0.5 / (1 + number))
    divided = having(undivided, micro=4, loss=lambda number: 1.0 / (1 + number))
    assert mistakes(having(times(3), micro=3)) == ("accumulation-factor",)
    assert mistakes(undivided, one=four) == ("accumulation-factor",)
    assert mistakes(divided, one=four) == ("world-size-factor",)


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
    assert mistakes(elsewhere) == ("different-initialization",)

    found = verdict(having(elsewhere, lambda training: times(1 + 0.1 * training.rank)(training))).report
    assert found.mistakes == ("different-initialization", "gradients-not-synchronized")
    assert "\n  and gradients-not-synchronized: " in str(found)


def test_all_ranks_start_elsewhere():
    found = verdict(having(begin=[value + 1 for value in start()]))
    assert (found.kind, found.report.mistakes) == ("not comparable", ())
    assert "start from other parameters than one device" in found.report.headline


def test_uneven_shards():
    def change(training):
        other(training)
        training.samples = lambda number: [8 * number + i for i in (range(5) if training.rank else range(5, 8))]
        training.loss = lambda number: (0.9 if training.rank else 1 + 0.5 / 3) / (1 + number)

    assert mistakes(change) == ("mean-of-means",)


def labelled(*counts: int):
    """The losses of two ranks, each the mean over its labels, whose mean over all labels is that of one device."""

    def change(training):
        other(training)
        training.loss = lambda number: (0.9 if training.rank else 1 + 0.1 * counts[1] / counts[0]) / (1 + number)
        training.labels = (counts[training.rank],)

    return change


def test_losses_that_are_divided_by_the_labels_of_each_rank():
    found = verdict(labelled(20, 23))
    assert found.report.mistakes == ("mean-of-means",)
    assert "the ranks have 20, 23 labels" in found.report.findings[0].evidence
    assert verdict(labelled(2000, 2001)).report.mistakes == ("mean-of-means",)


def test_a_mean_of_means_needs_counts_that_explain_the_losses():
    def miscounted(training):
        labelled(20, 23)(training)
        training.labels = (20 + 2 * training.rank,)

    assert mistakes(having(other, loss=lambda number: 1.2 / (1 + number))) == mistakes(miscounted) == ()


def test_two_models_that_are_clipped_rightly():
    clipped = [{"event": "clip", "after": 0, "norm": norm, "most": 1.0} for norm in (2.0, 7.0)]
    assert mistakes(having(other, events=clipped)) == ()


def test_batch_norm():
    assert mistakes(having(other, events=module(norms=["BatchNorm2d"]))) == ("batch-statistics-per-rank",)


def test_random_numbers_that_forward_draws_are_no_dropout():
    drawn = [{"event": "random", "after": 0, "what": "Net.forward", "line": "model.py:12"}]
    found = verdict(having(gradient=lambda number: [g + 1 for g in gradients(number)], events=drawn))
    assert found.kind == "not comparable"
    assert found.report.headline.endswith(
        "step 1: Net.forward (model.py:12) draws random numbers, which differ between ranks and one device"
    )
    assert f"do: {NUMBERS}" in found.report.remarks and "dropout" not in str(found.report.remarks)


def test_losses_that_are_not_divided_by_the_micro_batches_are_no_remark():
    def one(training):
        training.micro = 2
        training.loss = lambda number: 4.0 if training.world == 1 else 2.0

    found = verdict(having(micro=1), one=one)
    assert (found.kind, found.report.remarks) == ("equal", [])


def test_dropout():
    found = verdict(having(other, events=module(dropouts=["Dropout(p=0.5, inplace=False)"])))
    assert (found.kind, found.report.mistakes) == ("not comparable", ("random-numbers-per-rank",))


def test_the_same_part_of_the_data_on_each_rank():
    same = having(other, samples=lambda number: [8 * number + i for i in range(4)])
    assert mistakes(same) == ("dataset-not-split",)


def test_all_data_on_each_rank_is_found_though_nothing_differs():
    found = verdict(whole_batch)
    assert (found.kind, found.report.mistakes, found.parameter) == ("differs", ("dataset-not-split",), None)


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


def test_a_loss_that_is_logged_otherwise_is_a_remark():
    found = verdict(having(loss=lambda number: 2.0))
    assert found.kind == "equal" and "the logged loss is scaled differently" in found.report.remarks[0]


def test_another_number_of_steps():
    found = verdict(having(steps=2))
    assert (found.kind, found.step, found.compared) == ("differs", 3, 2)


def test_a_gradient_that_is_missing_on_a_rank():
    def drop(training):
        if training.rank:
            training.change = lambda made: made.steps[1].gradients.update({"net.bias": None})

    found = verdict(drop)
    assert (found.step, found.parameter, found.ranks) == (2, "net.bias", (1,))
    assert found.report.mistakes == ("gradients-not-synchronized",)
