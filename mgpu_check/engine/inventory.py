"""Find the GPUs of a host, whatever state their driver is in."""

from __future__ import annotations

from mgpu_check.devices.inventory import Inventory, take_inventory
from mgpu_check.engine.pool import RankPool
from mgpu_check.errors import AgentLost, RankFailure, RankHang

__all__ = ["look"]


def look(pool: RankPool, host: int = 0) -> Inventory:
    """Look for the GPUs of a host in a process of its own: a driver that hangs, or crashes, is trouble, and no error."""
    try:
        found: Inventory = pool.in_fresh_process(take_inventory, host)
    except AgentLost:
        raise
    except (RankFailure, RankHang) as error:
        first = str(error).splitlines()[0]
        return Inventory((), f"the GPUs of this machine cannot be looked at: {first}\n  does nvidia-smi answer?")
    return found
