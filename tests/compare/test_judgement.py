"""What is made of traces: each class of mistakes from traces that show it, and not from those that do not."""

from __future__ import annotations

import pytest

from mgpu_check.compare import diagnosis
from mgpu_check.compare.comparability import NUMBERS
from mgpu_check.diagnosis.report import RAISE
from tests.compare.training import (
    RATE,
    case,
    checks,
    elsewhere,
    gradients,
    having,
    module,
    other,
    own,
    start,
    times,
    verdict,
    whole_batch,
)


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


WORLD, UNSYNCHRONIZED, MEANS = "world-size-factor", "gradients-not-synchronized", "mean-of-means"
START, NOT_SPLIT, RANDOM = "different-initialization", "dataset-not-split", "random-numbers-per-rank"
UNDIVIDED = having(times(0.5), micro=2, loss=lambda number: 0.5 / (1 + number))
DIVIDED = having(UNDIVIDED, micro=4, loss=lambda number: 1.0 / (1 + number))
APART = having(elsewhere, lambda training: times(1 + 0.1 * training.rank)(training))
LOSSES = own(micro=lambda of: 2, loss=lambda of: lambda number: 4.0 if of.world == 1 else 2.0)
CLIPPED = [{"event": "clip", "after": 0, "norm": norm, "most": 1.0} for norm in (2.0, 7.0)]
DRAWN = [{"event": "random", "after": 0, "what": "Net.forward", "line": "model.py:12"}]


def local(training):
    def gradient(number):
        weight, bias = gradients(number)
        return [weight, bias * (1 + training.rank if number else 1)]

    training.gradient = gradient


def uneven(training):
    other(training)
    training.samples = lambda number: [8 * number + i for i in (range(5) if training.rank else range(5, 8))]
    training.loss = lambda number: (0.9 if training.rank else 1 + 0.5 / 3) / (1 + number)


def labelled(*counts: int):
    """The losses of two ranks, each the mean over its labels, whose mean over all labels is that of one device."""

    def change(training):
        other(training)
        training.loss = lambda number: (0.9 if training.rank else 1 + 0.1 * counts[1] / counts[0]) / (1 + number)
        training.labels = (counts[training.rank],)

    return change


def padded(training):
    other(training)
    whole = [*range(8), 0, 1]
    training.samples = lambda number: [8 * number + i for i in whole[training.rank :: 2]]
    training.events = [
        {"event": "sampler", "after": 0, "sampler": 0, "iteration": 1, "set_epoch": True, "shuffle": True}
        | {"replicas": 2, "length": 23, "drop_last": False}
    ]


def missing(training):
    if training.rank:
        training.change = lambda made: made.steps[1].gradients.update({"net.bias": None})


@checks(
    rounding=case(times(1 + 3e-7), "equal", remarks=[], compared=3),
    ten_times_as_much_as_rounding=case(times(1 + 3e-5)),
    factor_2=case(times(2.0), "differs", WORLD, step=1, tensor="gradient", ranks=(0, 1), ratio=pytest.approx(2.0)),
    factor_of_4_ranks=case(times(0.25), "differs", WORLD, world=4, ranks=(0, 1, 2, 3), ratio=pytest.approx(0.25)),
    factor_without_a_name=case(times(1.7), said="no known mistake explains this"),
    micro_batches=case(having(times(3), micro=3), "differs", "accumulation-factor"),
    undivided_micro_batches=case(UNDIVIDED, "differs", "accumulation-factor", one=having(micro=4)),
    divided_micro_batches=case(DIVIDED, "differs", WORLD, one=having(micro=4)),
    rate_by_world_size=case(own(rate=lambda of: RATE * of.world), "differs", WORLD, world=4, tensor="parameter"),
    rate_of_each_rank=case(own(rate=lambda of: RATE * (1 + of.rank)), "differs", "decision-per-rank"),
    local_gradients=case(local, "differs", UNSYNCHRONIZED, step=2, parameter="net.bias", ranks=(1,)),
    start_of_a_rank=case(elsewhere, "differs", START),
    start_and_gradients=case(APART, "differs", START, UNSYNCHRONIZED, said="\n  and gradients-not-synchronized: "),
    start_of_all_ranks=case(
        having(begin=[value + 1 for value in start()]), "not comparable",
        headline="start from other parameters than one device",
    ),
    uneven_shards=case(uneven, "differs", MEANS),
    labels=case(labelled(20, 23), "differs", MEANS, said="the ranks have 20, 23 labels"),
    many_labels=case(labelled(2000, 2001), "differs", MEANS),
    losses_without_labels=case(having(other, loss=lambda number: 1.2 / (1 + number))),
    labels_that_do_not_explain=case(having(labelled(20, 23), own(labels=lambda of: (20 + 2 * of.rank,)))),
    two_models_that_are_clipped_rightly=case(having(other, events=CLIPPED)),
    batch_norm=case(having(other, events=module(["BatchNorm2d"])), "differs", "batch-statistics-per-rank"),
    dropout=case(having(other, events=module((), ["Dropout(p=0.5, inplace=False)"])), "not comparable", RANDOM),
    undivided_losses=case(having(micro=1), "equal", one=LOSSES, remarks=[]),
    half_of_the_data=case(having(other, samples=lambda n: [8 * n + i for i in range(4)]), "differs", NOT_SPLIT),
    all_data_on_each_rank=case(whole_batch, "differs", NOT_SPLIT, parameter=None),
    padding=case(
        padded, "not comparable", "padding-counted",
        headline="the ranks together saw 10 samples; 8 of them are among the 8 samples of one device",
    ),
    other_loss=case(having(loss=lambda number: 2.0), "equal", remark="the loss is scaled differently"),
    fewer_steps=case(having(steps=2), step=3, compared=2),
    missing_gradient=case(missing, "differs", UNSYNCHRONIZED, step=2, parameter="net.bias", ranks=(1,)),
)  # fmt: skip
def test_the_verdict_on(check):
    check()


def test_random_numbers_that_forward_draws_are_no_dropout():
    found = verdict(having(gradient=lambda number: [g + 1 for g in gradients(number)], events=DRAWN))
    assert found.kind == "not comparable"
    assert found.report.headline.endswith(
        "step 1: Net.forward (model.py:12) draws random numbers, which differ between ranks and one device"
    )
    assert f"do: {NUMBERS}" in found.report.remarks and "dropout" not in str(found.report.remarks)
