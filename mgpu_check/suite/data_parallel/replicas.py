"""Check that the replicas of DataParallel hold the module's parameters and buffers of every dtype, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from mgpu_check.asserts.bits import first_difference, same_bits
from mgpu_check.errors import ReplicaMismatch
from mgpu_check.suite.common.values import significands
from mgpu_check.suite.data_parallel.results import Devices, both_ways, indices_of
from mgpu_check.suite.recipes.everything import Everything


def assert_replicas_hold(devices: Devices, seed: int) -> None:
    """Assert that each replica holds the module's parameters and buffers bit for bit, on its device, in the same
    structure."""
    replicate: Callable[..., Any] = torch.nn.parallel.replicate
    source = Everything(seed)
    tensors = {**dict(source.named_parameters()), **dict(source.named_buffers())}
    for order in both_ways(devices):
        model = Everything(seed).to(order[0])
        for detach in (False, True):
            replicas = replicate(model, indices_of(order), detach)
            for device, replica in zip(order, replicas, strict=True):
                what = f"replicate to {', '.join(map(str, order))}, detach={detach}: the replica on {device}"
                for name, expected in tensors.items():
                    _require_held(what, name, _found(replica, name), expected, device, detach)
                if replica.twin is not replica.inner or _found(replica, "inner.weight") is not _found(replica, "tied"):
                    raise ReplicaMismatch(
                        f"{what} does not share the parameters that the module shares", ranks=[device.index]
                    )
    _many_buffers(devices, seed)


_LARGE = (1 << 20) + 3
"""Elements of float32; four such parameters exceed the 10 MiB that torch copies, and sums, at a time."""


def _many_buffers(order: Devices, seed: int) -> None:
    """Require that replicas hold a model of more than 16 MiB, and that the gradients of all replicas are summed."""
    replicate: Callable[..., Any] = torch.nn.parallel.replicate
    values = significands((_LARGE,), torch.float32, seed)
    # Each parameter has different values and a different gradient, so that swapped ones are detected.
    model = nn.ParameterList(values * 2.0**place for place in range(4)).to(order[0])
    replicas = replicate(model, indices_of(order))
    terms = []
    for number, (device, replica) in enumerate(zip(order, replicas, strict=True), start=1):
        what = f"replicate of more than 16 MiB to {', '.join(map(str, order))}: the replica on {device}"
        for place, parameter in enumerate(model):
            held = replica[place]
            if held.device != device or not torch.equal(held.detach().to(order[0]), parameter.detach()):
                raise ReplicaMismatch(f"{what} does not hold parameter {place}", ranks=[device.index])
            terms.append(held.sum().to(order[0]) * number * (place + 1))
    sum(terms[1:], terms[0]).backward()
    for place, parameter in enumerate(model):
        expected = len(order) * (len(order) + 1) // 2 * (place + 1)
        if parameter.grad is None or not bool((parameter.grad == expected).all()):
            raise ReplicaMismatch(
                f"gradients of more than 16 MiB on {', '.join(map(str, order))}: that of parameter {place} is not "
                f"{expected} everywhere"
            )


def _found(replica: nn.Module, name: str) -> Any:
    found: Any = replica
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _require_held(what: str, name: str, got: Any, expected: torch.Tensor, device: torch.device, detach: bool) -> None:
    ranks = [device.index]
    if got.device != device:
        raise ReplicaMismatch(f"{what} has {name} on {got.device}", ranks=ranks)
    if not same_bits(expected, got):
        here = got.detach().cpu()
        at = first_difference(expected, here) if here.shape == expected.shape and here.dtype == expected.dtype else ()
        text = (
            f"element {list(at)} is {here[at].item()}, expected {expected[at].item()}"
            if at
            else f"{here.shape} {here.dtype}"
        )
        raise ReplicaMismatch(f"{what}: {name}, {expected.dtype}: {text}", ranks=ranks)
    # Not for detached replicas, which need no gradients: on the first device they are the module's own tensors.
    if not detach and got.requires_grad != expected.requires_grad:
        raise ReplicaMismatch(f"{what}: requires_grad of {name} is {got.requires_grad}", ranks=ranks)
