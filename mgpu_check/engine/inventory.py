"""Find the GPUs of a host, even if their driver hangs or crashes."""

from __future__ import annotations

from mgpu_check.devices.inventory import Inventory, take_inventory
from mgpu_check.engine.pool import RankPool
from mgpu_check.errors import AgentLost, RankFailure, RankHang


def look(pool: RankPool, host: int = 0) -> Inventory:
    """Take the inventory of a host's GPUs in a separate process, because a driver may hang or crash."""
    try:
        found: Inventory = pool.in_fresh_process(take_inventory, host)
    except AgentLost:
        raise
    except (RankFailure, RankHang) as error:
        first = str(error).splitlines()[0]
        return Inventory((), f"the GPUs of this machine cannot be listed: {first}\n  does nvidia-smi answer?")
    return found
