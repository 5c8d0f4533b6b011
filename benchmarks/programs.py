"""Right programs: steps that train the same model on any number of ranks as on one device, in the ways that people do.

What `gate.py` measures false alarms and flipped bits on. Each is what `assert_step_scales` takes; nothing here needs a GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

CLASSES, FEATURES, VOCABULARY, LENGTH, IGNORED = 4, 6, 12, 5, -100


@dataclass(frozen=True)
class Program:
    """What `assert_step_scales` takes.

    Attributes:
        sizes: batch sizes to draw from, multiples of the world size only where `divisible`.
        least: samples on each rank at least, where `divisible`.
        narrow: it computes in float16 or bfloat16, where a flipped bit of float32 drowns.
        observes_gradients: a gradient of each rank goes into its results.
    """

    step: Any
    build: Callable[[], Any]
    batch: Callable[[int], Any]
    reference: Callable[..., Any] | None = None
    divisible: bool = False
    least: int = 1
    narrow: bool = False
    single_process: bool = False
    observes_gradients: bool = True


PROGRAMS: dict[str, Program] = {}

after_placing: Callable[[nn.Module, Any], None] | None = None
"""Called in a rank with each model when it has come to its device, and the rank: to plant something there."""


def program(build: Callable[[], Any], batch: Callable[[int], Any], **options: Any) -> Callable[[Any], Any]:
    def register(step: Any) -> Any:
        PROGRAMS[step.__name__] = Program(step, build, batch, **options)
        return step

    return register


def placed(model: nn.Module, rank: Any) -> nn.Module:
    model.to(rank.device)
    if after_placing is not None:
        after_placing(model, rank)
    return model


def shard(batch: Any, rank: Any) -> list[torch.Tensor]:
    return [part[rank.index :: rank.size].to(rank.device) for part in batch]


def averaged(model: nn.Module, size: int) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= size


# Data and models


def vectors(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(n, FEATURES)
    return inputs, inputs[:, :CLASSES].argmax(1)


def numbers(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(n, FEATURES)
    return inputs, 3 * inputs.sum(1, keepdim=True).sin() * torch.rand(n, 1)


def images(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    labels = torch.randint(CLASSES, (n,))
    return torch.randn(n, 2, 8, 8) + labels.view(-1, 1, 1, 1) / 2, labels


def texts(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(VOCABULARY, (n, LENGTH))
    return tokens, tokens.roll(-1, 1).masked_fill(torch.arange(LENGTH) >= torch.randint(1, LENGTH + 1, (n, 1)), IGNORED)


def mlp(outputs: int = CLASSES) -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 12), nn.ReLU(), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, outputs))


def regressor() -> nn.Module:
    return mlp(1)


def convnet(norm: Callable[[int], nn.Module]) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), norm(4), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 8, 3), nn.Flatten(), nn.Linear(8, CLASSES)
    )


def language_model() -> nn.Module:
    return nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.LayerNorm(8), nn.Linear(8, VOCABULARY))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], tokens.device, torch.get_default_dtype())
        return self.head(self.layer(self.tokens(tokens), src_mask=mask))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module] = nn.GRU) -> None:
        super().__init__()
        self.tokens, self.body, self.head = nn.Embedding(VOCABULARY, 6), kind(6, 6, batch_first=True), nn.Linear(6, 1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.tokens(tokens))[0][:, -1])


class Parallel(nn.Module):
    """Two layers whose hidden features can be divided over ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.column, self.row = nn.Linear(FEATURES, 12), nn.Linear(12, CLASSES)


def text_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")


def counted(labels: torch.Tensor) -> torch.Tensor:
    count = (labels != IGNORED).sum()
    dist.all_reduce(count)
    return count


# DistributedDataParallel


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


# By hand


@program(lambda: convnet(lambda channels: nn.GroupNorm(2, channels)), images)
def group_norm_by_hand(model, batch, rank):
    placed(model, rank)
    inputs, labels = shard(batch, rank)
    (F.cross_entropy(model(inputs), labels, reduction="sum") * rank.size / len(batch[0])).backward()
    averaged(model, rank.size)
    torch.optim.Adam(model.parameters(), lr=1e-3).step()


@program(regressor, numbers)
def clipped_after_synchronization(model, batch, rank):
    placed(model, rank).zero_grad()
    inputs, targets = shard(batch, rank)
    (F.mse_loss(model(inputs), targets, reduction="sum") * rank.size / len(batch[0])).backward()
    averaged(model, rank.size)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return {"norm": norm}


@program(mlp, vectors)
def buckets(model, batch, rank):
    """Gradients flattened into buckets, reduced asynchronously, and waited for."""
    placed(model, rank).zero_grad()
    inputs, labels = shard(batch, rank)
    F.cross_entropy(model(inputs), labels, reduction="sum").backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    pending = []
    for start in range(0, len(gradients), 4):
        flat = torch.cat([gradient.flatten() for gradient in gradients[start : start + 4]]) / len(batch[0])
        pending.append((flat, gradients[start : start + 4], dist.all_reduce(flat, async_op=True)))
    for flat, bucket, work in pending:
        work.wait()
        for gradient, part in zip(bucket, flat.split([one.numel() for one in bucket]), strict=True):
            gradient.copy_(part.view_as(gradient))


