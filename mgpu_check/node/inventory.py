"""The devices that this machine really has."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Device", "visible_devices"]


@dataclass(frozen=True)
class Device:
    """A visible GPU.

    Attributes:
        index: as in ``cuda:<index>``, after ``CUDA_VISIBLE_DEVICES``.
        memory: total, in bytes.
        capability: compute capability, such as (9, 0).
        uuid: what tells this GPU from all others, whatever its index.
    """

    index: int
    name: str
    memory: int
    capability: tuple[int, int]
    uuid: str


def visible_devices() -> list[Device]:
    """The GPUs that torch sees in this process, in the order of their indices. Initializes the driver."""
    import torch  # here, because the pytest process reads `Device`s and does without torch

    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(
            Device(
                index=index,
                name=properties.name,
                memory=properties.total_memory,
                capability=(properties.major, properties.minor),
                uuid=str(getattr(properties, "uuid", "")),
            )
        )
    return found
