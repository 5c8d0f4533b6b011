"""Deliver ``non_blocking`` copies to the host late: the destination holds poison until the caller waits."""

from __future__ import annotations

import torch

from mgpu_check.simulated.delivery import Late, poison
from mgpu_check.simulated.streams import current_stream, hold_on_current, host_waits

_LATE = "_mgpu_check_late"


def late_host_copy(copy: torch.Tensor, source: torch.device, non_blocking: bool) -> None:
    """Make the host wait after a copy from a device, or with ``non_blocking`` hold the values back until it waits."""
    if not non_blocking:
        host_waits(source)
        return
    values = copy.clone()
    poison(copy)
    target = copy.detach()

    def deliver() -> None:
        with torch.no_grad():
            target.copy_(values)

    late = Late(deliver)
    hold_on_current(late, source)
    if copy.layout is torch.strided:
        attributes = copy.untyped_storage().__dict__
        attributes[_LATE] = [*(kept for kept in attributes.get(_LATE, ()) if not kept.done), late]


def deliver_queued(host: torch.Tensor, device: torch.device) -> None:
    """Deliver late copies to ``host`` before it is copied to ``device``, if they precede the copy on the stream."""
    if host.layout is not torch.strided:
        return
    late: list[Late] | None = host.untyped_storage().__dict__.get(_LATE)
    if late:
        stream = current_stream(device)
        for one in late:
            if stream.holds(one):
                one.deliver()
