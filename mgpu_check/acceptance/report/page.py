"""The report as a page: verdict, accused parts with their evidence, a card for each GPU, heat maps, telemetry."""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mgpu_check import pages
from mgpu_check.acceptance.report import view
from mgpu_check.acceptance.report.detected import detected
from mgpu_check.acceptance.report.figures import PANELS, over_time
from mgpu_check.acceptance.report.health import facts_of, health_of
from mgpu_check.acceptance.report.matrices import heat_maps, others
from mgpu_check.acceptance.report.picture import pictures
from mgpu_check.acceptance.report.values import encoded
from mgpu_check.acceptance.run_report import Gpu, RunReport
from mgpu_check.devices.observations import Observation, Outcome, Part
from mgpu_check.version import __version__

_TEMPLATE = Path(__file__).with_name("page.html")
_EVIDENCE = 20
"""Most observations to show for an accusation."""
_LONG = 200
"""Most characters of a value of the evidence."""
_CLASSES = {"ACCEPTED": "good", "REJECTED": "bad", "INCONCLUSIVE": "open", "SUSPECT": "open"}


@dataclass(frozen=True)
class Card:
    """The card of one GPU on the page.

    Attributes:
        accused: names of the accused parts that contain the GPU.
        wrong: the GPU itself is accused.
        identity: names and values that identify the GPU.
        outcomes: the worst outcome of the GPU alone, and of the GPU with others, in words.
        results: check, outcome, counts in words, and whether the subjects are pairs, groups or the host.
        health: name and value of each telemetry finding, and whether it is a bad sign.
    """

    gpu: Gpu
    host: str
    accused: list[str]
    wrong: bool
    identity: list[tuple[str, str]]
    outcomes: list[tuple[Outcome, str]]
    results: list[tuple[str, Outcome, str, bool]]
    health: list[tuple[str, str, bool]]


def render(report: RunReport) -> str:
    """Render the report as HTML. Needs the extra ``report``; see `pages.require`."""
    cards = _cards(report, _accused(report))
    return pages.render(
        _TEMPLATE,
        version=__version__,
        report=report,
        view=view,
        detected=detected,
        headline=view.headline(report),
        shade=_CLASSES[report.verdict.kind],
        shades=_CLASSES,
        accusations=[
            {
                "name": view.name_of(report, accusation.part),
                "who": view.describe_part(report, accusation.part),
                "gpus": list(_identities(report, accusation.part)),
                "accusation": accusation,
                "evidence": [_shown(entry) for entry in view.evidence_of(report, accusation)[:_EVIDENCE]],
                "of": len(accusation.observations),
            }
            for accusation in report.verdict.accusations
        ],
        facts=_facts([card.gpu for card in cards]),
        unexplained=[_shown(entry) for entry in view.failed_of(report, report.verdict)[:_EVIDENCE]],
        loose=len(report.verdict.unexplained),
        checks=view.checks_by_name(report),
        tallies=view.tallies(report),
        cards=cards,
        pictures=pictures(report),
        matrices=heat_maps(report),
        others=others(report),
        charts=_charts(report, _wrong(report)),
        outliers=view.among_hosts(report),
        folded=len(report.hosts) - len(view.in_detail(report)),
    )


def _shown(entry: Observation) -> dict[str, Any]:
    values = ((json.dumps(name), json.dumps(value)) for name, value in encoded(entry.evidence).items())
    lines = (f"{name}: {value[:_LONG]}{'...' * (len(value) > _LONG)}" for name, value in values)
    return {"entry": entry, "evidence": "\n".join(lines)}


def _facts(gpus: Sequence[Gpu]) -> list[tuple[str, list[tuple[str, list[int]]]]]:
    """Return for each fact its values, each with the GPUs that have it; without GPUs if all of them do."""
    found: dict[str, dict[str, list[int]]] = {}
    for gpu in gpus:
        for name, value in facts_of(gpu):
            found.setdefault(name, {}).setdefault(value, []).append(gpu.number)
    return [
        (name, [(value, [] if len(mine) == len(gpus) else mine) for value, mine in values.items()])
        for name, values in found.items()
    ]


