"""Facts that a rank knows about itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Rank", "current_rank"]


@dataclass(frozen=True)
class Rank:
    """This process's place in the world.

    Attributes:
        index: rank in the default process group, 0 to size - 1.
        size: world size.
        local_index: rank among those of this machine.
        node_index: index of this machine.
        device: the device that this rank owns: ``cuda:<local_index>``, unless the ranks run on devices that were chosen.
        mesh: the mesh of a gate that was given `meshes`; ``rank.mesh["tp"]`` is one of its axes.
    """

    index: int
    size: int
    local_index: int
    node_index: int
    device: torch.device
    mesh: DeviceMesh | None = None

    @property
    def group(self) -> ProcessGroup:
        """The default process group."""
        import torch.distributed as dist

        group = dist.group.WORLD
        assert group is not None, "the default process group of this rank was destroyed"
        return group


_current: Rank | None = None


def become(rank: Rank) -> None:
    """Make this process `rank`."""
    global _current
    _current = rank


def current_rank() -> Rank | None:
    """Return the rank that this process is; None in the node process and outside the engine."""
    return _current
