"""The report of a failure, by its facts."""

from __future__ import annotations

from dataclasses import replace

from mgpu_check.diagnosis.divergence import Parting, WrongModule
from mgpu_check.diagnosis.observations import AGREE, PARITY, Expected, ObservedRun, Relations, Result
from mgpu_check.gates.explanation.failure_report import Axes, FirstWrong, Mismatch, report_of

WEIGHT, BIAS = Result("params", "0.weight"), Result("params", "0.bias")

UNNAMED = Mismatch(
    name="step",
    case={"ranks": 4},
    size=4,
    single_process=False,
    relations=Relations(
        held={WEIGHT: {PARITY: False, AGREE: True}, BIAS: {PARITY: True, AGREE: True}},
        details={WEIGHT: "element [0, 1]: got 2, expected 1"},
        wrong={WEIGHT: [0, 1, 2, 3]},
    ),
    expected=Expected(ObservedRun(), None),
    axes=Axes(("tp",), "any", ("dp",), ("dp",)),
    first_wrong=FirstWrong(1, 2, WEIGHT),
    parting=Parting("train.py:40", "all_reduce, its result", ["1", "1", "2", "2"]),
    module=WrongModule("0", (2, 3), "output"),
    factor=2.0,
    factor_of=[WEIGHT],
    of_update=True,
)


def test_a_failure_without_a_name_says_at_the_top_what_is_known():
    assert str(report_of(UNNAMED)).splitlines()[:9] == [
        "step does not scale: 1 of 2 results on 4 ranks differ from one device, first 0.weight in optimizer step 1 "
        "on rank 2",
        "  fails when tp > 1, for any dp; passes with dp alone",
        "  smallest case: ranks 4",
        "  no known mistake explains this",
        "  gradients are right; what the optimizer makes of them is not",
        "  the first module whose output is not that of one device is 0, on ranks 2-3",
        "  0.weight is 2 times what one device gives",
        "  ranks first part at train.py:40, in all_reduce, its result: 1 on ranks 0-1, 2 on ranks 2-3",
        "",
    ]


def test_what_was_not_judged_is_said_below():
    relations = replace(
        UNNAMED.relations,
        skipped={BIAS: "no tensor of a rank is known to hold it"},
        left_out={"grads": "gradients; what the step returns stands for them"},
        placements={WEIGHT: "rank 0 dim 0: 0 to 3 of 8"},
        streams=[[0, 1], [2, 3]],
    )
    assert report_of(replace(UNNAMED, relations=relations, wrong_alone=True, repeated=False)).remarks == [
        "terminates: yes",
        "the step differs from the reference at world size 1 already",
        "not compared: gradients; what the step returns stands for them",
        "not compared: 0.bias: no tensor of a rank is known to hold it",
        "0.weight is divided: rank 0 dim 0: 0 to 3 of 8",
        "random numbers: the CPU generators of ranks are in different states in the end (ranks 0-1; ranks 2-3)",
        "a second run fails",
    ]
