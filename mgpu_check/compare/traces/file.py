"""Write and read the trace of a run: one zip file. `docs/reference/traces.md` has the format."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

from mgpu_check.compare.alignment import KINDS, of_kind
from mgpu_check.compare.outputs import OutputSummary
from mgpu_check.compare.trace import Parameter, State, Step, TensorSummary, Trace, TraceError
from mgpu_check.compare.traces.run import RecordedRun
from mgpu_check.processes.rank_lists import grouped
from mgpu_check.version import __version__

FORMAT = "mgpu-check run"
VERSION = 2
"""Raised whenever a number changes its meaning: version 1 had the bits of each element in its own dtype."""
_HEAD, _STEPS, _MOVED, _VALUES = "trace.json", "steps.jsonl", "rounding.jsonl", "values.safetensors"
_OF_ENTRIES = ("name", "shape", "dtype", "device", "order", "sharded", "over")


def write_run(path: Path, run: RecordedRun) -> None:
    """Write a run. An interrupted write leaves an earlier file unchanged."""
    head = {
        "format": FORMAT,
        "version": VERSION,
        "mgpu_check": __version__,
        "script": run.script,
        "world_size": run.world,
        "steps": max(len(trace.steps) for trace in run.ranks),
        "stopped_after": run.limit,
        "environment": run.environment,
        "divided": run.divided,
        "not_assembled": run.reasons,
        "partial": run.partial,
        "holders": run.holders,
        "parts": {name: _numbered(parts) for name, parts in run.parts.items()},
    }
    made = path.with_name(f".{path.name}.{os.getpid()}")  # replaces the file when it is complete
    try:
        with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as out:
            out.writestr(_HEAD, json.dumps(head, indent=1) + "\n")
            out.writestr(_STEPS, "\n".join(map(_line, _lines(run.ranks))) + "\n")
            if run.moved:
                out.writestr(_MOVED, "\n".join(map(_line, _lines(run.moved))) + "\n")
            if run.values is not None:
                out.writestr(_VALUES, run.values, zipfile.ZIP_STORED)
        os.replace(made, path)
    except BaseException:
        made.unlink(missing_ok=True)
        raise


def _numbered(parts: Mapping[int, object]) -> dict[int, int]:
    """Return the parts as numbers, equal for ranks with the same elements."""
    known = list(dict.fromkeys(parts.values()))
    return {rank: known.index(part) for rank, part in parts.items()}


def _line(value: Mapping[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"))


def _lines(ranks: Sequence[Trace]) -> Iterator[dict[str, Any]]:
    held: Mapping[int, Mapping[str, Any]]
    yield {"ranks": [trace.rank for trace in ranks], "world": ranks[0].world}
    for kind in ("parameters", "states"):
        for name in dict.fromkeys(name for trace in ranks for name in getattr(trace, kind)):
            held = {
                trace.rank: _described(getattr(trace, kind)[name]) for trace in ranks if name in getattr(trace, kind)
            }
            yield {kind.removesuffix("s"): _by_rank(held)}
    for name in dict.fromkeys(name for trace in ranks for name in trace.modules):
        yield {
            "module": _by_rank({t.rank: {"name": name, "dtype": t.modules[name]} for t in ranks if name in t.modules})
        }
    for trace in ranks:
        yield from ({"event": event, "rank": trace.rank} for event in trace.events)
    earlier: dict[int, dict[str, Any]] = {}
    for number in range(max(len(trace.steps) for trace in ranks)):
        steps = {trace.rank: trace.steps[number] for trace in ranks if number < len(trace.steps)}
        yield {
            "step": number + 1,
            "of": {
                rank: {
                    "optimizer": step.optimizer,
                    "losses": step.losses,
                    "samples": step.samples,
                    "columns": step.columns,
                    **_changed(earlier, rank, step),
                }
                for rank, step in steps.items()
            },
            **{
                kind: {
                    name: _by_rank({r: _numbers(own[name]) for r, own in held.items() if name in own})
                    for name in dict.fromkeys(name for own in held.values() for name in own)
                }
                for kind in KINDS
                if (held := {rank: of_kind(step, kind) for rank, step in steps.items()})
            },
            "output": {
                name: _by_rank({r: list(astuple(s.outputs[name])) for r, s in steps.items() if name in s.outputs})
                for name in dict.fromkeys(name for step in steps.values() for name in step.outputs)
            },
        }


def _described(entry: Parameter) -> dict[str, Any]:
    extra = {"of": entry.of, "key": entry.key, "constant": entry.constant} if isinstance(entry, State) else {}
    return {key: getattr(entry, key) for key in _OF_ENTRIES} | extra


def _numbers(summary: TensorSummary | None) -> list[float | None] | None:
    return None if summary is None else [summary.bits, summary.norm, *summary.sums, *summary.samples]


def _by_rank(values: Mapping[int, Any]) -> list[tuple[list[int], Any]]:
    """Return each distinct value with its ranks."""
    found = grouped((json.dumps(value), rank) for rank, value in values.items())
    return [(ranks, values[ranks[0]]) for _, ranks in found]


def _changed(earlier: dict[int, dict[str, Any]], rank: int, step: Step) -> dict[str, Any]:
    """Return the options of the step's parameters, without those that equal the options at an earlier step."""
    known = earlier.setdefault(rank, {})
    fresh = {name: options for name, options in step.options.items() if known.get(name) != options}
    known.update(fresh)
    groups = grouped((json.dumps(options), name) for name, options in fresh.items())
    return {"groups": [{"options": fresh[names[0]], "parameters": names} for _, names in groups]} if groups else {}


