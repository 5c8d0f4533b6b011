"""The ways to train a model on several devices: a row for each, with what applies it, and where it does not apply.

Each way is the library's own: torch's wrappers as their pages show them, and the plans of transformers.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.gates.search.scenarios import Mesh, size_of
from mgpu_check.models.training_options import prepare
from mgpu_check.models.traits import Traits, blocks_of, class_of, divisible_layers

Options = Mapping[str, str]


@dataclass(frozen=True)
class Way:
    """A way to train.

    Attributes:
        wrap: takes the model, the rank and options; returns what is called in place of the model.
        mesh: axes of the mesh and their sizes; () for one group of two devices.
        data: axes that divide the batch, of `mesh`; None: all ranks do.
        derived: whether the plan is made here, so that no one has said that the model can be divided so.
        refusal: why a model cannot be trained so; "" if it can.
    """

    name: str
    wrap: Callable[[Any, Rank, Options], Any]
    mesh: Mesh = ()
    data: tuple[str, ...] | None = None
    refusal: Callable[[Traits], str] = lambda traits: ""
    single_process: bool = False
    derived: bool = False

    @property
    def devices(self) -> int:
        return size_of(self.mesh) if self.mesh else 2

    @property
    def divides_parameters(self) -> bool:
        """True if some parameters are divided, and others are plain tensors."""
        return self.data is not None


def _data_parallel(model: Any, rank: Rank, options: Options) -> Any:
    return nn.DataParallel(model, device_ids=list(range(rank.size)))


def _ddp(model: Any, rank: Rank, options: Options) -> Any:
    arguments: dict[str, Any] = {}
    if (buckets := options.get("buckets")) is not None:
        arguments |= {"gradient_as_bucket_view": True} if "view" in buckets else {"bucket_cap_mb": 0.001}
    if (graph := options.get("graph")) is not None:
        arguments[graph] = True
    return DistributedDataParallel(model, **arguments)


def _fully_sharded(model: Any, rank: Rank, options: Options) -> Any:
    return _sharded(model, rank.mesh or init_device_mesh(rank.device.type, (rank.size,)), options)


def _sharded(model: Any, mesh: DeviceMesh, options: Options) -> Any:
    for _, block in blocks_of(model):
        fully_shard(block, mesh=mesh, reshard_after_forward="reshard" not in options)
    return fully_shard(model, mesh=mesh)


def _fsdp1(model: Any, rank: Rank, options: Options) -> Any:
    blocks = {block for _, block in blocks_of(model)}
    policy = functools.partial(lambda_auto_wrap_policy, lambda_fn=blocks.__contains__)
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=True, device_id=rank.device)


def _styles(model: nn.Module, size: int) -> dict[str, ParallelStyle]:
    """Return a plan of tensor parallelism that is right for each model that calls its layers.

    Each Linear divides its outputs, and each Embedding its rows. Inputs and outputs are whole.
    """
    whole: dict[str, Any] = {"input_layouts": Replicate(), "output_layouts": Replicate()}
    styles = {nn.Linear: ColwiseParallel, nn.Embedding: RowwiseParallel}
    return {name: styles[class_of(model.get_submodule(name))](**whole) for name in divisible_layers(model, size)}


def _axis(rank: Rank, name: str) -> DeviceMesh:
    assert rank.mesh is not None
    return rank.mesh[name]


def _tensor_parallel(model: Any, rank: Rank, options: Options) -> Any:
    mesh = _axis(rank, "tp")
    return parallelize_module(model, mesh, _styles(model, mesh.size()))


def _fsdp2_and_tensor_parallel(model: Any, rank: Rank, options: Options) -> Any:
    return _sharded(_tensor_parallel(model, rank, options), _axis(rank, "dp"), options)


@contextlib.contextmanager
def _shared_directory(rank: Rank) -> Iterator[str]:
    """Make a directory for all ranks, which rank 0 removes when all have left it."""
    place = [tempfile.mkdtemp() if rank.index == 0 else None]
    dist.broadcast_object_list(place, device=rank.device)
    directory = str(place[0])
    try:
        yield directory
        dist.barrier()
    finally:
        if rank.index == 0:
            shutil.rmtree(directory)


def _by_plan(**sizes: str) -> Callable[[Any, Rank, Options], Any]:
    """Return what applies the plan of a model of transformers. `sizes`: argument of DistributedConfig -> axis."""

    def wrap(model: Any, rank: Rank, options: Options) -> Any:
        distributed = importlib.import_module("transformers.distributed")
        axes = {argument: _axis(rank, axis).size() for argument, axis in sizes.items()}
        with _shared_directory(rank) as directory:
            # The way of users: a checkpoint is divided while it is loaded. Rank 0 alone writes it.
            model.save_pretrained(directory)
            dist.barrier()
            config = distributed.DistributedConfig(**axes)
            own = type(model).from_pretrained(directory, distributed_config=config, dtype=model.dtype)
        prepare(own.train(), options)
        # The gate reads the parameters of the model that it has built.
        model._modules, model._parameters, model._buffers = own._modules, own._parameters, own._buffers
        return own

    return wrap


def _needs_plan(kind: str) -> Callable[[Traits], str]:
    def refusal(traits: Traits) -> str:
        if kind not in traits.plans:
            return f"{traits.name} has no plan for it ({kind}_plan of transformers)"
        try:
            known = hasattr(importlib.import_module("transformers.distributed"), "DistributedConfig")
        except ImportError:
            known = False
        return "" if known else "transformers is too old: it has no DistributedConfig; 5.20 and newer have it"

    return refusal


def _needs_layers(traits: Traits) -> str:
    return "" if traits.divisible else "no Linear or Embedding has a dimension that the ranks divide"


def _two_by_two(first: str, second: str) -> Mesh:
    return (first, 2), (second, 2)


_OWN_TP, _OWN_EP = _needs_plan("tp"), _needs_plan("ep")
_BOTH = _by_plan(fsdp_size="dp", tp_size="tp")

WAYS: tuple[Way, ...] = (
    Way("dp", _data_parallel, single_process=True),
    Way("ddp", _ddp),
    Way("fsdp1", _fsdp1),
    Way("fsdp2", _fully_sharded),
    Way("hsdp", _fully_sharded, _two_by_two("replicate", "shard")),
    Way("tp", _by_plan(tp_size="tp"), (("tp", 2),), (), _OWN_TP),
    Way("tp-layers", _tensor_parallel, (("tp", 2),), (), _needs_layers, derived=True),
    Way("ep", _by_plan(tp_size="ep", ep_size="ep"), (("ep", 2),), (), _OWN_EP),
    Way("fsdp2-tp", _fsdp2_and_tensor_parallel, _two_by_two("dp", "tp"), ("dp",), _needs_layers, derived=True),
    Way("fsdp-tp", _BOTH, _two_by_two("dp", "tp"), ("dp",), _OWN_TP),
)
"""All ways, from the usual to the rare."""


ONE_DEVICE = Way("one device", lambda model, rank, options: model)
"""The control of options: what differs here is no fault of a way."""


def way_of(name: str) -> Way:
    return next(way for way in (*WAYS, ONE_DEVICE) if way.name == name)


def part_of(way: Way, rank: Rank) -> tuple[int, int]:
    """Return which part of the batch a rank trains on, and of how many."""
    if way.single_process:
        return 0, 1
    if rank.mesh is None or way.data is None:
        return rank.index, rank.size
    index, count = 0, 1
    for axis in way.data:
        index, count = index * rank.mesh[axis].size() + rank.mesh.get_local_rank(axis), count * rank.mesh[axis].size()
    return index, count


def shard(value: torch.Tensor, part: tuple[int, int]) -> torch.Tensor:
    return value.chunk(part[1])[part[0]]