def _identities(report: RunReport, part: Part) -> Iterator[list[tuple[str, str]]]:
    """Yield names and values that find each GPU of a part in the machine; nothing for a host."""
    known = {gpu.number: gpu for gpu in report.gpus}
    for member in dict.fromkeys(part.members) if part.kind != "host" else ():
        if gpu := known.get(member):
            slot = ("slot", f"PCI {gpu.pci or 'unknown'} of {view.host_name(report, gpu.host)}, cuda:{gpu.index}")
            uuid, serial, _ = view.identity(gpu)
            yield [(f"GPU {member}", gpu.name), slot, serial, uuid]
        else:
            yield [(f"GPU {member}", "unknown to this run")]


def _accused(report: RunReport) -> dict[int, list[str]]:
    """Return for each GPU the names of the accused parts that contain it, other than hosts."""
    found: dict[int, list[str]] = {gpu.number: [] for gpu in report.gpus}
    for accusation in report.verdict.accusations:
        part = accusation.part
        for number in part.members if part.kind != "host" else ():
            found.setdefault(number, []).append(view.name_of(report, part))
    return found


def _wrong(report: RunReport) -> set[int]:
    return {one.part.members[0] for one in report.verdict.accusations if one.part.kind == "gpu"}


def _cards(report: RunReport, accused: dict[int, list[str]]) -> list[Card]:
    own: dict[int, dict[str, list[Outcome]]] = {gpu.number: {} for gpu in report.gpus}
    shared: dict[int, dict[str, list[Outcome]]] = {gpu.number: {} for gpu in report.gpus}
    for entry in report.observations:
        among = own if entry.subject.kind in ("gpu", "upload", "download") else shared
        for number in view.gpus_of(report, entry.subject):
            if number in among:
                among[number].setdefault(entry.check, []).append(entry.outcome)
    by_gpu: dict[int, list[Any]] = {gpu.number: [] for gpu in report.gpus}
    for sample in report.samples:
        by_gpu.setdefault(sample.gpu, []).append(sample)
    wrong = _wrong(report)
    names = view.check_names(report)
    cards = []
    shown = {host.number for host in view.in_detail(report)}
    for gpu in (gpu for gpu in report.gpus if gpu.host in shown or len(report.gpus) <= view.MATRIX):
        results = _results(names, own[gpu.number], shared[gpu.number])
        ways = ((own[gpu.number], "alone"), (shared[gpu.number], "with others"))
        outcomes = [(view.Tally.of(itertools.chain(*some.values())).outcome, how) for some, how in ways if some]
        health = health_of(by_gpu[gpu.number])
        host = view.host_name(report, gpu.host)
        mine, known = accused[gpu.number], view.identity(gpu)
        cards.append(Card(gpu, host, mine, gpu.number in wrong, known, outcomes, results, health))
    return cards


def _results(
    names: Iterable[str], own: dict[str, list[Outcome]], shared: dict[str, list[Outcome]]
) -> list[tuple[str, Outcome, str, bool]]:
    rows: list[tuple[str, Outcome, str, bool]] = []
    for name in names:
        for seen, together in ((own.get(name), False), (shared.get(name), True)):
            if seen:
                tally = view.Tally.of(seen)
                others = [other for other in ("unknown", "skipped") if other != tally.outcome and getattr(tally, other)]
                parts = [f"{getattr(tally, tally.outcome)} of {tally.total}"]
                parts += [f"{getattr(tally, other)} {other}" for other in others]
                rows.append((name, tally.outcome, ", ".join(parts), together))
    return rows


def _charts(report: RunReport, accused: Collection[int]) -> list[dict[str, str]]:
    charts = []
    for host in view.in_detail(report):
        gpus = {gpu.number for gpu in report.gpus if gpu.host == host.number}
        samples = [sample for sample in report.samples if sample.gpu in gpus]
        if not any(isinstance(sample.values.get(key), (int, float)) for sample in samples for key in PANELS):
            continue
        name = view.host_name(report, host.number)
        checks = view.in_order(run for run in report.checks if run.host in (None, host.number))
        title = f"Temperature, power and clocks of the GPUs of {name} over time"
        drawn = over_time(samples, checks, accused, title)
        charts.append({"host": name, "svg": drawn, "text": _in_words(samples)})
    return charts


def _in_words(samples: Sequence[Any]) -> str:
    times = [sample.at for sample in samples]
    return f"{len(samples)} samples, from {view.seconds_text(min(times))} to {view.seconds_text(max(times))}"
