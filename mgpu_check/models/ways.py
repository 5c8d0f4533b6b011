"""The ways to train a model on several devices: a row for each, with what applies it, and where it does not apply.

Each way is the library's own: torch's wrappers and schedules as their pages show them, and the plans of transformers.
Torch cuts no unchanged model into stages, so `Stage` does.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, OffloadPolicy, fully_shard
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.gates.search.scenarios import Mesh, size_of
from mgpu_check.models.training_options import prepare
from mgpu_check.models.traits import Traits, blocks_of, class_of, divisible_layers
from mgpu_check.torch_hooks.patches import replaced

Options = Mapping[str, str]


@dataclass(frozen=True)
class Way:
    """A way to train.

    Attributes:
        wrap: takes the model, the rank and options; returns what is called in place of the model.
            It is not used where the step is another one: for a pipeline, and for the function of the user.
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
        """True if some parameters are divided, and others are plain tensors. Stages have whole ones."""
        return self.data is not None and self.name != "pp"


OF_DATA = ("dp", "data", "batch", "replicate", "shard", "fsdp", "dp_replicate", "dp_shard")
"""Axes of a user's mesh that divide the batch."""


def _unchanged(model: Any, rank: Rank, options: Options) -> Any:
    return model


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
    policy = CPUOffloadPolicy() if "offload" in options else OffloadPolicy()
    for _, block in blocks_of(model):
        fully_shard(block, mesh=mesh, reshard_after_forward="reshard" not in options, offload_policy=policy)
    return fully_shard(model, mesh=mesh, offload_policy=policy)


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


def _context_parallel(model: Any, rank: Rank, options: Options) -> Any:
    for name, module in model.named_modules():
        if name.endswith("self_attn"):
            module.register_forward_pre_hook(_causal, with_kwargs=True)
    return _sharded(model, _axis(rank, "cp"), options)


def _causal(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Leave out the mask, as accelerate does: torch's ring attention takes none."""
    return args, kwargs | {"attention_mask": None, "is_causal": True}


@contextlib.contextmanager
def context_of(inputs: Mapping[str, Any]) -> Iterator[None]:
    """Divide the sequences of a batch in place between all ranks, [samples, tokens], and attend in a ring."""
    attention = sys.modules.get("transformers.integrations.sdpa_attention")
    tensors = [value for value in inputs.values() if isinstance(value, torch.Tensor)]
    mesh = init_device_mesh(tensors[0].device.type, (dist.get_world_size(),))
    with contextlib.ExitStack() as stack:
        if attention is not None:  # keys and values are repeated: torch's kernel for float32 has no grouped queries
            stack.enter_context(replaced(attention, "use_gqa_in_sdpa", lambda *_, **__: False))
        stack.enter_context(context_parallel(mesh, buffers=tensors, buffer_seq_dims=[1] * len(tensors)))
        yield


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


def _needs_function(traits: Traits) -> str:
    return "" if traits.mesh else "no function parallelize(model, mesh) is beside the model"


def _needs_attention(traits: Traits) -> str:
    return "" if traits.attends else f"{traits.name} is no causal language model of transformers with SDPA"


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
    Way("cp", _context_parallel, (("cp", 2),), (), _needs_attention, derived=True),
    Way("pp", _unchanged, (("pp", 2),), (), derived=True),
    Way("own", _unchanged, (), OF_DATA, _needs_function),
    Way("ep", _by_plan(tp_size="ep", ep_size="ep"), (("ep", 2),), (), _OWN_EP),
    Way("fsdp2-tp", _fsdp2_and_tensor_parallel, _two_by_two("dp", "tp"), ("dp",), _needs_layers, derived=True),
    Way("fsdp-tp", _BOTH, _two_by_two("dp", "tp"), ("dp",), _OWN_TP),
)
"""All ways, from the usual to the rare."""


ONE_DEVICE = Way("one device", _unchanged)
"""The control of options: what differs here is no fault of a way."""


def way_of(name: str, traits: Traits | None = None) -> Way:
    """Return a way by name; that of the user has the mesh of `traits`."""
    way = next(way for way in (*WAYS, ONE_DEVICE) if way.name == name)
    return replace(way, mesh=traits.mesh) if traits is not None and name == "own" else way


def part_of(way: Way, rank: Rank) -> tuple[int, int]:
    """Return which part of the batch a rank trains on, and of how many."""
    if way.single_process:
        return 0, 1
    if rank.mesh is None or way.data is None:
        return rank.index, rank.size
    index, count = 0, 1
    for axis in filter(way.data.__contains__, rank.mesh.mesh_dim_names or ()):
        index, count = index * rank.mesh[axis].size() + rank.mesh.get_local_rank(axis), count * rank.mesh[axis].size()
    return index, count


def shard(value: torch.Tensor, part: tuple[int, int]) -> torch.Tensor:
    return value.chunk(part[1])[part[0]]


MICRO_BATCHES = 2

Loss = Callable[[nn.Module, Mapping[str, Any]], torch.Tensor]
"""Takes the model and a batch, and returns the loss."""


class _Cut(Exception):
    """The first block of the next stage was reached."""

    def __init__(self, value: torch.Tensor) -> None:
        super().__init__("the next stage")
        self.value = value


