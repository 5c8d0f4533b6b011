"""Write reports to files, in the format of the suffix; JSON is written and read here.

A JSON file is shortened: what went right is counted, what went wrong is kept. A node of 4 GPUs has a thousand
observations that passed, and a thousand samples. ``--evidence`` keeps them all. The dataclass `RunReport` is the format
of JSON. ``schema-1.json`` in this directory describes it for other programs; ``python -m
mgpu_check.acceptance.report.files`` writes that file.
"""

from __future__ import annotations

import json
import math
import pkgutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from mgpu_check import pages
from mgpu_check.acceptance.application import SUFFIXES
from mgpu_check.acceptance.documents import DocumentType, read_document, write_whole
from mgpu_check.acceptance.health.checks import THROTTLED
from mgpu_check.acceptance.run_report import Accusation, RunReport, Verdict
from mgpu_check.devices.observations import Observation, Work
from mgpu_check.devices.telemetry.fields import FIELDS, Value
from mgpu_check.devices.telemetry.sampler import TelemetrySample
from mgpu_check.processes.rank_lists import grouped

_VERSION = 1  # rises when a reader of the previous version would misread a file. Within a version, fields may be added.
FORM = DocumentType(
    "mgpu-check acceptance", _VERSION, RunReport, "`mgpu-check accept --report=FILE.json` writes such a file"
)
SCHEMA = Path(__file__).with_name(f"schema-{_VERSION}.json")


def to_json(report: RunReport) -> str:
    """Return the report as a JSON document, each observation, measurement and sample on a line of its own."""
    document = {"format": FORM.name, "version": FORM.version, **encoded(report)}
    entries = []
    for key, value in document.items():
        text = json.dumps(value)
        if isinstance(value, list) and value:
            text = "[\n  " + ",\n  ".join(json.dumps(row) for row in value) + "\n ]"
        entries.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(entries) + "\n}\n"


def encoded(value: Any) -> Any:
    """Return `value` in types of JSON, other types as text, so that no evidence can make the report fail."""
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: encoded(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): encoded(element) for key, element in value.items()}
    if isinstance(value, (list, tuple)):
        return [encoded(element) for element in value]
    return str(value)


def read(path: Path) -> RunReport:
    """Read a JSON report, or raise ValueError that names the invalid field."""
    return FORM.decoded(read_document(path), str(path))


def schema() -> str:
    url = f"https://github.com/mgpu-check/mgpu-check/blob/main/mgpu_check/acceptance/report/{SCHEMA.name}"
    return json.dumps({"$id": url, **FORM.schema(f"{FORM.name}, version {FORM.version}")}, indent=1) + "\n"


if __name__ == "__main__":
    SCHEMA.write_text(schema())


_WHOLE = 8  # observations of a check, a subject and an outcome other than passed that are kept unchanged
_SAMPLES = 48  # samples of a GPU, and at most as many again with clocks that are held down
PANELS = {"temperature": "°C", "power": "W", "sm_clock": "MHz"}  # telemetry fields to draw over time, with their units
_KEPT = {*PANELS} | {"throttle", "utilization", "pcie_generation", "pcie_width"}


def reasons(sample: TelemetrySample) -> list[str]:
    """Return the throttle reasons of a sample that are signs of a defect."""
    return [reason for reason in str(sample.values.get("throttle") or "").split(", ") if reason in THROTTLED]


def brief(report: RunReport) -> RunReport:
    """Return the report with like observations joined, and with fewer samples."""
    observations, kept_index = _joined(report.observations)
    return replace(
        report,
        observations=tuple(observations),
        samples=tuple(_thinned(report.samples)),
        verdict=_verdict(report.verdict, kept_index),
        verdicts={host: _verdict(verdict, kept_index) for host, verdict in report.verdicts.items()},
    )


