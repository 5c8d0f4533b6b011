"""Check device meshes, and DTensors on them: how they are made, code on the parts of ranks, operators and losses.

Operators on DTensors give the results and gradients of whole tensors, for each placement. They are functions of
matrices with at least 3 rows and 5 columns.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import tensor as dtensors
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    experimental,
)
from torch.nn import functional as F
from torch.torch_version import TorchVersion

from mgpu_check.asserts.findings import on_any_rank
from mgpu_check.asserts.known_defects import is_known, known_defect, left_out
from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.errors import ReplicaMismatch
from mgpu_check.numerics.differences import difference
from mgpu_check.oracles.pairs import near_square
from mgpu_check.suite.sharded.redistribution import compared, part_of, placed, require_none_wrong, text_of
from mgpu_check.torch_hooks.tensors import plain
from mgpu_check.version import torch_version

_NAMES = ("pp", "dp", "tp")


def assert_meshes_agree(rank: Rank) -> None:
    """Assert that meshes of one to three dimensions have the right coordinates and groups. A collective.

    Meshes have their ranks in order and out of order; one leaves the last rank out. The group of each dimension runs an
    all_reduce and an all_gather. A mesh made from a group must have the ranks of the group.
    """
    rows, columns = near_square(rank.size)
    everybody = torch.arange(rank.size)
    shapes: list[tuple[int, ...]] = [(rank.size,), (rows, columns)]
    if columns % 2 == 0:
        shapes.append((rows, columns // 2, 2))
    messages = []
    meshes: list[tuple[DeviceMesh, torch.Tensor]] = []
    for shape in shapes:
        meshes.append((init_device_mesh("cuda", shape, mesh_dim_names=_NAMES[-len(shape) :]), everybody.reshape(shape)))
    turned = everybody.flip(0).reshape(columns, rows).T.contiguous()
    meshes.append((DeviceMesh("cuda", turned, mesh_dim_names=("dp", "tp")), turned))
    if rank.size > 1:
        meshes.append((DeviceMesh("cuda", everybody[:-1], mesh_dim_names=("dp",)), everybody[:-1]))
    for mesh, ranks in meshes:
        inside = rank.index in ranks
        # If the groups of ranks disagree, a collective could hang, so all ranks leave it out.
        strange = inside and any(sorted(members) != sorted(line) for members, line in _groups(rank, mesh, ranks))
        calling = not on_any_rank(rank, strange)
        if inside:
            messages.append(_wrong_mesh(rank, mesh, ranks, calling=calling))
        elif mesh.get_coordinate() is not None:
            messages.append(f"a mesh without rank {rank.index} gives it the coordinate {mesh.get_coordinate()}")
    if text := next(filter(None, messages), None):
        raise ReplicaMismatch(f"device mesh, rank {rank.index}: {text}", ranks=[rank.index])


def _coordinate(rank: Rank, ranks: torch.Tensor) -> list[int]:
    return [int(position) for position in (ranks == rank.index).nonzero()[0]]


def _groups(rank: Rank, mesh: DeviceMesh, ranks: torch.Tensor) -> Iterator[tuple[list[int], list[int]]]:
    """Yield for each dimension the ranks of this rank's group, and the right ranks."""
    coordinate = _coordinate(rank, ranks)
    for dim, name in enumerate(mesh.mesh_dim_names or ()):
        line = ranks[tuple(slice(None) if axis == dim else at for axis, at in enumerate(coordinate))].tolist()
        yield dist.get_process_group_ranks(mesh.get_group(name)), line


def _wrong_mesh(rank: Rank, mesh: DeviceMesh, ranks: torch.Tensor, *, calling: bool) -> str | None:
    """Describe the first error of a mesh; None if it is right. With `calling`, a collective of the mesh's groups."""
    texts = []
    description = f"{tuple(ranks.shape)} of ranks {ranks.flatten().tolist()}"
    expected_coordinate = _coordinate(rank, ranks)
    coordinate = mesh.get_coordinate()
    if coordinate is None or list(coordinate) != expected_coordinate:
        texts.append(f"{description} has this rank at {coordinate}, expected {expected_coordinate}")
    for dim, (members, line) in enumerate(_groups(rank, mesh, ranks)):
        name = (mesh.mesh_dim_names or ())[dim]
        group, of_dimension = mesh.get_group(name), f"{description}, dimension {name!r}"
        if sorted(members) != sorted(line):
            texts.append(f"{of_dimension}: the group has ranks {members}, expected {line}")
        elif calling and (text := _wrong_collectives(rank, group, members)):
            texts.append(f"{of_dimension}: {text}")
        if not mesh.get_all_groups()[dim] is mesh.get_group(dim) is group:
            texts.append(f"{of_dimension}: get_group or get_all_groups gives another group by its number")
        # A group has its ranks in order, and the local rank is the position in the group.
        number = members.index(rank.index) if rank.index in members else None
        of_group = DeviceMesh.from_group(group, "cuda").mesh.tolist()
        for subject, got, expected in (
            (f"{description}, dimension {name!r}: local rank", mesh.get_local_rank(name), number),
            (f"{description}, dimension {dim!r}: local rank", mesh.get_local_rank(dim), number),
            (f"{of_dimension}: size", mesh.size(dim), len(line)),
            (f"{description}[{name!r}] has ranks", mesh[name].mesh.tolist() if ranks.dim() > 1 else line, line),
            (f"{of_dimension}: the mesh of its group has ranks", of_group, members),
        ):
            texts += [f"{subject} {got}, expected {expected}"] * (got != expected)
    if ranks.dim() > 1:
        rebuilt_mesh = DeviceMesh.from_group(mesh.get_all_groups(), "cuda", ranks, mesh_dim_names=mesh.mesh_dim_names)
        got = rebuilt_mesh.mesh.tolist()
        if rebuilt_mesh.get_coordinate() != mesh.get_coordinate() or got != ranks.tolist():
            texts.append(f"a mesh from the groups of {description} has ranks {got}, expected {ranks.tolist()}")
    for dropped in range(3 if ranks.dim() == 3 else 0):
        # Without the ranks that share this rank's place in the third of three dimensions.
        kept = tuple(name for dim, name in enumerate(mesh.mesh_dim_names or ()) if dim != dropped)
        slice_ranks, expected = mesh[kept].mesh.tolist(), ranks.select(dropped, expected_coordinate[dropped]).tolist()
        if slice_ranks != expected:
            texts.append(f"{description}[{', '.join(kept)}] has ranks {slice_ranks}, expected {expected}")
    return texts[0] if texts else None


