"""Describe the rank that this process is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Rank:
    """This process's place in the world.

    Attributes:
        index: rank in the default process group, 0 to size - 1.
        size: world size.
        local_index: index of the rank on this machine.
        node_index: index of this machine.
        device: the device that this rank owns: ``cuda:<local_index>``, unless the caller chose other devices.
        mesh: the mesh of a gate with `meshes`, else None; ``rank.mesh["tp"]`` is one of its axes.
    """

    index: int
    size: int
    local_index: int
    node_index: int
    device: torch.device
    mesh: DeviceMesh | None = None

    @property
    def group(self) -> ProcessGroup:
        import torch.distributed as dist

        group = dist.group.WORLD
        assert group is not None, "the default process group of this rank was destroyed"
        return group


_current: Rank | None = None


def become(rank: Rank) -> None:
    global _current
    _current = rank


def current_rank() -> Rank | None:
    """Return the rank of this process; None in the node process and outside the engine."""
    return _current
