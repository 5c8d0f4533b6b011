"""Follow GPUs over several reports by serial number."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from mgpu_check.acceptance.run_report import Gpu, Host, RunReport


@dataclass(frozen=True)
class Sighting:
    """A GPU in one report.

    Attributes:
        file: name of the report, for messages.
    """

    file: str
    report: RunReport
    host: Host
    gpu: Gpu

    @property
    def began(self) -> datetime.datetime:
        return _time(self.report)

    @property
    def ended(self) -> datetime.datetime:
        return self.began + datetime.timedelta(seconds=self.report.seconds)

    @property
    def place(self) -> str:
        return (
            f"{self.host.name or f'host {self.host.number}'} (cuda:{self.gpu.index}, PCI {self.gpu.pci or 'unknown'})"
        )


def same_host(one: Host, other: Host) -> bool:
    """Return whether two hosts are one machine: of one name, or of one boot of the kernel, as containers are."""
    return one.name == other.name or bool(one.boot and one.boot == other.boot)


def sightings(named: Mapping[str, RunReport]) -> dict[str, list[Sighting]]:
    """Return where and when each GPU was seen, in order of time, by serial number.

    The key of a GPU is its UUID if it has no serial number of its own: boards with several GPUs have one. A GPU with
    neither is left out.
    """
    serials = {gpu.uuid: gpu.serial for report in named.values() for gpu in report.gpus if gpu.uuid and gpu.serial}
    found: dict[str, list[Sighting]] = {}
    for file, report in sorted(named.items(), key=lambda item: _time(item[1])):
        hosts = {host.number: host for host in report.hosts}
        names = [serials.get(gpu.uuid, gpu.serial) for gpu in report.gpus]
        counts = Counter(names)
        for gpu, serial in zip(report.gpus, names, strict=True):
            key = serial if serial and counts[serial] == 1 else gpu.uuid
            if key and gpu.host in hosts:
                found.setdefault(key, []).append(Sighting(file, report, hosts[gpu.host], gpu))
    return found


def _time(report: RunReport) -> datetime.datetime:
    started = datetime.datetime.fromisoformat(report.started)
    return started if started.tzinfo else started.replace(tzinfo=datetime.UTC)