def _wrong_collectives(rank: Rank, group: dist.ProcessGroup, members: list[int]) -> str | None:
    """Describe an error in the order or the sum of a group's ranks; None without one. A collective of the group."""
    own_index = torch.tensor([rank.index], device=rank.device)
    gathered = [torch.empty_like(own_index) for _ in members]
    # all_gather shows the order of the ranks in the group.
    dist.all_gather(gathered, own_index, group=group)
    dist.all_reduce(own_index, group=group)
    if (ranks := [int(index) for index in gathered]) != members:
        return f"all_gather gives ranks {ranks}"
    return None if int(own_index) == sum(members) else f"the sum of the ranks {members} is {int(own_index)}"


def assert_dtensors_are_made(rank: Rank, seed: int) -> None:
    """Assert that DTensors are made with the right parts, and that functions of parts see them. A collective."""
    line = init_device_mesh("cuda", (rank.size,))
    square = init_device_mesh("cuda", near_square(rank.size))
    # Whole numbers from 1 to 97, an even number of rows and of columns for each rank.
    index = torch.arange(6 * rank.size**2, device="cpu").reshape(2 * rank.size, 3 * rank.size)
    full_tensor = (index * 7 + seed) % 97 + 1.0
    messages = [
        *_filled(line, seed, [(Shard(0),), (Shard(1),), (Replicate(),)]),
        *_filled(square, seed, [(Shard(0), Shard(1)), (Shard(0), Replicate())]),
        *_from_parts(rank, line, full_tensor),
        *_cast(rank, line, full_tensor),
        *_modules(rank, square, full_tensor),
        *_on_parts(rank, line, square, full_tensor),
    ]
    require_none_wrong(messages, rank)


def _filled(mesh: DeviceMesh, seed: int, targets: list[tuple[Placement, ...]]) -> Iterator[str | None]:
    shape = 2 * mesh.size() + 1, mesh.size() + 2
    values = {"zeros": 0, "ones": 1, "full": 7, "empty": 5}
    for number, target in enumerate(targets):
        for name, value in values.items():
            make: Any = functools.partial(getattr(dtensors, name), shape, *[value] * (name == "full"))
            dtype = (torch.float32, torch.float64, torch.int64)[(seed + number) % 3]
            trained = dtype.is_floating_point
            dtensor = make(dtype=dtype, requires_grad=trained, device_mesh=mesh, placements=target)
            if name == "empty":
                with torch.no_grad():
                    dtensor.fill_(5)
            expected = torch.full(shape, value, dtype=dtype, device="cpu")
            subject = f"{name} as {text_of(target)}"
            local: Any = dtensor.detach()
            yield compared(local.to_local(), part_of(expected, target, mesh), subject)
            if (dtensor.shape, dtensor.placements, dtensor.requires_grad) != (shape, target, trained):
                layout = f"{text_of(dtensor.placements)} of {tuple(dtensor.shape)}"
                yield f"{subject} is {layout}, requires_grad={dtensor.requires_grad}"


