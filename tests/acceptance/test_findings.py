"""Kinds of findings: every failure has one, pages list them, and a policy rules on them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mgpu_check.acceptance.findings import KINDS, SEVERITIES, identify, judged, listed, table
from mgpu_check.acceptance.plan import read_policy
from mgpu_check.devices.observations import Observation, Outcome, Subject
from mgpu_check.devices.telemetry.fields import FIELDS

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "findings.md"
CHANGED: dict[str, Any] = {"changed from": 18}
GPU, COPY, GROUP = Subject("gpu", (1,)), Subject("copy", (0, 1)), Subject("group", (0, 1))


def entry(check: str, subject: Subject = GPU, outcome: Outcome = "failed", **evidence: object) -> Observation:
    return Observation(check, subject, outcome, "something", evidence=evidence)


def test_the_page_has_the_table() -> None:
    assert PAGE.read_text().endswith(table()), "python -m mgpu_check.acceptance.findings prints it"


def test_ids_are_stable_words_and_the_last_kind_matches_all() -> None:
    assert all(re.fullmatch(r"MGPU-[A-Z]+(-[A-Z]+)*", name) for name in KINDS)
    *others, last = KINDS.values()
    assert identify(entry("inventory")) is last
    conditions = [(k.checks, k.subjects, k.fields, k.kinds, k.key) for k in others]
    assert all(any(one) for one in conditions) and len(set(conditions)) == len(conditions)
    assert all(kind.ruling == ("warn" if kind.severity == "warn" else "reject") for kind in KINDS.values())


@pytest.mark.parametrize(
    ("seen", "name"),
    [
        (entry("memory", kinds={}), "MEMORY-DATA"),
        (entry("soak", kinds={}), "MEMORY-DATA"),
        (entry("soak", lost=0.3), "GPU-FADES"),
        (entry("compute"), "COMPUTE-DATA"),
        (entry("links", COPY), "LINK-DATA"),
        (entry("training", Subject("upload", (1,))), "HOST-LINK-DATA"),
        (entry("memory", Subject("download", (1,))), "HOST-LINK-DATA"),
        (entry("collectives", GROUP), "COLLECTIVE-DATA"),
        (entry("performance", quantity="x"), "GPU-SLOW"),
        (entry("performance", COPY), "LINK-SLOW"),
        (entry("performance", Subject("download", (1,))), "HOST-LINK-SLOW"),
        (entry("performance", GROUP, collective=True), "COLLECTIVE-SLOW"),
        (entry("performance", COPY, collective=True), "COLLECTIVE-SLOW"),
        (entry("performance", GROUP, differ={}), "SPEED-DIFFERS"),
        (entry("performance", COPY, once=True, collective=True), "SPEED-ONCE"),
        (entry("memory", ended="died"), "GPU-NO-ANSWER"),
        (entry("training", GROUP, ended="hung"), "GROUP-NO-ANSWER"),
        (entry("inventory", COPY, field="p2p"), "PEER-ACCESS"),
        (entry("health", field="p2p_3", **CHANGED), "STATE-CHANGED"),
        (entry("health", field="nvlinks", **CHANGED), "NVLINK-DOWN"),
        (entry("inventory", Subject("host", (0,)), field="count"), "GPU-COUNT"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_observation_is_of_its_kind(seen: Observation, name: str) -> None:
    assert identify(seen).id == f"MGPU-{name}"


@pytest.mark.parametrize("name", FIELDS)
def test_each_field_that_a_check_judges_has_a_kind(name: str) -> None:
    if FIELDS[name].kind in ("fact", "state", "counter") and name != "ecc_corrected_ever":
        assert identify(entry("health", field=name)).id != "MGPU-OTHER"


def test_findings_are_listed_by_kind_and_subject_the_most_severe_first() -> None:
    seen = [entry("inventory", field="persistence"), entry("links", COPY), entry("links", COPY), entry("compute")]
    found = listed(judged(one, {}) for one in seen)
    assert [(one.id, one.times, one.ruling) for one in found] == [
        ("MGPU-COMPUTE-DATA", 1, "reject"),
        ("MGPU-LINK-DATA", 2, "reject"),
        ("MGPU-PERSISTENCE-MODE", 1, "warn"),
    ]
    assert [SEVERITIES.index(one.severity) for one in found] == [4, 4, 0]


def test_a_ruling_decides_whether_an_observation_has_failed() -> None:
    seen = entry("inventory", field="ecc")
    for ruling, outcome in (("accept", "passed"), ("warn", "passed"), ("reject", "failed")):
        one = judged(seen, {"MGPU-ECC-MODE": ruling})  # type: ignore[dict-item]
        assert (one.outcome, one.ruling, one.seen) == (outcome, ruling, "something")
    unknown = entry("inventory", outcome="unknown", field="ecc")
    assert judged(unknown, {"MGPU-ECC-MODE": "accept"}) == unknown


# Policy


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[findings", "is not TOML: "),
        ("", '[findings] is missing; give a table [findings] with lines such as MGPU-PERSISTENCE-MODE = "accept"'),
        ("findings = 3", "[findings] is missing"),
        ('[finding]\nMGPU-XID = "warn"', "finding is not known here; give a table [findings]"),
        ('[findings]\nMGPU-XIDS = "warn"', "findings.MGPU-XIDS is not the id of a finding; did you mean MGPU-XID"),
        ('[findings]\n"?" = "warn"', "findings.? is not the id of a finding; choose one of MGPU-GPU-NO-ANSWER, "),
        ('[findings]\nMGPU-XID = "ignore"', "findings.MGPU-XID is 'ignore'; choose one of accept, warn, reject"),
        ("[findings]\nMGPU-XID = true", "findings.MGPU-XID is True; choose one of accept, warn, reject"),
    ],
)
def test_a_wrong_policy_is_refused_with_what_is_valid(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "site.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(str(path))) as caught:
        read_policy(path)
    assert told in str(caught.value)


@pytest.mark.slow
def test_a_policy_decides_on_the_verdict_of_a_run(command: Callable[..., str], tmp_path: Path) -> None:
    policy = tmp_path / "site.toml"
    policy.write_text('[findings]\nMGPU-SRAM-THRESHOLD = "warn"\n')
    node = ("accept", "--gpus=2", "--simulate", "--gpu-level=quick", "-k", "inventory or health", "--report=node.json")
    text = command(*node, "--plant=sram-threshold:device=1", "--policy=site.toml")
    last = text.rstrip().splitlines()[-1]
    assert last.startswith("ACCEPTED on 2 SIMULATED cpu GPUs: 2 GPUs passed 2 checks; 1 warning")
    assert "  MGPU-SRAM-THRESHOLD: GPU 1: more uncorrectable errors in SRAM" in text
    assert "  policy: MGPU-SRAM-THRESHOLD = warn" in text and "--policy=site.toml" in text.partition("repeat: ")[2]
    (finding,) = json.loads((tmp_path / "node.json").read_text())["findings"]
    assert (finding["id"], finding["severity"], finding["action"]) == ("MGPU-SRAM-THRESHOLD", "replace", "replace-gpu")
    assert (finding["ruling"], finding["subject"]) == ("warn", {"kind": "gpu", "members": [1]})
