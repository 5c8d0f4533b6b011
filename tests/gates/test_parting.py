"""The line where ranks part: which values of a call are compared, and where a call is that only some make."""

from __future__ import annotations

import pytest
import torch

from mgpu_check.diagnosis.divergence import Parting, first_parting
from mgpu_check.diagnosis.observations import CallEvent, Expected, Hypotheses, ObservedRun, RankTrace, Relations, Result
from mgpu_check.diagnosis.rules.decisions import right_on_one_rank
from mgpu_check.diagnosis.tensors import Tensors

WEIGHT, GRADIENT = Result("params", "w"), Result("grads", "w")


def parting(*ranks, mistakes=(), seen=None, **relations):
    """Return where ranks with these calls part."""
    seen = seen or [ObservedRun() for _ in ranks]
    traces = [RankTrace(list(events)) for events in ranks]
    expected = Expected(ObservedRun(), None)
    tensors = Tensors(len(ranks), 4, 1, expected, Relations(**relations), seen, traces, Hypotheses([], []))
    return first_parting(tensors, mistakes)


def call(kind, line=7, name="", **details):
    return CallEvent(kind, name or kind, f"train.py:{line}", details)


IN_MEMORY = "order of dimensions in memory"


def tensors(**changed):
    """The only tensor of a call on two ranks."""
    tensor = {"dtype": "float32", "shape": (3,), "layout": (0,)}
    return [[tensor], [tensor | changed]]


def summary(total, norm=2.0, **more):
    return {"sum": total, "norm": norm, **more}


def reduced(total, group=None, name="all_reduce", **more):
    details = {"after": [summary(total, **more)], "group": group}
    return call("collective", name=name, **{key: value for key, value in details.items() if value is not None})


@pytest.mark.parametrize(
    ("kind", "key", "of_ranks", "what", "values"),
    [
        ("backward", "trained", [("w",), ()], "which parameters require gradients", ["(w)", "()"]),
        ("backward", "parameters", [{"w": 1.0}, {"w": 2.0}], "the sum of w", ["1", "2"]),
        ("model", "training", [{"bn": True}, {"bn": False}], "whether bn is in training mode", ["True", "False"]),
        ("model", "parameters", [{"w": 1.0}, {"w": 1.5}], "the sum of w", ["1", "1.5"]),
        ("collective", "op", ["sum", "max"], "its operation", ["sum", "max"]),
        ("collective", "src", [0, 1], "its source", ["0", "1"]),
        ("collective", "dst", [0, 1], "its destination", ["0", "1"]),
        ("collective", "tensors", tensors(dtype="int64"), "the dtype of its tensor", ["float32", "int64"]),
        ("collective", "tensors", tensors(shape=(4,)), "the shape of its tensor", ["(3)", "(4)"]),
        ("collective", "tensors", tensors(layout=(1, 0)), f"the {IN_MEMORY} of its tensor", ["(0)", "(1, 0)"]),
        ("clip", "norm", [1.0, 2.0], "the norm that it finds", ["1", "2"]),
        ("scale", "scale", [1024.0, 2048.0], "the scale", ["1024", "2048"]),
        ("schedule", "metric", [0.5, 0.25], "the metric that it is given", ["0.5", "0.25"]),
        ("sampler", "seed", [1, 2], "the seed", ["1", "2"]),
        ("sampler", "samples", [8, 9], "the number of samples", ["8", "9"]),
        ("iterate", "epoch", [0, 1], "the epoch", ["0", "1"]),
        ("step", "rates", [(0.1,), (0.2,)], "the learning rate", ["(0.1)", "(0.2)"]),
    ],
)
def test_each_detail_of_a_call_is_compared(kind, key, of_ranks, what, values):
    equal = call(kind, 3, **{key: of_ranks[0]})
    found = parting(*([equal, call(kind, 7, **{key: of_rank})] for of_rank in of_ranks))
    assert found == Parting("train.py:7", f"{kind}, {what}", values)
    assert parting([equal], [equal]) is None
    assert parting([equal], [call(kind, 3)]) is None  # not recorded on all ranks


