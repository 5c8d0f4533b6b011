"""Data that reach a loss from outside of a model: a replay joins them, or names them, but never leaves them out."""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from mgpu_check.compare.in_script.replay import Points, RankRecording, RankReplaying
from mgpu_check.compare.in_script.replay_outside import follows, unexplained
from mgpu_check.compare.in_script.tape import Tape, Tapes, write_joint
from mgpu_check.torch_hooks.patches import around, function_of
from tests.compare.conftest import script

Program = Callable[["Part"], torch.Tensor]
X, Y = torch.arange(24.0).reshape(8, 3).sin(), torch.arange(8.0).reshape(8, 1).cos()


class Part:
    """The data of a rank, or those that one device has by itself.

    Attributes:
        number: the rank; 2 for one device.
        world: the number of ranks; 1 for one device.
        rows: its samples.
        call: runs a function as an outermost call of a model.
    """

    def __init__(self, number: int, other: bool, call: Callable[..., Any]) -> None:
        self.number, self.world, self.call = number, 2 if number < 2 else 1, call
        self.rows = slice(4 * number, 4 * number + 4) if number < 2 else slice(0, 8)
        self._other = other and number == 2
        self.weight = nn.Parameter(torch.tensor([[1.0], [-2.0], [0.5]]))

    def net(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(lambda x: x @ self.weight, x)

    def of(self, data: torch.Tensor) -> torch.Tensor:
        """Return the samples of `data`, as another library gives them: without a history of operators."""
        return torch.tensor(((0.4 - data if self._other else data)[self.rows]).tolist())


class Replay:
    """Runs a program on two ranks, then on one device, whose own data differ from those of the ranks."""

    def __init__(self, directory: Any) -> None:
        self._files = [directory.joinpath(name).open("w+b") for name in ("0", "1", "joint")]
        self.events: list[dict[str, Any]] = []

    def run(self, program: Program, other: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradient on one device, and the mean gradient of the ranks.

        Args:
            other: one device has other data by itself.
        """
        tapes = [file.fileno() for file in self._files]
        gradients = []
        for number in range(3):
            recorder: Any = types.SimpleNamespace(
                done=0,
                passes=0,
                backwards=0,
                note=self._note,
                guard=lambda record: record,
                in_training_thread=lambda: True,
            )
            made: Points
            if number < 2:
                made = RankRecording(recorder, 1, number, Tape(tapes[number]))
            else:
                write_joint(tapes[2], tapes[:2], False)
                made = RankReplaying(recorder, 1, Tapes(tapes[2]))
            gradients.append(self._gradient(program, made, number, other))
        return gradients[2], (gradients[0] + gradients[1]) / 2

    def _gradient(self, program: Program, made: Points, number: int, other: bool) -> torch.Tensor:
        call = around(made.call_loss)(_called)
        part = Part(number, other, call)
        made.outside.origins.set([part.weight])
        with pytest.MonkeyPatch.context() as patch:
            apply = around(made.apply_function)(function_of(vars(torch.autograd.Function)["apply"]))
            patch.setattr(torch.autograd.Function, "apply", classmethod(apply))
            patch.setattr(torch.Tensor, "register_hook", around(made.register_hook)(torch.Tensor.register_hook))
            patch.setattr(torch.autograd, "backward", around(made.differentiate)(torch.autograd.backward))
            with made.draws:
                program(part).backward()
                made.outside.end()
        assert part.weight.grad is not None
        return part.weight.grad

    def _note(self, event: str, **what: Any) -> None:
        self.events.append({"event": event, **what})

    def of(self, event: str) -> list[dict[str, Any]]:
        return [one for one in self.events if one["event"] == event]

    @property
    def missing(self) -> list[str]:
        return [f"{event['what']}: {event['why']}" for event in self.of("unreplayed")]

    def close(self) -> None:
        for file in self._files:
            file.close()


def _called(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


@pytest.fixture
def replay(tmp_path) -> Iterator[Replay]:
    made = Replay(tmp_path)
    yield made
    made.close()


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        ctx.factor = factor
        return x * x * factor

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * ctx.factor, None


class Weighed(Scaled):
    """Weighs the gradient alone."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        ctx.factor = factor
        return x.view_as(x)


def target(part: Part) -> torch.Tensor:
    return (part.net(part.of(X)) - part.of(Y)).square().mean()


def labels(part: Part) -> torch.Tensor:
    scores = part.net(part.of(X)) * torch.tensor([1.0, 2.0])
    chosen = (part.of(Y).flatten() > 0).long()
    return -scores.log_softmax(1)[torch.arange(len(chosen)), chosen].mean()


def order_of_samples(part: Part) -> torch.Tensor:
    out = part.net(part.of(X))
    order = torch.tensor([2, 0, 3, 1] if len(out) == 4 else [2, 0, 3, 1, 6, 4, 7, 5])
    return (out - out.detach()[order] + out[order] * part.of(Y)).square().mean()


def advantages(part: Part) -> torch.Tensor:
    """They are normalized within a rank, before they reach the loss."""
    with torch.no_grad():
        values = part.of(X) @ part.weight
    raw = part.of(Y) - values
    normal = (raw - raw.mean()) / (raw.std() + 1e-8)
    return (part.net(part.of(X)) * normal).mean()


def buffer(part: Part) -> torch.Tensor:
    """Zeros that the script fills are no constant."""
    kept = torch.zeros(len(part.of(Y)), 1)
    kept[:] = part.of(Y)
    return (part.net(part.of(X)) - kept).square().mean()


def sparse(part: Part) -> torch.Tensor:
    weight = torch.sparse.mm(torch.eye(3).to_sparse(), part.weight)
    return (part.of(X) @ weight - part.of(Y)).square().mean()


def table(part: Part) -> torch.Tensor:
    """A table is longer on one device; factors that are equal on the ranks replace those of one device."""
    out = part.net(part.of(X))
    positions = torch.tensor([float(i) for i in range(len(out))])
    factors = torch.tensor([2.0, 3.0, 5.0, 7.0, 11.0] if part.world > 1 else [1.0, 1.0, 1.0, 1.0, 1.0])
    rows = out.expand(-1, 5) * factors
    return rows.square().mean() + (out.flatten() * positions * 0).sum()


def order_of_draws(part: Part) -> torch.Tensor:
    out = part.net(part.of(X))
    noise = torch.rand(len(out), 1, generator=torch.Generator().manual_seed(part.number))
    kept = nn.functional.dropout(out, 0.5)
    return (kept + noise - out[torch.randperm(len(out))]).square().mean()


def penalty(part: Part) -> torch.Tensor:
    x = part.of(X).requires_grad_()
    (gradient,) = torch.autograd.grad(part.net(x).sin().sum(), x, create_graph=True)
    return (gradient.norm(dim=1) - 1).square().mean()


PROGRAMS: dict[str, Program] = {
    "target": target,
    "autoencoder": lambda part: (part.net(x := part.of(X)) - x).square().mean(),
    "mask": lambda part: (part.net(part.of(X)).square() * (part.of(Y) > -0.5)).mean(),
    "function": lambda part: Scaled.apply(part.net(part.of(X)), part.of(Y)).mean(),
    "function of gradients": lambda part: Weighed.apply(part.net(part.of(X)), part.of(Y)).square().mean(),
}
PROGRAMS |= {
    program.__name__: program
    for program in (labels, order_of_samples, advantages, buffer, penalty, sparse, table, order_of_draws)
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_data_of_the_ranks_take_the_place_of_those_of_one_device(replay, program):
    one, ranks = replay.run(program)
    assert replay.missing == []
    assert torch.allclose(one, ranks, atol=1e-6)


def test_a_report_of_one_rank_counts_for_nothing(replay):
    def reported(part):
        out = part.net(part.of(X))
        if part.number == 0:
            assert (out > 0.5).sum() < 9 and out.argmax() < 9 and out.detach().mean() < 9
        loss = out.square().mean()
        assert part.number or loss.item() < 9
        return loss

    replay.run(reported)
    assert replay.missing == []


def test_data_that_one_device_has_itself_stay(replay):
    one, ranks = replay.run(target, other=False)
    assert replay.missing == [] and replay.of("given") == []
    assert torch.allclose(one, ranks, atol=1e-6)


def test_what_follows_from_joint_data_is_computed_and_not_replaced(replay):
    """Each rank divides by its own count: this is the mistake, and the count of one device is that of the joint mask."""

    def counted(part):
        mask = (part.of(Y) > 0.6).float()
        return (part.net(part.of(X)).square() * mask).sum() / mask.sum()

    one, ranks = replay.run(counted)
    assert replay.missing == [] and not torch.allclose(one, ranks, atol=1e-3)
    weight = torch.tensor([[1.0], [-2.0], [0.5]], requires_grad=True)
    mask = (Y > 0.6).float()
    (((X @ weight).square() * mask).sum() / mask.sum()).backward()
    assert torch.allclose(one, weight.grad, atol=1e-6)


def hook(part: Part) -> torch.Tensor:
    out, weights = part.net(part.of(X)), part.of(Y)
    out.register_hook(lambda gradient: gradient * weights)
    return out.mean()


def saved(part: Part) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor):
        return (part.net(part.of(X)) * part.of(Y)).mean()


def functional(part: Part) -> torch.Tensor:
    x, y = part.of(X), part.of(Y)
    gradient = torch.func.grad(lambda weight: (x @ weight - y).square().mean())(part.weight)
    return (gradient.detach() * part.weight).sum()


def changed_rows(part: Part) -> torch.Tensor:
    kept = part.of(Y)
    kept[:2] = part.net(part.of(X))[:2]
    return kept.square().mean()


OTHERS, SAVED = "ranks have tensors of shape [1, 1] with other values", "ranks have other values, and torch has saved"
UNREPLAYED: dict[str, tuple[Program, str]] = {
    "count": (
        lambda part: part.net(part.of(X)).square().sum() / part.of(Y).exp().sum(),
        "a tensor of shape [] at HERE: it is one number for all samples, and does not follow",
    ),
    "number": (
        lambda part: part.net(part.of(X)).square().mean() * part.of(Y).sum().item(),
        "mul at HERE: its number is 1.7",
    ),
    "statistic": (
        lambda part: (part.net(part.of(X)) * part.of(Y).cumsum(0)[-1:]).mean(),
        f"a tensor of shape [1, 1] at HERE: {OTHERS}",
    ),
    "choice by Python": (
        lambda part: (part.net(part.of(X)).square() if part.of(Y)[1] > 0.5 else part.net(part.of(X)).sin()).mean(),
        "sin at HERE: only some ranks run it",
    ),
    "hook": (hook, "a tensor of shape [8, 1] at HERE: a hook has computed it with data that are not replayed"),
    "saved": (saved, f"a tensor of shape [8, 1] at HERE: {SAVED}"),
    "functional": (functional, f"a tensor of shape [8, 1] at HERE: {SAVED}"),
    "changed rows": (changed_rows, "ranks have other values, and it cannot be replaced there"),
}


@pytest.mark.parametrize(("program", "why"), UNREPLAYED.values(), ids=UNREPLAYED)
def test_data_that_cannot_be_replaced_are_named(replay, program, why):
    replay.run(program)
    named = [re.sub(r"tests/compare/test_replay_outside\.py:\d+", "HERE", line) for line in replay.missing]
    assert any(why in line for line in named), named


@pytest.mark.parametrize(
    ("own", "ranks", "stays"),
    [
        ([[1.0, 2.0, 3.0]], [[[1.0, 2.0]], [[1.0, 2.0, 3.0]]], True),  # the beginning of a table
        ([[1.0, 2.0]], [[[2.0, 4.0]]] * 2, True),  # a factor of the number of ranks
        ([[1, 2]], [[[2, 4]]] * 2, False),
        ([[0.0, 1.0]], [[[float("-inf"), 1.0]]] * 2, False),
        ([[0.0, 1.0]], [[[0.0, 1.0001]]] * 2, False),
    ],
)
def test_tensors_without_samples(tmp_path, own, ranks, stays):
    """They stay if they follow from those of the ranks; else one device gets the tensor of the ranks, if they have the same."""
    with tmp_path.joinpath("joint").open("w+b") as file:
        write_joint(file.fileno(), [], False)
        recorder: Any = types.SimpleNamespace(
            done=0, passes=0, backwards=0, guard=lambda record: record, in_training_thread=lambda: True
        )
        made = RankReplaying(recorder, 1, Tapes(file.fileno()))
        value = made.outside.joint(torch.tensor(own), [torch.tensor(rank) for rank in ranks], [])
    assert (value is None) == stays
    assert stays or torch.equal(value, torch.tensor(ranks[0]))


def test_numbers_follow_from_those_of_the_ranks():
    assert follows(4, [4, 4], 2) and follows(8, [4, 4], 2) and follows(0.125, [0.25, 0.25], 2)
    assert follows(8**-0.5, [4**-0.5, 4**-0.5], 2) and follows(float("nan"), [float("nan")] * 2, 2)
    assert follows(6, [5, 1], 2) and follows(3, [5, 1], 2)  # the sum and the mean
    assert follows(1.25, [5, 1], 2, [1.25])  # computed from known tensors
    assert not follows(5, [5, 1], 2) and not follows(0.3, [0.4, 0.4], 2) and not follows(0, [1, 1], 2)


def test_operators_of_one_device_follow_from_those_of_the_ranks():
    def why(own, *ranks, operator="aten::mul"):
        return unexplained(operator, own, ranks, 2)

    assert why([(1,), (2,)], [(1,)], [(2,)]) is None  # a loop over samples
    assert why(None, [(1,)], [(2,)]) is why([(1,)], None, None) is None  # code for several ranks, or for one device
    assert why([(0, 8)], [(0, 4)], [(4, 8)], operator="aten::slice") is None
    assert "its number is 0 on one device, and 4, 8" in why([(0, 9)], [(4, 8)], [(8, 9)], operator="aten::slice")
    assert why([()], [()], None) == "only some ranks run it"
    assert why([()], [()], [(), ()]) == "ranks run it 1, 2 times"


def test_rollouts_in_a_shuffled_order_are_equal(compare):
    """Neither the environment nor the shuffle draws from generators that a replay knows."""
    pytest.importorskip("numpy")
    outcome = compare(script("rollouts"), code=0)
    assert outcome.json["replayed"] and outcome.json["steps_equal"] == 2
    assert re.search(r"the inputs of Sequential at train.py:\d+, a tensor of shape \[8, 1\] at train.py", outcome.text)


@pytest.mark.slow
def test_a_mistake_on_rollouts_is_named(compare, changed):
    """A difference also needs a run with the samples of the ranks in another order."""
    pytest.importorskip("numpy")
    outcome = compare(changed(script("rollouts"), ("                p.grad /= world\n", "")), code=1, more=1)
    assert outcome.json["replayed"] and outcome.json["mistakes"] == ["world-size-factor"]
    assert [run["label"] for run in outcome.json["runs"]][-1].endswith("with other seeds and in another order")


@pytest.mark.slow
def test_rows_that_are_steps_of_a_sequence_have_no_joint_order(compare, changed):
    """One device gets the rows of one rank after those of another: the script takes them for further steps."""
    pytest.importorskip("numpy")
    steps = ("        score = scores", "        scores = scores.cumsum(0)\n        score = scores")
    outcome = compare(changed(script("rollouts"), steps), code=2, more=1)
    assert "or the order of the rows has a meaning: with other seeds, and the samples of the last rank" in outcome.text
