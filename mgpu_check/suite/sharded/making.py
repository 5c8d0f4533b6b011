"""Check how DTensors are made, and code that runs on the parts of ranks."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
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

from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.suite.common.meshes import near_square
from mgpu_check.suite.sharded.redistribution import compared, part_of, placed, require_none_wrong, text_of


def assert_dtensors_are_made(rank: Rank, seed: int) -> None:
    """Assert that DTensors are made with the right parts, and that functions of parts see them. A collective.

    Filled tensors, tensors from local parts with their gradients, casts on the way, `distribute_module`, `local_map`,
    `implicit_replication` and `register_sharding`; filled tensors and modules over two dimensions too.
    """
    line = init_device_mesh("cuda", (rank.size,))
    square = init_device_mesh("cuda", near_square(rank.size))
    whole = _numbers(rank.size, seed)
    found = [
        *_filled(line, seed, [(Shard(0),), (Shard(1),), (Replicate(),)]),
        *_filled(square, seed, [(Shard(0), Shard(1)), (Shard(0), Replicate())]),
        *_from_parts(rank, line, whole),
        *_cast(rank, line, whole),
        *_modules(rank, square, whole),
        *_on_parts(rank, line, square, whole),
    ]
    require_none_wrong(found, rank)


def _numbers(ranks: int, seed: int) -> torch.Tensor:
    """Return whole numbers from 1 to 97, float32 on the CPU: an even number of rows and of columns for each rank."""
    index = torch.arange(2 * ranks * 3 * ranks, device="cpu").reshape(2 * ranks, 3 * ranks)
    return (index * 7 + seed) % 97 + 1.0


def _filled(mesh: DeviceMesh, seed: int, targets: list[tuple[Placement, ...]]) -> Iterator[str]:
    """Fill tensors whose parts are uneven."""
    shape = 2 * mesh.size() + 1, mesh.size() + 2
    makers: dict[str, Callable[..., DTensor]] = {
        "zeros": functools.partial(dtensors.zeros, shape),
        "ones": functools.partial(dtensors.ones, shape),
        "full": functools.partial(dtensors.full, shape, 7),
        "empty": functools.partial(dtensors.empty, shape),
    }
    for number, target in enumerate(targets):
        for name, make in makers.items():
            dtype = (torch.float32, torch.float64, torch.int64)[(seed + number) % 3]
            trained = dtype.is_floating_point
            held = make(dtype=dtype, requires_grad=trained, device_mesh=mesh, placements=target)
            if name == "empty":
                with torch.no_grad():
                    held.fill_(5)
            right = torch.full(shape, {"zeros": 0, "ones": 1, "full": 7, "empty": 5}[name], dtype=dtype, device="cpu")
            what = f"{name} as {text_of(target)}"
            local: Any = held.detach()
            yield compared(local.to_local(), part_of(right, target, mesh), what)
            if (held.shape, held.placements, held.requires_grad) != (shape, target, trained):
                yield f"{what} is {text_of(held.placements)} of {tuple(held.shape)}, requires_grad={held.requires_grad}"


def _from_parts(rank: Rank, mesh: DeviceMesh, whole: torch.Tensor) -> Iterator[str]:
    """Make DTensors from local parts, and take whole tensors, with gradients that differ between ranks."""
    # Ranks disagree, and the check of a replicated tensor gives all the values of the first.
    local = (whole + rank.index).to(rank.device)
    held = DTensor.from_local(local, mesh, [Replicate()], run_check=True)
    yield compared(held.to_local(), whole, "from_local with run_check, replicated")
    part = part_of(whole, [Shard(0)], mesh).to(rank.device)
    checked = DTensor.from_local(part, mesh, [Shard(0)], run_check=True)
    yield compared(checked.full_tensor(), whole, "from_local with run_check, divided")

    leaf = part.clone().requires_grad_()
    full = DTensor.from_local(leaf, mesh, [Shard(0)]).full_tensor(grad_placements=[Partial()])
    (full * (rank.index + 1)).sum().backward()
    assert leaf.grad is not None
    right = torch.full(part.shape, float(sum(range(1, rank.size + 1))), device="cpu")
    yield compared(leaf.grad, right, "gradient of full_tensor(grad_placements=[Partial()])")
    if "grad_placements" in inspect.signature(DTensor.from_local).parameters:  # older versions of torch lack it
        leaf = whole.to(rank.device, copy=True).requires_grad_()
        held = DTensor.from_local(leaf, mesh, [Replicate()], grad_placements=[Partial()])
        (held.to_local() * whole.to(rank.device)).sum().backward()
        assert leaf.grad is not None
        # Each rank has a part of 1/size, which a GPU may round otherwise: it multiplies by the reciprocal.
        total = DTensor.from_local(leaf.grad, mesh, [Partial()]).full_tensor()
        near = (total - total.round()).abs() <= (rank.size + 1) * torch.finfo(total.dtype).eps * total.abs()
        yield compared(
            torch.where(near, total.round(), total),
            whole,
            "sum of the gradients of from_local(grad_placements=[Partial()])",
        )


def _cast(rank: Rank, mesh: DeviceMesh, whole: torch.Tensor) -> Iterator[str]:
    """Redistribute in other dtypes than that of the tensor: 1/1024 beside whole numbers is lost in bfloat16."""
    fine = whole + 2.0**-10
    leaf = part_of(fine, [Shard(0)], mesh).to(rank.device).requires_grad_()
    held = DTensor.from_local(leaf, mesh, [Shard(0)])
    moved = held.redistribute(mesh, [Replicate()], forward_dtype=torch.bfloat16, backward_dtype=torch.float64)
    local = moved.to_local(grad_placements=[Partial()])
    yield compared(local.detach(), fine.bfloat16(), "redistribute with forward_dtype=bfloat16")
    (local * (rank.index + 1)).sum().backward()
    assert leaf.grad is not None
    right = torch.full(leaf.shape, float(sum(range(1, rank.size + 1))), device="cpu")
    yield compared(leaf.grad, right, "gradient of redistribute with backward_dtype=float64")


def _modules(rank: Rank, mesh: DeviceMesh, whole: torch.Tensor) -> Iterator[str]:
    """Divide a layer over two dimensions: its weight by rows over the second, its inputs by rows over the first."""
    layer = nn.Linear(whole.shape[1], whole.shape[0], bias=False, device="cpu")
    with torch.no_grad():
        layer.weight.copy_(whole if rank.index == 0 else -whole)

    def partition(name: str, module: nn.Module, over: DeviceMesh) -> None:
        weight = distribute_tensor(module.get_parameter("weight").detach(), over, [Replicate(), Shard(0)])
        module.register_parameter("weight", nn.Parameter(weight))

    def taken(module: nn.Module, given: Any, over: DeviceMesh) -> Any:
        return (distribute_tensor(given[0], over, [Shard(0), Replicate()]),)

    def given_back(module: nn.Module, made: Any, over: DeviceMesh) -> Any:
        return made.redistribute(over, [Replicate(), Replicate()]).to_local()

    held = distribute_module(layer.to(rank.device), mesh, partition, taken, given_back)
    weight = held.weight
    assert isinstance(weight, DTensor)
    yield compared(weight.to_local().detach(), part_of(whole, [Replicate(), Shard(0)], mesh), "weight of a module")
    yield compared(held(whole.to(rank.device)).detach(), whole @ whole.T, "outputs of a module under distribute_module")


def _on_parts(rank: Rank, mesh: DeviceMesh, square: DeviceMesh, whole: torch.Tensor) -> Iterator[str]:
    """Apply functions of plain tensors to parts, and functions of DTensors to plain tensors."""
    columns, rows = placed(whole, [Shard(1)], mesh), placed(whole.T.contiguous(), [Shard(0)], mesh)
    given = columns.detach().requires_grad_()
    for how, x, y, over, first, options in (
        ("", given, rows, mesh, [], {}),
        (
            " over two dimensions, redistributed",
            placed(whole, [Shard(0), Replicate()], square),
            placed(whole.T.contiguous(), [Replicate(), Shard(1)], square),
            square,
            [Replicate()],
            {"redistribute_inputs": True},
        ),
    ):
        divided = [*first, Shard(1)], [*first, Shard(0)]
        mapped = experimental.local_map(
            torch.matmul,
            out_placements=[*first, Partial()],
            in_placements=divided,
            in_grad_placements=divided,
            device_mesh=over,
            **options,
        )
        made = mapped(x, y)
        yield compared(made.full_tensor().detach(), whole @ whole.T, f"local_map{how}")
        if x is given:
            made.full_tensor().sum().backward()
            assert isinstance(given.grad, DTensor)
            back = whole.sum(0).expand_as(whole)
            yield compared(given.grad.to_local(), part_of(back, [Shard(1)], mesh), "gradient of local_map")
    with experimental.implicit_replication():
        mixed: Any = columns + whole.to(rank.device)
    yield compared(mixed.to_local(), part_of(2 * whole, [Shard(1)], mesh), "a sum under implicit_replication")
    reversed_rows = _reversed_rows()(columns)
    yield compared(
        reversed_rows.to_local(), part_of(whole.flip(0), [Shard(1)], mesh), "an operator with registered sharding"
    )


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
