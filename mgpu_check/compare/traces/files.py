"""A recorded run and its trace file, one zip file. `docs/reference/traces.md` has the format.

A run has a view as a run on one device, which another run can be compared with. The file may have values of tensors, in
the format safetensors: "STEP/gradient/NAME" and "STEP/parameter/NAME". The package safetensors comes with the extra
``mgpu-check[trace]``, and is imported when values are written or read.
"""

from __future__ import annotations

import json
import math
import os
import zipfile
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

from mgpu_check.compare.alignment import KINDS, Samples, of_kind
from mgpu_check.compare.assembly import Assembly, assembled
from mgpu_check.compare.trace import (
    OutputSummary,
    Parameter,
    State,
    Step,
    TensorSummary,
    Trace,
    TraceError,
    named_state,
    whole_output,
)
from mgpu_check.processes.rank_lists import grouped
from mgpu_check.version import __version__


@dataclass
class RecordedRun:
    """A run of a script, with whole tensors.

    Attributes:
        name: its name in reports: "a.trace".
        script: the script and its arguments.
        ranks: the trace of each rank.
        environment: what may change the results of the script.
        moved: the traces of a run that differs by rounding alone; empty if rounding was not measured.
        divided, reasons, holders, parts, partial: see `mgpu_check.compare.assembly.Assembly`.
        values: values of tensors, in the format safetensors; None without values.
        limit: the run was stopped at this step; None: it ran to its end.
    """

    name: str
    script: str
    ranks: list[Trace]
    environment: Mapping[str, Any] = field(default_factory=dict)
    moved: list[Trace] = field(default_factory=list)
    divided: bool = False
    reasons: Mapping[str, str] = field(default_factory=dict)
    holders: Mapping[str, Sequence[tuple[int, ...]]] = field(default_factory=dict)
    parts: Mapping[str, Mapping[int, object]] = field(default_factory=dict)
    partial: Mapping[str, str] = field(default_factory=dict)
    values: bytes | None = None
    limit: int | None = None

    @property
    def world(self) -> int:
        return len(self.ranks)


def whole(traces: Sequence[Trace], one: Trace | None = None) -> Assembly:
    """Assemble the tensors of ranks.

    Args:
        one: the run on one device that placed the slices; None: only slices that describe themselves are assembled.
    """
    return assembled(_outline(traces) if one is None else one, traces)


def _outline(traces: Sequence[Trace]) -> Trace:
    """Return the whole tensors of ranks without values: those that slices are of, and all others."""
    made = Trace(0, 1)
    for trace in traces:
        for parameter in trace.parameters.values():
            name = parameter.held.whole if parameter.held else parameter.name
            made.parameters.setdefault(name, replace(parameter, name=name, held=None))
        for state in trace.states.values():
            name = state.held.whole if state.held else state.name
            of = name.removeprefix(named_state(state.key, "")) if state.held else state.of
            made.states.setdefault(name, replace(state, name=name, of=of, held=None))
    return made


def disagreeing(ranks: Sequence[Trace]) -> set[str]:
    """Return the tensors that ranks hold with different bits at some step."""
    found: set[str] = set()
    for steps in zip(*(trace.steps for trace in ranks), strict=False):
        for kind in KINDS:
            first: dict[str, TensorSummary | None] = {}
            for step in steps:
                for name, value in of_kind(step, kind).items():
                    other = first.setdefault(name, value)
                    if (value and value.bits) != (other and other.bits):
                        found.add(name)
    return found


def renamed(trace: Trace, names: Mapping[str, str]) -> Trace:
    """Return the trace with other names for some parameters, states and buffers."""

    def named(entries: Mapping[str, Any]) -> dict[str, Any]:
        return {names.get(name, name): value for name, value in entries.items()}

    def entry(one: Parameter) -> Any:
        moved = replace(one, name=names.get(one.name, one.name))
        return replace(moved, of=names.get(moved.of, moved.of)) if isinstance(moved, State) else moved

    return replace(
        trace,
        parameters=named({name: entry(one) for name, one in trace.parameters.items()}),
        states=named({name: entry(one) for name, one in trace.states.items()}),
        steps=[
            replace(
                step,
                before=named(step.before),
                gradients=named(step.gradients),
                parameters=named(step.parameters),
                states=named(step.states),
                options=named(step.options),
            )
            for step in trace.steps
        ],
    )


def merged(ranks: Sequence[Trace], divided: bool, but: Collection[str] = ()) -> Trace:
    """Return the trace of a run as if one device had made it, with the tensors of the first rank that holds each.

    Args:
        divided: ranks hold parts of the model, so several ranks may see the same samples.
        but: parameters, states and buffers to leave out.
    """
    made = Trace(0, 1, events=ranks[0].events)
    for trace in ranks:
        made.modules |= trace.modules
        for name, parameter in trace.parameters.items():
            if name not in but:
                made.parameters.setdefault(name, parameter)
        for name, state in trace.states.items():
            if name in but:
                continue
            made.states.setdefault(name, state)
            if not state.constant:
                made.states[name] = replace(made.states[name], constant=False)
    for steps in zip(*(trace.steps for trace in ranks), strict=False):
        seen = [step for trace, step in zip(ranks, steps, strict=True) if _is_first_stage(trace, made)]
        made.steps.append(
            Step(
                steps[0].optimizer,
                [] if (loss := _mean_loss(steps)) is None else [loss],
                [_together([step.seen for step in seen], divided)],
                [_together([step.seen_columns for step in seen], divided)],
                options=_first([step.options for step in steps], but),
                before=_first([step.before for step in steps], but),
                gradients=_first([step.gradients for step in steps], but),
                parameters=_first([step.parameters for step in steps], but),
                states=_first([step.states for step in steps], but),
                outputs=_outputs(steps),
            )
        )
    return made


