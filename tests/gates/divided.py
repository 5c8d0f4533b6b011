"""Steps that divide a model among ranks by tensors, layers of a library, or flat buffers; each right, or with a
mistake."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import Partial
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

from mgpu_check import Rank

SCALED, MISSING, GROUP = "a slice scaled", "a missing reduction", "a wrong group"
MISTAKES = (SCALED, MISSING, GROUP)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.norm = nn.Linear(6, 8), nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x).tanh()
        return self.norm(x + self.down(self.up(x).relu()))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(12, 8), nn.Linear(8, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.words(tokens))


def rows(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(n, 6), torch.randn(n, 8)


def texts(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(12, (n, 3)), torch.randn(n, 3, 8)


def local(tensor: torch.Tensor) -> torch.Tensor:
    return getattr(tensor, "_local_tensor", tensor)


class Step:
    """Trains on this rank's part of the batch; subclasses divide the model.

    Attributes:
        data: axes of the mesh that the batch is divided along.
        averages: a library takes the mean of gradients over the ranks that divide the batch.
        wrong: the mistake, one of `MISTAKES`; "" for none, as on one device.
    """

    data: tuple[str, ...] = ("dp",)
    averages = False

    def __init__(self, model: Any, rank: Rank, wrong: str = "") -> None:
        self.rank, self.model, self.wrong = rank, model.to(rank.device), wrong if rank.size > 1 else ""
        self.divide()
        # DTensors and plain tensors are in no `foreach` together.
        self.optimizer = torch.optim.SGD(list(self.parameters()), lr=0.1, momentum=0.9, foreach=False)

    def divide(self) -> None:
        """Leave on this rank what it is to hold."""

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.model.parameters()

    def __call__(self, model: nn.Module, batch: tuple[torch.Tensor, ...], rank: Rank) -> dict[str, torch.Tensor] | None:
        self.optimizer.zero_grad()
        index, count = self.part()
        inputs, targets = (part.chunk(count)[index].to(rank.device) for part in batch)
        loss = self.backward(inputs, targets, batch[1].numel() / (count if self.averages else 1))
        self.synchronize()
        if self.wrong == SCALED and rank.index == rank.size - 1:
            local(self.divided().grad).mul_(2)
        self.optimizer.step()
        return self.returned(loss / (count if self.averages else 1))

    def part(self) -> tuple[int, int]:
        """Return the number of this rank's part of the batch, and the number of parts."""
        index, count = 0, 1
        for axis in self.data:
            size = self.rank.mesh[axis].size()
            index, count = index * size + self.rank.mesh.get_local_rank(axis), count * size
        return index, count

    def backward(self, inputs: torch.Tensor, targets: torch.Tensor, elements: float) -> torch.Tensor:
        loss = F.mse_loss(self.forward(inputs), targets, reduction="sum") / elements
        loss.backward()
        return loss.detach()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)

    def synchronize(self) -> None:
        """Add up gradients over the ranks that divide the batch."""
        for parameter in self.parameters():
            dist.all_reduce(local(parameter.grad), group=self.group("tp" if self.wrong == GROUP else "dp"))

    def group(self, axis: str) -> dist.ProcessGroup:
        return self.rank.mesh[axis].get_group()

    def divided(self) -> torch.Tensor:
        """A parameter that this rank has a slice of."""
        return next(self.parameters())

    def returned(self, loss: torch.Tensor) -> dict[str, torch.Tensor]:
        dist.all_reduce(loss)
        return {"loss": loss * self.part()[1] / self.rank.size}


class TensorParallel(Step):
    def divide(self) -> None:
        down = RowwiseParallel(output_layouts=Partial()) if self.wrong == MISSING else RowwiseParallel()
        parallelize_module(self.model, self.rank.mesh["tp"], {"up": ColwiseParallel(), "down": down})

    def divided(self) -> torch.Tensor:
        return self.model.up.weight


