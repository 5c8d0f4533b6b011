"""The account as a page: verdict, accused parts with their evidence, a card for each GPU, heat maps, telemetry."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mgpu_check import pages
from mgpu_check.acceptance.account import Account, Gpu
from mgpu_check.acceptance.report import view
from mgpu_check.acceptance.report.figures import PANELS, over_time
from mgpu_check.acceptance.report.health import facts_of, health_of
from mgpu_check.acceptance.report.matrices import heat_maps, others
from mgpu_check.acceptance.report.values import encoded
from mgpu_check.devices.observations import Observation, Outcome
from mgpu_check.version import __version__

__all__ = ["render"]

_TEMPLATE = Path(__file__).with_name("page.html")
_EVIDENCE = 20
"""Most observations to show for an accusation."""
_CLASSES = {"ACCEPTED": "good", "REJECTED": "bad", "INCONCLUSIVE": "open"}


@dataclass(frozen=True)
class Card:
    """The card of one GPU on the page.

    Attributes:
        host: name of the host.
        accused: names of the accused parts that contain the GPU.
        wrong: the GPU itself is accused.
        identity: names and values that identify the GPU.
        results: check, outcome, counts in words, and whether the subjects are pairs, groups or the host.
        health: name and value of each telemetry finding, and whether it is a bad sign.
    """

    gpu: Gpu
    host: str
    accused: list[str]
    wrong: bool
    identity: list[tuple[str, str]]
    results: list[tuple[str, Outcome, str, bool]]
    health: list[tuple[str, str, bool]]


def render(account: Account) -> str:
    """Render the account as HTML. Needs the extra ``report``; see `pages.require`."""
    accused = _accused(account)
    return pages.render(
        _TEMPLATE,
        version=__version__,
        account=account,
        view=view,
        headline=view.headline(account),
        shade=_CLASSES[account.verdict.kind],
        shades=_CLASSES,
        accusations=[
            {
                "name": view.name_of(account, accusation.part),
                "who": view.describe_part(account, accusation.part),
                "accusation": accusation,
                "evidence": [_shown(entry) for entry in view.evidence_of(account, accusation)[:_EVIDENCE]],
                "of": len(accusation.observations),
            }
            for accusation in account.verdict.accusations
        ],
        facts={gpu.number: facts_of(gpu) for gpu in account.gpus},
        unexplained=[_shown(entry) for entry in view.failed_of(account, account.verdict)[:_EVIDENCE]],
        loose=len(account.verdict.unexplained),
        checks=view.checks_by_name(account),
        tallies=view.tallies(account),
        cards=_cards(account, accused),
        matrices=heat_maps(account),
        others=others(account),
        charts=_charts(account, _wrong(account)),
        outliers=view.among_hosts(account),
        folded=len(account.hosts) - len(view.in_detail(account)),
    )


def _shown(entry: Observation) -> dict[str, Any]:
    evidence = json.dumps(encoded(entry.evidence), indent=1) if entry.evidence else ""
    return {"entry": entry, "evidence": evidence}


def _accused(account: Account) -> dict[int, list[str]]:
    """Return for each GPU the names of the accused parts that contain it, other than hosts."""
    found: dict[int, list[str]] = {gpu.number: [] for gpu in account.gpus}
    for accusation in account.verdict.accusations:
        part = accusation.part
        for number in part.members if part.kind != "host" else ():
            found.setdefault(number, []).append(view.name_of(account, part))
    return found


def _wrong(account: Account) -> set[int]:
    """Return the accused GPUs."""
    return {one.part.members[0] for one in account.verdict.accusations if one.part.kind == "gpu"}


def _cards(account: Account, accused: dict[int, list[str]]) -> list[Card]:
    own: dict[int, dict[str, list[Outcome]]] = {gpu.number: {} for gpu in account.gpus}
    shared: dict[int, dict[str, list[Outcome]]] = {gpu.number: {} for gpu in account.gpus}
    for entry in account.observations:
        among = own if entry.subject.kind in ("gpu", "upload", "download") else shared
        for number in view.gpus_of(account, entry.subject):
            if number in among:
                among[number].setdefault(entry.check, []).append(entry.outcome)
    by_gpu: dict[int, list[Any]] = {gpu.number: [] for gpu in account.gpus}
    for sample in account.samples:
        by_gpu.setdefault(sample.gpu, []).append(sample)
    wrong = _wrong(account)
    names = view.check_names(account)
    cards = []
    shown = {host.number for host in view.in_detail(account)}
    for gpu in (gpu for gpu in account.gpus if gpu.host in shown or len(account.gpus) <= view.MATRIX):
        results = _results(names, own[gpu.number], shared[gpu.number])
        health = health_of(by_gpu[gpu.number])
        host = view.host_name(account, gpu.host)
        cards.append(Card(gpu, host, accused[gpu.number], gpu.number in wrong, view.identity(gpu), results, health))
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


def _charts(account: Account, accused: Collection[int]) -> list[dict[str, str]]:
    charts = []
    for host in view.in_detail(account):
        gpus = {gpu.number for gpu in account.gpus if gpu.host == host.number}
        samples = [sample for sample in account.samples if sample.gpu in gpus]
        if not any(isinstance(sample.values.get(key), (int, float)) for sample in samples for key in PANELS):
            continue
        name = view.host_name(account, host.number)
        checks = view.in_order(run for run in account.checks if run.host in (None, host.number))
        title = f"Temperature, power and clocks of the GPUs of {name} over time"
        drawn = over_time(samples, checks, accused, title)
        charts.append({"host": name, "svg": drawn, "text": _in_words(samples)})
    return charts


def _in_words(samples: Sequence[Any]) -> str:
    times = [sample.at for sample in samples]
    return f"{len(samples)} samples, from {view.seconds_text(min(times))} to {view.seconds_text(max(times))}"