def _from_parts(rank: Rank, mesh: DeviceMesh, full_tensor: torch.Tensor) -> Iterator[str | None]:
    """Make DTensors from local parts, and take whole tensors, with gradients that differ between ranks."""
    # Ranks disagree, and the check of a replicated tensor gives all the values of the first.
    dtensor = DTensor.from_local((full_tensor + rank.index).to(rank.device), mesh, [Replicate()], run_check=True)
    yield compared(dtensor.to_local(), full_tensor, "from_local with run_check, replicated")
    shard = part_of(full_tensor, [Shard(0)], mesh).to(rank.device)
    checked = DTensor.from_local(shard, mesh, [Shard(0)], run_check=True)
    yield compared(checked.full_tensor(), full_tensor, "from_local with run_check, divided")

    leaf = shard.clone().requires_grad_()
    full = DTensor.from_local(leaf, mesh, [Shard(0)]).full_tensor(grad_placements=[Partial()])
    (full * (rank.index + 1)).sum().backward()
    assert leaf.grad is not None
    expected_gradient = torch.full(shard.shape, float(sum(range(1, rank.size + 1))), device="cpu")
    yield compared(leaf.grad, expected_gradient, "gradient of full_tensor(grad_placements=[Partial()])")
    if "grad_placements" in inspect.signature(DTensor.from_local).parameters:  # older versions of torch lack it
        leaf = full_tensor.to(rank.device, copy=True).requires_grad_()
        dtensor = DTensor.from_local(leaf, mesh, [Replicate()], grad_placements=[Partial()])
        (dtensor.to_local() * full_tensor.to(rank.device)).sum().backward()
        assert leaf.grad is not None
        # Each rank has a part of 1/size, which a GPU may round otherwise: it multiplies by the reciprocal.
        total = DTensor.from_local(leaf.grad, mesh, [Partial()]).full_tensor()
        near = (total - total.round()).abs() <= (rank.size + 1) * torch.finfo(total.dtype).eps * total.abs()
        subject = "sum of the gradients of from_local(grad_placements=[Partial()])"
        yield compared(torch.where(near, total.round(), total), full_tensor, subject)


def _cast(rank: Rank, mesh: DeviceMesh, full_tensor: torch.Tensor) -> Iterator[str | None]:
    """Redistribute in other dtypes than that of the tensor: 1/1024 beside whole numbers is lost in bfloat16."""
    fine = full_tensor + 2.0**-10
    leaf = part_of(fine, [Shard(0)], mesh).to(rank.device).requires_grad_()
    dtensor = DTensor.from_local(leaf, mesh, [Shard(0)])
    moved = dtensor.redistribute(mesh, [Replicate()], forward_dtype=torch.bfloat16, backward_dtype=torch.float64)
    local = moved.to_local(grad_placements=[Partial()])
    yield compared(local.detach(), fine.bfloat16(), "redistribute with forward_dtype=bfloat16")
    (local * (rank.index + 1)).sum().backward()
    assert leaf.grad is not None
    expected_gradient = torch.full(leaf.shape, float(sum(range(1, rank.size + 1))), device="cpu")
    yield compared(leaf.grad, expected_gradient, "gradient of redistribute with backward_dtype=float64")


def _modules(rank: Rank, mesh: DeviceMesh, full_tensor: torch.Tensor) -> Iterator[str | None]:
    """Divide a layer over two dimensions: its weight by rows over the second, its inputs by rows over the first."""
    layer = nn.Linear(full_tensor.shape[1], full_tensor.shape[0], bias=False, device="cpu")
    with torch.no_grad():
        layer.weight.copy_(full_tensor if rank.index == 0 else -full_tensor)

    def partition(name: str, module: nn.Module, over: DeviceMesh) -> None:
        weight = distribute_tensor(module.get_parameter("weight").detach(), over, [Replicate(), Shard(0)])
        module.register_parameter("weight", nn.Parameter(weight))

    def taken(module: nn.Module, inputs: Any, over: DeviceMesh) -> Any:
        return (distribute_tensor(inputs[0], over, [Shard(0), Replicate()]),)

    def given_back(module: nn.Module, outputs: Any, over: DeviceMesh) -> Any:
        return outputs.redistribute(over, [Replicate(), Replicate()]).to_local()

    sharded_layer = distribute_module(layer.to(rank.device), mesh, partition, taken, given_back)
    weight: Any = sharded_layer.weight
    own = part_of(full_tensor, [Replicate(), Shard(0)], mesh)
    yield compared(weight.to_local().detach(), own, "weight of a module")
    outputs = sharded_layer(full_tensor.to(rank.device)).detach()
    yield compared(outputs, full_tensor @ full_tensor.T, "outputs of a module under distribute_module")


def _on_parts(rank: Rank, mesh: DeviceMesh, square: DeviceMesh, full_tensor: torch.Tensor) -> Iterator[str | None]:
    """Apply functions of plain tensors to parts, and functions of DTensors to plain tensors."""
    turned = full_tensor.T.contiguous()
    columns, rows = placed(full_tensor, [Shard(1)], mesh), placed(turned, [Shard(0)], mesh)
    leaf = columns.detach().requires_grad_()
    x_of_square, y_of_square = [Shard(0), Replicate()], [Replicate(), Shard(1)]
    on_square = placed(full_tensor, x_of_square, square), placed(turned, y_of_square, square)
    for how, (x, y), over, outer, options in (
        ("", (leaf, rows), mesh, [], {}),
        (" over two dimensions, redistributed", on_square, square, [Replicate()], {"redistribute_inputs": True}),
    ):
        divided = [*outer, Shard(1)], [*outer, Shard(0)]
        places: dict[str, Any] = {"in_placements": divided, "in_grad_placements": divided, "device_mesh": over}
        mapped = experimental.local_map(torch.matmul, out_placements=[*outer, Partial()], **(places | options))
        product = mapped(x, y)
        yield compared(product.full_tensor().detach(), full_tensor @ full_tensor.T, f"local_map{how}")
        if x is leaf:
            product.full_tensor().sum().backward()
            assert isinstance(leaf.grad, DTensor)
            back = full_tensor.sum(0).expand_as(full_tensor)
            yield compared(leaf.grad.to_local(), part_of(back, [Shard(1)], mesh), "gradient of local_map")
    with experimental.implicit_replication():
        mixed: Any = columns + full_tensor.to(rank.device)
    yield compared(mixed.to_local(), part_of(2 * full_tensor, [Shard(1)], mesh), "a sum under implicit_replication")
    own = part_of(full_tensor.flip(0), [Shard(1)], mesh)
    yield compared(_reversed_rows()(columns).to_local(), own, "an operator with registered sharding")


