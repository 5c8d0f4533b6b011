"""Summarise the facts and the telemetry of one GPU in a few lines."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from mgpu_check.acceptance.report.figures import reasons
from mgpu_check.acceptance.report.view import bytes_text
from mgpu_check.acceptance.run_report import Gpu
from mgpu_check.devices.telemetry.fields import FIELDS, field_of, peer_of
from mgpu_check.devices.telemetry.values import TelemetrySample

_RANGES = ("temperature", "memory_temperature", "power", "sm_clock", "memory_clock")
_UNITS: Mapping[str, str] = {"degrees Celsius": "°C"}


def facts_of(gpu: Gpu) -> list[tuple[str, str]]:
    """Return the facts of a GPU other than its identity, as name and value in words."""
    rows = []
    for name, value in gpu.facts.items():
        try:
            field = field_of(name)
        except KeyError:
            text, unit = name, ""
        else:
            if field.kind == "identity":
                continue
            peer = peer_of(name)
            text, unit = field.text + ("" if peer is None else f", GPU {peer}"), field.unit
        if value is None or value == "":
            rows.append((text, "unknown" if value is None else "none"))
        elif isinstance(value, bool):
            rows.append((text, "yes" if value else "no"))
        else:
            rows.append(
                (text, bytes_text(value) if unit == "bytes" and isinstance(value, int) else f"{value} {unit}".rstrip())
            )
    return rows


def health_of(samples: Sequence[TelemetrySample]) -> list[tuple[str, str, bool]]:
    """Return the telemetry findings of a GPU: name, value, and whether it is a bad sign."""
    if not samples:
        return [("telemetry", "none", False)]
    rows: list[tuple[str, str, bool]] = []
    for name in _RANGES:
        values = _numbers(samples, name)
        if values:
            low, high = min(values), max(values)
            unit = _UNITS.get(FIELDS[name].unit, FIELDS[name].unit)
            rows.append(
                (FIELDS[name].text, f"{low:.4g} to {high:.4g} {unit}" if low != high else f"{low:.4g} {unit}", False)
            )
    generation, width = _numbers(samples, "pcie_generation"), _numbers(samples, "pcie_width")
    if generation and width:
        rows.append(("PCIe", f"generation {max(generation):g}, {max(width):g} lanes at most", False))
    held = list(dict.fromkeys(reason for sample in samples for reason in reasons(sample)))
    if held:
        share = sum(bool(reasons(sample)) for sample in samples) / len(samples)
        rows.append(("clocks held down", f"{', '.join(held)} ({share:.0%} of the time)", True))
    rows += _counters(samples)
    unknown = sorted(name for name, value in samples[-1].values.items() if value is None)
    if unknown:
        texts = ", ".join(FIELDS[name].text if name in FIELDS else name for name in unknown)
        rows.append(("not known to the device", texts, False))
    return rows


def _counters(samples: Sequence[TelemetrySample]) -> list[tuple[str, str, bool]]:
    grown = []
    known = False
    for name, field in FIELDS.items():
        values = _numbers(samples, name) if field.kind == "counter" else []
        known = known or bool(values)
        growth = sum(max(0.0, later - sooner) for sooner, later in itertools.pairwise(values))
        if growth:
            grown.append((field.text, f"{growth:g} more in this run, now {values[-1]:g} {field.unit}", True))
    return grown or ([("counters of errors", "none grew", False)] if known else [])


def _numbers(samples: Sequence[TelemetrySample], name: str) -> list[float]:
    values = (sample.values.get(name) for sample in samples)
    return [float(value) for value in values if isinstance(value, (int, float)) and not isinstance(value, bool)]
