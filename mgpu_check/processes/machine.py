"""Tell machines apart, also where several have the same name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mgpu_check.processes.rank_lists import grouped

_SHOWN = 8
"""Characters of a boot id that are shown: enough to distinguish the machines of a run."""


def boot_id() -> str:
    """Return the id of this boot of this machine's kernel, which no other machine has; "" if it is not known."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def distinct_names(hosts: Sequence[tuple[str, str]]) -> list[str]:
    """Return a name for each host: its own, with its boot id if another host has the same name.

    Hosts with one name and one boot id, as containers of one machine, get their place among the hosts.

    Args:
        hosts: name and boot id of each; empty where unknown.
    """
    of_name = dict(grouped(hosts))
    found = []
    for place, (name, boot) in enumerate(hosts):
        boots = of_name[name]
        if not name:
            found.append(f"host {place}")
        elif len(boots) == 1:
            found.append(name)
        elif all(boots) and len(set(boots)) == len(boots):
            found.append(f"{name} (boot {boot[:_SHOWN]})")
        else:
            found.append(f"{name} (node {place})")
    return found