@functools.cache
def _reversed_rows() -> Callable[[torch.Tensor], Any]:
    """Return an operator that torch does not know how to divide, after registering that columns may be divided."""

    @torch.library.custom_op("mgpu_check::reversed_rows", mutates_args=())
    def reverse(x: torch.Tensor) -> torch.Tensor:
        return x.flip(0)

    @reverse.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    def kept(x: Any) -> list[tuple[list[Placement], list[Placement]]]:
        return [([Replicate()], [Replicate()]), ([Shard(1)], [Shard(1)])]

    experimental.register_sharding(torch.ops.mgpu_check.reversed_rows.default)(kept)
    return reverse


_Unary = Callable[[torch.Tensor], torch.Tensor]
_Binary = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _beside(x: torch.Tensor, values: object) -> torch.Tensor:
    """Return another operand for `x`, the same on all ranks: a DTensor if `x` is one."""
    operand = torch.as_tensor(values, device="cpu")
    return placed(operand, [Replicate()] * x.device_mesh.ndim, x.device_mesh) if isinstance(x, DTensor) else operand


def _apart(x: torch.Tensor) -> torch.Tensor:
    """Make all elements different, because devices may choose either of two equal ones."""
    return x * x.numel() + _beside(x, torch.arange(float(x.numel())).view(x.shape))