def read_run(path: Path) -> RecordedRun:
    """Read a run.

    Raises:
        TraceError: the file does not exist, is no trace of a run, is damaged, or has another version.
    """
    try:
        with zipfile.ZipFile(path) as file:
            return _read(file, path.name)
    except (FileNotFoundError, IsADirectoryError):
        raise TraceError(f"there is no file {path}; make one with mgpu-check record --out={path} -- SCRIPT") from None
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror or error}") from None
    except TraceError as error:
        raise TraceError(f"{path} {error}") from None
    except zipfile.BadZipFile:
        raise TraceError(
            f"{path} is no trace of a run, or is truncated; give a file that mgpu-check record has written"
        ) from None
    except Exception as error:  # damaged content may raise any error
        raise TraceError(
            f"{path} is a damaged trace ({type(error).__name__}: {error}); record it again with mgpu-check record"
        ) from None


def _read(file: zipfile.ZipFile, name: str) -> RecordedRun:
    if _HEAD not in file.namelist():
        raise TraceError(f"has no {_HEAD}: it is no trace of a run; give a file that mgpu-check record has written")
    head = json.loads(file.read(_HEAD))
    if head["format"] != FORMAT:
        raise TraceError(f"has the format {head['format']!r}; this command reads {FORMAT!r}")
    if head["version"] != VERSION:
        again = "record it again, with mgpu-check record or compare --update-golden"
        do = "install a newer mgpu-check" if head["version"] > VERSION else again
        raise TraceError(
            f"has version {head['version']} of the format, written by mgpu-check {head['mgpu_check']}; mgpu-check "
            f"{__version__} reads version {VERSION}: {do}"
        )
    there = file.namelist()
    return RecordedRun(
        name,
        head["script"],
        _traces(file.read(_STEPS)),
        head["environment"],
        _traces(file.read(_MOVED)) if _MOVED in there else [],
        head["divided"],
        head["not_assembled"],
        {name: [tuple(ranks) for ranks in holders] for name, holders in head["holders"].items()},
        {name: {int(rank): part for rank, part in parts.items()} for name, parts in head["parts"].items()},
        head["partial"],
        file.read(_VALUES) if _VALUES in there else None,
        head["stopped_after"],
    )


def is_run(path: Path) -> bool:
    """Return whether a path names a trace of a run: by the end of its name, or by its content."""
    if path.suffix == ".trace":
        return True
    try:
        with zipfile.ZipFile(path) as file:
            return _HEAD in file.namelist()
    except (OSError, zipfile.BadZipFile):
        return False


def _traces(data: bytes) -> list[Trace]:
    first, *lines = map(json.loads, data.splitlines())
    traces = {rank: Trace(rank, first["world"]) for rank in first["ranks"]}
    options: dict[int, dict[str, Any]] = {rank: {} for rank in traces}
    for line in lines:
        if "step" in line:
            _add_step(line, traces, options)
        elif "event" in line:
            traces[line["rank"]].events.append(line["event"])
        else:
            for ranks, one in line.get("parameter", ()):
                for rank in ranks:
                    traces[rank].parameters[one["name"]] = Parameter(**_entry(one))
            for ranks, one in line.get("module", ()):
                for rank in ranks:
                    traces[rank].modules[one["name"]] = one["dtype"]
            for ranks, one in line.get("state", ()):
                for rank in ranks:
                    traces[rank].states[one["name"]] = State(**_entry(one))
    return list(traces.values())


def _add_step(line: Mapping[str, Any], traces: Mapping[int, Trace], options: Mapping[int, dict[str, Any]]) -> None:
    for rank, own in ((int(rank), own) for rank, own in line["of"].items()):
        traces[rank].steps.append(_step(own, options[rank]))
    for kind in KINDS:
        for name, values in line[kind].items():
            for ranks, numbers in values:
                summary = None if numbers is None else TensorSummary.of(numbers)
                for rank in ranks:
                    _kind_of(traces[rank].steps[-1], kind)[name] = summary
    for name, values in line["output"].items():
        for ranks, numbers in values:
            for rank in ranks:
                traces[rank].steps[-1].outputs[name] = OutputSummary(*numbers)
    for rank in map(int, line["of"]):
        step = traces[rank].steps[-1]
        step.options = {name: step.options[name] for name in step.gradients if name in step.options}


def _entry(one: Mapping[str, Any]) -> dict[str, Any]:
    return {**one, "shape": tuple(one["shape"]), "over": tuple(one["over"])}


def _kind_of(step: Step, kind: str) -> dict[str, Any]:
    found: dict[str, dict[str, Any]] = {
        "before": step.before,
        "gradient": step.gradients,
        "parameter": step.parameters,
        "state": step.states,
    }
    return found[kind]


def _step(own: Mapping[str, Any], options: dict[str, Any]) -> Step:
    for group in own.get("groups", ()):
        options.update(dict.fromkeys(group["parameters"], group["options"]))
    return Step(own["optimizer"], own["losses"], own["samples"], own["columns"], {}, {}, {}, options=dict(options))