NORM = "the norm of its result", ["2", "2"]
RESULTS = {
    "equal": ([reduced(1.0), reduced(1.0)], None),
    "the sum": ([reduced(1.0), reduced(2.0)], NORM),
    "the norm": ([reduced(1.0), reduced(1.0, norm=3.0)], (NORM[0], ["2", "3"])),
    "NaN is NaN": ([reduced(float("nan")), reduced(float("nan"))], None),
    "a number is shown": ([reduced(1.0, values=[1.0]), reduced(2.0, values=[2.0])], ("its result", ["1", "2"])),
    "some numbers are shown": (
        [reduced(3.0, values=[1.0, 2.0]), reduced(4.0, values=[1.0, 3.0])],
        ("its result", ["(1, 2)", "(1, 3)"]),
    ),
    "many are not": ([reduced(1.0, values=[0.2] * 5), reduced(2.0, values=[0.4] * 5)], NORM),
    "a group of all": ([reduced(1.0, (0, 1)), reduced(2.0, (0, 1))], NORM),
    "groups of each its own": ([reduced(1.0, (0,)), reduced(2.0, (1,))], None),
    "a group of more": ([reduced(1.0, (0, 1, 2)), reduced(2.0, (0, 1, 2))], None),
    "not recorded on a rank": ([reduced(1.0), call("collective", name="all_reduce")], None),
    "results that differ": ([reduced(1.0, name="reduce_scatter"), reduced(2.0, name="reduce_scatter")], None),
}


@pytest.mark.parametrize("case", RESULTS)
def test_results_that_all_ranks_get_are_compared(case):
    ranks, expected = RESULTS[case]
    found = parting(*([event] for event in ranks))
    assert found == (None if expected is None else Parting("train.py:7", f"all_reduce, {expected[0]}", expected[1]))


def test_a_collective_that_gives_ranks_different_results_is_no_mistake_of_the_code():
    """So it does not look like a value of one rank, although the result is right on one rank only."""

    def found(*totals):
        traces = [RankTrace([reduced(total)]) for total in totals]
        relations = Relations(split=[GRADIENT], wrong={GRADIENT: [1]})
        expected = Expected(ObservedRun(), None)
        seen = [ObservedRun(digests={GRADIENT: str(rank)}) for rank, _ in enumerate(totals)]
        return right_on_one_rank(Tensors(2, 4, 1, expected, relations, seen, traces, Hypotheses([], [])))

    assert found(1.0, 1.0).mistake == "value-of-one-rank"
    assert found(1.0, 2.0) is None


A, B, C = (call("iterate", line, name) for line, name in ((1, "a"), (2, "b"), (3, "c")))


CALLS = {
    "the end": ([[A, B], [A]], 2, ["b (train.py:2)", "nothing more"]),
    "one more": ([[A, B, C], [A, C]], 2, ["b (train.py:2)", "c (train.py:3)"]),
    "two more": ([[C], [A, B, C]], 1, ["c (train.py:3)", "a (train.py:1)"]),
    "others": ([[A], [B]], 1, ["a (train.py:1)", "b (train.py:2)"]),
}


@pytest.mark.parametrize("case", CALLS)
def test_a_call_that_only_some_ranks_make_is_named(case):
    ranks, line, calls = CALLS[case]
    assert parting(*ranks) == Parting(f"train.py:{line}", "what they call", calls)


def test_parts_of_parameters_may_differ():
    """A rank that holds a slice has a sum of its own."""
    ranks = [[call("model", parameters={"w": total})] for total in (1.0, 2.0)]
    assert parting(*ranks) is not None
    owns = [ObservedRun(own={WEIGHT: torch.ones(1, dtype=torch.bool)}), ObservedRun()]
    assert parting(*ranks, seen=owns) is None
    assert parting(*ranks, skipped={WEIGHT: "it is divided"}) is None
    assert parting(*ranks, skipped={WEIGHT: "it is divided"}, split=[GRADIENT]) is not None
    apart = [[call("model", parameters={"w": rank}, owns=(rank,))] for rank in range(2)]  # stages of a pipeline
    assert parting(*apart) is None


