"""Run pytest on ranks that a launcher has started, possibly on several hosts, and check that there are enough."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from mgpu_check.devices.inventory import Device
from mgpu_check.engine.remote import launched_process
from mgpu_check.plugin.device_leases import TooFewDevices
from mgpu_check.settings import Settings

if TYPE_CHECKING:
    from mgpu_check.engine.pool import RankPool
    from mgpu_check.engine.remote.driver import AgentLauncher


def is_launched() -> bool:
    return launched_process.driver() is not None


def launcher_of_this_run(settings: Settings) -> AgentLauncher | None:
    """Return the launcher of this run; None if no launcher has started the ranks."""
    driver = launched_process.driver()
    return None if driver is None else driver.launcher(settings.agent_timeout)


def wrong_launch(environment: Mapping[str, str]) -> str | None:
    """Return an error message if torchrun has launched pytest itself, once per rank; None otherwise."""
    size = environment.get("WORLD_SIZE", "1")
    if is_launched() or "TORCHELASTIC_RUN_ID" not in environment or size == "1":
        return None
    return (
        f"torchrun has launched pytest {size} times, and each would run all tests on the same GPUs; have it launch "
        "mgpu_check, which runs pytest once over all ranks: torchrun ... -m mgpu_check pytest ..."
    )


def over() -> str | None:
    """Return why the remaining tests cannot run; None if they can."""
    driver = launched_process.driver()
    return None if driver is None else driver.connections.over


def take_seats(settings: Settings, pool: RankPool, launcher: AgentLauncher) -> tuple[Settings, list[Device]]:
    """Wait for all launched ranks, and give the pool as many of them as the run asks for.

    Returns the settings, with the number of GPUs and their hosts filled in; and the real devices, host by host. Raises
    `TooFewDevices`: launched ranks are missing, inconsistent or too few, or see too few devices.
    """
    from mgpu_check.engine.pool import devices_of_host
    from mgpu_check.engine.remote.driver import WrongLaunch

    try:
        slots = launcher.gather()
    except WrongLaunch as wrong:
        raise TooFewDevices(str(wrong)) from None
    hosts = _hosts(launcher)
    gpus = len(slots) if settings.gpus is None else settings.gpus
    each, remainder = divmod(gpus, len(slots))
    # The ranks of a process share its hash seed, so a world on one host needs two processes to have two seeds.
    shared = settings.simulate == "cpu" and all(len(host.ranks) > 1 for host in launcher.hosts)
    if shared and each > 1 and not remainder:
        slots = launcher.place(each)
    if gpus > len(slots):
        alternative = " or a multiple of it" if shared else ""
        raise TooFewDevices(
            f"--gpus={gpus} ({settings.origins['gpus']}), but {len(slots)} ranks were launched ({hosts}): launch one "
            f"for each GPU, or use --gpus={len(slots)}{alternative}"
        )
    slots = slots[:gpus]
    pool.set_slots(slots)
    counts = Counter(slot.host for slot in slots)
    per_host = tuple(counts[host] for host in range(len(counts)))
    devices: list[Device] = []
    if settings.simulate != "cpu":
        backing = int(settings.simulate.partition(":")[2]) + 1 if settings.simulate else 0
        for host, count in enumerate(per_host):
            inventory = devices_of_host(pool, host)
            visible = inventory.devices
            wanted = 1 if launcher.visible_on(host) == 1 and not backing else backing or count
            if len(visible) < wanted:
                raise TooFewDevices(
                    f"--gpus={gpus} ({settings.origins['gpus']}): {count} ranks were launched on "
                    f"{launcher.hosts[host].name}, but a process there sees {len(visible)} GPUs; to simulate them: "
                    "--simulate" + (f"\n  {inventory.trouble}" if inventory.trouble else "")
                )
            devices += visible[:count]
    return replace(settings, gpus=gpus, per_host=per_host), devices


def _hosts(launcher: AgentLauncher) -> str:
    return ", ".join(f"{len(host.ranks)} on {host.name}" for host in launcher.hosts)


def describe(launcher: AgentLauncher) -> str:
    text = f"{sum(len(host.ranks) for host in launcher.hosts)} launched ranks: {_hosts(launcher)}"
    driver = launched_process.driver()
    if driver is None or driver.trusting is None:
        return text
    return f"{text}; NETWORK TRUSTED: anyone who can reach {driver.trusting} can run code in this run (--trust-network)"
