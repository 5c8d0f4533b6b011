"""Parse `CUDA_VISIBLE_DEVICES` of a simulated node by the driver's rules."""

from __future__ import annotations

import re


def uuid_of(physical: int) -> str:
    """Return the UUID of a device of the machine, without NVML's prefix "GPU-"."""
    return f"5107a7ed-0000-0000-0000-{physical:012d}"


def visible(listed: str | None, total: int) -> tuple[int, ...]:
    """Return the visible devices, of ``total`` in the machine, for this value of the variable, in its order.

    An entry is an index, or "GPU-" and the beginning of a UUID that only one device has. The driver stops at the first
    invalid entry. If a device is listed twice, no device is visible. None means that the variable is not set.
    """
    if listed is None:
        return tuple(range(total))
    seen: list[int] = []
    for entry in listed.split(","):
        device = _device(entry.strip(), total)
        if device is None:
            break
        if device in seen:
            return ()
        seen.append(device)
    return tuple(seen)


def _device(entry: str, total: int) -> int | None:
    if entry.startswith("GPU-"):
        found = [i for i in range(total) if f"GPU-{uuid_of(i)}".startswith(entry.lower().replace("gpu-", "GPU-", 1))]
        return found[0] if len(found) == 1 else None
    index = re.match(r"\+?\d+", entry)
    return int(index[0]) if index is not None and int(index[0]) < total else None
