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


def tensor(**changed):
    return {"dtype": "float32", "shape": (3,), "layout": (0,)} | changed


def summary(total, norm=2.0, **more):
    return {"sum": total, "norm": norm, **more}


def reduced(total, group=None, name="all_reduce", **more):
    details = {"after": [summary(total, **more)], "group": group}
    return call("collective", name=name, **{key: value for key, value in details.items() if value is not None})


@pytest.mark.parametrize(
    ("kind", "details", "what", "values"),
    [
        ("backward", [{"trained": ("w",)}, {"trained": ()}], "which parameters require gradients", ["(w)", "()"]),
        ("backward", [{"parameters": {"w": 1.0}}, {"parameters": {"w": 2.0}}], "the sum of w", ["1", "2"]),
        (
            "model",
            [{"training": {"bn": True}}, {"training": {"bn": False}}],
            "whether bn is in training mode",
            ["True", "False"],
        ),
        ("model", [{"parameters": {"w": 1.0}}, {"parameters": {"w": 1.5}}], "the sum of w", ["1", "1.5"]),
        ("collective", [{"op": "sum"}, {"op": "max"}], "its operation", ["sum", "max"]),
        ("collective", [{"src": 0}, {"src": 1}], "its source", ["0", "1"]),
        ("collective", [{"dst": 0}, {"dst": 1}], "its destination", ["0", "1"]),
        (
            "collective",
            [{"tensors": [tensor()]}, {"tensors": [tensor(dtype="int64")]}],
            "the dtype of its tensor",
            ["float32", "int64"],
        ),
        (
            "collective",
            [{"tensors": [tensor()]}, {"tensors": [tensor(shape=(4,))]}],
            "the shape of its tensor",
            ["(3)", "(4)"],
        ),
        (
            "collective",
            [{"tensors": [tensor()]}, {"tensors": [tensor(layout=(1, 0))]}],
            "the order of dimensions in memory of its tensor",
            ["(0)", "(1, 0)"],
        ),
        ("clip", [{"norm": 1.0}, {"norm": 2.0}], "the norm that it finds", ["1", "2"]),
        ("scale", [{"scale": 1024.0}, {"scale": 2048.0}], "the scale", ["1024", "2048"]),
        ("schedule", [{"metric": 0.5}, {"metric": 0.25}], "the metric that it is given", ["0.5", "0.25"]),
        ("sampler", [{"seed": 1}, {"seed": 2}], "the seed", ["1", "2"]),
        ("sampler", [{"samples": 8}, {"samples": 9}], "the number of samples", ["8", "9"]),
        ("iterate", [{"epoch": 0}, {"epoch": 1}], "the epoch", ["0", "1"]),
        ("step", [{"rates": (0.1,)}, {"rates": (0.2,)}], "the learning rate", ["(0.1)", "(0.2)"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_detail_of_a_call_is_compared(kind, details, what, values):
    equal = call(kind, 3, **details[0])
    found = parting(*([equal, call(kind, 7, **of_rank)] for of_rank in details))
    assert found == Parting("train.py:7", f"{kind}, {what}", values)
    assert parting([equal], [equal]) is None
    assert parting([equal], [call(kind, 3)]) is None  # not recorded on all ranks


@pytest.mark.parametrize(
    ("ranks", "what", "values"),
    [
        pytest.param([reduced(1.0), reduced(1.0)], None, None, id="equal"),
        pytest.param([reduced(1.0), reduced(2.0)], "the norm of its result", ["2", "2"], id="the sum"),
        pytest.param([reduced(1.0), reduced(1.0, norm=3.0)], "the norm of its result", ["2", "3"], id="the norm"),
        pytest.param([reduced(float("nan")), reduced(float("nan"))], None, None, id="NaN is NaN"),
        pytest.param(
            [reduced(1.0, values=[1.0]), reduced(2.0, values=[2.0])], "its result", ["1", "2"], id="a number is shown"
        ),
        pytest.param(
            [reduced(3.0, values=[1.0, 2.0]), reduced(4.0, values=[1.0, 3.0])],
            "its result",
            ["(1, 2)", "(1, 3)"],
            id="some numbers are shown",
        ),
        pytest.param(
            [reduced(1.0, values=[0.2] * 5), reduced(2.0, values=[0.4] * 5)],
            "the norm of its result",
            ["2", "2"],
            id="many are not",
        ),
        pytest.param(
            [reduced(1.0, (0, 1)), reduced(2.0, (0, 1))], "the norm of its result", ["2", "2"], id="a group of all"
        ),
        pytest.param([reduced(1.0, (0,)), reduced(2.0, (1,))], None, None, id="groups of each its own"),
        pytest.param([reduced(1.0, (0, 1, 2)), reduced(2.0, (0, 1, 2))], None, None, id="a group of more"),
        pytest.param([reduced(1.0), call("collective", name="all_reduce")], None, None, id="not recorded on a rank"),
        pytest.param(
            [reduced(1.0, name="reduce_scatter"), reduced(2.0, name="reduce_scatter")],
            None,
            None,
            id="results that differ",
        ),
    ],
)
def test_results_that_all_ranks_get_are_compared(ranks, what, values):
    found = parting(*([event] for event in ranks))
    assert found == (None if what is None else Parting("train.py:7", f"all_reduce, {what}", values))


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


@pytest.mark.parametrize(
    ("ranks", "found"),
    [
        pytest.param(
            [[A, B], [A]], Parting("train.py:2", "what they call", ["b (train.py:2)", "nothing more"]), id="the end"
        ),
        pytest.param(
            [[A, B, C], [A, C]],
            Parting("train.py:2", "what they call", ["b (train.py:2)", "c (train.py:3)"]),
            id="one more",
        ),
        pytest.param(
            [[C], [A, B, C]],
            Parting("train.py:1", "what they call", ["c (train.py:3)", "a (train.py:1)"]),
            id="two more",
        ),
        pytest.param(
            [[A], [B]], Parting("train.py:1", "what they call", ["a (train.py:1)", "b (train.py:2)"]), id="others"
        ),
        pytest.param([[A, B, C]], None, id="one rank"),
    ],
)
def test_a_call_that_only_some_ranks_make_is_named(ranks, found):
    assert parting(*ranks) == found


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


@pytest.mark.parametrize(
    ("values", "split", "mistakes", "found"),
    [
        pytest.param(
            ([[1.0, 2.0]], [[1.0, 5.0]]),
            [GRADIENT],
            (),
            Parting("train.py:7", "SGD, element [1] of gradient of w", ["2", "5"]),
            id="an element",
        ),
        pytest.param(
            ([1.0, 1.0], [1.0, 2.0]),
            [GRADIENT],
            (),
            Parting("train.py:8", "SGD, gradient of w", ["1", "2"]),
            id="a later step",
        ),
        pytest.param(
            ([[1.0]], [[1.0, 1.0]]),
            [GRADIENT],
            (),
            Parting("train.py:7", "SGD, the shape of gradient of w", ["[1]", "[2]"]),
            id="a shape",
        ),
        pytest.param(([1.0], [2.0]), [], (), None, id="equal in the end"),
        pytest.param(
            ([1.0], [2.0]),
            [],
            ("gradients-not-synchronized",),
            Parting("train.py:7", "SGD, gradient of w", ["1", "2"]),
            id="equal in the end, of a mistake about each step",
        ),
    ],
)
def test_gradients_at_a_step_are_compared(values, split, mistakes, found):
    events = [call("step", line, "SGD") for line in (7, 8)]
    assert parting(events, events, seen=steps(*values), mistakes=mistakes, split=split) == found


def test_results_that_differ_after_equal_calls_are_named_last():
    seen = [ObservedRun(values={WEIGHT: torch.tensor([[1.0, 2.0], [3.0, 4.0 + rank]])}) for rank in range(2)]
    ranks = [[A, B]] * 2
    assert parting(*ranks, seen=seen, split=[WEIGHT]) == Parting(
        "train.py:2", "element [1, 1] of w", ["4", "5"], after=True
    )
    assert parting(*ranks, seen=seen) is None
    assert parting(*ranks, seen=[seen[0], ObservedRun()], split=[WEIGHT]) is None


def backward(value, line=5):
    return call("backward", line, left={"w": summary(value, norm=abs(value))})


def stepped(line=7):
    return call("step", line, "SGD")


LEFT = Parting("train.py:5", "backward, the norm of gradient of w, which nothing combines after it", ["1", "2"])
AT_STEP = Parting("train.py:7", "SGD, gradient of w", ["1", "2"])


@pytest.mark.parametrize(
    ("calls", "found"),
    [
        pytest.param(lambda value: [backward(value), stepped()], LEFT, id="kept"),
        pytest.param(lambda value: [backward(0.5, 4), backward(value), stepped()], LEFT, id="the last of two"),
        pytest.param(
            lambda value: [backward(0.5, 4), A, backward(value), A, stepped()], LEFT, id="other calls between"
        ),
        pytest.param(lambda value: [backward(3.0 * value), stepped()], AT_STEP, id="changed since"),
        pytest.param(lambda _: [backward(1.0), stepped()], AT_STEP, id="equal before"),
        pytest.param(lambda _: [call("backward", 5), stepped()], AT_STEP, id="not recorded"),
        pytest.param(lambda _: [stepped()], AT_STEP, id="no backward pass"),
    ],
)
def test_a_gradient_that_nothing_changes_parts_in_its_backward_pass(calls, found):
    assert parting(calls(1.0), calls(2.0), seen=steps([1.0], [2.0]), split=[GRADIENT]) == found


def test_a_gradient_of_an_earlier_step_is_not_that_of_a_later_backward_pass():
    ranks = [[backward(value), stepped(), stepped(8)] for value in (1.0, 2.0)]
    seen = steps([0.0, 1.0], [0.0, 2.0])
    assert parting(*ranks, seen=seen, split=[GRADIENT]) == Parting("train.py:8", "SGD, gradient of w", ["1", "2"])
    ranks = [[backward(0.5, 4), stepped(6), backward(value), stepped()] for value in (1.0, 2.0)]
    assert parting(*ranks, seen=seen, split=[GRADIENT]) == LEFT


def test_a_parameter_parts_at_the_step():
    ranks = [[backward(value), stepped()] for value in (1.0, 2.0)]
    assert parting(*ranks, seen=steps([1.0], [2.0], name=WEIGHT), split=[WEIGHT]) == Parting(
        "train.py:7", "SGD, w", ["1", "2"]
    )


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