@program(mlp, vectors, narrow=True)
def float16_compressed(model, batch, rank):
    """Divided first, so that the sum over ranks overflows no more than the mean does."""
    placed(model, rank).zero_grad()
    inputs, labels = shard(batch, rank)
    (F.cross_entropy(model(inputs), labels, reduction="sum") / len(batch[0])).backward()
    for parameter in model.parameters():
        half = parameter.grad.half()
        dist.all_reduce(half)
        parameter.grad.copy_(half)


@program(regressor, numbers)
class ShardedOptimizer:
    """ZeRO: each rank gets its part of the summed gradients, updates its part of the parameters, and gathers the rest."""

    def __init__(self, model, rank):
        placed(model, rank)
        self.momentum = None

    def __call__(self, model, batch, rank):
        model.zero_grad()
        inputs, targets = shard(batch, rank)
        (F.mse_loss(model(inputs), targets, reduction="sum") / len(batch[0])).backward()
        parameters = list(model.parameters())
        length = sum(one.numel() for one in parameters)
        pad = -length % rank.size
        flat = F.pad(torch.cat([one.grad.flatten() for one in parameters]), (0, pad))
        own = torch.empty_like(flat[: len(flat) // rank.size])
        dist.reduce_scatter(own, list(flat.chunk(rank.size)))
        self.momentum = own.clone() if self.momentum is None else 0.9 * self.momentum + own
        values = F.pad(torch.cat([one.detach().flatten() for one in parameters]), (0, pad))
        dist.all_gather(list(values.chunk(rank.size)), values.chunk(rank.size)[rank.index] - 0.05 * self.momentum)
        gathered = torch.empty_like(flat)
        dist.all_gather(list(gathered.chunk(rank.size)), own)
        sizes = [one.numel() for one in parameters]
        with torch.no_grad():
            new, total = values[:length].split(sizes), gathered[:length].split(sizes)
            for one, value, gradient in zip(parameters, new, total, strict=True):
                one.copy_(value.view_as(one))
                one.grad.copy_(gradient.view_as(one))


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


@program(Parallel, vectors)
def tensor_parallel(model, batch, rank):
    """The first layer by columns, the second by rows; all ranks have all samples."""
    placed(model, rank).zero_grad()
    inputs, labels = (part.to(rank.device) for part in batch)
    mine = [part.chunk(rank.size)[rank.index] for part in (model.column.weight, model.column.bias)]
    hidden = F.gelu(F.linear(inputs, *mine))
    part = F.linear(hidden, model.row.weight.chunk(rank.size, 1)[rank.index])
    F.cross_entropy(_Sum.apply(part) + model.row.bias, labels).backward()
    for parameter in (model.column.weight, model.column.bias, model.row.weight):
        dist.all_reduce(parameter.grad)  # each rank has its own columns or rows, and zeros elsewhere
    return {"bias": model.row.bias.grad}


class _Gather(torch.autograd.Function):
    """All ranks' rows; the gradient of this rank's own is the sum of what all ranks have for them."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rank: Any) -> torch.Tensor:
        ctx.rank, ctx.rows = rank, len(x)
        parts = [torch.empty_like(x) for _ in range(rank.size)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = gradients[0].contiguous()
        dist.all_reduce(total)
        return total[ctx.rank.index * ctx.rows :][: ctx.rows], None


@program(regressor, numbers, divisible=True)
def contrast_with_all(model, batch, rank):
    """Each sample is told from those of all ranks."""
    placed(model, rank).zero_grad()
    inputs = batch[0].to(rank.device).chunk(rank.size)[rank.index]
    one, other = (F.normalize(model[:3](x), dim=1) for x in (inputs, inputs.flip(1)))
    logits = one @ _Gather.apply(other, rank).T / 0.5
    own = rank.index * len(inputs) + torch.arange(len(inputs), device=rank.device)
    (F.cross_entropy(logits, own, reduction="sum") / len(batch[0])).backward()
    for parameter in model[:3].parameters():
        dist.all_reduce(parameter.grad)


@program(mlp, vectors, observes_gradients=False)
def metrics(model, batch, rank):
    placed(model, rank)
    inputs, labels = shard(batch, rank)
    with torch.no_grad():
        logits = model(inputs)
        found = torch.zeros(CLASSES, CLASSES, device=rank.device, dtype=torch.int64)
        found.index_put_((labels, logits.argmax(1)), torch.ones_like(labels), accumulate=True)
        total = F.cross_entropy(logits, labels, reduction="sum")
    dist.all_reduce(found)
    dist.all_reduce(total)
    return {"confusion": found, "accuracy": found.trace() / found.sum(), "loss": total / found.sum()}


# Other ways


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
        if after_placing is not None:
            after_placing(model, rank)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)

    def __call__(self, model, batch, rank):
        inputs, targets = shard(batch, rank)
        self.optimizer.zero_grad()
        F.mse_loss(model(inputs), targets).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        self.optimizer.step()


@contextlib.contextmanager
def planting(plant: Callable[[nn.Module, Any], None]) -> Iterator[None]:
    """Call `plant` with each model that comes to its device in the meantime."""
    global after_placing
    after_placing = plant
    try:
        yield
    finally:
        after_placing = None
