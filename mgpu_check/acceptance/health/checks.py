"""Judge the health of GPUs by telemetry from before, during and after a run.

An error of a query is a failure of its GPU. A field that a GPU does not support counts as unknown, and is not a
failure.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mgpu_check.acceptance.health.limits import SHARE, examine_limits
from mgpu_check.acceptance.health.xids import CONSEQUENCES, advice_on, meaning_of
from mgpu_check.acceptance.inventory.checks import is_under_load
from mgpu_check.devices.observations import Observation, Outcome, Subject, Work
from mgpu_check.devices.telemetry.fields import Value, field_of, names, peer_of
from mgpu_check.devices.telemetry.values import Snapshot, TelemetrySample, Trouble

_CHECK = "health"

TRANSFERS: Mapping[int, float] = {1: 2.5e9, 2: 5e9, 3: 8e9, 4: 16e9, 5: 32e9, 6: 64e9}
"""Bits per second on one lane of PCIe, in one direction, by generation (PCI Express Base Specification)."""

_COOLING = "look at fans, air flow, inlet temperature and heat sinks; compare with the other GPUs"

_STATES = (
    *("remap_pending", "remap_failed", "retired_pending", "repair_pending", "sram_threshold", "unrepairable_memory"),
)
"""States that mean trouble when they are True."""

_SINCE_LOADED = "ecc_uncorrected"
_MOST_RETIRED = 62  # DCGM and the field diagnostic call 63 retired pages a failure

_HELD = ("thermal_violation", "reliability_violation", "board_violation")
"""Counters of nanoseconds with clocks held down, other than by the power limit."""
_COUNTERS = (
    *_HELD,
    *("ecc_corrected", "ecc_uncorrected", "ecc_uncorrected_ever", "remapped_corrected", "remapped_uncorrected"),
    *("retired_pages", "pcie_replays", "pcie_nonfatal", "pcie_fatal"),
    *("nvlink_crc", "nvlink_replay", "nvlink_recovery", "nvlink_packets"),
)
"""Counters that must not grow, or only slowly."""

THROTTLED = {
    "hardware slowdown": _COOLING + "; look at power cables and supplies",
    "thermal (software)": _COOLING,
    "thermal (hardware)": _COOLING,
    "power brake": "look at the power supplies of the machine, and at what caps the power of the rack",
    "reliability": "look at the power supply of the GPU; if it stays, exchange the GPU",
}
"""Reason for low clocks that a healthy machine does not have -> advice.

