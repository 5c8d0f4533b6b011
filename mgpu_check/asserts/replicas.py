"""Check that replicas on all ranks or devices hold the same tensors, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from mgpu_check.errors import ReplicaMismatch
from mgpu_check.numerics.compare import difference
from mgpu_check.numerics.diagnosis import diagnose
from mgpu_check.torch_hooks.members import named_buffers, named_parameters
from mgpu_check.torch_hooks.tensors import INTEGER_OF_SIZE, as_real, name_of, plain

State = Mapping[str, torch.Tensor]


def assert_replicas_agree(
    replicas: nn.Module | State | Sequence[nn.Module | State],
    *,
    group: dist.ProcessGroup | None = None,
    what: str = "replicas",
) -> None:
    """Assert that replicas hold the same tensors, bit for bit.

    The members of a sequence are compared with each other, in this process. With one module or mapping, every rank of
    `group` must call this function with its own, and they are compared across the ranks. This is a collective, of 16
    bytes per rank if all agree.

    Args:
        replicas: modules, compared by their parameters and buffers, or mappings. Tensors may be on any device; for an
            NCCL group they must be on the devices of the ranks.
        group: the ranks that hold the replicas; the default process group if not given.
        what: the name of the replicas, for the message.

    Raises:
        ReplicaMismatch: on the ranks that differ from most others, or from the first if there is no majority. Names the
            first tensor that differs, with its worst element. `.ranks` has the ranks that differ.
        ValueError: the sequence is empty.
    """
    __tracebackhide__ = True
    if isinstance(replicas, nn.Module | Mapping):
        _across_ranks(_state(replicas), group, what)
        return
    states = [_state(replica) for replica in replicas]
    if not states:
        raise ValueError("assert_replicas_agree: replicas is empty; give at least one")
    prints = [tuple(_fingerprints(state)) for state in states]
    usual = max(prints, key=prints.count)
    model = prints.index(usual)
    odd = [index for index, values in enumerate(prints) if values != usual]
    if odd:
        found = _first_difference(states[odd[0]], states[model], f"replica {model}")
        raise ReplicaMismatch(f"{what}: {_named(odd, 'replica')} differ{'s' * (len(odd) == 1)}: {found}", ranks=odd)


def fingerprint(tensor: torch.Tensor) -> int:
    """Return a fingerprint of 64 bits over all bits of `tensor`; a change of any single element changes it."""
    words = as_real(plain(tensor)).reshape(-1)
    if words.dtype == torch.bool:
        words = words.to(torch.int8)
    integers = words.view(INTEGER_OF_SIZE[words.element_size()]).long()
    # Odd multipliers are invertible modulo 2^64, so a difference in one element cannot vanish.
    positions = torch.arange(len(integers)) * 0x9E3779B97F4A7C1 + 0x632BE59BD9B4E019
    return int((integers * (positions | 1)).sum()) if len(integers) else 0


def _state(replica: nn.Module | State) -> dict[str, torch.Tensor]:
    if isinstance(replica, nn.Module):
        return {**dict(named_parameters(replica)), **dict(named_buffers(replica))}
    return dict(replica)


def _fingerprints(state: State) -> list[int]:
    kinds = [f"{name} {tuple(value.shape)} {value.dtype}" for name, value in state.items()]
    # Names and shapes first, because the other fingerprints are comparable only if these agree.
    layout = fingerprint(torch.frombuffer(bytearray("\n".join(kinds).encode()), dtype=torch.uint8)) if kinds else 0
    return [layout, *(fingerprint(value) for value in state.values())]


def _across_ranks(state: dict[str, torch.Tensor], group: dist.ProcessGroup | None, what: str) -> None:
    device = next((value.device for value in state.values()), torch.device("cpu"))
    own = _fingerprints(state)
    combined = fingerprint(torch.tensor(own[1:], dtype=torch.int64))
    rows = _gathered(torch.tensor([own[0], combined], dtype=torch.int64, device=device), group)
    if all(row == rows[0] for row in rows):
        return
    rank = dist.get_rank(group)
    usual = max(rows, key=rows.count)
    model = rows.index(usual)
    odd = [index for index, row in enumerate(rows) if row != usual]
    head = f"{what}: {_named(odd, 'rank')} of {len(rows)} differ{'s' * (len(odd) == 1)} from rank {model}"
    if any(row[0] != usual[0] for row in rows):
        if rank in odd:
            raise ReplicaMismatch(f"{head} in names, shapes or dtypes; here: {_listed(state)}", ranks=odd)
        return
    # All ranks have found the difference, so all take part in this broadcast, which locates it.
    source = model if group is None else dist.get_global_rank(group, model)
    found = ""
    for name, value in state.items():
        reference = value.detach().clone().contiguous()
        dist.broadcast(reference, source, group=group)
        if not found and fingerprint(reference) != fingerprint(value):
            found = _first_difference({name: value}, {name: reference}, f"rank {model}")
    if found:
        raise ReplicaMismatch(f"{head}: {found}", ranks=odd)


def _gathered(values: torch.Tensor, group: dist.ProcessGroup | None) -> list[list[int]]:
    rows = [torch.empty_like(values) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, values, group=group)
    return [row.tolist() for row in rows]


def _first_difference(state: State, reference: State, owner: str) -> str:
    if state.keys() != reference.keys():
        return f"it has {', '.join(state)}; {owner} has {', '.join(reference)}"
    for name, value in state.items():
        other = reference[name]
        if value.shape != other.shape or value.dtype != other.dtype:
            return f"{name!r} is {_kind(value)}, on {owner} {_kind(other)}"
        if fingerprint(value) == fingerprint(other):
            continue
        off = difference(value, other)
        if off is None:
            return f"{name!r} differs from {owner} in the sign of zeros or the bits of NaN only"
        looks = "".join(f"; {line}" for line in diagnose(value, other))
        return f"{name!r} is not that of {owner}: {off}{looks}"
    return f"nothing by value; compare the layouts with {owner}"


def _kind(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {name_of(tensor.dtype)}"


def _listed(state: State) -> str:
    names = [f"{name} {_kind(value)}" for name, value in state.items()]
    return ", ".join(names[:6]) + (", …" if len(names) > 6 else "")


def _named(indices: Sequence[int], noun: str) -> str:
    return f"{noun}{'s' * (len(indices) > 1)} {', '.join(map(str, indices))}"
