"""Severity and action of an accusation are of the accused part, and no finding asks to exchange another part."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace

import pytest

from mgpu_check.acceptance.findings import KINDS, listed
from mgpu_check.acceptance.plan import CHECKS
from mgpu_check.acceptance.run_report import Accusation
from mgpu_check.acceptance.verdict import of_symptoms, remedy_for
from mgpu_check.devices.observations import Observation, Part, PartKind, Subject

ALL = Part("gpu", (1,)), Part("link", (1, 2)), Part("host-link", (1,)), Part("host", (0,))
PARTS: Mapping[PartKind, Part] = {part.kind: part for part in ALL}
SUBJECTS = (
    *(Subject("gpu", (1,)), Subject("gpu", (2,)), Subject("copy", (1, 2)), Subject("copy", (2, 1))),
    *(Subject("upload", (1,)), Subject("download", (1,)), Subject("group", (1, 2)), Subject("host", (0,))),
)
OF: Mapping[PartKind, str] = {"gpu": "gpu", "link": "copy", "host-link": "upload download", "host": "host"}
FOR_OTHERS: Mapping[PartKind, set[str]] = {
    "gpu": {"replace-link"},
    "link": {"replace-gpu", "reset-gpu"},
    "host-link": {"replace-gpu", "reset-gpu", "replace-link"},
    "host": {"replace-gpu", "reset-gpu", "replace-link"},
}
"""Actions that would exchange or reset a part of another kind."""
OF_SYMPTOMS = {"gpu": "reset-gpu", "link": "reseat", "host-link": "reseat", "host": "inspect-node"}


def failed(name: str, subject: Subject, check: str = "links") -> Observation:
    return Observation(check, subject, "failed", "wrong", finding=name, ruling="reject")


def is_of(subject: Subject, part: Part) -> bool:
    return subject.kind in OF[part.kind].split() and subject.members == part.members


@pytest.mark.parametrize("name", KINDS)
def test_the_action_is_for_a_part_of_this_kind(name: str) -> None:
    for part, subject, check in itertools.product(ALL, SUBJECTS, CHECKS):
        remedy = remedy_for(part, [failed(name, subject, check)])
        assert remedy.action not in FOR_OTHERS[part.kind], (part, subject, check)
        if check == "links":
            own = is_of(subject, part)
            assert remedy.severity == (KINDS[name].severity if own else "isolate")
            if not own:
                assert remedy.action == OF_SYMPTOMS[part.kind]
            elif KINDS[name].action not in FOR_OTHERS[part.kind]:
                assert remedy.action == KINDS[name].action


@pytest.mark.parametrize("own", ["MGPU-LINK-DATA", "MGPU-COMPUTE-DATA"])
@pytest.mark.parametrize("symptom", KINDS)
def test_a_symptom_that_is_more_severe_does_not_decide(symptom: str, own: str) -> None:
    part = PARTS["link" if own == "MGPU-LINK-DATA" else "gpu"]
    subject = Subject("copy", (1, 2)) if part.kind == "link" else Subject("gpu", (1,))
    remedy = remedy_for(part, [failed(symptom, Subject("group", (0, 1, 2))), failed(own, subject)])
    assert (remedy.severity, remedy.action) == (KINDS[own].severity, KINDS[own].action)


def accusation(part: Part, *numbers: int) -> Accusation:
    return Accusation(part, (), numbers)


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.ruling == "reject"])
def test_a_finding_whose_subject_is_not_accused_asks_to_inspect_the_node(name: str) -> None:
    for part, subject in itertools.product(ALL, SUBJECTS):
        entries = [failed(name, subject)]
        for accusations in ([], [accusation(part, 0)], [accusation(part)]):
            (finding,) = of_symptoms(listed(entries), entries, accusations)
            if KINDS[name].severity == "config" or (accusations and is_of(subject, part)):
                assert finding == listed(entries)[0]
            else:
                assert (finding.severity, finding.action) == ("isolate", "inspect-node")
                explained = bool(accusations and accusations[0].observations)
                assert (str(part) in finding.advice) == explained


def test_a_warning_keeps_its_action() -> None:
    entries = [replace(failed("MGPU-XID-PAST", Subject("gpu", (1,))), outcome="passed", ruling="warn")]
    assert list(of_symptoms(listed(entries), entries, [])) == listed(entries)
