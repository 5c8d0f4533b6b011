"""Explain why a run is refused, or a test skipped, if there are too few devices."""

from __future__ import annotations

from collections.abc import Mapping

from mgpu_check.devices.inventory import Inventory
from mgpu_check.settings import Settings


class TooFewDevices(Exception):
    """The machine has fewer devices than the run asks for."""


def too_few(settings: Settings, found: Inventory, environment: Mapping[str, str], torch: str) -> str:
    """Return a line that names the requested devices, the visible devices, and the remedy.

    Args:
        torch: version of torch.
    """
    devices = found.devices
    masked = environment.get(found.mask)
    asked = "all" if settings.gpus is None else settings.gpus
    names = ", ".join(f"cuda:{device.index} {device.name}" for device in devices) or "none"
    parts = [f"--gpus={asked} ({settings.origins['gpus']}), but this process sees {len(devices)} GPUs: {names}"]
    if settings.simulate:
        origin = settings.origins["simulate"]
        parts.insert(0, f"--simulate={settings.simulate} ({origin}): that device is not visible")
    if found.trouble:
        parts.append(": ".join(line.strip() for line in found.trouble.splitlines()))
    elif masked is not None:
        parts.append(f"{found.mask}={masked!r} restricts what is visible: change it if that is not intended")
    elif not devices:
        parts.append(
            f"torch {torch} finds no CUDA driver, or was built without CUDA: compare nvidia-smi with mgpu-check devices"
        )
    if devices:
        parts.append(f"lower it: --gpus={len(devices)}")
    simulated = 4 if asked == "all" else asked
    parts.append(
        f"or simulate them: --gpus={simulated} --simulate, which tests the code and says nothing about this hardware"
    )
    return "; ".join(parts)


def lack(settings: Settings, count: int, host: int | None = None) -> str | None:
    """Return why a test for `count` devices (0: all) cannot run here, or on `host`; None if it can."""
    have = settings.gpus or 0
    if host is not None and settings.per_host and count > settings.per_host[host]:
        return f"needs {count} GPUs in one process, and host {host} has {settings.per_host[host]}"
    if not have:
        return "needs GPUs: run with --gpus=N, or with --gpus=N --simulate on a machine without GPUs"
    if count > have:
        return f"needs {count} GPUs, --gpus={have}"
    return None
