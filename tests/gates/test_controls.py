"""Right calls in a wrong step are not blamed: each innocent call beside a mistake of another kind."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from mgpu_check.diagnosis.observations import (
    KINDS,
    CallEvent,
    Expected,
    Hypotheses,
    Labels,
    ObservedRun,
    RankTrace,
    Relations,
    Result,
)
from mgpu_check.diagnosis.report import Attempts
from mgpu_check.diagnosis.rules import collectives, data, decisions, factors, gradients, training_state
from mgpu_check.diagnosis.tensors import Tensors
from mgpu_check.gates.explanation.evidence import evidence_of
from mgpu_check.gates.explanation.investigation import SecondLook
from mgpu_check.gates.gate_arguments import Program
from mgpu_check.gates.search.scenarios import Scenario
from mgpu_check.gates.search.trials import Trials
from tests.gates.diagnosed import backward, mlp, part, regression, report, synchronize
from tests.gates.divided import Copied, Reduced
from tests.gates.single_cases import failure

pytestmark = pytest.mark.gpus(2)


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.norm = torch.nn.Linear(6, 8), torch.nn.LayerNorm(8)
        self.up, self.down = torch.nn.Linear(8, 16, bias=False), torch.nn.Linear(16, 1, bias=False)

    def forward(self, x):
        return self.down(self.up(self.norm(self.enter(x))).tanh())


def divides_layers(model, batch, rank, adds: bool):
    """Divide two layers among ranks; backward adds up the gradient of what enters them."""
    model.to(rank.device)
    for module, dim in ((model.up, 0), (model.down, 1)):
        part_of_it = module.weight.detach().chunk(rank.size, dim)[rank.index].clone()
        module.weight = torch.nn.Parameter(part_of_it)
    x, y = (leaf.to(rank.device) for leaf in batch)
    x = model.norm(model.enter(x))
    x = Copied.apply(x, None) if adds else x
    F.mse_loss(Reduced.apply(model.down(model.up(x).tanh()), None), y).backward()


@pytest.mark.slow
def test_parts_of_the_gradient_of_an_activation_are_to_be_added_up(ranks):
    right = Program(functools.partial(divides_layers, adds=True), Block, regression)
    assert failure(ranks, right, 2, 4) is None
    found = report(ranks, functools.partial(divides_layers, adds=False), build=Block)
    assert found.mistakes[0] == "gradients-not-synchronized", str(found)
    assert "the output of norm: their sum is the gradient of one device" in str(found)


def is_off_by_little(model, batch, rank):
    backward(model.to(rank.device), tuple(leaf.to(rank.device) for leaf in part(batch, rank)))
    synchronize(model, rank)
    for parameter in model.parameters():  # so that no known mistake explains it
        parameter.grad *= 1 + torch.linspace(2e-5, 5e-5, parameter.numel(), device=rank.device).view_as(parameter)


def with_a_head_of_zeros() -> torch.nn.Module:
    model = mlp()
    *_, weight, _ = model.parameters()
    torch.nn.init.zeros_(weight)
    return model


def loses_its_groups(model, batch, rank):
    """Decay weights and biases alike; on one device biases do not decay, and a first bias without gradient stays as it
    is."""
    model.to(rank.device)
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    weights = [one for one in model.parameters() if one.dim() > 1]
    biases = [one for one in model.parameters() if one.dim() == 1]
    groups: list[dict[str, Any]] = [
        {"params": weights},
        {"params": biases, "weight_decay": 0.3 if rank.size > 1 else 0.0},
    ]
    optimizer = torch.optim.Adam(groups, lr=0.1, weight_decay=0.3)
    backward(model, tuple(leaf.to(rank.device) for leaf in part(batch, rank)))
    synchronize(model, rank)
    optimizer.step()


@pytest.mark.slow
def test_a_broadcast_of_a_parameter_that_does_not_change_has_lost_nothing(ranks):
    found = report(ranks, loses_its_groups, build=with_a_head_of_zeros)
    assert found.mistakes == ("optimizer-differs",), str(found)


@pytest.mark.slow
def test_what_is_off_by_little_is_not_lost_and_a_reference_is_given_because_the_step_does_not_run_alone(ranks):
    def step(model, batch, rank):
        if rank.size == 1:
            raise RuntimeError("for several ranks")
        is_off_by_little(model, batch, rank)

    found = report(ranks, step, reference=backward)
    assert "world size 1" not in str(found) and "result-discarded" not in found.mistakes, str(found)


def case(*seen: ObservedRun, traces=(), alone=None, relations=None, samples=4) -> Tensors:
    expected = Expected(ObservedRun(), None)
    return Tensors(
        len(traces), samples, 1, expected, relations or Relations(), seen, traces, Hypotheses([], []), alone=alone
    )


def stepped(*rates: float) -> RankTrace:
    return RankTrace([CallEvent("step", "SGD", "train.py:9", {"rates": rates})])


@pytest.mark.parametrize(("own", "apart"), [({"b": {"lr": 0.2}}, False), ({"a": {"lr": 0.2}}, True)])
def test_learning_rates_of_parameters_that_each_rank_steps_alone(own, apart):
    seen = ObservedRun(groups=1, settings={"a": {"lr": 0.1}}), ObservedRun(groups=2, settings=own)
    found = evidence_of(case(*seen, traces=(stepped(0.1), stepped(0.2, 0.2))), Attempts())
    assert found.decisions[1].apart is apart


@pytest.mark.parametrize(("name", "blamed"), [("all_gather", True), ("send", False)])
def test_a_message_to_another_stage_cuts_no_gradient(name, blamed):
    sent = {"differentiable": True, "result": None, "upstream": ("a",), "shape": (2,), "dtype": "float32"}
    weight = Result("grads", "a")
    relations = Relations(held={weight: {"one device": False}}, wrong={weight: [0, 1]})
    trace = RankTrace([CallEvent("collective", name, "train.py:9", {"tensors": [sent]})])
    seen = ObservedRun(values={weight: torch.zeros(2)})
    found = collectives.gradient_cut(case(seen, seen, traces=(trace, trace), relations=relations))
    assert (found is not None) is blamed


PARTS = torch.tensor([[1.0, 3.0], [2.0, -1.0]]), torch.tensor([[3.0, 1.0], [1.0, 2.0]])


@pytest.mark.parametrize(
    ("parts", "whole", "apart", "named"),
    [
        (PARTS, PARTS[0] + PARTS[1], True, True),
        (PARTS, PARTS[0] - PARTS[1], True, False),
        (PARTS, PARTS[0] + PARTS[1], False, False),  # the gradients of parameters are added up
        ((PARTS[0], PARTS[0]), 2 * PARTS[0], True, False),  # ranks share out the loss
    ],
)
def test_parts_of_a_gradient_add_up(parts, whole, apart, named):
    weight = Result("grads", "norm.weight")
    relations = Relations(held={weight: {"one device": False}}, wrong={weight: [0, 1]}, split=[weight] * apart)
    traces = [RankTrace(groups=((0, 1),), gradients={"norm": part_of_it}) for part_of_it in parts]
    seen = ObservedRun(values={weight: torch.zeros(2)})
    found = gradients.adds_up_no_parts_of_an_activation(
        case(seen, seen, traces=traces, alone=RankTrace(gradients={"norm": whole}), relations=relations)
    )
    assert (found is not None) is named


WHOLE = PARTS[0] + PARTS[1]


@pytest.mark.parametrize(
    ("parts", "of_others", "whole", "named"),
    [
        (PARTS, 1.0, WHOLE, True),
        (PARTS, 1.0, WHOLE / 2, True),
        (PARTS, 0.3, WHOLE / 0.3, True),  # clipped since
        (PARTS, 0.3, WHOLE / 0.7, False),
        (PARTS, 1.0, WHOLE / 3, False),
        ((PARTS[0], 2 * PARTS[0]), 1.0, 3 * PARTS[0], False),  # multiples
    ],
)
def test_gradients_of_ranks_add_up(parts, of_others, whole, named):
    local, other = Result("grads", "a"), Result("grads", "b")
    wrong = [local, other] if of_others != 1 else [local]
    relations = Relations(held={}, wrong={name: [0, 1] for name in wrong}, split=[local])
    seen = [ObservedRun(values={local: value, other: of_others * PARTS[0]}) for value in parts]
    found = case(*seen, traces=(RankTrace(), RankTrace()), relations=relations)
    found.expected.exact.update({local: whole.double(), other: PARTS[0].double()})
    assert (gradients.adds_up_to_the_whole(found) is not None) is named


@pytest.mark.parametrize(
    ("decay", "wrong", "steps", "named"),
    [
        (0.3, ("params",), 1, True),
        (0.0, ("params",), 1, False),
        (0.3, ("params", "grads"), 1, False),  # wrong gradients explain wrong parameters
        (0.3, ("params",), 2, False),
    ],
)
def test_other_settings_explain_the_only_step(decay, wrong, steps, named):
    relations = Relations(
        held={Result(kind, "a"): {} for kind in ("grads", "params")}, wrong={Result(kind, "a"): [1] for kind in wrong}
    )
    values = {Result(kind, "a"): torch.zeros(2) for kind in ("grads", "params")}
    of_ranks = [{"a": {"weight_decay": 0.0}}, {"a": {"weight_decay": decay}}]
    seen = [ObservedRun(values=values, settings=settings, optimizer_steps=steps) for settings in of_ranks]
    found = case(*seen, traces=(RankTrace(), RankTrace()), relations=relations)
    found.expected.single.settings, found.expected.single.optimizer_steps = of_ranks[0], steps
    said = training_state.makes_something_else(found)
    assert ("weight_decay of a is 0.3 on rank 1" in str(said)) is named


def picks(*values: int) -> RankTrace:
    return RankTrace(labels=[Labels("train.py:9", values, None)])


TEXT = (3, 1, 4, 1, 5, 9, 2, 6, 8, 0, 7, 4)


@pytest.mark.parametrize(
    ("alone", "by_rank", "shifted"),
    [
        ((*TEXT, *TEXT[::-1]), ((*TEXT[:5], *TEXT[::-1][:5]), (*TEXT[6:11], *TEXT[::-1][6:11])), True),
        # neighbours share a sample
        ((*TEXT, *TEXT[::-1]), (TEXT[:5], TEXT[6:11], TEXT[::-1][:5], TEXT[::-1][6:11]), True),
        ((*TEXT, *TEXT[::-1]), (TEXT, TEXT[::-1]), False),  # samples, and no parts
        ((0, 1, 0, 1, 0, 0, 1, 1), ((0, 0, 0, 1), (0, 0, 1, 1)), False),  # so few may be the next ones by chance
    ],
)
def test_labels_are_shifted_where_it_is_no_chance(alone, by_rank, shifted):
    found = data.labels_shifted_after_split(
        case(traces=[picks(*values) for values in by_rank], alone=picks(*alone), samples=2)
    )
    assert (found is not None) is shifted
    assert found is None or "within each of 2 parts of the sequence" in found.evidence


def trains_alone(model, batch, rank):
    """Nothing combines the gradients of ranks."""
    backward(model.to(rank.device), tuple(leaf.to(rank.device) for leaf in part(batch, rank)))


@pytest.mark.slow
def test_gradients_of_own_backward_passes_are_blamed_only_if_combining_them_makes_the_step_right(ranks):
    trials = Trials(ranks, Program(trains_alone, mlp, regression), frozenset(KINDS), None, "trains_alone")
    failed = trials.run(Scenario(2, 4))
    assert failed is not None
    tensors = SecondLook(trials, failed, [2], Attempts()).taken()
    found = gradients.stays_as_backward_left_it(tensors)
    assert found is not None and found.mistake == "gradients-not-synchronized"
    assert "with their mean over ranks 0-1 the step is right" in found.evidence
    assert gradients.stays_as_backward_left_it(dataclasses.replace(tensors, tried=tensors.tried[:-1])) is None


@pytest.mark.parametrize(("of_gradient", "named"), [([1], True), ([0, 1], False)])
def test_a_parameter_that_is_right_by_chance_on_one_rank(of_gradient, named):
    parameter, gradient = Result("params", "a"), Result("grads", "a")
    relations = Relations(held={}, wrong={parameter: [1], gradient: of_gradient}, split=[gradient, parameter])
    found = decisions.right_on_one_rank(
        case(
            *(ObservedRun(digests={parameter: of}) for of in "ab"),
            traces=(RankTrace(), RankTrace()),
            relations=relations,
        )
    )
    assert (found is not None) is named


RIGHT = torch.tensor([1.0, 2.0, 3.0, 4.0])


def scaled(size: int, samples: int, by: Any) -> Tensors:
    gradient, trace = Result("grads", "a"), RankTrace()
    relations = Relations(held={}, wrong={gradient: [*range(size)]})
    seen = [ObservedRun(values={gradient: by * RIGHT}) for _ in range(size)]
    found = case(*seen, traces=[trace] * size, relations=relations, samples=samples)
    found.expected.exact[gradient] = RIGHT.double()
    return found


MIXED = torch.tensor([0.5, 0.5, 1.0, 1.0])


@pytest.mark.parametrize(
    ("samples", "elsewhere", "named"),
    [
        (8, 0.25, True),
        (8, 0.5, False),
        (8, MIXED, False),
        (6, MIXED, True),  # the parts are of unlike size there
        (2, MIXED, True),  # some ranks have no sample there
    ],
)
def test_a_factor_that_equals_the_world_size_by_chance(samples, elsewhere, named):
    here = dataclasses.replace(scaled(2, 2, 0.5), elsewhere=scaled(4, samples, elsewhere))
    found = factors.off_by_world_size(evidence_of(here, Attempts()))
    assert (found is not None) is named


def test_a_factor_that_equals_the_size_of_a_group_at_each_world_size():
    here = dataclasses.replace(scaled(2, 2, 0.5), elsewhere=scaled(4, 8, 0.5))
    for trace in here.traces:
        trace.groups = ((0, 1), (0, 1))  # the world, and a group of two
    assert factors.off_by_world_size(evidence_of(here, Attempts())) is not None
