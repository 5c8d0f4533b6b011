"""A transformer that is divided by hand: tensor, sequence, context, expert and pipeline parallelism, together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from programs.divided.collectives import Grid
from programs.divided.drawing import Draw
from programs.divided.layers import Attention, Experts, Mlp, Transformer, token_losses

__all__ = ["Hand"]

MICRO_BATCHES = 2


@dataclasses.dataclass
class Owned:
    """A parameter that this rank trains.

    Attributes:
        cut: the axes along which ranks have other slices of it.
        stages: of the pipeline that have it.
    """

    name: str
    parameter: nn.Parameter
    cut: frozenset[str]
    stages: int = 1


class Hand:
    """The part of a model that a rank has.

    Args:
        model: whole; it is cut in place.
    """

    def __init__(self, model: Transformer, grid: Grid, program: Draw) -> None:
        self.model, self.grid, self.program, self.shape = model, grid, program, model.shape
        self.sequence = "sequence" in program.options and grid.sizes["tp"] > 1
        self.vocabulary = "vocabulary" in program.options and model.shape.tokens and grid.sizes["tp"] > 1
        self.first = grid.places["pp"] == 0
        self.last = grid.places["pp"] == grid.sizes["pp"] - 1
        self.cuts: dict[int, frozenset[str]] = {}
        count = len(model.blocks)
        self.mine = [i for i in range(count) if i * grid.sizes["pp"] // count == grid.places["pp"]]
        self.partial = tuple(axis for axis in program.data_axes if axis != "tp") + (("tp",) if self.sequence else ())
        for block in model.blocks:
            self._divide(block)
        if self.vocabulary:
            self._cut(model.embed, "weight", 0)
            if model.shape.tied:
                model.head.weight = model.embed.weight
            else:
                self._cut(model.head, "weight", 0)
            if model.head.bias is not None:
                self._cut(model.head, "bias", 0)
        if "slim" in program.options:
            self._drop_others()
        self.owned = list(self._owned())

    def planted(self, name: str) -> bool:
        return self.program.plant is not None and self.program.plant.name == name

    # Dividing

    def _divide(self, block: nn.Module) -> None:
        if self.grid.sizes["tp"] > 1:
            if isinstance(block, Mlp):
                self._cut(block.up, "weight", 0)
                self._cut(block.up, "bias", 0)
                self._cut(block.down, "weight", 1)
            elif isinstance(block, Attention):
                self._cut(block.qkv, "weight", 0, block)
                self._cut(block.qkv, "bias", 0, block)
                self._cut(block.out, "weight", 1)
        if isinstance(block, Experts):
            each = len(block.experts) // self.grid.sizes["ep"]
            low = self.grid.places["ep"] * each
            block.local = range(low, low + each)
            for one in block.local:
                for parameter in block.experts[one].parameters():
                    self.cuts[id(parameter)] = frozenset({"ep"})
            if "slim" in self.program.options:
                block.experts = nn.ModuleList(block.experts[one] for one in block.local)

    def _cut(self, owner: nn.Module, key: str, dim: int, heads: Attention | None = None) -> None:
        whole = getattr(owner, key)
        if whole is None:
            return
        value = whole.detach()
        if heads is not None and heads.fused:
            parts = value.view(3, value.shape[0] // 3, *value.shape[1:])
            value = self.grid.parts_of(parts, "tp", 1).flatten(0, 1)
        else:
            value = self.grid.parts_of(value, "tp", dim)
        setattr(owner, key, nn.Parameter(value.clone()))
        new = getattr(owner, key)
        self.cuts[id(new)] = frozenset({"tp"})
        if "attributes" in self.program.options and not (heads is not None and heads.fused):
            new.tensor_model_parallel, new.partition_dim, new.partition_stride = True, dim, 1

    def _drop_others(self) -> None:
        model = self.model
        for index in range(len(model.blocks)):
            if index not in self.mine:
                model.blocks[index] = nn.Identity()
        if not self.first:
            model.positions = None
            model.embed = nn.Identity()
        if not self.last:
            model.norm, model.head = nn.Identity(), nn.Identity()

    def _owned(self) -> Iterator[Owned]:
        model, seen = self.model, set()
        parts: list[tuple[str, nn.Module]] = []
        if self.first:
            parts.append(("embed", model.embed))
        for index in self.mine:
            block = model.blocks[index]
            for name, part in block.named_children():
                if name != "experts":
                    parts.append((f"blocks.{index}.{name}", part))
            if isinstance(block, Experts):
                for one, expert in zip(block.local, self._experts(block), strict=True):
                    parts.append((f"blocks.{index}.experts.{one}", expert))
        if self.last:
            parts += [("norm", model.norm), ("head", model.head)]
        if self.first and model.positions is not None:
            yield Owned("positions", model.positions, frozenset())
        for prefix, part in parts:
            for name, parameter in part.named_parameters():
                if id(parameter) in seen:
                    continue
                seen.add(id(parameter))
                tied = self.shape.tied and name == "weight" and prefix in ("embed", "head")
                stages = min(2, self.grid.sizes["pp"]) if tied else 1
                yield Owned(f"{prefix}.{name}", parameter, self.cuts.get(id(parameter), frozenset()), stages)

    def _experts(self, block: Experts) -> list[nn.Module]:
        return list(block.experts) if "slim" in self.program.options else [block.experts[one] for one in block.local]

    # Computing

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        if self.sequence:
            return self.grid.gather(x, "tp", 1)
        if self.grid.sizes["tp"] == 1 or self.planted("gradient of the input not reduced"):
            return x
        return self.grid.copy(x, "tp")

    def leave(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if bias is not None and self.planted("bias added on every rank"):
            x, bias = x + bias, None
        if self.sequence:
            x = self.grid.scatter(x, "tp", 1)
        elif self.grid.sizes["tp"] > 1 and not self.planted("output not reduced"):
            x = self.grid.reduce(x, "tp")
        return x if bias is None else x + bias

    def stage(self, x: torch.Tensor) -> torch.Tensor:
        """Embedding on the first stage, and the blocks."""
        if self.first:
            x = self._embedded(x)
        for index in self.mine:
            block = self.model.blocks[index]
            forward: Callable[..., torch.Tensor] = {
                Mlp: self._mlp,
                Attention: self._attention,
                Experts: self._mixture,
            }[type(block)]
            x = forward(block, x)
        return x

    def _embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        model, grid = self.model, self.grid
        if self.vocabulary:
            each = model.embed.weight.shape[0]
            local = tokens - grid.places["tp"] * each
            inside = (local >= 0) & (local < each)
            found = F.embedding(local.clamp(0, each - 1), model.embed.weight)
            if not self.planted("tokens of others not masked"):
                found = found * inside[..., None]
            x = grid.scatter(found, "tp", 1) if self.sequence else grid.reduce(found, "tp")
        else:
            x = model.embed(grid.parts_of(tokens, "tp", 1) if self.sequence else tokens)
        if model.positions is not None:
            whole = tokens.shape[1]
            low = 0 if self._restarts("cp") else grid.places["cp"] * whole
            if self.sequence and not self._restarts("tp"):
                low += grid.places["tp"] * x.shape[1]
            x = x + model.positions[low : low + x.shape[1]]
        return x

    def _restarts(self, axis: str) -> bool:
        return self.planted("positions restart") and self.program.plant.axis == axis

    def _mlp(self, block: Mlp, x: torch.Tensor) -> torch.Tensor:
        inside = F.gelu(F.linear(self.enter(block.norm(x)), block.up.weight, block.up.bias))
        return x + self.leave(F.linear(inside, block.down.weight), block.down.bias)

    def _attention(self, block: Attention, x: torch.Tensor) -> torch.Tensor:
        q, k, v = block.split(F.linear(self.enter(block.norm(x)), block.qkv.weight, block.qkv.bias))
        offset = 0
        if self.grid.sizes["cp"] > 1:
            offset = self.grid.places["cp"] * k.shape[2]
            k, v = (self.grid.gather(part, "cp", 2) for part in (k, v))
        mixed = block.attend(q, k, v, offset)
        return x + self.leave(F.linear(mixed, block.out.weight), block.out.bias)

    def _mixture(self, block: Experts, x: torch.Tensor) -> torch.Tensor:
        flat, chosen, weight = block.routed(x)
        experts = self._experts(block)
        order = chosen.argsort(stable=True)
        count = self.grid.sizes["ep"]
        places = chosen // len(experts)
        send = torch.bincount(places, minlength=count)
        receive = torch.empty_like(send)
        if count > 1:
            dist.all_to_all_single(receive, send, group=self.grid.group("ep"))
        else:
            receive = send
        to, back = send.tolist(), receive.tolist()
        tokens = self.grid.exchange(flat[order], "ep", to, back)
        whose = self.grid.exchange(chosen[order].to(flat.dtype)[:, None], "ep", to, back)[:, 0].long()
        answers = sum(
            (whose == one)[:, None] * expert(tokens) for one, expert in zip(block.local, experts, strict=True)
        )
        home = self.grid.exchange(answers, "ep", back, to)
        found = torch.zeros_like(flat).index_copy(0, order, home)
        return x + (weight * found).view_as(x)

    def loss(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The sum over the tokens of this rank; along tp the same on all ranks, or a part of the sequence."""
        model, grid = self.model, self.grid
        x = model.norm(x)
        if not self.vocabulary:
            labels = grid.parts_of(labels, "tp", 1) if self.sequence else labels
            return token_losses(F.linear(x, model.head.weight, model.head.bias), labels)
        logits = F.linear(self.enter(x), model.head.weight, model.head.bias)
        each = logits.shape[-1]
        largest = logits.detach().amax(-1)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=grid.group("tp"))
        logits = logits - largest[..., None]
        total = grid.reduce(logits.exp().sum(-1), "tp")
        local = labels - grid.places["tp"] * each
        inside = (local >= 0) & (local < each)
        own = logits.gather(-1, local.clamp(0, each - 1)[..., None])[..., 0] * inside
        return (total.log() - grid.reduce(own, "tp")).sum()

    @property
    def loss_axes(self) -> tuple[str, ...]:
        """The axes along which `loss` is to be summed."""
        return tuple(axis for axis in self.partial if axis != "tp" or not self.vocabulary)

    def balance(self) -> torch.Tensor:
        total = torch.zeros((), device=self.grid.device)
        for index in self.mine:
            block = self.model.blocks[index]
            if isinstance(block, Experts):
                total, block.balance = total + block.balance, None
        return total * self.grid.world if self.planted("auxiliary loss times the world") else total

    def train(self, inputs: torch.Tensor, labels: torch.Tensor, tokens: int) -> torch.Tensor:
        """Forward and backward; the loss, without the auxiliary one, as a part of the mean over `tokens`."""
        if self.program.way != "pipeline":
            loss = self.loss(self.stage(inputs), labels) / tokens
            (loss + self.balance() / tokens).backward()
            return loss.detach()
        total = torch.zeros((), device=self.grid.device)
        pending = []
        for part, answers in zip(inputs.chunk(MICRO_BATCHES), labels.chunk(MICRO_BATCHES), strict=True):
            x = part if self.first else self._received(len(part))
            out = self.stage(x)
            balance = self.balance() / tokens
            if self.last:
                loss = self.loss(out, answers) / tokens
                total += loss.detach()
                pending.append((x, loss + balance, None))
            else:
                dist.send(out.detach().contiguous(), self.grid.neighbour("pp", 1))
                pending.append((x, out, balance))
        for x, out, balance in pending:
            if self.last:
                out.backward()
            else:
                gradient = torch.empty_like(out).contiguous()
                dist.recv(gradient, self.grid.neighbour("pp", 1))
                torch.autograd.backward(
                    [out] + ([balance] if balance.requires_grad else []),
                    [gradient] + ([None] if balance.requires_grad else []),
                )
            if not self.first:
                dist.send(x.grad.contiguous(), self.grid.neighbour("pp", -1))
        return total

    def _received(self, rows: int) -> torch.Tensor:
        length = self.shape.length // self.grid.sizes["cp"] // (self.grid.sizes["tp"] if self.sequence else 1)
        x = torch.empty(rows, length, self.shape.width, device=self.grid.device)
        dist.recv(x, self.grid.neighbour("pp", -1))
        return x.requires_grad_()

    # The end of a step

    def reduce_gradients(self, without: str = "") -> None:
        """Add up the gradients of ranks that have seen other tokens, and those of tied weights."""
        plant, grid = self.program.plant, self.grid
        victim = self.owned[int(plant.choice * len(self.owned))] if plant else None
        for one in self.owned:
            if one.parameter.grad is None:
                one.parameter.grad = torch.zeros_like(one.parameter)
            axes = [axis for axis in self.partial if axis not in one.cut and axis != without]
            if plant is not None:
                if plant.name == "gradients not reduced" or (
                    plant.name == "one gradient not reduced" and one is self._affected(victim, plant.axis)
                ):
                    axes = [axis for axis in axes if axis != plant.axis]
                if plant.name == "norms and biases not reduced" and one.parameter.dim() == 1:
                    axes = [axis for axis in axes if axis != "tp"]
                if plant.name == "reduced over all ranks":
                    axes = [*axes, *(["tp"] if "tp" not in axes else [])]
                if plant.name == "reduced over the other axis":
                    axes = ["tp" if axis == "dp" else axis for axis in axes]
            grid.summed(one.parameter.grad, axes)
        if self.shape.tied and grid.sizes["pp"] > 1 and not self.planted("tied weights not summed"):
            tied = next((one.parameter.grad for one in self.owned if one.stages > 1), None)
            rows = self.shape.vocabulary // (grid.sizes["tp"] if self.vocabulary else 1)
            if tied is None:
                tied = torch.zeros(rows, self.shape.width, device=grid.device)
            grid.summed(tied, ["pp"])

    def _affected(self, victim: Owned | None, axis: str) -> Owned:
        """The victim, or else the first parameter whose gradient is to be reduced along the axis."""
        if victim is not None and axis not in victim.cut:
            return victim
        return next(one for one in self.owned if axis not in one.cut)

    def replicas(self, one: Owned, axes: tuple[str, ...]) -> int:
        """How many of the ranks along these axes have the same elements of a parameter."""
        count = 1
        for axis in axes:
            if axis == "pp":
                count *= one.stages
            elif axis not in one.cut:
                count *= self.grid.sizes[axis]
        return count
