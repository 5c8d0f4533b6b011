"""Programs that wrap their model: DistributedDataParallel, nn.DataParallel, FSDP2."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from programs import setting
from programs.models import (
    Attention,
    Recurrent,
    convnet,
    counted,
    images,
    language_model,
    mlp,
    numbers,
    regressor,
    text_loss,
    texts,
    vectors,
)
from programs.setting import placed, program, shard


@program(mlp, vectors)
def ddp_of_any_size(model, batch, rank):
    ddp = DDP(placed(model, rank))
    inputs, labels = shard(batch, rank)
    (F.cross_entropy(ddp(inputs), labels, reduction="sum") * rank.size / len(batch[0])).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


@program(mlp, vectors, divisible=True)
class DdpOfEqualShards:
    """The optimizer outlives the step, and its momentum."""

    def __init__(self, model, rank):
        self.ddp = DDP(placed(model, rank), gradient_as_bucket_view=True)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)

    def __call__(self, model, batch, rank):
        inputs, labels = shard(batch, rank)
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.ddp(inputs), labels, label_smoothing=0.1)
        loss.backward()
        self.optimizer.step()
        loss = loss.detach().clone()
        dist.all_reduce(loss)
        return {"loss": loss / rank.size}


@program(lambda: convnet(nn.BatchNorm2d), images, divisible=True, least=2)
def sync_batch_norm(model, batch, rank):
    ddp = DDP(nn.SyncBatchNorm.convert_sync_batchnorm(placed(model, rank)))
    inputs, labels = shard(batch, rank)
    F.cross_entropy(ddp(inputs), labels).backward()
    torch.optim.SGD(model.parameters(), lr=0.05).step()


@program(lambda: convnet(nn.BatchNorm2d).eval(), images)
def frozen_batch_norm(model, batch, rank):
    ddp = DDP(placed(model, rank))
    inputs, labels = shard(batch, rank)
    (F.cross_entropy(ddp(inputs), labels, reduction="sum") * rank.size / len(batch[0])).backward()
    torch.optim.RMSprop(model.parameters(), lr=1e-3).step()


@program(language_model, texts)
def token_weights(model, batch, rank):
    ddp = DDP(placed(model, rank))
    tokens, labels = shard(batch, rank)
    (text_loss(ddp(tokens), labels) * rank.size / counted(labels)).backward()
    torch.optim.AdamW(model.parameters(), lr=1e-2).step()


@program(Attention, texts, divisible=True)
def attention(model, batch, rank):
    ddp = DDP(placed(model, rank))
    tokens, labels = shard(batch, rank)
    (text_loss(ddp(tokens), labels) * rank.size / counted(labels)).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    torch.optim.Adam(model.parameters(), lr=1e-2).step()
    return {"norm": norm}


@program(mlp, vectors)
class Accumulation:
    """Micro-batches of six samples on all ranks, two to a step of the optimizer; the last may be incomplete."""

    def __init__(self, model, rank):
        self.ddp = DDP(placed(model, rank))
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def __call__(self, model, batch, rank):
        for window in zip(*(part.split(12) for part in batch), strict=True):
            micro_batches = list(zip(*(part.split(6) for part in window), strict=True))
            self.optimizer.zero_grad()
            for number, micro_batch in enumerate(micro_batches):
                last = number + 1 == len(micro_batches)
                inputs, labels = shard(micro_batch, rank)
                with contextlib.nullcontext() if last else self.ddp.no_sync():
                    loss = F.cross_entropy(self.ddp(inputs), labels, reduction="sum")
                    (loss * rank.size / len(window[0])).backward()
            self.optimizer.step()


@program(mlp, vectors, narrow=True)
def bfloat16_autocast(model, batch, rank):
    ddp = DDP(placed(model, rank))
    inputs, labels = shard(batch, rank)
    with torch.autocast(rank.device.type, torch.bfloat16):
        logits = ddp(inputs)
    (F.cross_entropy(logits.float(), labels, reduction="sum") * rank.size / len(batch[0])).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


@program(Recurrent, texts)
def gru(model, batch, rank):
    ddp = DDP(placed(model, rank))
    tokens, _ = shard(batch, rank)
    target = tokens.to(torch.get_default_dtype()).mean(1, keepdim=True)
    # A recurrent layer takes no empty batch.
    loss = (
        F.huber_loss(ddp(tokens), target, reduction="sum")
        if len(tokens)
        else 0 * ddp(batch[0][:1].to(rank.device)).sum()
    )
    (loss * rank.size / len(batch[0])).backward()
    torch.optim.Adagrad(model.parameters(), lr=0.05).step()


@program(regressor, numbers)
class CosineSchedule:
    def __init__(self, model, rank):
        self.ddp = DDP(placed(model, rank))
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=4)

    def __call__(self, model, batch, rank):
        inputs, targets = shard(batch, rank)
        self.optimizer.zero_grad()
        (F.mse_loss(self.ddp(inputs), targets, reduction="sum") * rank.size / len(batch[0])).backward()
        self.optimizer.step()
        self.schedule.step()


@program(lambda: {"model": regressor(), "average": regressor()}, numbers)
class MovingAverage:
    """A second model follows the first."""

    def __init__(self, models, rank):
        self.ddp = DDP(placed(models["model"], rank))
        self.average = models["average"].to(rank.device).requires_grad_(False)
        self.average.load_state_dict(models["model"].state_dict())
        self.optimizer = torch.optim.Adam(self.ddp.parameters(), lr=0.01)

    def __call__(self, models, batch, rank):
        inputs, targets = shard(batch, rank)
        self.optimizer.zero_grad()
        (F.mse_loss(self.ddp(inputs), targets, reduction="sum") * rank.size / len(batch[0])).backward()
        self.optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(self.average.parameters(), self.ddp.parameters(), strict=True):
                slow.lerp_(fast, 0.1)


@program(mlp, vectors, single_process=True)
def data_parallel(model, batch, rank):
    replicated = nn.DataParallel(placed(model, rank), device_ids=list(range(rank.size)))
    inputs, labels = (part.to(rank.device) for part in batch)
    loss = F.cross_entropy(replicated(inputs), labels)
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=1e-2).step()
    return {"loss": loss}


@program(regressor, numbers, divisible=True)
class FullyShardedDataParallel:
    def __init__(self, model, rank):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        model.to(rank.device)
        mesh = init_device_mesh(rank.device.type, (rank.size,))
        for layer in model[:3:2]:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        if setting.after_placing is not None:
            setting.after_placing(model, rank)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)

    def __call__(self, model, batch, rank):
        inputs, targets = shard(batch, rank)
        self.optimizer.zero_grad()
        F.mse_loss(model(inputs), targets).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        self.optimizer.step()
