"""Steps that divide a model among ranks by layers or experts; each right, or with a mistake."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.nn import functional as F

from tests.gates.divided import GROUP, MISSING, Step

MICRO_BATCHES = 2


def layers() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)))


def batch(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(n, 6), torch.randn(n, 6)


class Staged(Step):
    """Each rank has some of the layers; ranks with the same layers divide the batch."""

    per_rank = 1

    def divide(self) -> None:
        mesh = self.rank.mesh["pp"]
        self.index, self.size = mesh.get_local_rank(), mesh.size()
        self.count = self.size * self.per_rank
        share = len(self.model) // self.count
        self.parts = {
            number: self.model[number * share : (number + 1) * share]
            for number in range(self.index, self.count, self.size)
        }

    def parameters(self) -> Iterator[nn.Parameter]:
        return (one for part in self.parts.values() for one in part.parameters())

    def synchronize(self) -> None:
        if self.wrong == MISSING:
            return
        for parameter in self.parameters():
            dist.all_reduce(parameter.grad, group=self.group("pp" if self.wrong == GROUP else "dp"))

    def returned(self, loss: torch.Tensor) -> dict[str, torch.Tensor] | None:
        if self.index < self.size - 1:
            return None
        dist.all_reduce(loss, group=self.group("dp"))
        return {"loss": loss}


class Scheduled(Staged):
    schedule_class: Any = ScheduleGPipe

    def backward(self, inputs: torch.Tensor, targets: torch.Tensor, elements: float) -> torch.Tensor:
        def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return F.mse_loss(output, target, reduction="sum") / elements * MICRO_BATCHES

        stages = [
            PipelineStage(part, number, self.count, self.rank.device, group=self.group("pp"))
            for number, part in self.parts.items()
        ]
        of_class = stages if issubclass(self.schedule_class, ScheduleInterleaved1F1B) else stages[0]
        schedule = self.schedule_class(of_class, MICRO_BATCHES, loss_fn=loss_of)
        losses: list[torch.Tensor] = []
        given = {"target": targets, "losses": losses} if self.index == self.size - 1 else {}
        schedule.step(*((inputs,) if self.index == 0 else ()), **given)
        return torch.stack(losses).mean().detach() if losses else torch.zeros(())


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.head = nn.Linear(6, 4, bias=False), nn.Linear(6, 6)
        nn.init.eye_(self.router.weight)  # each expert is chosen as often
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.router(x).softmax(-1)
        chosen = weights.argmax(-1)
        mixed = [((chosen == e) * weights[:, e]).unsqueeze(-1) * expert(x) for e, expert in enumerate(self.experts)]
        return self.head(x + torch.stack(mixed).sum(0))


class Exchanged(torch.autograd.Function):
    """Rows sent from each rank to each other, and their gradients back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, send: list[int], receive: list[int]) -> torch.Tensor:
        ctx.send, ctx.receive = send, receive
        found = x.new_empty(sum(receive), x.shape[1])
        dist.all_to_all_single(found, x.contiguous(), receive, send)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        found = gradient.new_empty(sum(ctx.send), gradient.shape[1])
        dist.all_to_all_single(found, gradient.contiguous(), ctx.send, ctx.receive)
        return found, None, None


class Experts(Step):
    """Each rank has some of the experts, and sends each sample to the rank that has its expert; all modules are
    kept."""

    data = ("ep",)

    def divide(self) -> None:
        self.share = len(self.model.experts) // self.rank.size
        self.first = self.rank.index * self.share
        self.own = self.model.experts[self.first : self.first + self.share]

    def parameters(self) -> Iterator[nn.Parameter]:
        yield from (*self.own.parameters(), *self.shared())

    def shared(self) -> Iterator[nn.Parameter]:
        yield from (*self.model.router.parameters(), *self.model.head.parameters())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.model.router(x).softmax(-1)
        chosen = weights.argmax(-1)
        order = chosen.argsort(stable=True)
        send = (chosen // self.share).bincount(minlength=self.rank.size)
        receive = torch.empty_like(send)
        dist.all_to_all_single(receive, send)
        counts = send.tolist(), receive.tolist()
        rows, of = (
            Exchanged.apply(part[order], *counts)
            for part in (x, chosen.unsqueeze(1).to(x.dtype))  # one type of rows
        )
        mixed = [(of == self.first + number) * expert(rows) for number, expert in enumerate(self.own)]
        back = Exchanged.apply(torch.stack(mixed).sum(0), counts[1], counts[0])
        found = torch.zeros_like(x).index_copy(0, order, back)
        return self.model.head(x + found * weights.gather(1, chosen.unsqueeze(1)))

    def synchronize(self) -> None:
        if self.wrong == MISSING:
            return
        group = dist.new_subgroups(self.rank.size // 2)[0] if self.wrong == GROUP else None
        for parameter in self.shared():
            dist.all_reduce(parameter.grad, group=group)


class SlimExperts(Experts):
    """Each rank keeps its own experts only, under new indices."""

    def divide(self) -> None:
        super().divide()
        self.model.experts = nn.ModuleList(self.own)
