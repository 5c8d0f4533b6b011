"""Models that torch divides: DTensor, FSDP1, FSDP2, hybrid sharding, and pipelining."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from programs.divided.collectives import Grid
from programs.divided.drawing import Draw
from programs.divided.layers import Attention, Mlp, Transformer, loss_of, token_losses
from programs.divided.optimizers import groups_of, loses_groups, made, rate_of, steps_here

__all__ = ["Library"]


class Library:
    def __init__(self, program: Draw, model: Transformer, rank: Any) -> None:
        model.to(rank.device)
        if program.style == "rebuilt":
            model = copy.deepcopy(model)
        self.program, self.rank, self.grid = program, rank, Grid(rank, program.mesh[0][0])
        self.model: nn.Module = model
        self.schedule: Any = None
        self.named: list[tuple[str, nn.Parameter]] = []
        self.reduced = ("dp",) if program.way in ("dtensor", "pipelining") else ()
        getattr(self, f"_{program.way}")(model)
        self.parameters = [one for _, one in self.named]
        groups = groups_of(program, self.named, loses_groups(program, self.grid))
        self.optimizer = made(program, groups, rate_of(program, self.grid))

    # Dividing

    def _mesh(self, axis: str) -> Any:
        from torch.distributed.device_mesh import init_device_mesh

        if self.rank.mesh is None:
            return init_device_mesh(self.rank.device.type, (self.rank.size,))
        return self.rank.mesh[axis]

    def _tensor_parallel(self, model: Transformer) -> None:
        from torch.distributed.tensor import Replicate
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        mesh = self._mesh("tp")
        for block in model.blocks:
            if isinstance(block, Mlp):
                parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
            elif isinstance(block, Attention):
                parallelize_module(block, mesh, {"qkv": ColwiseParallel(), "out": RowwiseParallel()})
        if "vocabulary" in self.program.options and not model.shape.tied and self.program.way == "dtensor":
            parallelize_module(model.head, mesh, ColwiseParallel(output_layouts=Replicate()))

    def _dtensor(self, model: Transformer) -> None:
        self._tensor_parallel(model)
        self.named = list(model.named_parameters())

    def _fsdp1(self, model: Transformer) -> None:
        from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

        strategy = ShardingStrategy.SHARD_GRAD_OP if "grad op" in self.program.options else ShardingStrategy.FULL_SHARD
        self._wrap(model, self._mesh("dp"), strategy)
        assert isinstance(self.model, FullyShardedDataParallel)

    def _hsdp(self, model: Transformer) -> None:
        from torch.distributed.fsdp import ShardingStrategy

        if "flat" in self.program.options and self.grid.sizes["fs"] == 1:
            # HYBRID_SHARD over one rank does not reduce among replicas.
            self._wrap(model, self.rank.mesh["dp"], ShardingStrategy.NO_SHARD)
        elif "flat" in self.program.options:
            self._wrap(model, self.rank.mesh["dp", "fs"], ShardingStrategy.HYBRID_SHARD)
        else:
            self._fully_shard(model, self.rank.mesh["dp", "fs"])

    def _wrap(self, model: Transformer, mesh: Any, strategy: Any) -> None:
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        self.model = FullyShardedDataParallel(
            model,
            device_id=self.rank.device,
            device_mesh=mesh,
            sharding_strategy=strategy,
            auto_wrap_policy=ModuleWrapPolicy({Mlp, Attention}),
            use_orig_params="flat" not in self.program.options
            or self.program.way == "hsdp"
            or self.program.optimizer.groups,
        )
        self.named = list(self.model.named_parameters())

    def _fully_shard(self, model: Transformer, mesh: Any) -> None:
        from torch.distributed.fsdp import fully_shard

        for block in model.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward="grad op" not in self.program.options)
        fully_shard(model, mesh=mesh)
        self.named = list(model.named_parameters())

    def _fsdp2(self, model: Transformer) -> None:
        if self.program.size("tp") > 1:
            self._tensor_parallel(model)
        self._fully_shard(model, self._mesh("dp"))

    def _pipelining(self, model: Transformer) -> None:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
        from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B

        size, place = self.grid.sizes["pp"], self.grid.places["pp"]
        virtual = 2 if "interleaved" in self.program.options else 1
        count, total = len(model.blocks), size * virtual
        numbers = [place + size * turn for turn in range(virtual)]
        self.stages = []
        for number in numbers:
            part = nn.ModuleList(one for i, one in enumerate(model.blocks) if i * total // count == number)
            self.stages.append(_Stage(model, part, number == 0, number == total - 1))
        group = self.grid.group("pp")
        made_of = [
            PipelineStage(stage, number, total, self.rank.device, group=group)
            for stage, number in zip(self.stages, numbers, strict=True)
        ]
        how: dict[str, Any] = {"loss_fn": self._loss, "scale_grads": False}
        if virtual > 1:
            self.schedule = ScheduleInterleaved1F1B(made_of, 2 * size, **how)
        elif "1F1B" in self.program.options:
            self.schedule = Schedule1F1B(made_of[0], max(2, size), **how)
        else:
            self.schedule = ScheduleGPipe(made_of[0], 2, **how)
        self.has_first, self.has_last = numbers[0] == 0, numbers[-1] == total - 1
        self.named = [one for stage in self.stages for one in stage.named_parameters()]

    def _loss(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return token_losses(outputs, labels) / self.tokens

    # Training

    def _plants(self, name: str) -> bool:
        plant = self.program.plant
        return plant is not None and plant.name == name

    def __call__(self, batch: Any) -> dict[str, torch.Tensor] | None:
        grid, axes = self.grid, self._axes_of_data()
        parts = batch
        for axis in axes:
            if axis == "dp" and self._plants("replicas take the same samples"):
                parts = [part.chunk(grid.sizes[axis])[0] for part in parts]
            else:
                parts = [grid.parts_of(part, axis, 0) for part in parts]
        inputs, labels = (part.to(self.rank.device) for part in parts)
        tokens = batch[0].shape[0] * batch[0].shape[1]
        self.optimizer.zero_grad()
        if self.schedule is not None:
            loss = self._scheduled(inputs, labels, tokens)
        else:
            replicas = 1
            for axis in ("dp", "fs"):
                replicas *= grid.sizes[axis] if axis not in self.reduced else 1
            if self._plants("sum in place of a mean"):
                tokens //= grid.sizes["dp"]
            total = loss_of(self.model, inputs, labels, tokens) * replicas  # which FSDP divides by
            total.backward()
            loss = total.detach() / replicas
        for parameter in self.parameters:
            if parameter.grad is None and not hasattr(parameter, "_params") and not self._is_fsdp1():
                parameter.grad = torch.zeros_like(parameter)
            if parameter.grad is not None and not self._plants("gradients not reduced"):
                grid.summed(_local(parameter.grad), self.reduced)
        self._damage()
        self._clip()
        if steps_here(self.program, grid):
            self.optimizer.step()
        if self.schedule is None:
            return {"loss": grid.summed(loss.clone(), axes)} if self.program.returns_loss else None
        loss = grid.summed(loss.clone(), axes)
        if "returns on last" in self.program.options and grid.sizes["pp"] > 1:
            return {"loss": loss} if self.has_last else None
        return {"loss": grid.summed(loss, ["pp"])}

    def _is_fsdp1(self) -> bool:
        from torch.distributed.fsdp import FullyShardedDataParallel

        return isinstance(self.model, FullyShardedDataParallel)

    def _axes_of_data(self) -> list[str]:
        return [axis for axis in ("dp", "fs") if self.grid.sizes[axis] > 1]

    def _scheduled(self, inputs: torch.Tensor, labels: torch.Tensor, tokens: int) -> torch.Tensor:
        self.tokens = tokens
        losses: list[torch.Tensor] = []
        given = (inputs,) if self.has_first else ()
        self.schedule.step(*given, **({"target": labels, "losses": losses} if self.has_last else {}))
        return sum((loss.detach() for loss in losses), torch.zeros((), device=self.rank.device))

    def _damage(self) -> None:
        plant, grid = self.program.plant, self.grid
        if plant is None:
            return
        gradients = [
            _local(one.grad)
            for one in self.parameters
            if one.grad is not None and one.grad.numel() and (plant.axis != "tp" or _is_cut(one, "tp"))
        ]
        if plant.name == "slice scaled" and grid.is_last(plant.axis):
            several = [one for one in gradients if one.numel()]
            if several:
                several[int(plant.choice * len(several))].mul_(plant.factor)
        elif plant.name == "scaled by the size of an axis":
            for parameter in self.parameters:
                if parameter.grad is not None:
                    _local(parameter.grad).mul_(float(grid.sizes[plant.axis]) ** (1 if plant.factor > 1 else -1))

    def _clip(self) -> None:
        most, grid = self.program.optimizer.clip, self.grid
        if most is None:
            return
        local = self._plants("norm of the shards of one rank")
        if self.schedule is not None:
            total = sum(one.grad.square().sum() for one in self.parameters)
            norm = grid.summed(total.clone(), [] if local else ["pp"]).sqrt()
            for one in self.parameters:
                one.grad.mul_((most / (norm + 1e-6)).clamp(max=1.0))
        elif self._is_fsdp1() and not local:
            self.model.clip_grad_norm_(most)
        elif self.program.way == "fsdp1":
            nn.utils.clip_grad_norm_(self.parameters, most)
        else:
            self._clip_dtensors(most)

    def _clip_dtensors(self, most: float) -> None:
        """Of several meshes, which `clip_grad_norm_` does not take together."""
        norms = []
        for one in self.parameters:
            norm = one.grad.norm()
            norms.append(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        factor = (most / (torch.stack(norms).norm() + 1e-6)).clamp(max=1.0)
        for one in self.parameters:
            _local(one.grad).mul_(factor)


class _Stage(nn.Module):
    def __init__(self, model: Transformer, blocks: nn.ModuleList, first: bool, last: bool) -> None:
        super().__init__()
        self.blocks, self.embed = blocks, model.embed if first else None
        self.positions = model.positions if first else None
        self.norm, self.head = (model.norm, model.head) if last else (None, None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embed is not None:
            x = self.embed(x)
        if self.positions is not None:
            x = x + self.positions
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(self.norm(x))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a DTensor that is here, which shares its memory."""
    return getattr(tensor, "_local_tensor", tensor)


def _is_cut(parameter: torch.Tensor, axis: str) -> bool:
    placements = getattr(parameter, "placements", ())
    return any(place.is_shard() for place in placements)