OF_ONE: tuple[tuple[str, _Unary], ...] = (
    # elementwise
    ("neg", lambda x: -x), ("abs", lambda x: x.abs()), ("exp", lambda x: x.exp()), ("clamp", lambda x: x.clamp(-1, 2)),
    ("relu", lambda x: F.relu(x)), ("square", lambda x: x * x), ("times a number", lambda x: x * 3),
    ("plus a number", lambda x: x + 5), ("minus a number", lambda x: x - 5), ("a number minus", lambda x: 3 - x),
    ("divided by a number", lambda x: x / 4), ("divided from a number", lambda x: 1 / (x * x + 1)),
    ("remainder", lambda x: x % 2), ("pow", lambda x: x**3), ("sign", lambda x: x.sign()),
    ("round", lambda x: (x / 2).round()), ("sigmoid", lambda x: x.sigmoid()), ("log", lambda x: (x * x + 1).log()),
    ("rsqrt", lambda x: (x * x + 1).rsqrt()), ("silu", lambda x: F.silu(x)), ("gelu", lambda x: F.gelu(x)),
    ("leaky_relu", lambda x: F.leaky_relu(x, 0.1)), ("glu", lambda x: F.glu(x.repeat(1, 2), 1)),
    ("clamp_min", lambda x: x.clamp_min(0.5)), ("add with alpha", lambda x: torch.add(x, x, alpha=3)),
    ("addcmul", lambda x: torch.addcmul(x, x, x, value=2)), ("in place", lambda x: x.clone().mul_(2).add_(1)),
    ("filled", lambda x: x.clone().fill_(2.0) + x), ("zeroed", lambda x: x.clone().zero_() + x),
    ("masked_fill", lambda x: x.masked_fill(x > 1, 0.0)), ("where with a number", lambda x: torch.where(x > 0, x, 2.0)),
    ("to float64", lambda x: x.double()), ("to bfloat16", lambda x: x.to(torch.bfloat16).float()),
    ("to int64", lambda x: x.to(torch.int64) * 2), ("bits", lambda x: x.to(torch.int64) & 3),
    ("logical_not", lambda x: x.logical_not()), ("detached", lambda x: x * x.detach()),
    ("bucketize", lambda x: torch.bucketize(x, _beside(x, [-1.0, 1.0]))),
    ("zeros_like", lambda x: torch.zeros_like(x) + x), ("full_like", lambda x: torch.full_like(x, 3.0) * x),
    ("new_ones", lambda x: x.new_ones(x.shape) * x), ("new_full", lambda x: x.new_full((2,), 4.0)),
    ("copied", lambda x: torch.empty_like(x).copy_(x)),
    ("foreach mul", lambda x: torch._foreach_mul([x, x + 1], 2.0)[1]),
    ("foreach norm", lambda x: torch._foreach_norm([x, x + 1])[1]),
    # reductions
    ("sum", lambda x: x.sum()), ("sum over 0", lambda x: x.sum(0)), ("sum over 1", lambda x: x.sum(1, keepdim=True)),
    ("sum over both", lambda x: x.sum((0, 1))), ("sum in float64", lambda x: x.sum(1, dtype=torch.float64)),
    ("sum of whole numbers", lambda x: x.to(torch.int64).sum(0)), ("nansum", lambda x: x.nansum(1)),
    ("mean", lambda x: x.mean()), ("mean over 0", lambda x: x.mean(0)), ("mean over 1", lambda x: x.mean(1)),
    ("amax over 0", lambda x: x.amax(0)), ("amin over 1", lambda x: x.amin(1)), ("max", lambda x: x.max()),
    ("aminmax", lambda x: x.aminmax(dim=1)[1]), ("max over 0", lambda x: _apart(x).max(0).values),
    ("min over 1", lambda x: _apart(x).min(1, keepdim=True).values),
    ("place of max", lambda x: _apart(x).max(1).indices),
    ("argmax over 1", lambda x: _apart(x).argmax(1)), ("argmin over 0", lambda x: _apart(x).argmin(0, keepdim=True)),
    ("any", lambda x: (x > 2).any()), ("all over 1", lambda x: (x > -3).all(1)),
    ("count_nonzero", lambda x: x.count_nonzero(0)), ("histc", lambda x: x.detach().histc(4, -3, 3)),
    ("var over 0", lambda x: x.var(0)), ("std over 1", lambda x: x.std(1)),
    ("var_mean", lambda x: torch.var_mean(x, 1)[1]),
    ("norm", lambda x: torch.linalg.vector_norm(x)), ("norm over 1", lambda x: torch.linalg.vector_norm(x, dim=1)),
    ("norm of order 1", lambda x: torch.linalg.vector_norm(x, 1)),
    ("norm of order 0", lambda x: torch.linalg.vector_norm(x, 0, dim=0)),
    ("norm of order 3", lambda x: torch.linalg.vector_norm(x, 3, dim=0)),
    ("logsumexp over 0", lambda x: x.logsumexp(0)), ("logsumexp over 1", lambda x: x.logsumexp(1)),
    ("softmax over 0", lambda x: F.softmax(x, 0)), ("softmax over 1", lambda x: F.softmax(x, 1)),
    ("log_softmax over 0", lambda x: F.log_softmax(x, 0)), ("log_softmax over 1", lambda x: F.log_softmax(x, 1)),
    ("layer_norm", lambda x: F.layer_norm(x, (x.shape[1],))), ("rms_norm", lambda x: F.rms_norm(x, (x.shape[1],))),
    # along a dimension
    ("cumsum over 0", lambda x: x.cumsum(0)), ("cumsum over 1", lambda x: x.cumsum(1)),
    ("logcumsumexp", lambda x: x.logcumsumexp(1)), ("median", lambda x: _apart(x).median()),
    ("median over 1", lambda x: _apart(x).median(1).values), ("kthvalue", lambda x: _apart(x).kthvalue(2, 1).values),
    ("sort over 1", lambda x: _apart(x).sort(1, descending=True).values),
    ("order of columns", lambda x: x.sort(dim=0, stable=True).indices),
    ("topk over 0", lambda x: _apart(x).topk(2, 0).values), ("topk over 1", lambda x: _apart(x).topk(2, 1).values),
    ("cross", lambda x: torch.linalg.cross(x[:, :3], x[:, 1:4], dim=1)),
    ("max_pool2d", lambda x: F.max_pool2d(_apart(x)[None, None], 2)),
    ("interpolate", lambda x: F.interpolate(x[None, None], scale_factor=2.0, mode="nearest")),
    # places
    ("gather", lambda x: x.gather(1, _beside(x, torch.arange(2 * x.shape[0]).view(-1, 2) % x.shape[1]))),
    ("scatter", lambda x: x.scatter(1, _beside(x, torch.zeros(x.shape[0], 1, dtype=torch.int64)), 7.0)),
    ("scatter_add", lambda x: x.scatter_add(
        0, _beside(x, torch.zeros(2, x.shape[1], dtype=torch.int64)), _beside(x, torch.ones(2, x.shape[1])))),
    ("index_select of rows", lambda x: x.index_select(0, _beside(x, [2, 0, 0]))),
    ("index_select of columns", lambda x: x.index_select(1, _beside(x, [3, 1, 1]))),
    ("rows by a list", lambda x: x[_beside(x, [2, 0, 1, 1])]),
    ("columns by a list", lambda x: x[:, _beside(x, [4, 0])]),
    ("index_put", lambda x: x.index_put((_beside(x, [1, 2]),), _beside(x, 9.0))),
    ("index_add", lambda x: x.index_add(0, _beside(x, [0, 2]), _beside(x, torch.ones(2, x.shape[1])))),
    ("index_fill", lambda x: x.index_fill(1, _beside(x, [0, 2]), 5.0)),
    ("embedding", lambda x: F.embedding(_beside(x, [0, 2, 1]), x)),
    ("slice of 0", lambda x: x[1:4]), ("slice of 1", lambda x: x[:, 2:]), ("every second row", lambda x: x[::2]),
    ("every second column", lambda x: x[:, ::2]), ("select", lambda x: x[:, 1]), ("last row", lambda x: x[-1]),
    ("tensor_split", lambda x: x.tensor_split(3, 1)[2]), ("pad", lambda x: F.pad(x, (1, 2))),
    ("pad of rows", lambda x: F.pad(x, (0, 0, 1, 1), value=2.0)), ("roll", lambda x: x.roll(1, 1)),
    ("roll of rows", lambda x: x.roll(2, 0)), ("flip", lambda x: x.flip(1)), ("flip of rows", lambda x: x.flip(0)),
    ("tril", lambda x: x.tril()), ("triu", lambda x: x.triu(1)), ("diagonal", lambda x: x.diagonal()),
    ("diag_embed", lambda x: x.diag_embed()),
    # shapes
    ("t", lambda x: x.t()), ("contiguous", lambda x: x.t().contiguous()), ("transpose", lambda x: x.transpose(-1, -2)),
    ("permute", lambda x: x.unsqueeze(1).permute(2, 0, 1)), ("movedim", lambda x: x.unsqueeze(0).movedim(2, 0)),
    ("unsqueeze", lambda x: x.unsqueeze(1)), ("squeeze", lambda x: (2 * x.unsqueeze(1)).squeeze(1)),
    ("view of columns", lambda x: x.view(x.shape[0], -1, 1)), ("view", lambda x: x.view(1, *x.shape)),
    ("unflatten", lambda x: x.repeat(1, 2).unflatten(1, (2, -1))), ("repeat", lambda x: x.repeat(2, 3)),
    ("expand", lambda x: x.unsqueeze(0).expand(2, -1, -1)), ("expand of a row", lambda x: x[:1].expand(3, -1)),
    ("cat over 0", lambda x: torch.cat([x, 2 * x])), ("cat over 1", lambda x: torch.cat([x, 2 * x], 1)),
    ("cat with a row", lambda x: torch.cat([x, x[:1]])), ("stack", lambda x: torch.stack([x, -x])),
    ("stack over 1", lambda x: torch.stack([x, x], 1)), ("einsum", lambda x: torch.einsum("ij->ji", x)),
)  # fmt: skip
OF_ALIKE: tuple[tuple[str, _Binary], ...] = (
    ("add", lambda x, y: x + y), ("sub", lambda x, y: x - 2 * y), ("mul", lambda x, y: x * y),
    ("div", lambda x, y: x / (y * y + 1)), ("add in place", lambda x, y: x.clone().add_(y, alpha=2)),
    ("div in place", lambda x, y: x.clone().div_(y * y + 1)),
    ("maximum", lambda x, y: torch.maximum(x, y)), ("where", lambda x, y: torch.where(x > y, x, 3 * y)),
    ("copy", lambda x, y: x.clone().copy_(y)), ("comparison", lambda x, y: (x >= y).float() * x),
    ("eq", lambda x, y: x == y),
    ("logical_and", lambda x, y: torch.logical_and(x, y)), ("masked_fill", lambda x, y: x.masked_fill(y > 0, 1.0)),
    ("addcdiv", lambda x, y: torch.addcdiv(x, y, y * y + 1, value=2)), ("lerp", lambda x, y: torch.lerp(x, y, 0.25)),
    ("foreach add", lambda x, y: torch._foreach_add([x, y], [y, x], alpha=2)[0]),
    ("add of a row", lambda x, y: x + y[:1]), ("mul of a column", lambda x, y: x * y[:, :1]),
    ("matmul with the transpose", lambda x, y: x @ y.t()), ("matmul of the transpose", lambda x, y: x.t() @ y),
    ("linear", lambda x, y: F.linear(x, y)), ("linear with a bias", lambda x, y: F.linear(x, y, y[:, 0])),
    ("addmm", lambda x, y: torch.addmm(x @ y.t(), x, y.t(), beta=2, alpha=3)),
    ("bmm", lambda x, y: torch.bmm(x[None], y.t()[None])),
    ("baddbmm", lambda x, y: torch.baddbmm(x @ y.t(), x[None], y.t()[None])),
    ("matrix and vector", lambda x, y: x @ y[0]),
    ("dot", lambda x, y: torch.dot(x[:, 0], y[:, 0])), ("outer", lambda x, y: torch.outer(x[:, 0], y[0])),
    ("tensordot", lambda x, y: torch.tensordot(x, y, ([1], [1]))), ("cat", lambda x, y: torch.cat([x, y])),
    ("cat of columns", lambda x, y: torch.cat([x, y], 1)), ("stack", lambda x, y: torch.stack([x, y], 1)),
    ("layer_norm with a weight", lambda x, y: F.layer_norm(x, (x.shape[1],), y[0], y[1])),
    ("gather", lambda x, y: x.gather(1, (y.detach() > 0).to(torch.int64))),
    ("sum of squared errors", lambda x, y: F.mse_loss(x, y, reduction="sum")),
    ("squared errors", lambda x, y: F.mse_loss(x, y, reduction="none")),
)  # fmt: skip
"""Functions of two matrices of the same shape."""

