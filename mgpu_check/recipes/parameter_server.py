"""Parameter servers written by hand: one in the devices of a process, and one over point-to-point messages."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
import torch.distributed as dist

__all__ = ["KeyValueStore", "push_and_pull"]

Update = Callable[[torch.Tensor, torch.Tensor], None]
"""Takes a step, in place: (value, sum of the gradients)."""


class KeyValueStore:
    """Values by key, each at home on one of several devices, as in the chapter on parameter servers of *Dive into Deep
    Learning*.

    Gradients of all devices are pushed to a key and added up at its home, where the value takes its step; values are
    pulled from there.
    """

    def __init__(self, devices: Sequence[torch.device], update: Update) -> None:
        self._devices = list(devices)
        self._update = update
        self._values: dict[Hashable, torch.Tensor] = {}

    def init(self, key: Hashable, value: torch.Tensor) -> None:
        """Keep a copy of `value`; homes go round the devices in the order of keys."""
        home = self._devices[len(self._values) % len(self._devices)]
        self._values[key] = value.detach().to(home, copy=True)

    def home(self, key: Hashable) -> torch.device:
        """Return the device on which the value of `key` is kept."""
        return self._values[key].device

    def push(self, key: Hashable, gradients: Sequence[torch.Tensor]) -> None:
        """Add up `gradients`, one of each device, and take a step by them."""
        home = self.home(key)
        total = gradients[0].detach().to(home, copy=True)
        for gradient in gradients[1:]:
            total += gradient.detach().to(home)
        self._update(self._values[key], total)

    def pull(self, key: Hashable, out: Sequence[torch.Tensor]) -> None:
        """Write the value of `key` into each tensor of `out`."""
        for tensor in out:
            tensor.detach().copy_(self._values[key])


def push_and_pull(
    parameters: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    update: Update,
    homes: Sequence[int],
) -> None:
    """Take a step with parameters that live on ranks: push gradients there, pull what comes of it. In place, on all ranks.

    Args:
        parameters, gradients: this rank's, in one order on all ranks.
        update: what the home does with the sum of all gradients.
        homes: for each parameter the rank that keeps it: all 0 is one server, i % size is one that is sharded.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    for parameter, gradient, home in zip(parameters, gradients, homes, strict=True):
        value = parameter.detach()
        others = [other for other in range(size) if other != home]
        if rank == home:
            total = gradient.detach().clone()
            received = torch.empty_like(total)
            for other in others:
                dist.recv(received, other)
                total += received
            update(value, total)
            for other in others:
                dist.send(value, other)
        else:
            dist.send(gradient.detach().contiguous(), home)
            dist.recv(value, home)
