"""The relations that a gate judges."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from mgpu_check.diagnosis.observations import (
    AGREE,
    FINITE,
    KINDS,
    PARITY,
    REPEATS,
    Expected,
    ObservedRun,
    Relations,
    Result,
)
from mgpu_check.gates.comparison.relations import relations_of, repeats
from mgpu_check.numerics.placement import Unplaced
from mgpu_check.torch_hooks.tensors import digest_of

WEIGHT, GRADIENT, STATE = Result("params", "w"), Result("grads", "w"), Result("optimizer", "momentum of w")
BUFFER, LOSS = Result("buffers", "mean"), Result("returned", "loss")
RETURNED, FLAT = Result("returned", "w"), Result("returned", "")
RIGHT = {
    WEIGHT: torch.tensor([1.0, 2.0]),
    GRADIENT: torch.tensor([3.0, 4.0]),
    STATE: torch.tensor([5.0, 6.0]),
    BUFFER: torch.tensor([0.0, 8.0]),
    LOSS: torch.tensor(9.0),
}
HOLDS = {PARITY: True, AGREE: True, FINITE: True}


def run(changed=None, without=(), **more):
    """Return a run with the right values, but for those in `changed`, and those that it lacks."""
    values = {name: value for name, value in {**RIGHT, **(changed or {})}.items() if name not in without}
    given = {"touched": {"grads", "params"}, "trained": {"w"}, "optimizers": 1, **more}
    return ObservedRun(values=values, digests={name: digest_of(value) for name, value in values.items()}, **given)


def judged(ranks, single=None, kinds=KINDS, tolerance=None, **more):
    single = single or run()
    exact = {name: value.double() for name, value in single.values.items()}
    allowed = {name: torch.zeros_like(value) for name, value in exact.items()}
    return relations_of(Expected(single, None, exact=exact, tolerance=allowed, **more), ranks, kinds, tolerance)


def test_what_rounding_decides_need_not_repeat():
    n, m = Result("returned", "n"), Result("returned", "m")
    one, other = (ObservedRun(values={n: at, m: at}, digests={n: str(at), m: str(at)}) for at in torch.arange(2))
    relations = Relations(held={n: {}, m: {}})
    repeats(relations, Expected(one, None, undetermined={n}), [one], [other], None)
    assert relations.held == {n: {}, m: {REPEATS: False}}


def of_flat(*parts):
    return {FLAT: torch.cat(parts)}


WHY = {
    "grads": "gradients; what the step returns stands for them",
    "params": "parameters; what the step returns stands for them",
    "optimizer": "the optimizer's state; what the step returns stands for them",
}
GRADS_ONLY = {"grads": WHY["grads"]}


@pytest.mark.parametrize(
    ("more", "touched", "left_out"),
    [
        pytest.param({}, {"params"}, {}, id="nothing of the model"),
        pytest.param({RETURNED: RIGHT[GRADIENT]}, {"params"}, GRADS_ONLY, id="its gradients"),
        pytest.param({RETURNED: RIGHT[WEIGHT]}, {"params"}, WHY, id="its parameters"),
        pytest.param({RETURNED: torch.zeros(2)}, {"params"}, WHY, id="parameters of elsewhere"),
        pytest.param({RETURNED: torch.zeros(2)}, {"grads"}, GRADS_ONLY, id="gradients of elsewhere"),
        pytest.param({RETURNED: torch.zeros(1)}, {"grads"}, GRADS_ONLY, id="another shape"),
        pytest.param(of_flat(RIGHT[WEIGHT]), {"params"}, WHY, id="its parameters, in one"),
        pytest.param(of_flat(RIGHT[GRADIENT]), {"params"}, GRADS_ONLY, id="its gradients, in one"),
        pytest.param(of_flat(RIGHT[WEIGHT], torch.zeros(1)), {"params"}, {}, id="a longer tensor"),
        pytest.param({FLAT: RIGHT[WEIGHT].view(1, 2)}, {"params"}, {}, id="a matrix"),
    ],
)
def test_what_a_step_returns_of_its_model_stands_for_the_model(more, touched, left_out):
    one = run(more, touched=touched)
    relations = judged([one, one], one)
    assert relations.left_out == left_out
    assert relations.skipped == {name: left_out[name.kind] for name in one.values if name.kind in left_out}
    assert relations.held == {name: HOLDS for name in one.values if name.kind not in left_out}


OF_REFERENCE = "gradients; the reference returns the gradients to compare"
UNCHANGED = {
    name: f"{what}; the reference does not change them"
    for name, what in [("grads", "gradients"), ("params", "parameters")]
}
OTHER_NUMBER = {"optimizer": "the optimizers' state; the reference has another number of optimizers"}


@pytest.mark.parametrize(
    ("single", "left_out"),
    [
        pytest.param(run(), {}, id="as the step"),
        pytest.param(run({RETURNED: RIGHT[GRADIENT]}), {"grads": OF_REFERENCE}, id="returns a gradient"),
        pytest.param(run({RETURNED: RIGHT[GRADIENT] + 1}), {}, id="returns another tensor"),
        pytest.param(run({RETURNED: RIGHT[GRADIENT].view(1, 2)}), {}, id="returns another shape"),
        pytest.param(run({GRADIENT: RIGHT[LOSS]}), {}, id="a gradient of one number is no proof"),
        pytest.param(
            run({RETURNED: RIGHT[GRADIENT]}, touched={"params"}), {"grads": UNCHANGED["grads"]}, id="leaves no gradient"
        ),
        pytest.param(run(touched={"grads"}), {"params": UNCHANGED["params"]}, id="makes no step"),
        pytest.param(run(touched=set()), UNCHANGED, id="only returns"),
        pytest.param(run(optimizers=2), OTHER_NUMBER, id="two optimizers"),
    ],
)
def test_what_a_reference_does_not_have_is_left_out(single, left_out):
    ranks = [run(), run()]
    assert judged(ranks, single, by_reference=True).left_out == left_out
    assert judged(ranks, single).left_out == {}  # the step itself, on one device


AMBIGUOUS = {"unplaced": {"w": Unplaced.AMBIGUOUS}}
HALF = torch.zeros(1)
LOST = "no tensor of a rank is known to hold it"


WHOLE, PLACELESS, WITHOUT = run(), run(**AMBIGUOUS), run(without=[WEIGHT])
UNUSED = run(unused={"w"})
PARTS = {
    "whole": ([WHOLE, WHOLE], {}),
    "whole after all": ([PLACELESS, PLACELESS], {}),
    "a part": ([run({WEIGHT: HALF}), PLACELESS], {WEIGHT: str(Unplaced.AMBIGUOUS)}),
    "a part of a state": ([run({STATE: HALF}), PLACELESS], {STATE: str(Unplaced.AMBIGUOUS)}),
    "a state alone": ([WHOLE, run({STATE: HALF})], {STATE: "it is divided in a way that is not known"}),
    "a parameter alone is wrong": ([run({WEIGHT: HALF}), WHOLE], {}),
    "buffers are not divided": ([WHOLE, run({BUFFER: HALF}, **AMBIGUOUS)], {}),
    "lost": ([run(without=[WEIGHT], **AMBIGUOUS), WITHOUT], {WEIGHT: LOST}),
    "lost, and all that is there is placed": ([WITHOUT, WITHOUT], {}),
    "lost on one rank": ([PLACELESS, WITHOUT], {}),
    "unused on all": ([run(unused={"w"}, **AMBIGUOUS), UNUSED], {WEIGHT: LOST, GRADIENT: LOST}),
    "unused on one rank": ([run(unused={"w"}, **AMBIGUOUS), WHOLE], {}),
    "unused, and all that is there is placed": ([UNUSED, UNUSED], {}),
}


@pytest.mark.parametrize("case", PARTS)
def test_a_part_of_unknown_place_is_not_judged(case):
    ranks, skipped = PARTS[case]
    relations = judged(ranks)
    assert relations.skipped == skipped
    assert relations.held.keys() == RIGHT.keys() - skipped.keys()


OTHER = torch.tensor([1.0, 5.0])
NO_ZERO = torch.tensor([3.0, 8.0])
HOLED = torch.tensor([1.0, float("nan")])


OFF = run({WEIGHT: OTHER})
APART, ALIKE = (False, False, True), (False, True, True)  # of PARITY, AGREE and FINITE
BOTH = [0, 1]
AT_FIRST, AT_LAST = [torch.tensor(at) for at in ([True, False], [False, True])]
EACH = {
    "one rank": (WEIGHT, [run(), OFF], APART, [1], "ratio 2.5"),
    "all ranks": (WEIGHT, [OFF, OFF], ALIKE, BOTH, "ratio 2.5"),
    "the first": (WEIGHT, [OFF, run()], APART, [0], ", rank 0"),
    "shape": (WEIGHT, [run({WEIGHT: HALF})] * 2, ALIKE, BOTH, "shape [1], expected [2]"),
    "not a number": (WEIGHT, [run({WEIGHT: HOLED})] * 2, (False, True, False), BOTH, "nan"),
    "missing": (WEIGHT, [run(without=[WEIGHT])] * 2, ALIKE, BOTH, "missing"),
    "on one": (WEIGHT, [run(), run(without=[WEIGHT])], (True, False, True), None, "on rank 1"),
    "one rank alone": (WEIGHT, [run()], (True, None, True), None, None),
    "a checksum for a large value": (WEIGHT, [OFF, dataclasses.replace(OFF, values={})], ALIKE, BOTH, "ratio 2.5"),
    "zero": (BUFFER, [run({BUFFER: NO_ZERO})] * 2, ALIKE, BOTH, "expected 0; all other"),
    "gap": (WEIGHT, [run(gaps={WEIGHT: "half"})] * 2, ALIKE, BOTH, "holds half"),
    "broadcast": (BUFFER, [run(broadcast={BUFFER}), run({BUFFER: OTHER})], (False, None, True), [1], "got 5"),
    "an element of another rank": (
        WEIGHT,
        [run({WEIGHT: OTHER}, own={WEIGHT: AT_FIRST}), run()],
        (True, False, True),
        None,
        "other values than on rank 0 on rank 1",
    ),
    "an element of its own": (
        WEIGHT,
        [run({WEIGHT: OTHER}, own={WEIGHT: at}) for at in (AT_FIRST, AT_LAST)],
        ALIKE,
        [1],
        "got 5",
    ),
}


@pytest.mark.parametrize("case", EACH)
def test_each_relation_is_judged_by_itself(case):
    name, ranks, held, wrong, detail = EACH[case]
    relations = judged(ranks)
    found = relations.held.pop(name)
    assert tuple(found[relation] for relation in HOLDS) == held
    assert all(False not in others.values() for others in relations.held.values())
    assert relations.wrong == ({} if wrong is None else {name: wrong})
    assert relations.split == ([] if held[1] is not False else [name])
    if detail is None:
        assert relations.details == {}
    else:
        assert detail in relations.details[name]


@pytest.mark.parametrize(
    ("tolerance", "provisional", "right"),
    [
        (None, False, False),
        (1.5, False, True),  # of the largest value, 2
        (1.4, False, False),
        ({"w": 1.5}, False, True),
        ({"other": 1.5}, False, False),
        (1.5, True, False),  # half of it is for the reference
        (3.0, True, True),
    ],
)
def test_a_tolerance_is_a_fraction_of_the_largest_value(tolerance, provisional, right):
    ranks = [run({WEIGHT: OTHER}), run({WEIGHT: OTHER})]
    assert judged(ranks, tolerance=tolerance, provisional=provisional).held[WEIGHT][PARITY] is right


@pytest.mark.parametrize(
    ("stepped", "copies"),
    [
        (({"head": ("a", "g")}, {"head": ("a", "g")}), True),
        (({"head": ("a", "g")}, {"head": ("b", "g")}), False),
        (({"head": ("a", "g")}, {"head": ("b", "h")}), True),  # of other gradients: they need not be copies
        (({"head": ("a", "g")}, {}), True),
        (({"w": ("a", "g")}, {"w": ("b", "g")}), True),  # compared otherwise
    ],
)
def test_parameters_outside_of_the_model_that_get_the_same_gradient_are_copies(stepped, copies):
    relations = judged([run(stepped=one) for one in stepped])
    head = Result("params", "head")
    assert relations.held.get(head) == (None if copies else {AGREE: False})
    assert (head in relations.split) is not copies