_SINCE = {
    "2.12": (
        "glu", "nansum", "aminmax", "max over 0", "min over 1", "var_mean", "cumsum over 0",
        "cumsum over 1", "logcumsumexp", "median", "median over 1", "kthvalue", "sort over 1", "topk over 0",
        "topk over 1", "cross", "max_pool2d", "index_select of rows", "index_select of columns", "columns by a list",
        "index_add", "index_fill", "pad of rows", "roll", "roll of rows", "flip", "flip of rows", "diagonal",
        "add in place", "copy", "layer_norm with a weight",
    ),
    "2.13": ("interpolate",),
}  # fmt: skip
"""Version of torch -> rows that older versions refuse for some placements, in the forward or the backward pass.

A partial weight of `layer_norm` is not refused: its gradients are wrong.
"""


def lacks(name: str) -> bool:
    """Return whether this version of torch refuses a row for at least one placement, or has wrong gradients."""
    version = TorchVersion(torch_version())
    return any(version < since and name in row_names for since, row_names in _SINCE.items())


_DIVIDED: tuple[Placement, ...] = (Shard(0), Shard(1), Partial("sum"))
_PLACES: tuple[Placement, ...] = (*_DIVIDED, Replicate())


def assert_operators_agree(rank: Rank, seed: int) -> None:
    """Assert that operators on DTensors give each rank its part of the right results and gradients. A collective.

    Operands are small whole numbers, divided unevenly, and no part is empty. Each operator runs with one placement per
    operand, which `seed` selects. Results may differ by rounding, which depends on how sums are divided.
    """
    mesh = init_device_mesh("cuda", (rank.size,))
    shape = max(3, 2 * rank.size - 1), max(5, 3 * rank.size - 1)  # torch refuses the maximum of an empty part
    wholes = [_drawn_numbers(shape, seed + number) for number in range(2)]
    require_none_wrong(_described(_calls(wholes, seed, rank.size), mesh), rank)