def _outputs(steps: Sequence[Step]) -> dict[str, OutputSummary]:
    """Return the outputs of modules that the ranks of a step have together."""
    seen = {index: tuple(sorted(step.seen)) for index, step in enumerate(steps)}
    return {
        name: whole_output({i: step.outputs[name] for i, step in enumerate(steps) if name in step.outputs}, seen)
        for name in dict.fromkeys(name for step in steps for name in step.outputs)
    }


def _first(values: Sequence[Mapping[str, Any]], but: Collection[str]) -> dict[str, Any]:
    """Return the first value of each name that is not None, or None if all are, without the names `but`."""
    found: dict[str, Any] = {}
    for some in values:
        for name, value in some.items():
            if found.get(name) is None and name not in but:
                found[name] = value
    return found


def _is_first_stage(trace: Trace, whole: Trace) -> bool:
    """Return whether a rank holds the first parameter of the model: later stages receive no samples."""
    first = min(whole.parameters.values(), key=lambda parameter: parameter.order, default=None)
    return first is None or first.name in trace.parameters


def _together(seen: Sequence[Sequence[int]], divided: bool) -> list[int]:
    ranks = tuple(map(Counter, seen))
    return list(Samples(Counter(), ranks, divided).together.elements())


def _mean_loss(steps: Sequence[Step]) -> float | None:
    """Return the mean loss of ranks at a step, weighted by their samples; None if no rank has a finite loss."""
    known = [(len(step.seen) or 1, step.loss) for step in steps if step.loss is not None]
    return math.fsum(count * loss for count, loss in known) / sum(count for count, _ in known) if known else None


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


INSTALL = "pip install 'mgpu-check[trace]'"
VALUES_OF_COMPARISON = 2**26
"""Most bytes of values that a comparison of two runs keeps of each, in memory."""


def installed() -> bool:
    """Return whether values can be written and read."""
    return find_spec("safetensors") is not None


def gathered(files: Sequence[IO[bytes]]) -> bytes:
    """Return the values that the ranks kept, whole, in the format safetensors.

    Incomplete tensors are left out.

    Args:
        files: for each rank the file that `mgpu_check.compare.traces.attachments` has written.
    """
    from safetensors.torch import save

    from mgpu_check.numerics.placement import Slice, assembled

    parts: dict[str, list[tuple[Slice, Any]]] = defaultdict(list)
    for file in files:
        file.seek(0)
        data, places = bytearray(file.read()), {}
        start = data.index(b"\n") + 1
        while start < len(data):
            end = data.index(b"\n", start)
            head, start = json.loads(data[start:end]), end + 1
            own, *at = head["bytes"]
            value = _tensor(data, start, own, head["dtype"])
            if at:
                places[head["name"]] = _tensor(data, start + own, at[0], "int64")
            start += own + sum(at)
            part = Slice(head["name"], tuple(head["shape"]), places.get(head["name"]))
            parts[f"{head['step']}/{head['kind']}/{head['name']}"].append((part, value))
    found = {name: assembled(some) for name, some in parts.items()}
    return bytes(save({name: one.value for name, one in found.items() if one.missing is None}))


def _tensor(data: bytearray, start: int, size: int, dtype: str) -> Any:
    import torch

    if not size:
        return torch.empty(0, dtype=getattr(torch, dtype))
    # Cloned, because a view as another dtype must be aligned.
    return torch.frombuffer(data, dtype=torch.uint8, count=size, offset=start).clone().view(getattr(torch, dtype))


def described(values: tuple[bytes | None, bytes | None], names: tuple[str, str], tolerance: float) -> str:
    """Describe the elements of a tensor that differ between two runs; "" if a run has no values of it.

    Args:
        values: of both runs, in the format safetensors.
        names: the name of the tensor in both.
        tolerance: relative to the root mean square of the first tensor.
    """
    if None in values or not installed():
        return ""
    import torch
    from safetensors.torch import load

    from mgpu_check.numerics.placement import Slice

    one, other = (load(data).get(name) for data, name in zip(values, names, strict=True) if data is not None)
    if one is None or other is None or one.shape != other.shape or not one.numel():
        return ""
    shape = tuple(one.shape)
    one, other = one.double().reshape(-1), other.double().reshape(-1)
    apart = (other - one).abs()
    off = (~(apart <= tolerance * float(one.norm()) / math.sqrt(one.numel()))).nonzero().flatten()
    if not len(off):
        return ""
    # Scattered elements are counted, not listed.
    where = str(Slice("", shape, off))
    worst = int(apart.nan_to_num(math.inf).argmax())
    index = list(map(int, torch.unravel_index(torch.tensor(worst), shape))) if shape else []
    return (
        f"{len(off)} of {one.numel()} elements differ{f' ({where})' if where.startswith('dim') else ''}, the largest "
        f"difference is at {index}: {float(other[worst]):.7g} instead of {float(one[worst]):.7g}"
    )
