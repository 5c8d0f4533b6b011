"""Parameter servers by hand: on the devices of one process, and over point-to-point messages between ranks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
import torch.distributed as dist

Update = Callable[[torch.Tensor, torch.Tensor], None]
"""Updates a value in place: (value, sum of the gradients)."""


class KeyValueStore:
    """Values by key, each with a home device, as in the chapter on parameter servers of *Dive into Deep Learning*.

    A push sums the gradients of all devices on the home device, and updates the value there. A pull copies the value
    from there.
    """

    def __init__(self, devices: Sequence[torch.device], update: Update) -> None:
        self._devices = list(devices)
        self._update = update
        self._values: dict[Hashable, torch.Tensor] = {}

    def init(self, key: Hashable, value: torch.Tensor) -> None:
        """Store a copy of `value`. New keys are assigned to the devices in turn."""
        home = self._devices[len(self._values) % len(self._devices)]
        self._values[key] = value.detach().to(home, copy=True)

    def home(self, key: Hashable) -> torch.device:
        """Return the home device of `key`."""
        return self._values[key].device

    def push(self, key: Hashable, gradients: Sequence[torch.Tensor]) -> None:
        """Sum `gradients`, one per device, and update the value."""
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
    parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], update: Update, homes: Sequence[int]
) -> None:
    """Push gradients to the home ranks of the parameters, update there, and pull the results. In place, on all ranks.

    Args:
        parameters, gradients: those of this rank, in the same order on all ranks.
        update: called on the home rank with the parameter and the sum of all gradients.
        homes: the home rank of each parameter: 0 for all is a single server, i % size a sharded one.
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