_Call = tuple[str, Callable[..., torch.Tensor], list[torch.Tensor], tuple[Placement, ...]]


def _calls(wholes: list[torch.Tensor], seed: int, ranks: int) -> Iterator[_Call]:
    for number, (name, unary) in enumerate(OF_ONE, seed):
        # Norms of partial tensors have no gradient. Before 2.12 and since 2.14 torch refuses `add_` to them.
        places = _DIVIDED[:2] if "norm" in name or name == "in place" else _DIVIDED
        if name == "rms_norm" and ranks == 1:
            places = _DIVIDED[:1]  # on one rank torch refuses `rms_norm` of divided columns
        yield name, unary, wholes[:1], (places[number % len(places)],)
    pairs = [pair for pair in itertools.product(_PLACES, repeat=2) if pair != (Replicate(), Replicate())]
    for number, (name, binary) in enumerate(OF_ALIKE):
        yield name, binary, wholes, pairs[(seed + 4 * number) % len(pairs)]


def _described(calls: Iterable[_Call], mesh: DeviceMesh) -> Iterator[str | None]:
    """Yield a description of each call, None if it is right, up to one that raises: ranks may then be out of step."""
    for name, call, wholes, places in calls:
        if lacks(name):
            left_out(name, "this torch does not have it for all placements")
            continue
        subject = f"{name} of {' and '.join(text_of([placement]) for placement in places)}"
        try:
            judged = functools.partial(_wrong_result, subject, call, wholes, places, mesh)
            message = judged()
            is_excused = name == "filled" and _fills_each_part(placed(wholes[0], places, mesh), judged, message)
            yield None if is_excused else message
        except Exception as error:
            if type(error).__module__ != "builtins":
                raise  # full memory and broken connections have types of their own, which show their cause
            yield f"{subject} raised {type(error).__name__}: {error}"
            return


def _fills_each_part(operand: DTensor, judged: Callable[..., str | None], message: str | None) -> bool:
    """Return whether `fill_` of a partial copy has the result of a known defect, not met if `clone` sums the parts.
    `judged` describes the error of the call by a reference; `message` is the error of the call."""
    copy, size = operand.clone(), operand.device_mesh.size()
    if not (isinstance(copy, DTensor) and copy.placements[0].is_partial()):
        return False
    otherwise = judged(lambda x: x.new_full(x.shape, 2.0 * size) + x)
    if message and otherwise:  # all ranks have computed both, because they call collectives
        return False
    return is_known("dtensor-fills-each-part", failed=bool(message), size=size)


def _drawn_numbers(shape: tuple[int, int], seed: int) -> torch.Tensor:
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed), device="cpu").float()