class Copied(torch.autograd.Function):
    """Forward the same on all ranks of a group; backward the sum over them."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class Reduced(torch.autograd.Function):
    """Forward the sum over the ranks of a group; backward the same on all of them."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class Megatron(Step):
    """By hand: a shard replaces the parameter."""

    def divide(self) -> None:
        self.cut(self.model.up, "weight", 0)
        self.cut(self.model.up, "bias", 0)
        self.cut(self.model.down, "weight", 1)

    def cut(self, module: nn.Module, name: str, dim: int) -> None:
        mesh = self.rank.mesh["tp"]
        chunk = getattr(module, name).detach().chunk(mesh.size(), dim)[mesh.get_local_rank()]
        setattr(module, name, nn.Parameter(self.kept(chunk.clone())))

    def kept(self, shard: torch.Tensor) -> torch.Tensor:
        return shard

    def copied(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.wrong == MISSING else Copied.apply(x, self.group("tp"))

    def reduced(self, x: torch.Tensor) -> torch.Tensor:
        return Reduced.apply(x, self.group("tp"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        model = self.model
        x = model.enter(x).tanh()
        hidden = model.up(self.copied(x)).relu()
        return model.norm(x + self.reduced(F.linear(hidden, model.down.weight)) + model.down.bias)

    def divided(self) -> torch.Tensor:
        return self.model.up.weight


class VocabularyParallel(Megatron):
    """By hand: each rank has the vectors of some words."""

    def divide(self) -> None:
        self.cut(self.model.words, "weight", 0)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        weight = self.model.words.weight
        own = tokens - self.rank.mesh.get_local_rank("tp") * len(weight)
        here = (own >= 0) & (own < len(weight))
        vectors = F.embedding(own.clamp(0, len(weight) - 1), weight) * here.unsqueeze(-1)
        vectors = vectors.to(self.model.head.weight.dtype)
        return self.model.head(vectors if self.wrong == MISSING else self.reduced(vectors))

    def divided(self) -> torch.Tensor:
        return self.model.words.weight


class Sharded(Step):
    """FSDP1 with a flat parameter for each linear layer."""

    averages = True
    originals = False

    def divide(self) -> None:
        self.model = FSDP(
            self.model,
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
            device_id=self.rank.device,
            use_orig_params=self.originals,
            ignored_modules=[self.model.down] if self.wrong == MISSING else None,
            process_group=dist.new_subgroups(self.rank.size // 2)[0] if self.wrong == GROUP else None,
        )

    def synchronize(self) -> None:
        """FSDP has done it."""


class FullyShard(Step):
    averages = True

    def divide(self) -> None:
        ignored = set(self.model.down.parameters()) if self.wrong == MISSING else None
        mesh = self.mesh()
        for module in (self.model.enter, self.model.up):
            fully_shard(module, mesh=mesh)
        fully_shard(self.model, mesh=mesh, ignored_params=ignored)

    def mesh(self) -> DeviceMesh:
        if self.wrong != GROUP:
            return self.rank.mesh["dp"]
        return init_device_mesh(self.rank.device.type, (2, self.rank.size // 2), mesh_dim_names=("a", "b"))["b"]

    def synchronize(self) -> None:
        """FSDP has done it."""


class HybridShard(FullyShard):
    """FSDP2 that shards within an axis, and replicates over another."""

    data = ("replicate", "shard")

    def divide(self) -> None:
        super().divide()
        if self.wrong == MISSING:
            self.model.set_requires_all_reduce(False)

    def mesh(self) -> DeviceMesh:
        return self.rank.mesh["shard"] if self.wrong == GROUP else self.rank.mesh


class FullyShardTensorParallel(TensorParallel):
    """FSDP2 over one axis, DTensors over the other; the mistake is to divide the batch along the wrong one."""

    averages = True

    def divide(self) -> None:
        super().divide()
        fully_shard(self.model, mesh=self.rank.mesh["dp"])

    def part(self) -> tuple[int, int]:
        axis = "tp" if self.wrong == GROUP else "dp"
        return self.rank.mesh.get_local_rank(axis), self.rank.mesh[axis].size()

    def synchronize(self) -> None:
        """FSDP has done it."""


class FlatShards(Step):
    """ZeRO-1 by hand: all parameters are one flat buffer, and each rank's optimizer has its chunk of it."""

    def divide(self) -> None:
        self.size = self.rank.mesh["dp"].size()
        self.shard = nn.Parameter(self.mine(self.flat(one.detach() for one in self.model.parameters())))

    def flat(self, tensors: Iterator[torch.Tensor]) -> torch.Tensor:
        flat = torch.cat([one.reshape(-1) for one in tensors])
        return F.pad(flat, (0, -len(flat) % self.size))

    def mine(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.chunk(self.size)[self.rank.mesh.get_local_rank("dp")].clone()

    def parameters(self) -> Iterator[nn.Parameter]:
        yield self.shard

    def synchronize(self) -> None:
        flat = self.flat(one.grad for one in self.model.parameters())
        if self.wrong == GROUP:
            dist.all_reduce(flat, group=dist.new_subgroups(self.size // 2)[0])
        elif self.wrong != MISSING:
            dist.all_reduce(flat)
        self.shard.grad = self.mine(flat)
        self.model.zero_grad()

    def returned(self, loss: torch.Tensor) -> dict[str, torch.Tensor]:
        chunks = [torch.empty_like(self.shard) for _ in range(self.size)]
        dist.all_gather(chunks, self.shard.detach())
        nn.utils.vector_to_parameters(torch.cat(chunks), self.model.parameters())
        return super().returned(loss)
