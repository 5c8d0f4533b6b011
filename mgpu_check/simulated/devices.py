"""Replace ``torch.device`` in a simulation, so that an int means a CUDA device on every build of torch."""

from __future__ import annotations

import torch

from mgpu_check.torch_hooks.patches import Patches

_real: type = type(torch.device("cpu"))


class _DeviceMeta(type):
    """Metaclass of the replacement, which creates real devices, compares equal to the real type and has its hash."""

    def __call__(cls, *args: object, **kwargs: object) -> torch.device:
        first = args[0] if args else kwargs.get("device")
        if isinstance(first, int) and not isinstance(first, bool) and len(args) + len(kwargs) == 1:
            if first < 0:
                raise RuntimeError(f"Device index must not be negative, got {first}")
            made: torch.device = _real("cuda", first)
            return made
        return _real(*args, **kwargs)  # type: ignore[no-any-return]

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _real)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, _real)

    def __getattr__(cls, name: str) -> object:
        return getattr(_real, name)

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is _real

    def __hash__(cls) -> int:
        return hash(_real)


def install_device_type(patches: Patches) -> None:
    patches.replace(_real, _DeviceMeta("device", (), {"__module__": "torch", "__doc__": _real.__doc__}))
