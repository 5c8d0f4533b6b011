"""The gradients that a gate compares are those that optimizers apply, whatever an optimizer writes into them."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from tests.gates.agreed import Replicated
from tests.gates.steps import chunked, passes, refuted, regression, variant

pytestmark = pytest.mark.gpus(2)


def build():
    return nn.Linear(6, 3)


def gate(judge, ranks, step, **options):
    return judge(ranks, step, build=build, batch=regression, sizes=4, max_examples=1, **options)


class Step(Replicated):
    """On devices torch's foreach optimizers add the momentum to `grad`, on the CPU they do not."""

    kind, options = torch.optim.SGD, {"momentum": 0.9, "nesterov": True}
    returns = False

    def __call__(self, model, batch, rank):
        super().__call__(model, batch, rank)
        return {name: parameter.grad for name, parameter in model.named_parameters()} if self.returns else None


class Reference:
    returns = False

    def __init__(self, model):
        self.optimizer = Step.kind(model.parameters(), lr=0.01, **Step.options)

    def __call__(self, model, batch):
        self.optimizer.zero_grad()
        F.mse_loss(model(batch[0]), batch[1]).backward()
        self.optimizer.step()
        return {name: parameter.grad for name, parameter in model.named_parameters()} if self.returns else None


class Closed(Step):
    """The gradients appear within the step of the optimizer, as with Lightning and L-BFGS."""

    def __call__(self, model, batch, rank):
        x, y = chunked(batch, rank)

        def closure():
            self.optimizer.zero_grad()
            loss = F.mse_loss(self.model(x), y)
            loss.backward()
            return loss

        self.optimizer.step(closure)


class Alone(Step):
    """No wrapper averages the gradients."""

    def divided(self, model):
        return model


class Averaging(Alone):
    """A hook of the optimizer averages the gradients."""

    mean = True

    def __init__(self, model, rank):
        super().__init__(model, rank)
        self.optimizer.register_step_pre_hook(lambda *_: self.average(rank))

    def average(self, rank):
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)
            if self.mean:
                parameter.grad /= rank.size


class Reducing(torch.optim.SGD):
    """An optimizer of the user that averages the gradients in its step."""

    operation = dist.ReduceOp.AVG

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            dist.all_reduce(parameter.grad, self.operation)
        return super().step(closure)


Summing = variant(Reducing, operation=dist.ReduceOp.SUM)
InStep = variant(Alone, kind=Reducing, options={})


class Owned(torch.optim.Optimizer):
    """Each rank computes the update of some parameters in their gradients, and sends it to the others, as Muon does."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for number, parameter in enumerate(self.param_groups[0]["params"]):
            owner = number % dist.get_world_size()
            if dist.get_rank() == owner:
                parameter.grad.sign_().mul_(0.1)
                parameter.sub_(parameter.grad)
            dist.broadcast(parameter.detach(), owner)


Distributed = variant(Step, kind=Owned, options={})


@pytest.mark.parametrize(
    ("step", "reference"),
    [
        pytest.param(Closed, Reference, marks=pytest.mark.slow),
        pytest.param(variant(Step, returns=True), variant(Reference, returns=True), marks=pytest.mark.slow),
        (Averaging, Reference),
    ],
)
def test_what_torch_writes_into_gradients_does_not_count(ranks, step, reference):
    gate(passes, ranks, step, reference=reference)


@pytest.mark.slow
@pytest.mark.parametrize("step", [InStep, Distributed])
def test_optimizers_of_the_user_may_write_into_gradients(ranks, step):
    gate(passes, ranks, step)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "reference"), [(variant(Averaging, mean=False), Reference), (variant(InStep, kind=Summing), None)]
)
def test_gradients_that_are_reduced_wrongly_before_they_are_applied(ranks, step, reference):
    gate(refuted, ranks, step, match="gradient of weight", reference=reference)
