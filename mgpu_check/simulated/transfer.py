"""Copy tensors between devices under autograd: the gradient of a copy returns to the source device."""

from __future__ import annotations

from collections.abc import Callable

import torch

from mgpu_check.simulated import hardware
from mgpu_check.simulated.host_copies import deliver_queued, late_host_copy
from mgpu_check.simulated.memory import BLOCK, Block
from mgpu_check.simulated.pinned import pin
from mgpu_check.simulated.recording import recorder_of
from mgpu_check.simulated.state import active_node
from mgpu_check.simulated.streams import host_waits
from mgpu_check.simulated.tensor import SimulatedTensor, raw, tag

_to = torch._C.TensorBase.to
_host_copy: Callable[[torch.Tensor, torch.device, bool], object] | None = None


def on_host_copy(call: Callable[[torch.Tensor, torch.device, bool], object] | None) -> None:
    """Call ``call(copy, source device, non_blocking)`` after each copy from a device to the host."""
    global _host_copy
    _host_copy = call


def _transfer(
    t: torch.Tensor,
    device: torch.device,
    dtype: torch.dtype | None,
    non_blocking: bool,
    memory_format: torch.memory_format,
    into: torch.Tensor | None,
) -> torch.Tensor:
    node = active_node()
    source = t.device
    below = hardware.present
    if below is not None:
        for end in (source, device):
            below.touch(end)
        below.read(source, [t])
    if device.type == "cuda" and node is not None:
        if into is None:
            node.memory[device.index].require(t.numel() * (dtype or t.dtype).itemsize)
        if source.type == "cpu":
            deliver_queued(t, device)
            if not non_blocking:
                host_waits(device)

    def copied(given: tuple[torch.Tensor], _: object = None) -> torch.Tensor:
        return _copied(given[0], device, dtype, non_blocking, memory_format, into)

    recorder = recorder_of(device if device.type == "cuda" else source)
    if recorder is None:
        out = copied((t,))
    elif device.type == "cuda":
        out = recorder.record(copied, (t,), {}, [], device)
    else:
        out = recorder.record(copied, (t,), {}, [], source, after=lambda host: late_host_copy(host, source, True))
    if _host_copy is not None and device.type == "cpu" and isinstance(t, SimulatedTensor):
        if non_blocking and into is None and out.layout is torch.strided:
            pin(out)  # torch also uses pinned memory for a non-blocking copy
        if recorder is None or not non_blocking:
            _host_copy(out, source, non_blocking)
    return out


def _copied(
    t: torch.Tensor,
    device: torch.device,
    dtype: torch.dtype | None,
    non_blocking: bool,
    memory_format: torch.memory_format,
    into: torch.Tensor | None,
) -> torch.Tensor:
    node = active_node()
    on_device = device.type == "cuda" and node is not None
    home = node.backing if on_device and node is not None else device
    with torch._C._DisableTorchDispatch(), torch.no_grad():
        out = _to(raw(t), device=home, dtype=dtype or t.dtype, copy=True, memory_format=memory_format)
        if hardware.present is not None:
            hardware.present.copied(t, device, out, into, _is_pinned(t, into, non_blocking))
    if on_device and node is not None:
        if into is not None and out.layout is torch.strided:  # a device writes the copy straight into `into`
            out.untyped_storage().__dict__[BLOCK] = Block(device, node.memory[device.index], 0)
        return tag(out, device)
    return out


def captured_to_host(host: torch.Tensor, t: torch.Tensor) -> bool:
    """Record an asynchronous copy to pinned memory; return False if no graph is being captured."""
    source = t.device
    recorder = recorder_of(source)
    if recorder is None:
        return False

    def copy(given: tuple[torch.Tensor, torch.Tensor], _: object = None) -> torch.Tensor:
        return given[0].copy_(_copied(given[1], host.device, None, True, torch.preserve_format, None))

    given = host, t.detach()
    recorder.record(copy, given, {}, [host], source, after=lambda _: late_host_copy(host, source, True))
    return True


def _is_pinned(t: torch.Tensor, into: torch.Tensor | None, non_blocking: bool) -> bool:
    """Return whether the host side of a copy is pinned; new host memory is pinned if the copy is non-blocking."""
    host = t if t.device.type == "cpu" else into
    return non_blocking if host is None else host.is_pinned()


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: object,
        t: torch.Tensor,
        device: torch.device,
        dtype: torch.dtype | None,
        non_blocking: bool,
        memory_format: torch.memory_format,
        into: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.source, ctx.dtype = t.device, t.dtype  # type: ignore[attr-defined]
        return _transfer(t, device, dtype, non_blocking, memory_format, into)

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None, None]:
        back = move(grad, ctx.source, ctx.dtype)  # type: ignore[attr-defined]
        return back, None, None, None, None, None


def move(
    t: torch.Tensor,
    device: torch.device,
    dtype: torch.dtype | None = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format = torch.preserve_format,
    *,
    into: torch.Tensor | None = None,
) -> torch.Tensor:
    """Copy ``t`` to ``device`` (a simulated device with its index, or a real one), as ``Tensor.to`` does.

    Twice differentiable. The result has new memory, even if only the dtype changes; it is ``t`` itself if nothing
    changes. ``into`` is the tensor on ``device`` that receives the result from the caller, or None.
    """
    if t.device == device and (dtype is None or dtype == t.dtype):
        return t
    if torch.is_grad_enabled() and t.requires_grad:
        out: torch.Tensor = _Move.apply(t, device, dtype, non_blocking, memory_format, into)
        return out
    return _transfer(t, device, dtype, non_blocking, memory_format, into)
