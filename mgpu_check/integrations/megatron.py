"""Gate a model of Megatron Core: `step` returns the arguments of `assert_step_scales`.

Each rank builds the model twice: whole, with all sizes 1, and divided at the mesh of the case. `placements` finds the
part of the whole model that each parameter is, from what Megatron declares: attributes of parameters, the number of
each layer, and the indices of experts. The divided model gets its values from there. So both train from the same start,
and a wrong declaration gives another model, which the gate reports. An undeclared parameter is an error that names it.
Megatron itself trains: its DistributedDataParallel, schedules, `finalize_model_grads` and optimizers.
"""

from __future__ import annotations

import fnmatch
import functools
import importlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

from mgpu_check.engine.rank_side.rank import Rank

__all__ = ["AXES", "mesh", "placements", "step"]

AXES = ("pp", "dp", "ep", "cp", "tp")
"""The axes of a mesh in Megatron's default order of ranks, "tp-cp-ep-dp-pp"; the last varies fastest."""

_UNDECLARED: Mapping[str, int] = MappingProxyType({"*.softmax_offset": 0})
"""The dimension that tp divides; `DotProductAttention` 0.16 has it in `sharded_state_dict`, not in attributes."""

_SHARED = "embedding.word_embeddings.weight"  # the last stage has it as `output_layer.weight`


def _core(name: str) -> Any:
    try:
        return importlib.import_module(f"megatron.core.{name}")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"mgpu_check.integrations.megatron: {error}; pip install megatron-core") from error


def _sizes(tp: int, pp: int, cp: int, ep: int, vpp: int | None) -> dict[str, int | None]:
    """Return the sizes under the names that `initialize_model_parallel` and `TransformerConfig` have for them."""
    sizes = {"tensor_model": tp, "pipeline_model": pp, "virtual_pipeline_model": vpp, "context": cp, "expert_model": ep}
    return {f"{name}_parallel_size": size for name, size in sizes.items()}


_meshes: dict[tuple[int, ...], tuple[Any, dict[str, Any]]] = {}


def mesh(*, tp: int = 1, pp: int = 1, cp: int = 1, ep: int = 1, vpp: int | None = None) -> None:
    """Initialize `parallel_state` at these sizes, in place of any mesh before. Call it on all ranks of the world.

    A mesh that this process had before in the same call is restored without communication, with its groups.
    `vpp`: the number of model chunks of each stage, for the interleaved schedule.
    """
    state, key = _core("parallel_state"), (tp, pp, cp, ep, vpp or 0)
    group, kept = _meshes.get(key, (None, {}))
    if group is not None and group in dist.distributed_c10d._world.pg_map:
        vars(state).update(kept)
        return
    state.destroy_model_parallel()
    state.initialize_model_parallel(**_sizes(tp, pp, cp, ep, vpp), create_gloo_process_groups=False)
    private = [name for name in vars(state) if name.startswith("_") and not name.startswith("__")]
    kept = {name: vars(state)[name] for name in private if not callable(vars(state)[name])}
    _meshes[key] = state.get_tensor_model_parallel_group(), kept


def placements(
    local: nn.Module, whole: nn.Module, *, declared: Mapping[str, int | str] = MappingProxyType({}), stage: str = ""
) -> dict[str, tuple[str, Any]]:
    """Return, for each parameter of a divided model, the parameter of the whole model and the slice of it.

    The gate takes both as a specification of its argument `placement`.

    Args:
        local: the model of this rank, built while `parallel_state` is at the mesh.
        whole: the model built while all sizes are 1.
        declared: a pattern of names without attributes -> the dimension that tp divides, or "whole".
        stage: a prefix of the returned names, for one of several model chunks.

    Raises:
        ValueError: slices are not known, or attributes do not fit the shapes. The message names the parameters.
    """
    wholes, slices, problems, renamed = dict(whole.named_parameters()), {}, [], _names(local, whole)
    for name, parameter in local.named_parameters():
        target = renamed(name)
        if target not in wholes and name == "output_layer.weight" and _SHARED in wholes:
            target = _SHARED
        if target not in wholes:
            problems.append(f"{name}: the whole model has no {target}")
            continue
        spec, problem = _slice(name, parameter, wholes[target].shape, declared)
        problems += [f"{name}: {problem}"] if problem else []
        slices[stage + name] = target, spec
    if problems:
        shown = "; ".join([*problems[:8], *[f"and {len(problems) - 8} more"] * (len(problems) > 8)])
        advice = 'declare a dimension with declared={"*.NAME": 0}, or correct the attributes'
        raise ValueError(f"megatron: parameters have an unknown place in the whole model: {shown}; {advice}")
    return slices


