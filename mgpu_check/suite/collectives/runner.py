"""Call collectives by their names, with the parameters of their rows in the table."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from mgpu_check.suite.collectives.cases import form_of
from mgpu_check.torch_hooks.table import COLLECTIVES, TRANSFERS, is_list

Tensors = Sequence[torch.Tensor]


def named(name: str, *, older: bool = False) -> Callable[..., Any]:
    """Return a collective under the name that this version of torch does not deprecate, or under the older name."""
    found: Callable[..., Any] = (not older and getattr(dist, COLLECTIVES[name].newer, None)) or getattr(dist, name)
    return found


def coalescing(group: Any, device: torch.device, *, asynchronous: bool) -> Any:
    """Return the context that puts collectives of a device together; it is waited for if it is asynchronous."""
    # A private name, because there is no public one yet; libraries use it too.
    return dist.distributed_c10d._coalescing_manager(group, device, async_ops=asynchronous)


def called(
    name: str, given: Tensors, taken: Tensors, *splits: list[int] | None, older: bool = False, **options: Any
) -> Any:
    """Call a collective of `torch.distributed`.

    Args:
        given: the tensors that this rank gives; none if only the root gives any.
        taken: the tensors for the result of this rank; none if only the root gets one. For a collective in place they
            are the same tensors.
        splits: the sizes of parts, for `all_to_all_single`.
        older: whether to use the older name of a function that torch has renamed.
        options: the root, the operation of a reduction, and all that every collective has.
    """
    row = COLLECTIVES[name]
    operands = {row.given: given, row.taken: taken}
    tensors = [(list(operands[one]) or None) if is_list(one) else operands[one][0] for one in _order(name)]
    return named(name, older=older)(*tensors, *splits, **options)


@functools.cache
def _order(name: str) -> list[str]:
    """Return the parameters for tensors in the order of the function: most programs give them by position."""
    return [one for one in inspect.signature(getattr(dist, name)).parameters if one in COLLECTIVES[name].tensors]


def parts_of(parameter: str, whole: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Return a tensor as a parameter of a collective takes it: as one tensor, or as a part for each of `count`
    ranks."""
    return list(whole.chunk(count)) if is_list(parameter) else [whole]


@dataclass(frozen=True)
class Runner:
    """A collective that is ready to be called; `output` has its result, or None on ranks that get no result."""

    call: Callable[[], object]
    output: torch.Tensor | None


def runner(
    transfer: str,
    reduction: str,
    given: torch.Tensor,
    group: dist.ProcessGroup | None,
    count: int,
    place: int,
    root: int,
) -> Runner:
    """Prepare a collective with new memory for its result.

    Args:
        transfer: a name in `TRANSFERS`.
        given: as many elements as the largest tensor of this rank has.
        group: None for all ranks.
        root: the root, as a rank of the world.
    """
    name, how, me = form_of(transfer), TRANSFERS[transfer], dist.get_rank()
    row, part = COLLECTIVES[name], given.numel() // count
    options: dict[str, Any] = {"group": group}
    if how.root:
        options[how.root] = root
    if how.reduces:
        options["op"] = dist.ReduceOp.AVG if reduction == "avg" else getattr(dist.ReduceOp, reduction.upper())
    if row.in_place:
        whole = given.clone()
        return Runner(lambda: called(name, [whole], [whole], **options), whole if how.takes(me, root) else None)
    source = given if how.divides else given[:part]
    inputs = parts_of(row.given, source, count) if how.gives(me, root) else []
    result = given.new_empty(len(given) if how.joins else part) if how.takes(me, root) else None
    outputs = [] if result is None else parts_of(row.taken, result, count)
    return Runner(lambda: called(name, inputs, outputs, **options), result)
