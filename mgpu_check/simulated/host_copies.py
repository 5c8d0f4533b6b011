"""Copies from a device to the host that are late: their destination holds poison until somebody has waited."""

from __future__ import annotations

import torch

from mgpu_check.simulated.delivery import Late, poison
from mgpu_check.simulated.streams import current_stream, hold_on_current, host_waits

__all__ = ["deliver_queued", "late_host_copy"]

_LATE = "_mgpu_check_late"


def late_host_copy(copy: torch.Tensor, source: torch.device, non_blocking: bool) -> None:
    """Finish a copy to the host: without ``non_blocking`` it has waited; with it, the values come with the wait."""
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
    """Deliver, before a copy of ``host`` to ``device``, the copies to ``host`` that its stream comes after."""
    if host.layout is not torch.strided:
        return
    late: list[Late] | None = host.untyped_storage().__dict__.get(_LATE)
    if late:
        stream = current_stream(device)
        for one in late:
            if stream.holds(one):
                one.deliver()