def _joined(observations: Sequence[Observation]) -> tuple[list[Observation], dict[int, int]]:
    """Return the kept observations, and for each index of `observations` the index of the one that has its case."""
    kept: list[Observation] = []
    kept_index: dict[int, int] = {}
    groups: dict[tuple[object, ...], list[int]] = {}
    for number, entry in enumerate(observations):
        mine = groups.setdefault((entry.check, entry.subject, entry.outcome, entry.finding), [])
        full_count = 0 if entry.outcome in ("passed", "skipped") and not entry.finding else _WHOLE
        if len(mine) <= full_count:  # the last of the group stands for all later ones
            mine.append(len(kept))
            whole = len(mine) <= full_count
            kept.append(entry if whole else replace(entry, evidence={}, suspects=(), work=Work(), times=0))
        kept_index[number] = mine[-1]
        if len(mine) > full_count:
            last = kept[mine[-1]]
            kept[mine[-1]] = replace(last, work=last.work + entry.work, times=last.times + entry.times)
    for index, entry in enumerate(kept):
        if entry.times != 1:
            case = f"{entry.times} cases, such as: {entry.case}".removesuffix(", such as: ")
            kept[index] = replace(entry, case=case)
    return kept, kept_index


def _verdict(verdict: Verdict, kept_index: Mapping[int, int]) -> Verdict:
    def moved(numbers: Sequence[int]) -> tuple[int, ...]:
        return tuple(dict.fromkeys(kept_index[number] for number in numbers))

    def accusation(original: Accusation) -> Accusation:
        return replace(original, observations=moved(original.observations), shared=moved(original.shared))

    accusations = tuple(accusation(original) for original in verdict.accusations)
    return replace(verdict, accusations=accusations, unexplained=moved(verdict.unexplained))


def _thinned(samples: Sequence[TelemetrySample]) -> list[TelemetrySample]:
    """Return evenly chosen samples of each GPU, with all values in the last, and counters where they have changed."""
    thinned = []
    for _, mine in grouped((sample.gpu, sample) for sample in samples):
        counted: Mapping[str, Value | None] = {}
        throttled = [index for index, sample in enumerate(mine) if reasons(sample)]
        few = range(0, len(mine), -(-len(mine) // _SAMPLES))
        for index in sorted({*few, *throttled[:: max(1, -(-len(throttled) // _SAMPLES))], len(mine) - 1}):
            sample = mine[index]
            counters = {name: value for name, value in sample.values.items() if FIELDS[name].kind == "counter"}
            is_complete = counters != counted or index == len(mine) - 1
            values = {name: value for name, value in sample.values.items() if is_complete or name in _KEPT}
            counted = counters
            thinned.append(replace(sample, values=values))
    return sorted(thinned, key=lambda sample: (sample.at, sample.gpu))


_WRITERS = {".html": "page:render", ".json": "files:to_json", ".prom": "summary:to_prometheus"}
"""Suffix -> the module beside this one, and its function that renders a report. A module is imported when needed."""
assert tuple(_WRITERS) == SUFFIXES


def check_paths(paths: Iterable[Path | str]) -> None:
    """Raise ValueError, with the file and the remedy, unless a report can be written to each path."""
    for path in map(Path, paths):
        _writer(path)
        check_place(path)
        if path.suffix.lower() == ".html":
            pages.require(f"the report {path.name}")


def check_place(path: Path) -> None:
    """Raise ValueError unless a file can be written at `path`."""
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ValueError(f"there is no directory {folder} for {path.name}; make it, or choose another one")
    if path.is_dir():
        raise ValueError(f"{path} is a directory; give the name of a file in it, such as {path / 'report.html'}")
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        text = f"{path} cannot be written: {error.strerror}"
        raise ValueError(f"{text}; choose a directory that you may write to") from None


def clear(paths: Iterable[Path | str]) -> None:
    """Remove reports of earlier runs, so that they cannot be mistaken for those of a run that was killed."""
    for path in map(Path, paths):
        path.unlink(missing_ok=True)


def shortened(path: Path, report: RunReport) -> RunReport:
    """Return what the file has without ``--evidence``: in JSON, like observations are joined; pages have no more."""
    return brief(report) if path.suffix.lower() == ".json" else report


def write(path: Path | str, report: RunReport) -> None:
    """Write a report atomically, in the format of the suffix of `path`, in upper or lower case."""
    path = Path(path)
    if path.suffix.lower() == ".html":
        pages.require(f"the report {path.name}")
    write_whole(path, _writer(path)(report))


def _writer(path: Path) -> Callable[[RunReport], str]:
    if path.suffix.lower() not in _WRITERS:
        *suffixes, last = SUFFIXES
        raise ValueError(f"{path} does not end in {', '.join(suffixes)} or {last}; choose one of them")
    return pkgutil.resolve_name(f"{__package__}.{_WRITERS[path.suffix.lower()]}")
