"""Find nodes that are slower than the other nodes of their model, from the reports of many nodes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from mgpu_check.acceptance.baseline import SOFTWARE
from mgpu_check.acceptance.comparison import Comparison, amount, beside_peers, least_shortfall, models, useless
from mgpu_check.acceptance.robust import LEAST_PEERS
from mgpu_check.acceptance.run_report import RunReport
from mgpu_check.devices.observations import Measurement, Observation, Subject, Work

__all__ = ["SLOW_NODE", "AmongNodes", "Outlier", "among_nodes"]

SLOW_NODE = "MGPU-NODE-SLOW"
"""Id of the finding about a node that stands out."""


@dataclass(frozen=True)
class Outlier:
    """A node that is too slow compared with the others.

    Attributes:
        report: index of its report in the order given; `host` is the number of the host in that report.
        name: name of the host.
        subject: kind of the measured subjects, such as "gpu"; `value` is the median over those of this node.
        nodes: number of other nodes in the comparison.
    """

    report: int
    host: int
    name: str
    model: str
    subject: str
    quantity: str
    unit: str
    size: int
    value: float
    comparison: Comparison
    nodes: int

    def __str__(self) -> str:
        return f"{self.name}: {self.seen}"

    @property
    def seen(self) -> str:
        """The comparison in one line without the node."""
        c = self.comparison
        return (
            f"{self.quantity} of size {self.size} is {amount(self.value, self.unit)}, {c.missing:.0%} "
            f"slower than {amount(c.reference or 0.0, self.unit)}, the median of {self.nodes} other nodes (limit "
            f"{c.limit:.0%})"
        )

    @property
    def observation(self) -> Observation:
        """The comparison as a failed observation of the host."""
        measured = {"quantity": self.quantity, "unit": self.unit, "size": self.size, "value": self.value}
        evidence = {**measured, "comparisons": [self.comparison.as_json()]}
        case = f"{self.quantity}, size {self.size}"
        host = Subject("host", (self.host,))
        return Observation("performance", host, "failed", self.seen, case, Work(operations=self.nodes), evidence)


@dataclass(frozen=True)
class AmongNodes:
    """The result of `among_nodes`.

    Attributes:
        compared: number of values of nodes that were compared.
        unknown: a line for each node, or quantity of one, that could not be compared, with the reason.
    """

    outliers: tuple[Outlier, ...]
    compared: int
    unknown: tuple[str, ...]


def among_nodes(reports: Sequence[RunReport]) -> AmongNodes:
    """Compare each node with the others of the same model and software, real with real, simulated with simulated.

    A node has one value for each quantity and size: the median over its GPUs or links. A single slow GPU or link does
    not move it; the verdict of the node's own run names that part.
    """
    groups: defaultdict[tuple[Any, ...], dict[tuple[int, int], list[Measurement]]] = defaultdict(
        lambda: defaultdict(list)
    )
    every = [(number, gpu) for number, report in enumerate(reports) for gpu in report.gpus]
    kinds = models(replace(gpu, number=place) for place, (_, gpu) in enumerate(every))
    model_of = {(number, gpu.number): kinds[place] for place, (number, gpu) in enumerate(every)}
    for number, report in enumerate(reports):
        hosts = {gpu.number: gpu.host for gpu in report.gpus}
        software = {host.number: tuple(host.software.get(name, "") for name in SOFTWARE) for host in report.hosts}
        for m in report.measurements:
            if m.subject.kind == "host" or useless(m):
                continue
            there = {hosts[member] for member in m.subject.members}
            model = {model_of[number, member] for member in m.subject.members}
            if len(there) == len(model) == 1:
                host = there.pop()
                kind = (m.subject.kind, len(m.subject.members), m.quantity, m.unit, m.size)
                groups[(bool(report.simulated), *model, software.get(host, ()), *kind)][number, host].append(m)
    outliers: list[Outlier] = []
    alone: dict[str, None] = {}
    undecided: dict[str, None] = {}
    compared = 0
    for group in groups.values():
        if len(group) <= LEAST_PEERS:
            alone.update((_name(reports, *node), None) for node in group)
            continue
        compared += len(group)
        standing, why = _stand_out(reports, group)
        outliers += standing
        undecided.update(dict.fromkeys(why))
    lines = [
        f"{name}: fewer than {LEAST_PEERS} other nodes have its model and software; not all was compared"
        for name in alone
    ]
    return AmongNodes(tuple(outliers), compared, (*lines, *undecided))


def _stand_out(
    reports: Sequence[RunReport], group: Mapping[tuple[int, int], Sequence[Measurement]]
) -> tuple[list[Outlier], list[str]]:
    """Return the nodes of a group that are too slow, and why others are undecided."""
    values = {node: median(m.value for m in several) for node, several in group.items()}
    found, why = [], []
    for node, several in group.items():
        first = several[0]
        others = [value for other, value in values.items() if other != node]
        comparison = beside_peers(values[node], others, first.unit, least_shortfall(first.kind))
        if comparison.outcome == "unknown":
            why.append(f"{_name(reports, *node)}: {first.quantity} of size {first.size}: {comparison.why}")
        if comparison.outcome == "failed":
            model = next(gpu.name for gpu in reports[node[0]].gpus if gpu.number == first.subject.members[0])
            found.append(
                Outlier(
                    report=node[0],
                    host=node[1],
                    name=_name(reports, *node),
                    model=model,
                    subject=first.subject.kind,
                    quantity=first.quantity,
                    unit=first.unit,
                    size=first.size,
                    value=values[node],
                    comparison=comparison,
                    nodes=len(others),
                )
            )
    if 2 * len(found) < len(group):
        return found, [] if found else why  # a named node explains why the others scatter
    half = ", ".join(one.name for one in found)
    return [], [*why, f"{found[0].quantity} of size {found[0].size}: half of the nodes are slow, none is named: {half}"]


def _name(reports: Sequence[RunReport], report: int, host: int) -> str:
    return next((h.name for h in reports[report].hosts if h.number == host), f"host {host}")
