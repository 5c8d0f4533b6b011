"""The kinds of findings: stable ids with severity, action and meaning, and the observations that each matches.

Programs act on ids, not on texts. The table is ``findings.toml``. ``python -m mgpu_check.acceptance.findings`` prints
that of docs/reference/findings.md.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Literal, get_args

from mgpu_check.acceptance.documents import convert
from mgpu_check.devices.observations import Observation, PartKind, Ruling, Subject
from mgpu_check.devices.telemetry.fields import peer_of
from mgpu_check.processes.rank_lists import grouped

Severity = Literal["warn", "config", "reset", "isolate", "replace"]
"""From the mildest: nothing to do now; change a setting; reset or restart; take out of service and examine; exchange a
part.
"""
SEVERITIES: tuple[Severity, ...] = get_args(Severity)

Action = Literal[
    "watch", "configure", "install", "reset-gpu", "restart-node", "inspect-cooling", "inspect-power", "inspect-node",
    "reseat", "replace-gpu", "replace-link",
]  # fmt: skip


@dataclass(frozen=True)
class FindingKind:
    """A kind of finding, and the observations that are of it.
    An observation matches if each attribute of the last group that is not empty has its value."""

    id: str
    severity: Severity
    action: Action  # what automation should do first
    ruling: Ruling  # what the finding means for the verdict, unless a policy says otherwise
    meaning: str  # what is wrong, as a sentence
    evidence: str  # what the observation's evidence and text contain
    do: str  # what a person should do
    do_for_host: str = ""  # the same if all GPUs of a host have it; "" if it is `do`
    checks: tuple[str, ...] = ()
    subjects: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()  # telemetry fields, by the evidence "field"; a pair field without its peer
    kinds: tuple[str, ...] = ()  # kinds of trouble, by the evidence "kind"
    key: str = ""  # a key of the evidence

    def matches(self, entry: Observation) -> bool:
        pairs = (
            (self.checks, entry.check),
            (self.subjects, entry.subject.kind),
            (self.fields, _field(entry)),
            (self.kinds, entry.evidence.get("kind")),
            ((self.key,) if self.key else (), self.key if self.key in entry.evidence else None),
        )
        return all(value in wanted for wanted, value in pairs if wanted)


def _field(entry: Observation) -> str:
    name = str(entry.evidence.get("field", ""))
    return name if peer_of(name) is None else name.rpartition("_")[0]


_TEXT = files("mgpu_check.acceptance").joinpath("findings.toml").read_text(encoding="utf-8")
KINDS: Mapping[str, FindingKind] = {
    name: convert({"id": name, **row}, FindingKind) for name, row in tomllib.loads(_TEXT).items()
}
"""All kinds by id. The first that matches an observation is its kind; the last matches all."""


@dataclass(frozen=True)
class ReportedFinding:
    """A finding of a run: all observations of one kind about one subject.

    Attributes:
        id: id of its kind.
        severity, action: of its kind.
        ruling: what it means for the verdict: "reject", "warn" or "accept".
        subject: what it is about.
        times: number of observations.
        seen: the text of the first of them.
        advice: what to do, in one line.
    """

    id: str
    severity: Severity
    action: Action
    ruling: Ruling
    subject: Subject
    times: int
    seen: str
    advice: str = ""


def identify(entry: Observation) -> FindingKind:
    return next(row for row in KINDS.values() if row.matches(entry))


def judged(entry: Observation, policy: Mapping[str, Ruling]) -> Observation:
    """Return a failed observation with the id of its finding and its ruling.
    A finding that is not rejected is no failure: its observation passes, and keeps its text."""
    if entry.outcome != "failed":
        return entry
    finding = identify(entry)
    ruling = policy.get(finding.id, finding.ruling)
    return replace(entry, finding=finding.id, ruling=ruling, outcome="failed" if ruling == "reject" else "passed")


_SUITED: Mapping[PartKind, Mapping[Action, Action]] = {
    "gpu": {"replace-link": "reseat"},
    "link": {"replace-gpu": "reseat", "reset-gpu": "reseat"},
    "host-link": {"replace-gpu": "reseat", "reset-gpu": "reseat", "replace-link": "reseat"},
    "host": {"replace-gpu": "inspect-node", "reset-gpu": "inspect-node", "replace-link": "inspect-node"},
}
"""Actions for parts of another kind -> the action that takes their place, by the kind of the part."""


def suited(action: Action, component_kind: PartKind) -> Action:
    """Return the action, or the one that takes its place for a part of this kind."""
    return _SUITED[component_kind].get(action, action)


def listed(observations: Iterable[Observation]) -> list[ReportedFinding]:
    """Return the findings of a run, the most severe first."""
    findings = []
    pairs = (((entry.finding, entry.subject), entry) for entry in observations if entry.finding)
    for (name, subject), entries in grouped(pairs):
        row, earliest, host = KINDS[name], entries[0], subject.kind == "host"
        advice = str(earliest.evidence.get("advice") or (host and row.do_for_host) or row.do)
        action = suited(row.action, "host") if host else row.action
        times, ruling = sum(entry.times for entry in entries), earliest.ruling or row.ruling
        findings.append(ReportedFinding(name, row.severity, action, ruling, subject, times, earliest.seen, advice))
    return sorted(findings, key=lambda finding: (-SEVERITIES.index(finding.severity), finding.id, finding.subject))


def table() -> str:
    head = ("id", "severity", "action", "verdict", "means", "evidence", "do")
    rows = []
    for row in KINDS.values():
        do = f"{row.do}. For a host: {row.do_for_host}" if row.do_for_host else row.do
        rows.append((f"`{row.id}`", row.severity, row.action, row.ruling, row.meaning, row.evidence, do))
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, ("---",) * len(head), *rows]) + "\n"


if __name__ == "__main__":
    print(table(), end="")