def _wrong_result(
    subject: str,
    call: Callable[..., torch.Tensor],
    wholes: list[torch.Tensor],
    places: tuple[Placement, ...],
    mesh: DeviceMesh,
    reference: Callable[..., torch.Tensor] | None = None,
) -> str | None:
    """Describe the error of a call; None if it is right: as on whole tensors, or as the `reference` is on them."""
    leaves = [full_tensor.clone().requires_grad_() for full_tensor in wholes]
    expected_output = (reference or call)(*leaves)
    operands = [placed(whole, [place], mesh).requires_grad_() for whole, place in zip(wholes, places, strict=True)]
    got = call(*operands)
    if not isinstance(got, DTensor):
        return f"{subject} is not a DTensor"
    message = _differs(subject, got, expected_output, mesh)
    if got.requires_grad != expected_output.requires_grad:
        return message or f"{subject} has requires_grad={got.requires_grad}, expected {expected_output.requires_grad}"
    if not expected_output.requires_grad:
        return message
    places_of_elements = torch.arange(expected_output.numel(), device="cpu").view(expected_output.shape)
    weights = (places_of_elements % 5 - 1.0).to(expected_output.dtype)
    back = [Replicate() if isinstance(placement, Partial) else placement for placement in got.placements]
    # With allow_unused they may be None, which torch's annotations lack.
    expected_gradients: Any = torch.autograd.grad(expected_output, leaves, weights, allow_unused=True)
    gradients: Any = torch.autograd.grad(got, operands, placed(weights, back, mesh), allow_unused=True)
    for number, (gradient, expected) in enumerate(zip(gradients, expected_gradients, strict=True)):
        what = f"the gradient of operand {number} of {subject}"
        if gradient is not None and expected is not None:
            message = message or _differs(what, gradient, expected, mesh)
        elif gradient is not expected:
            message = message or f"{what} is {'lost' if gradient is None else 'made'}"
    return message


@torch.no_grad()
def _differs(subject: str, got: DTensor, expected_output: torch.Tensor, mesh: DeviceMesh) -> str | None:
    if got.shape != expected_output.shape or got.dtype != expected_output.dtype:
        expected_form = f"{expected_output.dtype}{list(expected_output.shape)}"
        return f"{subject} is {got.dtype}{list(got.shape)}, expected {expected_form}"
    partial = any(isinstance(placement, Partial) for placement in got.placements)
    local = plain(got.full_tensor() if partial else got.to_local())
    expected = expected_output if partial else part_of(expected_output, got.placements, mesh)
    where = f"{subject}, {text_of(got.placements)}"
    if local.shape != expected.shape:
        return f"{where}, has a part of {list(local.shape)}, expected {list(expected.shape)}"
    # Sums of fewer than 2^8 terms below 2^8 are exact; functions of these sums round about ten times.
    off = difference(local, expected, float(expected_output.double().abs().max()) * 2.0**-18)
    return f"{where}: {off}" if off else None


_LOSSES = ("mse_loss", "l1_loss", "huber_loss", "smooth_l1_loss")
_OF_CLASSES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("nll_loss", {}),
    ("nll_loss with ignored classes", {"ignore_index": 0}),
    ("weighted nll_loss", {"weight": torch.arange(1.0, 6.0, device="cpu")}),
)


def assert_losses_agree(rank: Rank, seed: int) -> None:
    """Assert that the mean losses of DTensors average over all samples, divided evenly or not. A collective."""
    mesh = init_device_mesh("cuda", (rank.size,))
    for rows in (2 * rank.size, max(3, 2 * rank.size - 1)):
        even = rows % rank.size == 0
        x, y = _drawn_numbers((rows, 5), seed), _drawn_numbers((rows, 5), seed + 1)
        for name in _LOSSES:
            _judge_loss(name, getattr(F, name), (x, y), {}, rank, mesh)
        if even:  # torch up to 2.13 refuses nll_loss of unequal parts
            for name, options in _OF_CLASSES:
                _judge_loss(name, F.nll_loss, (x, torch.arange(rows, device="cpu") % 5), options, rank, mesh)


def _judge_loss(
    name: str,
    loss: Callable[..., torch.Tensor],
    wholes: tuple[torch.Tensor, ...],
    options: Mapping[str, torch.Tensor | int],
    rank: Rank,
    mesh: DeviceMesh,
) -> None:
    divided = [placed(full_tensor, [Shard(0)], mesh) for full_tensor in wholes]
    tensors = {key: value for key, value in options.items() if isinstance(value, torch.Tensor)}
    got = loss(*divided, **{**options, **{key: placed(value, [Replicate()], mesh) for key, value in tensors.items()}})
    assert isinstance(got, DTensor)
    mean_loss = plain(got.full_tensor())
    rows = len(wholes[0])
    subject = f"{name} of {rows} samples on {rank.size} ranks"

    def judge(expected: torch.Tensor) -> None:
        if not bool((mean_loss - expected).abs() <= 2.0**-18 * (expected.abs() + 1)):
            require_none_wrong([f"{subject}: got {mean_loss.item()}, expected {expected.item()}"], rank)

    def explained() -> None:
        chunks = zip(*(full_tensor.chunk(rank.size) for full_tensor in wholes), strict=True)
        judge(torch.stack([loss(*chunk, **options) for chunk in chunks]).mean())

    even = rows % rank.size == 0
    defect = "dtensor-weighted-mean-of-parts" if "nll" in name else "dtensor-mean-of-unequal-parts"
    with known_defect(defect, explained=explained, loss=name, even=even, size=rank.size):
        judge(loss(*wholes, **options))
