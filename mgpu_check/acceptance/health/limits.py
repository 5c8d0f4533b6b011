"""Judge telemetry against limits: of the device itself, of its power, of its links, and of the other GPUs.

Only samples under load count, because an idle GPU lowers clocks, power and links. A limit that is not known judges
nothing. The rows of `_HOT` and the constants below are all limits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from mgpu_check.acceptance.inventory.checks import is_under_load
from mgpu_check.acceptance.robust import LEAST_PEERS
from mgpu_check.devices.observations import Observation, Subject, Work
from mgpu_check.devices.telemetry.fields import Value, field_of
from mgpu_check.devices.telemetry.values import Snapshot, TelemetrySample, Values

_CHECK = "health"
_CASE = "limits under load"

_HOT = (
    ("temperature", "temperature_slowdown", "the temperature at which it slows itself down"),
    ("memory_temperature", "memory_temperature_max", "the highest temperature of its memory"),
)
"""Gauge, limit of the device, and what the limit is."""

SHARE = 0.01  # of the samples under load, and at least two, because one may be a momentary event
_SLOW_SHARE = 0.25  # of the samples: the generation of PCIe follows the load, and may lag
_LAST = 3
"""Samples at the end of the load: a link that has trained down there stays down."""
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
    """Return a failed observation for each limit that a GPU misses; some of them are warnings by their kind.

    Args:
        before, after: full snapshots at the start and at the end of the run.
    """
    busy = {gpu: [sample for sample in mine if is_under_load(sample)] for gpu, mine in samples.items()}
    found: list[Observation] = []
    for gpu, facts in sorted(after.facts.items()):
        mine = busy.get(gpu, [])
        for examine in (_hot, _slow_clocks, _power, _pcie, _nvlinks):
            found += examine(gpu, facts, mine)
        found += _memory(gpu, facts, before.counters.get(gpu, {}))
    return found + _beside_others(before, after, busy)


def _hot(gpu: int, facts: Values, busy: Sequence[TelemetrySample]) -> Iterator[Observation]:
    for gauge, limit, what in _HOT:
        highest = _number(facts.get(limit))
        over = [value for value in _values(busy, gauge) if highest is not None and value >= highest]
        if highest is not None and _often(over, busy, SHARE):
            text = f"{field_of(gauge).text} was {max(over):g} degrees Celsius under load, and {what} is {highest:g}"
            yield _of(gpu, text + _share(over, busy), gauge, max(over), highest)
    margin = [value for value in _values(busy, "temperature_margin") if value <= 0]
    if _often(margin, busy, SHARE):
        text = "it was as hot as its slowdown limit under load" + _share(margin, busy)
        yield _of(gpu, text, "temperature", min(margin), 0)


def _slow_clocks(gpu: int, facts: Values, busy: Sequence[TelemetrySample]) -> Iterator[Observation]:
    texts = (str(sample.values.get("throttle") or "") for sample in busy)
    reasons = list(dict.fromkeys(reason for text in texts for reason in text.split(", ") if reason))
    for clock, share in _LEAST_CLOCK.items():
        able, seen = _number(facts.get(f"{clock}_max")), _values(busy, clock)
        if able is None or len(seen) < 2 or max(seen) >= share * able:
            continue
        if clock == "sm_clock" and any(reason in _CAPPED for reason in reasons):
            continue
        text = f"{field_of(clock).text} was {max(seen):g} MHz at most under load, and can be {able:g}"
        text += f"; the driver gives {', '.join(reasons) or 'no reason'}"
        yield _of(gpu, text, clock, max(seen), able)


def _power(gpu: int, facts: Values, busy: Sequence[TelemetrySample]) -> Iterator[Observation]:
    limit, default = _number(facts.get("power_limit")), _number(facts.get("power_limit_default"))
    if limit is None:
        return
    over = [value for value in _values(busy, "power") if value > _POWER_OVER * limit]
    if _often(over, busy, SHARE):
        text = f"it drew {max(over):.0f} W, and its power limit is {limit:g} W" + _share(over, busy)
        yield _of(gpu, text, "power", max(over), limit)
    if default is not None and limit < default:
        text = f"power limit is {limit:g} W, and the default of the board is {default:g} W"
        yield _of(gpu, text, "power_limit_default", limit, default)


def _pcie(gpu: int, facts: Values, busy: Sequence[TelemetrySample]) -> Iterator[Observation]:
    """Judge PCIe over all load of the run: inventory has seen it at the start only."""
    for name, share in (("pcie_width", SHARE), ("pcie_generation", _SLOW_SHARE)):
        able = _number(facts.get(f"{name}_max"))
        seen = _values(busy, name)
        below = [value for value in seen if able is not None and value < able]
        stays = len(seen) >= _LAST and all(able is not None and value < able for value in seen[-_LAST:])
        if able is not None and (stays or _often(below, busy, share)):
            text = f"{field_of(name).text} was {min(below):g} under load, and can be {able:g}" + _share(below, busy)
            yield _of(gpu, text, name, min(below), able)


def _nvlinks(gpu: int, facts: Values, busy: Sequence[TelemetrySample]) -> Iterator[Observation]:
    up = _values(busy, "nvlinks_up")
    most = max([*up, _number(facts.get("nvlinks")) or 0.0])
    down = [value for value in up if value < most]
    if down:  # a single time, because a link that goes down is an event and no noise
        text = f"only {min(down):g} of {most:g} NVLinks were active under load" + _share(down, busy)
        yield _of(gpu, text, "nvlinks_up", min(down), most)


def _memory(gpu: int, facts: Values, counters: Mapping[str, int | None]) -> Iterator[Observation]:
    """Judge what the memory of a GPU has been through before the run."""
    spent, low = (_number(facts.get(f"banks_{name}")) for name in ("without_spares", "low_on_spares"))
    if spent:
        text = f"{spent:g} banks of memory have no spare rows left"
        yield _of(gpu, text, "banks_without_spares", spent, 0)
    if low:
        yield _of(gpu, f"{low:g} banks of memory have few spare rows left", "banks_low_on_spares", low, 0)
    rows = [counters.get(f"remapped_{kind}") or 0 for kind in ("corrected", "uncorrected")]
    if sum(rows):
        text = f"{sum(rows)} rows of memory were remapped before the run, {rows[1]} of them after uncorrected errors"
        yield _of(gpu, text, "remapped_rows", sum(rows), 0)
    ever, loaded = counters.get("ecc_uncorrected_ever") or 0, counters.get("ecc_uncorrected") or 0
    if ever > loaded:  # those since the driver was loaded have a finding of their own
        text = f"{ever} uncorrected memory errors in its life, before the run"
        yield _of(gpu, text, "ecc_uncorrected_ever", ever, 0, **{"before the run": True})


def _held(gpu: int, name: str, before: Snapshot, after: Snapshot) -> float | None:
    """Return the seconds that a counter of nanoseconds grew; None if it is not known."""
    first, last = (snapshot.counters.get(gpu, {}).get(name) for snapshot in (before, after))
    return None if first is None or last is None or last < first else (last - first) / 1e9


def _beside_others(
    before: Snapshot, after: Snapshot, busy: Mapping[int, Sequence[TelemetrySample]]
) -> list[Observation]:
    """Compare each GPU with the others of its model: their load is alike, so clocks and power are, too."""
    found: list[Observation] = []
    for gpus in after.by_model():
        for gauge, field, least in (("sm_clock", "sm_clock", _BESIDE), ("power", "power_low", _HALF)):
            seen = {gpu: _values(busy.get(gpu, []), gauge) for gpu in gpus}
            for gpu, mine, usual in _with_others({gpu: median(some) for gpu, some in seen.items() if len(some) >= 2}):
                if mine < least * usual:
                    text = f"{field_of(gauge).text} was {mine:g} under load, and that of the others {usual:g} (medians)"
                    found.append(_of(gpu, text, field, mine, usual))
        seconds = max(1e-9, after.at - before.at)
        held = {gpu: _held(gpu, "power_violation", before, after) for gpu in gpus}
        for gpu, mine, usual in _with_others({gpu: time / seconds for gpu, time in held.items() if time is not None}):
            if mine > usual + _HALF:
                text = f"its power limit held clocks down for {mine:.0%} of the time, and the others for {usual:.0%}"
                found.append(_of(gpu, text, "power_violation", mine, usual))
    return found


def _with_others(values: Mapping[int, float]) -> Iterator[tuple[int, float, float]]:
    """Yield each GPU with its value and the median of the others, if there are enough others."""
    for gpu, mine in values.items():
        others = [value for other, value in values.items() if other != gpu]
        if len(others) >= LEAST_PEERS:
            yield gpu, mine, median(others)


def _values(samples: Sequence[TelemetrySample], gauge: str) -> list[float]:
    return [number for sample in samples if (number := _number(sample.values.get(gauge))) is not None]


def _number(value: Value | None) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _often(some: Sequence[float], samples: Sequence[TelemetrySample], share: float) -> bool:
    return len(some) >= max(2.0, share * len(samples))


def _share(some: Sequence[float], samples: Sequence[TelemetrySample]) -> str:
    return f", in {len(some)} of {len(samples)} samples"


def _of(gpu: int, seen: str, field: str, value: float, limit: float, **more: Any) -> Observation:
    evidence = {"field": field, "seen": value, "limit": limit, **more}
    return Observation(_CHECK, Subject("gpu", (gpu,)), "failed", seen, _CASE, Work(operations=1), evidence)