The power limit is a normal reason, so it is absent.
"""

_BIT_ERRORS = 1e-12  # the rate per bit and lane that PCIe allows
_CORRECTED = 10  # DCGM's DCGM_LIMIT_MAX_SBE_RATE
_CRC_PER_SECOND = 100  # DCGM's DCGM_LIMIT_MAX_NVLINK_CRC_ERROR
_SLOWED = (0.1, 0.01)  # tolerated slowdown: the larger of these seconds and this share of the time
_WRAPS = 1 << 31


def allowed_growth(counter: str, seconds: float, gauges: Mapping[str, Value | None]) -> float:
    """Return the largest growth of a counter on a healthy GPU.

    Args:
        seconds: the time between the two readings.
        gauges: generation and width of the PCIe link.
    """
    if counter == "pcie_replays":
        generation, width = gauges.get("pcie_generation"), gauges.get("pcie_width")
        fastest = max(TRANSFERS.values())
        transfers = TRANSFERS.get(generation, fastest) if isinstance(generation, int) else fastest
        lanes = width if isinstance(width, int) else 16
        expected = _BIT_ERRORS * transfers * lanes * seconds
        return math.ceil(expected + 6 * math.sqrt(expected))
    if counter == "nvlink_crc":
        return _CRC_PER_SECOND * max(1.0, seconds)
    if counter == "ecc_corrected":
        return _CORRECTED
    if counter in _HELD:
        return 1e9 * max(_SLOWED[0], _SLOWED[1] * seconds)
    return 0


def examine_growth(before: Snapshot, after: Snapshot, case: str) -> list[Observation]:
    seconds = max(0.0, after.at - before.at)
    found = []
    for gpu in sorted(before.counters.keys() & after.counters.keys()):
        failed = []
        counted = 0
        for name in _COUNTERS:
            first, last = before.counters[gpu].get(name), after.counters[gpu].get(name)
            if first is None or last is None:
                continue
            counted += 1
            if name == "ecc_uncorrected_ever" and before.counters[gpu].get("ecc_uncorrected") is not None:
                continue  # "ecc_uncorrected" counts the same errors
            text = _grown(name, first, last, allowed_growth(name, seconds, after.gauges.get(gpu, {})))
            if text:
                evidence = {"field": name, "before": first, "after": last, "seconds": seconds}
                failed.append(_of(gpu, "failed", text, case, 1, evidence))
        found += failed or [_of(gpu, "passed", "", case, counted, {})]
    return found


def _grown(name: str, first: int, last: int, allowed: float) -> str:
    what = field_of(name).text
    if last < first and first > _WRAPS:
        last += 1 << 32
    if last < first:
        return (
            f"{what}: from {first} to {last}: the GPU was reset, or the driver loaded again, in the middle of the run"
        )
    if last - first <= allowed:
        return ""
    if name in _HELD:
        return f"{what}: {(last - first) / 1e9:.1f} s more"
    return f"{what}: {last - first} more (from {first} to {last})"


def examine_health(
    snapshots: Sequence[tuple[str, Snapshot]],
    samples: Iterable[TelemetrySample],
    troubles: Sequence[Trouble],
    *,
    host: int = 0,
) -> list[Observation]:
    """Judge the telemetry of the GPUs of one host in a run.

    Args:
        snapshots: at least two, in order of time, each with the name of the work before it; the first and the last are
            full.

    Returns:
        For each GPU failed observations, or a passed or unknown one; for the host errors that no single GPU causes.
    """
    (_, before), (_, after) = snapshots[0], snapshots[-1]
    gpus = sorted({*before.facts, *before.missing, *after.facts, *after.missing})
    found = examine_troubles(troubles, host)
    if before.absent or after.absent:
        return found + [_of(gpu, "unknown", after.absent or before.absent) for gpu in gpus]
    found += _fabric(after, host)
    found += _growth(snapshots)
    seen: dict[int, list[TelemetrySample]] = {gpu: [] for gpu in gpus}
    for sample in samples:
        seen.setdefault(sample.gpu, []).append(sample)
    for gpu in gpus:
        found += _states(gpu, before.facts.get(gpu, {}), after.facts.get(gpu, {}), before.counters.get(gpu, {}))
        found += _throttling(gpu, seen[gpu])
    found += examine_limits(before, after, seen)
    blamed = {entry.subject.members[0] for entry in found if entry.subject.kind == "gpu"}
    for gpu in gpus:
        missing = after.missing.get(gpu) or before.missing.get(gpu)
        if missing and gpu not in blamed:
            found.append(_of(gpu, "unknown", missing))
        elif not missing:  # also for a GPU with findings: they may be warnings only, and then its work counts
            found.append(_well(gpu, before, after, seen[gpu]))
    return found


def _growth(snapshots: Sequence[tuple[str, Snapshot]]) -> list[Observation]:
    """Return the counters that grew too much in one test, and those that grew too much only over all tests."""
    found = [
        entry
        for (_, before), (what, after) in itertools.pairwise(snapshots)
        for entry in examine_growth(before, after, f"in {what}")
        if entry.outcome == "failed"
    ]
    noted = {(entry.subject, entry.evidence["field"]) for entry in found}
    for entry in examine_growth(snapshots[0][1], snapshots[-1][1], "in the run"):
        if entry.outcome == "failed" and (entry.subject, entry.evidence["field"]) not in noted:
            found.append(entry)
    return found


def _well(gpu: int, before: Snapshot, after: Snapshot, samples: Sequence[TelemetrySample]) -> Observation:
    facts, counters = after.facts[gpu], after.counters[gpu]
    states = sum(facts.get(name) is not None for name in names("state"))
    counted = sum(counters.get(name) is not None for name in _COUNTERS)
    unknown = dict(after.unknown.get(gpu, {}))
    if not states + counted:
        return _of(gpu, "unknown", "nothing is known of its health: " + "; ".join(sorted(set(unknown.values()))))
    busy = sum(map(is_under_load, samples))
    if not busy:
        return _of(gpu, "unknown", "no sample was taken under load", "", states + counted)
    seconds = (after.at - before.at) * busy / len(samples)
    work = Work(operations=states + counted + len(samples), seconds=seconds)
    evidence = {"not known": unknown} if unknown else {}
    return Observation(_CHECK, Subject("gpu", (gpu,)), "passed", work=work, evidence=evidence)


def _states(
    gpu: int, before: Mapping[str, Value | None], after: Mapping[str, Value | None], counters: Mapping[str, int | None]
) -> list[Observation]:
    facts = after or before
    found = []

    def wrong(field: str, text: str, value: Any, **more: Any) -> None:
        found.append(_of(gpu, "failed", text, "", 1, {"field": field, "seen": value, **more}))

    for name in _STATES:
        if facts.get(name) is True:
            wrong(name, field_of(name).text, True)
    action = facts.get("recovery_action")
    if action not in (None, "none"):
        wrong("recovery_action", f"the driver asks: {action}", action, advice=f"{action}, and run again")
    if None not in (facts.get("ecc"), facts.get("ecc_pending")) and facts["ecc"] != facts["ecc_pending"]:
        text = f"ECC mode is {facts['ecc']}, and will be {facts['ecc_pending']} after a restart"
        wrong("ecc_pending", text, facts["ecc_pending"])
    errors = counters.get(_SINCE_LOADED)
    if errors:
        text = f"{field_of(_SINCE_LOADED).text}, before the run: {errors}"
        wrong(_SINCE_LOADED, text, errors)
    pages = counters.get("retired_pages")
    if pages is not None and pages > _MOST_RETIRED:
        wrong("retired_pages", f"{pages} retired pages", pages)
    for name, value in before.items():
        kind = field_of(name).kind
        if (
            kind not in ("state", "gauge")
            and name in after
            and None not in (value, after[name])
            and after[name] != value
        ):
            text = f"{field_of(name).text} has changed in the run: from {value} to {after[name]}"
            if peer_of(name) is not None:
                text = f"{text} (GPU {peer_of(name)})"
            wrong(name, text, after[name], **{"changed from": value})
    return found


def _fabric(after: Snapshot, host: int) -> list[Observation]:
    bad = {gpu: f for gpu, facts in after.facts.items() if (f := facts.get("fabric")) not in (None, "completed")}
    if not bad:
        return []
    states = ", ".join(sorted({str(state) for state in bad.values()}))
    evidence = {"field": "fabric", "seen": states}
    if len(bad) == len(after.facts) > 1:
        text = f"the NVLink fabric of its GPUs is {states}"
        return [Observation(_CHECK, Subject("host", (host,)), "failed", text, "fabric", Work(operations=1), evidence)]
    return [_of(gpu, "failed", f"its NVLink fabric is {state}", "fabric", 1, evidence) for gpu, state in bad.items()]


def _throttling(gpu: int, samples: Sequence[TelemetrySample]) -> list[Observation]:
    busy = [sample for sample in samples if is_under_load(sample)]
    reasons = Counter(
        reason
        for sample in busy
        if isinstance(text := sample.values.get("throttle"), str)
        for reason in text.split(", ")
        if reason in THROTTLED
    )
    found = []
    for reason, times in reasons.items():
        if times >= max(2.0, SHARE * len(busy)):
            hottest = max((t for s in busy if isinstance(t := s.values.get("temperature"), int)), default=None)
            heat = "" if hottest is None else f"; it was {hottest} degrees Celsius at most"
            text = f"clocks were held down under load: {reason}, in {times} of {len(busy)} samples{heat}"
            evidence = {"field": "throttle", "seen": reason, "samples": times, "advice": THROTTLED[reason]}
            found.append(_of(gpu, "failed", text, "clocks under load", len(busy), evidence))
    return found


def examine_troubles(troubles: Iterable[Trouble], host: int = 0) -> list[Observation]:
    return [entry for trouble in troubles for entry in _trouble(trouble, host)]


def _trouble(trouble: Trouble, host: int) -> list[Observation]:
    subject = Subject("host", (host,)) if trouble.gpu is None else Subject("gpu", (trouble.gpu,))
    outcome: Outcome = "failed"
    text = f"{trouble.field}: {trouble.text}" if trouble.field else trouble.text
    evidence = {"kind": trouble.kind, "field": trouble.field, "code": trouble.code, "at": trouble.at}
    if trouble.kind == "xid" and trouble.code is not None:
        text, evidence["advice"] = meaning_of(trouble.code), advice_on(trouble.code)
        if trouble.code in CONSEQUENCES:
            return []
    elif trouble.kind == "blocked":
        outcome, text = "unknown", f"{text}, and another query had hung before it"
    elif trouble.kind == "sampler":
        outcome = "unknown"
    elif trouble.kind == "lost":
        text = f"the driver says: {trouble.text}"
    elif trouble.kind == "error":
        text = f"the driver cannot report its {field_of(trouble.field).text}: {trouble.text}"
    elif trouble.kind == "hang":
        text = f"a query of the driver hangs ({trouble.field}): {trouble.text}"
    return [Observation(_CHECK, subject, outcome, text, "", Work(operations=1), evidence)]


def _of(
    gpu: int,
    outcome: Outcome,
    seen: str,
    case: str = "",
    operations: int = 0,
    evidence: Mapping[str, Any] | None = None,
) -> Observation:
    return Observation(_CHECK, Subject("gpu", (gpu,)), outcome, seen, case, Work(operations=operations), evidence or {})
