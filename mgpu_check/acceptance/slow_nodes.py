"""Find nodes that are slower than the other nodes of their model, from the reports of many nodes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from mgpu_check.acceptance.comparison import (
    LEAST_PEERS,
    Comparison,
    amount,
    beside_peers,
    least_shortfall,
    models,
    useless,
)
from mgpu_check.acceptance.references import SOFTWARE
from mgpu_check.acceptance.run_report import RunReport
from mgpu_check.devices.observations import Measurement, Observation, Subject, Work

SLOW_NODE = "MGPU-NODE-SLOW"  # id of the finding about a node that stands out


@dataclass(frozen=True)
class Outlier:
    """A node that is too slow compared with the others."""

    host: int  # its number in the report; `name` is its name
    name: str
    quantity: str
    unit: str
    size: int
    value: float  # the median over the measured subjects of this node
    comparison: Comparison
    nodes: int  # number of other nodes in the comparison

    def __str__(self) -> str:
        return f"{self.name}: {self.seen}"

    @property
    def seen(self) -> str:
        c = self.comparison
        return (
            f"{self.quantity} of size {self.size} is {amount(self.value, self.unit)}, {c.missing:.0%} "
            f"slower than {amount(c.reference or 0.0, self.unit)}, the median of {self.nodes} other nodes (limit "
            f"{c.limit:.0%})"
        )

    @property
    def observation(self) -> Observation:
        measured = {"quantity": self.quantity, "unit": self.unit, "size": self.size, "value": self.value}
        evidence = {**measured, "comparisons": [self.comparison.as_json()]}
        case = f"{self.quantity}, size {self.size}"
        host = Subject("host", (self.host,))
        return Observation("performance", host, "failed", self.seen, case, Work(operations=self.nodes), evidence)


@dataclass(frozen=True)
class AmongNodes:
    """The result of `among_nodes`."""

    outliers: tuple[Outlier, ...]
    unknown: tuple[str, ...]  # a line for each node, or quantity of one, that could not be compared, with the reason


def among_nodes(report: RunReport) -> AmongNodes:
    """Compare each node of a report of many nodes with the others of the same model and software.

    A node has one value for each quantity and size: the median over its GPUs or links. A single slow GPU or link does
    not move it; the verdict of the node's own run names that part.
    """
    groups: defaultdict[tuple[Any, ...], dict[int, list[Measurement]]] = defaultdict(lambda: defaultdict(list))
    model = models(report.gpus)
    host_of = {gpu.number: gpu.host for gpu in report.gpus}
    software = {host.number: tuple(host.software.get(name, "") for name in SOFTWARE) for host in report.hosts}
    host_names = {host.number: host.name for host in report.hosts}
    for m in report.measurements:
        if m.subject.kind == "host" or useless(m):
            continue
        hosts = {host_of[member] for member in m.subject.members}
        if len(hosts) == len({model[member] for member in m.subject.members}) == 1:
            host = hosts.pop()
            groups[(model[m.subject.members[0]], software.get(host, ()), m.kind)][host].append(m)
    outliers: list[Outlier] = []
    alone: dict[str, None] = {}
    undecided: dict[str, None] = {}
    for group in groups.values():
        if len(group) <= LEAST_PEERS:
            alone.update((host_names.get(host, f"host {host}"), None) for host in group)
            continue
        standing, reasons = _stand_out(host_names, group)
        outliers += standing
        undecided.update(dict.fromkeys(reasons))
    few = f"fewer than {LEAST_PEERS} other nodes have its model and software; not all was compared"
    return AmongNodes(tuple(outliers), (*(f"{name}: {few}" for name in alone), *undecided))


def _stand_out(
    host_names: Mapping[int, str], group: Mapping[int, Sequence[Measurement]]
) -> tuple[list[Outlier], list[str]]:
    """Return the nodes of a group that are too slow, and why others are undecided."""
    values = {host: median(m.value for m in several) for host, several in group.items()}
    measured_kind = next(iter(group.values()))[0].kind
    label = f"{measured_kind.quantity} of size {measured_kind.size}"
    outliers, reasons = [], []
    for host, value in values.items():
        name = host_names.get(host, f"host {host}")
        others = [value for peer, value in values.items() if peer != host]
        comparison = beside_peers(value, others, measured_kind.unit, least_shortfall(measured_kind))
        if comparison.outcome == "unknown":
            reasons.append(f"{name}: {label}: {comparison.why}")
        if comparison.outcome == "failed":
            outliers.append(Outlier(host, name, *measured_kind[:3], value, comparison, len(others)))
    if 2 * len(outliers) < len(group):
        return outliers, [] if outliers else reasons  # a named node explains why the others scatter
    half = ", ".join(outlier.name for outlier in outliers)
    return [], [*reasons, f"{label}: half of the nodes are slow, none is named: {half}"]
