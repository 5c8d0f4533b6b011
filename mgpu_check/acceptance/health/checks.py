"""Judge the health of GPUs by telemetry from before, during and after a run.

An error of a query is a failure of its GPU. A field that a GPU does not support counts as unknown, and is not a
failure. Xids are the error numbers of NVIDIA's driver; the common ones are explained, with advice.

Limits are those of the device itself, of its power, of its links, and of the other GPUs. For them only samples under
load count, because an idle GPU lowers clocks, power and links. A limit that is not known judges nothing. The rows of
`_HOT` and the constants beside it are all limits.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from mgpu_check.acceptance.comparison import LEAST_PEERS
from mgpu_check.acceptance.inventory.checks import is_under_load
from mgpu_check.devices.observations import Observation, Outcome, Subject, Work
from mgpu_check.devices.telemetry.fields import Value, field_of, names, number_of, peer_of
from mgpu_check.devices.telemetry.sampler import Snapshot, TelemetrySample, Trouble, Values, values_of

CONSEQUENCES = frozenset((43, 45, 154))
"""Xids that follow from a killed process or from another Xid, and so accuse no GPU."""

_RESET = "reset the GPU and run again; if it comes back, exchange the GPU"
_REMAP = "reset the GPU, so that the remapping takes effect, and run again"
_LINK = "reset the GPU; look at the error counters of its NVLinks; re-seat it or its bridge"
_LINK += "; if it comes back, exchange it"
_FIRMWARE = "reset the GPU or restart the machine, update driver and firmware; if it comes back, exchange the GPU"
_CODE = "run again; if it comes back on this GPU alone, it is hardware: exchange it; if on others, it is software"

_XIDS: dict[int, tuple[str, str]] = {
    13: ("exception of the graphics engine", _CODE),
    31: ("page fault in the memory of the GPU", _CODE),
    32: ("invalid or corrupted push buffer", _CODE),
    38: ("error of the driver's firmware", _FIRMWARE),
    43: ("the GPU stopped processing", _CODE),
    45: ("clean-up after an earlier error, or after a process was killed", ""),
    46: ("the GPU stopped processing", _RESET),
    48: ("uncorrectable error of memory (double bit)", _RESET),
    61: ("breakpoint of an internal micro-controller", _RESET),
    62: ("halt of an internal micro-controller", _RESET),
    63: ("a row or page of memory was marked for remapping or retirement", _REMAP),
    64: ("a row or page of memory could not be remapped or retired", "exchange the GPU"),
    69: ("class error of the graphics engine", _CODE),
    74: ("error of an NVLink", _LINK),
    79: (
        "the GPU has fallen off the bus",
        "power the machine off and on; re-seat the GPU, look at its power and riser; if it comes back, exchange it",
    ),
    92: ("high rate of corrected errors of memory", _RESET),
    94: ("uncorrectable error of memory, contained", _REMAP),
    95: ("uncorrectable error of memory, not contained", _REMAP),
    109: ("timeout of a switch between contexts", _RESET),
    110: ("fault of the security engine", _RESET),
    119: ("timeout of the GPU's system processor (GSP)", _FIRMWARE),
    120: ("error of the GPU's system processor (GSP)", _FIRMWARE),
    121: ("error of the link between chips (C2C)", "restart the machine; if it comes back, exchange the module"),
    136: ("error while an NVLink was trained", _LINK),
    137: ("error of an access over NVLink", _LINK),
    140: ("uncorrectable error of memory or of a cache", _RESET),
    143: ("the GPU could not be initialized", _FIRMWARE),
    **dict.fromkeys(range(144, 151), ("error of an NVLink", _LINK)),
    154: ("the recovery action of the GPU has changed", "take the recovery action of the GPU"),
    156: ("a resource of the GPU was retired", _REMAP),
    157: ("a resource of the GPU could not be retired", "exchange the GPU"),
    158: ("fatal timeout of the GPU", _RESET),
}


def meaning_of(xid: int) -> str:
    return f"Xid {xid}: {_XIDS[xid][0]}" if xid in _XIDS else f"Xid {xid}"


def advice_on(xid: int) -> str:
    return _XIDS[xid][1] if xid in _XIDS else f"look it up in NVIDIA's catalog of Xids; {_RESET}"


def examine_past_xids(xids_of_gpus: Mapping[int, Mapping[int, int]]) -> list[Observation]:
    observations = []
    for gpu, xids in sorted(xids_of_gpus.items()):
        for xid, times in sorted(xids.items()):
            if xid not in CONSEQUENCES:
                text = f"{meaning_of(xid)}, {times} times in the kernel log before the run"
                evidence = {"kind": "past xid", "code": xid, "times": times, "advice": advice_on(xid)}
                observations.append(_of(gpu, "failed", text, "kernel log", 1, evidence))
    return observations


_CHECK = "health"
_CASE = "limits under load"

_HOT = (
    ("temperature", "temperature_slowdown", "the temperature at which it slows itself down"),
    ("memory_temperature", "memory_temperature_max", "the highest temperature of its memory"),
)
"""Gauge, limit of the device, and what the limit is."""

SHARE = 0.01  # of the samples under load, and at least two, because one may be a momentary event
_SLOW_SHARE = 0.25  # of the samples: the generation of PCIe follows the load, and may lag
_LAST = 3  # samples at the end of the load: a link that has trained down there stays down
_LEAST_CLOCK = {"sm_clock": 0.5, "memory_clock": 0.75}
"""Share of the highest clock that a GPU must reach once under load: a power cap may halve the SM clock; memory keeps
its clock, but for the few percent of consumer cards."""
_CAPPED = ("power cap", "application clocks", "sync boost", "display clocks")
"""Reasons for a low SM clock that a person or the power budget has chosen."""
_BESIDE = 0.75  # of the median of the others: GPUs of one model differ by 22 % at most (Sinha et al., SC 2022)
_POWER_OVER = 1.1  # of the enforced limit; a sample is a mean over up to a second
_HALF = 0.5


def examine_limits(
    before: Snapshot, after: Snapshot, samples: Mapping[int, Sequence[TelemetrySample]]
) -> list[Observation]:
    """Return a failed observation for each limit that a GPU misses; some of them are warnings by their kind. `before`
    and `after` are full snapshots at the start and at the end of the run."""
    busy = {gpu: [sample for sample in mine if is_under_load(sample)] for gpu, mine in samples.items()}
    observations: list[Observation] = []
    for gpu, facts in sorted(after.facts.items()):
        mine = busy.get(gpu, [])
        for examine in (_hot, _slow_clocks, _power, _pcie, _nvlinks):
            observations += examine(gpu, facts, mine)
        observations += _memory(gpu, facts, before.counters.get(gpu, {}))
    return observations + _beside_others(before, after, busy)


def _hot(gpu: int, facts: Values, busy: Sequence[TelemetrySample]) -> Iterator[Observation]:
    for gauge, limit, limit_text in _HOT:
        highest = number_of(facts.get(limit))
        over = [value for value in values_of(busy, gauge) if highest is not None and value >= highest]
        if highest is not None and _often(over, busy, SHARE):
            text = f"{field_of(gauge).text} was {max(over):g} degrees Celsius under load"
            text += f", and {limit_text} is {highest:g}"
            yield _of_limit(gpu, text + _share(over, busy), gauge, max(over), highest)
    margin = [value for value in values_of(busy, "temperature_margin") if value <= 0]
    if _often(margin, busy, SHARE):
        text = "it was as hot as its slowdown limit under load" + _share(margin, busy)
        yield _of_limit(gpu, text, "temperature", min(margin), 0)


def _slow_clocks(gpu: int, facts: Values, busy: Sequence[TelemetrySample]) -> Iterator[Observation]:
    texts = (str(sample.values.get("throttle") or "") for sample in busy)
    reasons = list(dict.fromkeys(reason for text in texts for reason in text.split(", ") if reason))
    for clock, share in _LEAST_CLOCK.items():
        able, clocks = number_of(facts.get(f"{clock}_max")), values_of(busy, clock)
        if able is None or len(clocks) < 2 or max(clocks) >= share * able:
            continue
        if clock == "sm_clock" and any(reason in _CAPPED for reason in reasons):
            continue
        text = f"{field_of(clock).text} was {max(clocks):g} MHz at most under load, and can be {able:g}"
        text += f"; the driver gives {', '.join(reasons) or 'no reason'}"
        yield _of_limit(gpu, text, clock, max(clocks), able)


def _power(gpu: int, facts: Values, busy: Sequence[TelemetrySample]) -> Iterator[Observation]:
    limit, default = number_of(facts.get("power_limit")), number_of(facts.get("power_limit_default"))
    if limit is None:
        return
    over = [value for value in values_of(busy, "power") if value > _POWER_OVER * limit]
    if _often(over, busy, SHARE):
        text = f"it drew {max(over):.0f} W, and its power limit is {limit:g} W" + _share(over, busy)
        yield _of_limit(gpu, text, "power", max(over), limit)
    if default is not None and limit < default:
        text = f"power limit is {limit:g} W, and the default of the board is {default:g} W"
        yield _of_limit(gpu, text, "power_limit_default", limit, default)


def _pcie(gpu: int, facts: Values, busy: Sequence[TelemetrySample]) -> Iterator[Observation]:
    """Judge PCIe over all load of the run: inventory has seen it at the start only."""
    for name, share in (("pcie_width", SHARE), ("pcie_generation", _SLOW_SHARE)):
        able, readings = number_of(facts.get(f"{name}_max")), values_of(busy, name)
        if able is None:
            continue
        below = [value for value in readings if value < able]
        stays = len(readings) >= _LAST and max(readings[-_LAST:]) < able
        if stays or _often(below, busy, share):
            text = f"{field_of(name).text} was {min(below):g} under load, and can be {able:g}" + _share(below, busy)
            yield _of_limit(gpu, text, name, min(below), able)


def _nvlinks(gpu: int, facts: Values, busy: Sequence[TelemetrySample]) -> Iterator[Observation]:
    up = values_of(busy, "nvlinks_up")
    most = max([*up, number_of(facts.get("nvlinks")) or 0.0])
    down = [value for value in up if value < most]
    if down:  # a single time, because a link that goes down is an event and no noise
        text = f"only {min(down):g} of {most:g} NVLinks were active under load" + _share(down, busy)
        yield _of_limit(gpu, text, "nvlinks_up", min(down), most)


def _memory(gpu: int, facts: Values, counters: Mapping[str, int | None]) -> Iterator[Observation]:
    for name, few in (("without_spares", "no spare rows left"), ("low_on_spares", "few spare rows left")):
        if banks := number_of(facts.get(f"banks_{name}")):
            yield _of_limit(gpu, f"{banks:g} banks of memory have {few}", f"banks_{name}", banks, 0)
    rows = [counters.get(f"remapped_{error_type}") or 0 for error_type in ("corrected", "uncorrected")]
    if sum(rows):
        text = f"{sum(rows)} rows of memory were remapped before the run, {rows[1]} of them after uncorrected errors"
        yield _of_limit(gpu, text, "remapped_rows", sum(rows), 0)
    ever, loaded = counters.get("ecc_uncorrected_ever") or 0, counters.get("ecc_uncorrected") or 0
    if ever > loaded:  # those since the driver was loaded have a finding of their own
        text = f"{ever} uncorrected memory errors in its life, before the run"
        yield _of_limit(gpu, text, "ecc_uncorrected_ever", ever, 0, **{"before the run": True})


def _throttled_seconds(gpu: int, before: Snapshot, after: Snapshot) -> float | None:
    """Return for how long the power limit held clocks down; None if it is not known."""
    earlier, later = (snapshot.counters.get(gpu, {}).get("power_violation") for snapshot in (before, after))
    return None if earlier is None or later is None or later < earlier else (later - earlier) / 1e9


def _beside_others(
    before: Snapshot, after: Snapshot, busy: Mapping[int, Sequence[TelemetrySample]]
) -> list[Observation]:
    """Compare each GPU with the others of its model: their load is alike, so clocks and power are, too."""
    observations: list[Observation] = []
    for gpus in after.by_model():
        for gauge, field, least in (("sm_clock", "sm_clock", _BESIDE), ("power", "power_low", _HALF)):
            readings = {gpu: values_of(busy.get(gpu, []), gauge) for gpu in gpus}
            medians = {gpu: median(series) for gpu, series in readings.items() if len(series) >= 2}
            for gpu, mine, usual in _with_others(medians):
                if mine < least * usual:
                    text = f"{field_of(gauge).text} was {mine:g} under load, and that of the others {usual:g} (medians)"
                    observations.append(_of_limit(gpu, text, field, mine, usual))
        seconds = max(1e-9, after.at - before.at)
        throttled = {gpu: _throttled_seconds(gpu, before, after) for gpu in gpus}
        shares = {gpu: time / seconds for gpu, time in throttled.items() if time is not None}
        for gpu, mine, usual in _with_others(shares):
            if mine > usual + _HALF:
                text = f"its power limit held clocks down for {mine:.0%} of the time, and the others for {usual:.0%}"
                observations.append(_of_limit(gpu, text, "power_violation", mine, usual))
    return observations


def _with_others(values: Mapping[int, float]) -> Iterator[tuple[int, float, float]]:
    """Yield each GPU with its value and the median of the others, if there are enough others."""
    for gpu, mine in values.items():
        others = [value for peer, value in values.items() if peer != gpu]
        if len(others) >= LEAST_PEERS:
            yield gpu, mine, median(others)


def _often(matching: Sequence[float], samples: Sequence[TelemetrySample], share: float) -> bool:
    return len(matching) >= max(2.0, share * len(samples))


def _share(matching: Sequence[float], samples: Sequence[TelemetrySample]) -> str:
    return f", in {len(matching)} of {len(samples)} samples"


def _of_limit(gpu: int, message: str, field: str, value: float, limit: float, **details: Any) -> Observation:
    return _of(gpu, "failed", message, _CASE, 1, {"field": field, "seen": value, "limit": limit, **details})


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
    """Return the largest growth of a counter on a healthy GPU in the `seconds` between two readings. `gauges` are
    generation and width of the PCIe link."""
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
    observations = []
    for gpu in sorted(before.counters.keys() & after.counters.keys()):
        failed, counted = [], 0
        for name in _COUNTERS:
            initial, last = before.counters[gpu].get(name), after.counters[gpu].get(name)
            if initial is None or last is None:
                continue
            counted += 1
            if name == "ecc_uncorrected_ever" and before.counters[gpu].get("ecc_uncorrected") is not None:
                continue  # "ecc_uncorrected" counts the same errors
            if text := _grown(name, initial, last, allowed_growth(name, seconds, after.gauges.get(gpu, {}))):
                evidence = {"field": name, "before": initial, "after": last, "seconds": seconds}
                failed.append(_of(gpu, "failed", text, case, 1, evidence))
        observations += failed or [_of(gpu, "passed", "", case, counted)]
    return observations


def _grown(name: str, initial: int, last: int, allowed: float) -> str | None:
    label = field_of(name).text
    if last < initial and initial > _WRAPS:
        last += 1 << 32
    if last < initial:
        cause = "the GPU was reset, or the driver loaded again, in the middle of the run"
        return f"{label}: from {initial} to {last}: {cause}"
    if last - initial <= allowed:
        return None
    if name in _HELD:
        return f"{label}: {(last - initial) / 1e9:.1f} s more"
    return f"{label}: {last - initial} more (from {initial} to {last})"


def examine_health(
    snapshots: Sequence[tuple[str, Snapshot]],
    samples: Iterable[TelemetrySample],
    troubles: Sequence[Trouble],
    *,
    host: int = 0,
) -> list[Observation]:
    """Judge the telemetry of the GPUs of one host in a run.

    There are at least two `snapshots`, in order of time, each with the name of the work before it; the first and the
    last are full. Return failed observations for each GPU, or a passed or unknown one, and for the host errors that no
    single GPU causes.
    """
    (_, before), (_, after) = snapshots[0], snapshots[-1]
    gpus = sorted({*before.facts, *before.missing, *after.facts, *after.missing})
    observations = examine_troubles(troubles, host)
    if before.absent or after.absent:
        return observations + [_of(gpu, "unknown", after.absent or before.absent) for gpu in gpus]
    observations += _fabric(after, host)
    observations += _growth(snapshots)
    samples_by_gpu: dict[int, list[TelemetrySample]] = {gpu: [] for gpu in gpus}
    for sample in samples:
        samples_by_gpu.setdefault(sample.gpu, []).append(sample)
    for gpu in gpus:
        observations += _states(gpu, before.facts.get(gpu, {}), after.facts.get(gpu, {}), before.counters.get(gpu, {}))
        observations += _throttling(gpu, samples_by_gpu[gpu])
    observations += examine_limits(before, after, samples_by_gpu)
    blamed = {entry.subject.members[0] for entry in observations if entry.subject.kind == "gpu"}
    for gpu in gpus:
        missing = after.missing.get(gpu) or before.missing.get(gpu)
        if missing and gpu not in blamed:
            observations.append(_of(gpu, "unknown", missing))
        elif not missing:  # also for a GPU with findings: they may be warnings only, and then its work counts
            observations.append(_well(gpu, before, after, samples_by_gpu[gpu]))
    return observations


def _growth(snapshots: Sequence[tuple[str, Snapshot]]) -> list[Observation]:
    """Return the counters that grew too much in one test, and those that grew too much only over all tests."""
    observations = []
    for (_, before), (test_name, after) in itertools.pairwise(snapshots):
        entries = examine_growth(before, after, f"in {test_name}")
        observations += [entry for entry in entries if entry.outcome == "failed"]
    noted = {(entry.subject, entry.evidence["field"]) for entry in observations}
    for entry in examine_growth(snapshots[0][1], snapshots[-1][1], "in the run"):
        if entry.outcome == "failed" and (entry.subject, entry.evidence["field"]) not in noted:
            observations.append(entry)
    return observations


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
    observations = []

    def wrong(field: str, text: str, value: Any, **details: Any) -> None:
        observations.append(_of(gpu, "failed", text, "", 1, {"field": field, "seen": value, **details}))

    for name in _STATES:
        if facts.get(name) is True:
            wrong(name, field_of(name).text, True)
    action = facts.get("recovery_action")
    if action not in (None, "none"):
        wrong("recovery_action", f"the driver asks: {action}", action, advice=f"{action}, and run again")
    if None not in (facts.get("ecc"), facts.get("ecc_pending")) and facts["ecc"] != facts["ecc_pending"]:
        text = f"ECC mode is {facts['ecc']}, and will be {facts['ecc_pending']} after a restart"
        wrong("ecc_pending", text, facts["ecc_pending"])
    if errors := counters.get(_SINCE_LOADED):
        wrong(_SINCE_LOADED, f"{field_of(_SINCE_LOADED).text}, before the run: {errors}", errors)
    pages = counters.get("retired_pages")
    if pages is not None and pages > _MOST_RETIRED:
        wrong("retired_pages", f"{pages} retired pages", pages)
    for name, value in before.items():
        kept = field_of(name).kind not in ("state", "gauge") and name in after
        if kept and None not in (value, after[name]) and after[name] != value:
            text = f"{field_of(name).text} has changed in the run: from {value} to {after[name]}"
            if (peer := peer_of(name)) is not None:
                text = f"{text} (GPU {peer})"
            wrong(name, text, after[name], **{"changed from": value})
    return observations


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
    texts = [str(sample.values.get("throttle") or "") for sample in busy]
    reasons = Counter(reason for text in texts for reason in text.split(", ") if reason in THROTTLED)
    observations = []
    for reason, times in reasons.items():
        if times >= max(2.0, SHARE * len(busy)):
            hottest = max((t for s in busy if isinstance(t := s.values.get("temperature"), int)), default=None)
            heat = "" if hottest is None else f"; it was {hottest} degrees Celsius at most"
            text = f"clocks were held down under load: {reason}, in {times} of {len(busy)} samples{heat}"
            evidence = {"field": "throttle", "seen": reason, "samples": times, "advice": THROTTLED[reason]}
            observations.append(_of(gpu, "failed", text, "clocks under load", len(busy), evidence))
    return observations


def examine_troubles(troubles: Iterable[Trouble], host: int = 0) -> list[Observation]:
    return [entry for trouble in troubles for entry in _trouble(trouble, host)]


_TROUBLES = {
    "blocked": "{field}: {text}, and another query had hung before it",
    "lost": "the driver says: {text}",
    "error": "the driver cannot report its {label}: {text}",
    "hang": "a query of the driver hangs ({field}): {text}",
}


def _trouble(trouble: Trouble, host: int) -> list[Observation]:
    field, code = trouble.field, trouble.code
    label = field_of(field).text if trouble.kind == "error" else ""
    text = _TROUBLES.get(trouble.kind, "{field}: {text}").format(field=field, text=trouble.text, label=label)
    evidence = {"kind": trouble.kind, "field": field, "code": code, "at": trouble.at}
    if trouble.kind == "xid" and code is not None:
        text, evidence["advice"] = meaning_of(code), advice_on(code)
        if code in CONSEQUENCES:
            return []
    outcome: Outcome = "unknown" if trouble.kind in ("blocked", "sampler") else "failed"
    subject = Subject("host", (host,)) if trouble.gpu is None else Subject("gpu", (trouble.gpu,))
    return [Observation(_CHECK, subject, outcome, text.removeprefix(": "), "", Work(operations=1), evidence)]


def _of(gpu: int, outcome: Outcome, text: str, case: str = "", count: int = 0, evidence: Any = None) -> Observation:
    return Observation(_CHECK, Subject("gpu", (gpu,)), outcome, text, case, Work(operations=count), evidence or {})