def _slice(name: str, parameter: Any, shape: Sequence[int], declared: Mapping[str, int | str]) -> tuple[Any, str]:
    """Return the slice of the whole parameter, and why it is not known; "" if it is."""
    state = _core("parallel_state")
    parallel = "expert_tensor_parallel" if ".local_experts." in name else "tensor_model_parallel"
    count, index = getattr(state, f"get_{parallel}_world_size")(), getattr(state, f"get_{parallel}_rank")()
    dim, stride = -1, 1
    patterns = [*declared.items(), *_UNDECLARED.items()]
    matching = [value for pattern, value in patterns if fnmatch.fnmatchcase(name, pattern)]
    if matching:
        dim = -1 if isinstance(matching[0], str) else matching[0]
    elif getattr(parameter, "tensor_model_parallel", False):
        dim, stride = parameter.partition_dim, max(1, parameter.partition_stride)
    divided = [size // count if axis == dim else size for axis, size in enumerate(shape)]
    if list(parameter.shape) != divided or (dim >= 0 and shape[dim] % (count * stride)):
        how = f"dimension {dim} is divided among {count} ranks" if dim >= 0 else "no attribute says that it is divided"
        return None, f"{how}, but its shape is {list(parameter.shape)} here and {list(shape)} in the whole model"
    if dim < 0 or count == 1:
        return "whole", ""
    rows = torch.cat(torch.arange(shape[dim]).chunk(stride * count)[index::count])
    return (*[slice(None)] * dim, rows.tolist()), ""


def _names(local: nn.Module, whole: nn.Module) -> Callable[[str], str]:
    """Return a function from the name of a local parameter to the name in the whole model."""
    numbers: dict[str, str] = {}  # a path of local modules -> its last two parts in the whole model
    modules, wholes = dict(local.named_modules()), dict(whole.named_modules())
    for path, children in modules.items():
        if not isinstance(children, nn.ModuleList):
            continue
        above, _, last = path.rpartition(".")
        experts = getattr(modules[above.rpartition(".")[0]], "local_expert_indices", None)
        for index, child in enumerate(children):
            number = getattr(child, "layer_number", None)
            if last == "local_experts" and experts is not None:
                numbers[f"{path}.{index}"] = f"{last}.{experts[index]}"
            elif number is not None:
                others = enumerate(wholes.get(_renamed(path, numbers)) or ())
                same = [str(i) for i, other in others if getattr(other, "layer_number", None) == number]
                numbers[f"{path}.{index}"] = f"{last}.{[*same, f'[layer_number {number}]'][0]}"
    return functools.partial(_renamed, numbers=numbers)


def _renamed(name: str, numbers: Mapping[str, str]) -> str:
    parts, renamed = name.split("."), []
    for count in range(len(parts)):
        renamed.append(parts[count])
        if (pair := numbers.get(".".join(parts[: count + 1]))) is not None:
            renamed[-2:] = pair.split(".", 1)
    return ".".join(renamed)


def step(
    model: Callable[..., nn.Module],
    config: Callable[..., Any],
    batch: Callable[[int], Any],
    *,
    forward_step: Callable[..., Any] | None = None,
    sequence_length: int | None = None,
    sequence_parallel: bool = False,
    chunks: int | None = None,
    micro_batch_size: int = 1,
    optimizer: Mapping[str, Any] = MappingProxyType({}),
    ddp: Mapping[str, Any] = MappingProxyType({}),
    declared: Mapping[str, int | str] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return arguments of `assert_step_scales`: ``assert_step_scales(ranks, **step(...), meshes=..., sizes=...)``.

    The axes of `meshes` are some of `AXES`, in this order. Sizes of batches must be divisible by dp * ep *
    micro_batch_size. The step returns the loss, as the mean over micro-batches and data parallel ranks.

    Args:
        model: ``model(config, pre_process, post_process)`` returns this rank's part of the model, such as a GPTModel.
            With `chunks` it also gets ``vp_stage``.
        config: ``config(**sizes)`` returns the TransformerConfig, with the sizes of the mesh among its arguments. The
            dropouts must be 0, and parameters in float32.
        batch: ``batch(n)`` returns n samples; see `assert_step_scales`. The default `forward_step` needs tokens: int64,
            shape [n, sequence length + 1].
        forward_step: ``forward_step(iterator, model)`` as of Megatron's training loop; the last result of its function
            of the loss has a tensor "loss". Default: the loss of a GPTModel for the next token, with a causal mask.
        sequence_length: tokens that stages send. Default: one less than the first tensor of the batch has.
        sequence_parallel: use sequence parallelism where tp is above 1.
        chunks: model chunks of each stage, for the interleaved schedule.
        optimizer, ddp: arguments of OptimizerConfig and DistributedDataParallelConfig. One device has no distributed
            optimizer.
        declared: see `placements`.

    Raises:
        ModuleNotFoundError: megatron-core is not installed.
        ValueError: `micro_batch_size` is below 1. Ranks also raise it for other axes, dropout, or undivided batches.
    """
    _core("parallel_state")  # raises where it is not installed
    if micro_batch_size < 1:
        raise ValueError(f"megatron: micro_batch_size={micro_batch_size}; give an int of at least 1")
    of_model = model, config, forward_step or _next_token, sequence_length, sequence_parallel, chunks
    training = _Training(*of_model, micro_batch_size, dict(optimizer), dict(ddp), dict(declared))
    functions = {"build": training.whole, "batch": batch, "placement": training.placement}
    return {"step": functools.partial(_Step, training), **functions}


@dataclass
class _Training:
    """The user's functions and options, and the placements of the divided model that the process has now."""

    model: Callable[..., nn.Module]
    config: Callable[..., Any]
    forward_step: Callable[..., Any]
    sequence_length: int | None
    sequence_parallel: bool
    chunks: int | None
    micro_batch_size: int
    optimizer: Mapping[str, Any]
    ddp: Mapping[str, Any]
    declared: Mapping[str, int | str]
    places: dict[str, tuple[str, Any]] = field(default_factory=dict)

    def placement(self, name: str, rank: Rank) -> tuple[str, Any] | None:
        return self.places.get(name)

    def whole(self) -> nn.Module:
        """Build the model of one device, on each rank with the same values."""
        return self.parts({})[0]

    def parts(self, sizes: Mapping[str, int]) -> list[nn.Module]:
        """Build the model chunks of this rank at a mesh, and leave `parallel_state` at this mesh."""
        tp, pp, cp, ep = (sizes.get(axis, 1) for axis in ("tp", "pp", "cp", "ep"))
        count = self.chunks if pp > 1 else None
        mesh(tp=tp, pp=pp, cp=cp, ep=ep, vpp=count)
        _core("tensor_parallel").model_parallel_cuda_manual_seed(torch.initial_seed() % 2**31)
        options = {"sequence_parallel": self.sequence_parallel and tp > 1, "pipeline_dtype": torch.float32}
        config = self.config(**_sizes(tp, pp, cp, ep, count), **options)
        on = [name for name in ("hidden_dropout", "attention_dropout") if getattr(config, name, 0)]
        if on:
            raise ValueError(f"megatron: the config has {on[0]}={getattr(config, on[0])}; a gate needs dropouts of 0")
        state, parts = _core("parallel_state"), []
        for number in range(count or 1):
            of_chunk = {"vp_stage": number} if count else {}
            ends = {"ignore_virtual": False, **of_chunk} if count else {}
            first, last = state.is_pipeline_first_stage(**ends), state.is_pipeline_last_stage(**ends)
            parts.append(self.model(config, first, last, **of_chunk))
        return parts


def _coordinates(rank: Rank) -> dict[str, tuple[int, int]]:
    """Return this rank's index and the size of each axis of `AXES`."""
    places = {"dp": (rank.index, rank.size)}
    if rank.mesh is not None:
        names = list(rank.mesh.mesh_dim_names or ())
        if names != [axis for axis in AXES if axis in names]:
            raise ValueError(f"megatron: the mesh has the axes {names}; give some of {list(AXES)}, in this order")
        places = {axis: (rank.mesh.get_local_rank(axis), rank.mesh[axis].size()) for axis in names}
    return dict.fromkeys(AXES, (0, 1)) | places


class _Step:
    """Megatron's training step, on the mesh of a rank."""

    def __init__(self, training: _Training, model: nn.Module, rank: Rank) -> None:
        self.training, self.at = training, _coordinates(rank)
        parts, training.places = [model], {}
        if any(size > 1 for axis, (_, size) in self.at.items() if axis != "dp"):
            parts = training.parts({axis: size for axis, (_, size) in self.at.items()})
            self._replace(model, parts)
        self.config = _core("utils").get_model_config(parts[0])
        distributed, optimizers = _core("distributed"), _core("optimizer")
        sharded = bool(training.optimizer.get("use_distributed_optimizer")) and rank.size > 1
        ddp = distributed.DistributedDataParallelConfig(**{**training.ddp, "use_distributed_optimizer": sharded})
        self.chunks = [distributed.DistributedDataParallel(self.config, ddp, part.to(rank.device)) for part in parts]
        options = {"lr": 0.01, "optimizer": "adam", **training.optimizer, "use_distributed_optimizer": sharded}
        settings = optimizers.OptimizerConfig(**options)
        self.optimizer = optimizers.get_megatron_optimizer(settings, self.chunks, use_gloo_process_groups=False)
        self.config.grad_scale_func = self.optimizer.scale_loss
        self.config.finalize_model_grads_func = distributed.finalize_model_grads

    def _replace(self, model: nn.Module, parts: Sequence[nn.Module]) -> None:
        """Give the parts the values of the whole model, and put them in its place, where the gate reads parameters."""
        stages = [f"chunk{number}" for number in range(len(parts))]
        wholes = dict(model.named_parameters())
        for part, stage in zip(parts, stages, strict=True):
            prefix = f"{stage}." if len(parts) > 1 else ""
            self.training.places |= placements(part, model, declared=self.training.declared, stage=prefix)
            for name, parameter in part.named_parameters():
                target, spec = self.training.places[prefix + name]
                values = wholes[target].detach()[... if spec == "whole" else spec]
                parameter.data = values.to(parameter.device, copy=True).contiguous()
        own = parts[0] if len(parts) == 1 else nn.ModuleDict(dict(zip(stages, parts, strict=True)))
        model._modules, model._parameters, model._buffers = own._modules, own._parameters, own._buffers

    def __call__(self, model: nn.Module, batch: Any, rank: Rank) -> dict[str, torch.Tensor]:
        batch = pytree.tree_map_only(torch.Tensor, operator.methodcaller("to", rank.device), batch)
        first = next(leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor))
        micro_batches = list(self._micro_batches(batch, len(first)))
        self.optimizer.zero_grad()
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
            chunk.train()
        iterators = [iter(micro_batches) for _ in self.chunks]
        losses = _core("pipeline_parallel").get_forward_backward_func()(
            forward_step_func=self.training.forward_step,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
            num_microbatches=len(micro_batches),
            seq_length=self.training.sequence_length or first.shape[1] - 1,
            micro_batch_size=self.training.micro_batch_size,
            forward_only=False,
        )
        self.optimizer.step()
        return {"loss": self._mean([entry["loss"] for entry in losses], rank.device)}

    def _micro_batches(self, batch: Any, samples: int) -> Iterator[Any]:
        index = self.at["dp"][0] * self.at["ep"][1] + self.at["ep"][0]
        count, size = self.at["dp"][1] * self.at["ep"][1], self.training.micro_batch_size
        share, rest = divmod(samples, count * size)
        if rest or not share:
            where = f"{count} data parallel ranks, in micro-batches of {size}"
            raise ValueError(f"megatron: {samples} samples on {where}; give sizes that {count * size} divides")
        for start in range(index * share * size, (index + 1) * share * size, size):
            yield pytree.tree_map_only(torch.Tensor, operator.itemgetter(slice(start, start + size)), batch)

    def _mean(self, losses: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
        """Return the mean loss on all ranks; only the last stage has losses."""
        state = _core("parallel_state")
        mean = torch.stack(list(losses)).detach().float().mean() if losses else torch.zeros((), device=device)
        stages = state.get_pipeline_model_parallel_group()
        dist.broadcast(mean, state.get_pipeline_model_parallel_last_rank(), group=stages)
        data = state.get_data_parallel_group(with_context_parallel=True)
        dist.all_reduce(mean, group=data)
        return mean / dist.get_world_size(data)


def _next_token(iterator: Iterator[torch.Tensor], model: nn.Module) -> tuple[torch.Tensor, Callable[..., Any]]:
    tokens = next(iterator)
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    length = inputs.shape[1]
    positions = torch.arange(length, device=inputs.device).expand_as(inputs)
    mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=inputs.device).triu(1)
    return model(inputs, positions, mask, labels=labels), _mean_loss


def _mean_loss(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    mean = losses.mean()
    # Copied, because the schedule divides the loss by the number of micro-batches in place.
    return mean, {"loss": mean.detach().clone()}