def test_seeds_may_differ_unless_the_mistake_is_about_them():
    ranks = [[call("seed", name="manual_seed", seed=rank)] for rank in range(2)]
    found = Parting("train.py:7", "manual_seed, the seed that it is given", ["0", "1"])
    assert parting(*ranks) is None
    assert parting(*ranks, mistakes=["random-numbers-per-rank"]) == found
    built = [ObservedRun(built=events) for events in ranks]
    assert parting([], [], seen=built, mistakes=["random-numbers-per-rank"]) is None
    assert parting([], [], seen=built, mistakes=["different-initialization"]) == found


def steps(*values, name=GRADIENT):
    return [ObservedRun(snapshots=[{name: torch.tensor(of_step)} for of_step in of_rank]) for of_rank in values]


def at_step(what, *values, line=7):
    return Parting(f"train.py:{line}", f"SGD, {what}", [*values])


LOCAL = "gradients-not-synchronized"
STEPS = {
    "an element": (([[1.0, 2.0]], [[1.0, 5.0]]), [GRADIENT], (), at_step("element [1] of gradient of w", "2", "5")),
    "a later step": (([1.0, 1.0], [1.0, 2.0]), [GRADIENT], (), at_step("gradient of w", "1", "2", line=8)),
    "a shape": (([[1.0]], [[1.0, 1.0]]), [GRADIENT], (), at_step("the shape of gradient of w", "[1]", "[2]")),
    "equal in the end": (([1.0], [2.0]), [], (), None),
    "equal in the end, of a mistake about each step": (
        ([1.0], [2.0]),
        [],
        (LOCAL,),
        at_step("gradient of w", "1", "2"),
    ),
}


@pytest.mark.parametrize("case", STEPS)
def test_gradients_at_a_step_are_compared(case):
    values, split, mistakes, expected = STEPS[case]
    events = [call("step", line, "SGD") for line in (7, 8)]
    assert parting(events, events, seen=steps(*values), mistakes=mistakes, split=split) == expected


def backward(value, line=5):
    return call("backward", line, left={"w": summary(value, norm=abs(value))})


def stepped(line=7):
    return call("step", line, "SGD")


LEFT = Parting("train.py:5", "backward, the norm of gradient of w, which nothing combines after it", ["1", "2"])
AT_STEP = at_step("gradient of w", "1", "2")


BACKWARD = {
    "kept": (lambda value: [backward(value), stepped()], LEFT),
    "the last of two": (lambda value: [backward(0.5, 4), backward(value), stepped()], LEFT),
    "other calls between": (lambda value: [backward(0.5, 4), A, backward(value), A, stepped()], LEFT),
    "changed since": (lambda value: [backward(3.0 * value), stepped()], AT_STEP),
    "equal before": (lambda _: [backward(1.0), stepped()], AT_STEP),
    "not recorded": (lambda _: [call("backward", 5), stepped()], AT_STEP),
    "no backward pass": (lambda _: [stepped()], AT_STEP),
}


@pytest.mark.parametrize("case", BACKWARD)
def test_a_gradient_that_nothing_changes_parts_in_its_backward_pass(case):
    calls, expected = BACKWARD[case]
    assert parting(calls(1.0), calls(2.0), seen=steps([1.0], [2.0]), split=[GRADIENT]) == expected


@pytest.mark.parametrize("name", [GRADIENT, Result("returned", "w"), WEIGHT])
@pytest.mark.parametrize("before", [[], [backward(0.5, 4)]], ids=["one pass", "two passes"])
def test_what_a_step_without_an_optimizer_leaves_parts_in_its_last_backward_pass(name, before):
    seen = [ObservedRun(values={name: torch.tensor(value)}) for value in (1.0, 2.0)]
    ranks = [[*before, backward(value), A] for value in (1.0, 2.0)]
    in_the_end = Parting("train.py:1", str(name), ["1", "2"], after=True)
    of_backward = Parting("train.py:5", f"backward, the norm of {name}, which nothing combines after it", ["1", "2"])
    assert parting(*ranks, seen=seen, split=[name]) == (in_the_end if name == WEIGHT else of_backward)
    changed = [[*before, backward(3.0 * value), A] for value in (1.0, 2.0)]
    assert parting(*changed, seen=seen, split=[name]) == in_the_end