def _first_tensor(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int | str, torch.Tensor]:
    """Return which argument of a block passes from block to block, and its value."""
    arguments: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    for place, value in arguments:
        if isinstance(value, torch.Tensor):
            return place, value
    raise ValueError("a block of the model takes no tensor")


class Stage(nn.Module):
    """A part of a model, from one of its blocks to another one, as a stage of a pipeline.

    The whole model is called. Blocks of earlier stages pass their first input on, the first block of the stage gets
    what the stage before it sent, and the call ends before the first block of the next stage. So the code of the model
    does not change. Only what passes from block to block crosses stages; `divide` checks that it suffices.

    Called with what the stage before it returned, and the batch; the first stage with the batch alone. The last stage
    returns the loss, (1,); others return the input of the next stage.
    """

    def __init__(self, model: nn.Module, loss: Loss, index: int, count: int, tuples: bool) -> None:
        super().__init__()
        self.model, self.loss = model, loss
        self.tuples = tuples  # whether blocks return tuples
        blocks = [block for _, block in blocks_of(model)]
        first, end = (len(blocks) * stage // count for stage in (index, index + 1))
        self._earlier, self._own, self._later = blocks[:first], blocks[first:end], blocks[end:]

    def forward(self, *received: torch.Tensor, batch: Mapping[str, Any]) -> torch.Tensor:
        with contextlib.ExitStack() as stack:
            for block in self._earlier:
                stack.enter_context(_passing(block, self.tuples))
            if received:
                handle = self._own[0].register_forward_pre_hook(_replacing(received[0]), with_kwargs=True)
                stack.callback(handle.remove)
            if self._later:
                handle = self._later[0].register_forward_pre_hook(_cutting, with_kwargs=True)
                stack.callback(handle.remove)
            try:
                return self.loss(self.model, batch).reshape(1)
            except _Cut as cut:
                return cut.value


def _passing(block: nn.Module, in_tuple: bool) -> contextlib.AbstractContextManager[None]:
    """Let a block return its first input."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        value = _first_tensor(args, kwargs)[1]
        return (value,) if in_tuple else value

    return replaced(block, "forward", forward)


def _replacing(value: torch.Tensor) -> Callable[..., Any]:
    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        place = _first_tensor(args, kwargs)[0]
        if isinstance(place, str):
            return args, kwargs | {place: value}
        return (*args[:place], value, *args[place + 1 :]), kwargs

    return hook


def _cutting(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    raise _Cut(_first_tensor(args, kwargs)[1])


def divide(model: nn.Module, loss: Loss, batch: Mapping[str, Any], rank: Rank, schedule: str) -> Any:
    """Return the schedule of this rank's stage. The model keeps only the parameters that the stage trains.

    Args:
        batch: a batch on the device of the rank, to try the stages with.
        schedule: "1F1B", or "GPipe".

    Raises:
        ValueError: the model has too few blocks, two stages use a parameter, or the stages one after another have
            another loss than the model.
    """
    trial, count, kinds = copy.deepcopy(model), rank.size, set[bool]()
    blocks = blocks_of(trial)
    if len(blocks) < count:
        raise ValueError(f"it has {len(blocks)} block{'s' * (len(blocks) != 1)} for {count} stages")
    handles = [block.register_forward_hook(lambda _, __, out: kinds.add(type(out) is tuple)) for _, block in blocks]
    with torch.no_grad():
        whole = loss(trial, batch).reshape(1)
    for handle in handles:
        handle.remove()
    received: tuple[torch.Tensor, ...] = ()
    stages_of: dict[str, list[int]] = {}  # stages that train each parameter
    trained = {name: parameter for name, parameter in trial.named_parameters() if parameter.requires_grad}
    for index in range(count):
        output = Stage(trial, loss, index, count, True in kinds)(*received, batch=batch)
        gradients = torch.autograd.grad(output.sum(), [*trained.values()], allow_unused=True)
        for name, gradient in zip(trained, gradients, strict=True):
            stages_of.setdefault(name, []).extend([index] if gradient is not None else [])
        received = (output.detach(),)
    if several := next((name for name, stages in stages_of.items() if len(stages) > 1), None):
        raise ValueError(f"stages {' and '.join(map(str, stages_of[several]))} use {several}, and nothing adds it up")
    if not torch.equal(received[0], whole):
        raise ValueError("more passes from block to block than the first input of a block")
    own = Stage(model, loss, rank.index, count, True in kinds)
    for name in (name for name, stages in stages_of.items() if rank.index not in stages):
        place, _, key = name.rpartition(".")
        owner, value = model.get_submodule(place), model.get_parameter(name)
        delattr(owner, key)
        setattr(owner, key, value.detach())  # as a plain tensor: modules before the first block still run
    stage = PipelineStage(own, rank.index, count, rank.device)
    kind = {"1F1B": Schedule1F1B, "GPipe": ScheduleGPipe}[schedule]
    # With scale_grads, `eval` divides the gradients that are there once more (torch 2.13, perform_reduce_grad).
    return kind(stage, MICRO_BATCHES, loss_fn=lambda value, _: value[0] / MICRO_BATCHES, scale_grads=False)
