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

from mgpu_check.compare.alignment import QUANTITIES, Samples, of_quantity
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


def whole(traces: Sequence[Trace], reference: Trace | None = None) -> Assembly:
    """Assemble the tensors of ranks.

    Args:
        reference: the run on one device that placed the slices; None: only slices that describe themselves are
            assembled.
    """
    return assembled(_outline(traces) if reference is None else reference, traces)


def _outline(traces: Sequence[Trace]) -> Trace:
    """Return the whole tensors of ranks without values: those that slices are of, and all others."""
    outline = Trace(0, 1)
    for trace in traces:
        for parameter in trace.parameters.values():
            name = parameter.held.whole if parameter.held else parameter.name
            outline.parameters.setdefault(name, replace(parameter, name=name, held=None))
        for state in trace.states.values():
            name = state.held.whole if state.held else state.name
            owner = name.removeprefix(named_state(state.key, "")) if state.held else state.of
            outline.states.setdefault(name, replace(state, name=name, of=owner, held=None))
    return outline


def disagreeing(ranks: Sequence[Trace]) -> set[str]:
    """Return the tensors that ranks hold with different bits at some step."""
    differing: set[str] = set()
    for steps in zip(*(trace.steps for trace in ranks), strict=False):
        for quantity in QUANTITIES:
            values_by_name: dict[str, TensorSummary | None] = {}
            for step in steps:
                for name, value in of_quantity(step, quantity).items():
                    earliest = values_by_name.setdefault(name, value)
                    if (value and value.bits) != (earliest and earliest.bits):
                        differing.add(name)
    return differing


def renamed(trace: Trace, new_names: Mapping[str, str]) -> Trace:
    """Return the trace with other names for some parameters, states and buffers."""

    def named(entries: Mapping[str, Any]) -> dict[str, Any]:
        return {new_names.get(name, name): value for name, value in entries.items()}

    def entry(parameter: Parameter) -> Any:
        moved = replace(parameter, name=new_names.get(parameter.name, parameter.name))
        return replace(moved, of=new_names.get(moved.of, moved.of)) if isinstance(moved, State) else moved

    return replace(
        trace,
        parameters=named({name: entry(parameter) for name, parameter in trace.parameters.items()}),
        states=named({name: entry(parameter) for name, parameter in trace.states.items()}),
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
    joint = Trace(0, 1, events=ranks[0].events)
    for trace in ranks:
        joint.modules |= trace.modules
        for name, parameter in trace.parameters.items():
            if name not in but:
                joint.parameters.setdefault(name, parameter)
        for name, state in trace.states.items():
            if name in but:
                continue
            joint.states.setdefault(name, state)
            if not state.constant:
                joint.states[name] = replace(joint.states[name], constant=False)
    for steps in zip(*(trace.steps for trace in ranks), strict=False):
        first_stages = [step for trace, step in zip(ranks, steps, strict=True) if _is_first_stage(trace, joint)]
        joint.steps.append(
            Step(
                steps[0].optimizer,
                [] if (loss := _mean_loss(steps)) is None else [loss],
                [_together([step.seen for step in first_stages], divided)],
                [_together([step.seen_columns for step in first_stages], divided)],
                options=_first([step.options for step in steps], but),
                before=_first([step.before for step in steps], but),
                gradients=_first([step.gradients for step in steps], but),
                parameters=_first([step.parameters for step in steps], but),
                states=_first([step.states for step in steps], but),
                outputs=_outputs(steps),
            )
        )
    return joint


def _outputs(steps: Sequence[Step]) -> dict[str, OutputSummary]:
    """Return the outputs of modules that the ranks of a step have together."""
    sample_keys = {index: tuple(sorted(step.seen)) for index, step in enumerate(steps)}
    return {
        name: whole_output({i: step.outputs[name] for i, step in enumerate(steps) if name in step.outputs}, sample_keys)
        for name in dict.fromkeys(name for step in steps for name in step.outputs)
    }


def _first(values: Sequence[Mapping[str, Any]], but: Collection[str]) -> dict[str, Any]:
    """Return the first value of each name that is not None, or None if all are, without the names `but`."""
    merged: dict[str, Any] = {}
    for mapping in values:
        for name, value in mapping.items():
            if merged.get(name) is None and name not in but:
                merged[name] = value
    return merged


def _is_first_stage(trace: Trace, model: Trace) -> bool:
    """Return whether a rank holds the first parameter of the model: later stages receive no samples."""
    head = min(model.parameters.values(), key=lambda parameter: parameter.order, default=None)
    return head is None or head.name in trace.parameters


def _together(samples: Sequence[Sequence[int]], divided: bool) -> list[int]:
    ranks = tuple(map(Counter, samples))
    return list(Samples(Counter(), ranks, divided).together.elements())


def _mean_loss(steps: Sequence[Step]) -> float | None:
    """Return the mean loss of ranks at a step, weighted by their samples; None if no rank has a finite loss."""
    weighted = [(len(step.seen) or 1, step.loss) for step in steps if step.loss is not None]
    return (
        math.fsum(count * loss for count, loss in weighted) / sum(count for count, _ in weighted) if weighted else None
    )


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
        "parts": {name: _numbered(shards) for name, shards in run.parts.items()},
    }
    draft = path.with_name(f".{path.name}.{os.getpid()}")  # replaces the file when it is complete
    try:
        with zipfile.ZipFile(draft, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as out:
            out.writestr(_HEAD, json.dumps(head, indent=1) + "\n")
            out.writestr(_STEPS, "\n".join(map(_line, _lines(run.ranks))) + "\n")
            if run.moved:
                out.writestr(_MOVED, "\n".join(map(_line, _lines(run.moved))) + "\n")
            if run.values is not None:
                out.writestr(_VALUES, run.values, zipfile.ZIP_STORED)
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def _numbered(shards: Mapping[int, object]) -> dict[int, int]:
    """Return the parts as numbers, equal for ranks with the same elements."""
    distinct = list(dict.fromkeys(shards.values()))
    return {rank: distinct.index(shard) for rank, shard in shards.items()}


def _line(value: Mapping[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"))


def _lines(ranks: Sequence[Trace]) -> Iterator[dict[str, Any]]:
    entries: Mapping[int, Mapping[str, Any]]
    yield {"ranks": [trace.rank for trace in ranks], "world": ranks[0].world}
    for section in ("parameters", "states"):
        for name in dict.fromkeys(name for trace in ranks for name in getattr(trace, section)):
            entries = {
                trace.rank: _described(getattr(trace, section)[name])
                for trace in ranks
                if name in getattr(trace, section)
            }
            yield {section.removesuffix("s"): _by_rank(entries)}
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
                quantity: {
                    name: _by_rank({r: _numbers(own[name]) for r, own in entries.items() if name in own})
                    for name in dict.fromkeys(name for own in entries.values() for name in own)
                }
                for quantity in QUANTITIES
                if (entries := {rank: of_quantity(step, quantity) for rank, step in steps.items()})
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
    groups = grouped((json.dumps(value), rank) for rank, value in values.items())
    return [(ranks, values[ranks[0]]) for _, ranks in groups]


def _changed(earlier: dict[int, dict[str, Any]], rank: int, step: Step) -> dict[str, Any]:
    """Return the options of the step's parameters, without those that equal the options at an earlier step."""
    options_by_name = earlier.setdefault(rank, {})
    fresh = {name: options for name, options in step.options.items() if options_by_name.get(name) != options}
    options_by_name.update(fresh)
    groups = grouped((json.dumps(options), name) for name, options in fresh.items())
    return (
        {
            "groups": [
                {"options": fresh[parameter_names[0]], "parameters": parameter_names} for _, parameter_names in groups
            ]
        }
        if groups
        else {}
    )


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
        remedy = "record it again, with mgpu-check record or compare --update-golden"
        do = "install a newer mgpu-check" if head["version"] > VERSION else remedy
        raise TraceError(
            f"has version {head['version']} of the format, written by mgpu-check {head['mgpu_check']}; mgpu-check "
            f"{__version__} reads version {VERSION}: {do}"
        )
    members = file.namelist()
    return RecordedRun(
        name,
        head["script"],
        _traces(file.read(_STEPS)),
        head["environment"],
        _traces(file.read(_MOVED)) if _MOVED in members else [],
        head["divided"],
        head["not_assembled"],
        {name: [tuple(ranks) for ranks in holders] for name, holders in head["holders"].items()},
        {name: {int(rank): shard for rank, shard in shards.items()} for name, shards in head["parts"].items()},
        head["partial"],
        file.read(_VALUES) if _VALUES in members else None,
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
    head, *lines = map(json.loads, data.splitlines())
    traces = {rank: Trace(rank, head["world"]) for rank in head["ranks"]}
    options: dict[int, dict[str, Any]] = {rank: {} for rank in traces}
    for line in lines:
        if "step" in line:
            _add_step(line, traces, options)
        elif "event" in line:
            traces[line["rank"]].events.append(line["event"])
        else:
            for ranks, entry in line.get("parameter", ()):
                for rank in ranks:
                    traces[rank].parameters[entry["name"]] = Parameter(**_entry(entry))
            for ranks, entry in line.get("module", ()):
                for rank in ranks:
                    traces[rank].modules[entry["name"]] = entry["dtype"]
            for ranks, entry in line.get("state", ()):
                for rank in ranks:
                    traces[rank].states[entry["name"]] = State(**_entry(entry))
    return list(traces.values())


def _add_step(line: Mapping[str, Any], traces: Mapping[int, Trace], options: Mapping[int, dict[str, Any]]) -> None:
    for rank, own in ((int(rank), own) for rank, own in line["of"].items()):
        traces[rank].steps.append(_step(own, options[rank]))
    for quantity in QUANTITIES:
        for name, values in line[quantity].items():
            for ranks, numbers in values:
                summary = None if numbers is None else TensorSummary.of(numbers)
                for rank in ranks:
                    _tensors_of(traces[rank].steps[-1], quantity)[name] = summary
    for name, values in line["output"].items():
        for ranks, numbers in values:
            for rank in ranks:
                traces[rank].steps[-1].outputs[name] = OutputSummary(*numbers)
    for rank in map(int, line["of"]):
        step = traces[rank].steps[-1]
        step.options = {name: step.options[name] for name in step.gradients if name in step.options}


def _entry(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {**fields, "shape": tuple(fields["shape"]), "over": tuple(fields["over"])}


def _tensors_of(step: Step, quantity: str) -> dict[str, Any]:
    tensors: dict[str, dict[str, Any]] = {
        "before": step.before,
        "gradient": step.gradients,
        "parameter": step.parameters,
        "state": step.states,
    }
    return tensors[quantity]


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

    slices: dict[str, list[tuple[Slice, Any]]] = defaultdict(list)
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
            slice_ = Slice(head["name"], tuple(head["shape"]), places.get(head["name"]))
            slices[f"{head['step']}/{head['kind']}/{head['name']}"].append((slice_, value))
    assembled_tensors = {name: assembled(pieces) for name, pieces in slices.items()}
    return bytes(save({name: tensor.value for name, tensor in assembled_tensors.items() if tensor.missing is None}))


def _tensor(data: bytearray, start: int, size: int, dtype: str) -> Any:
    import torch

    if not size:
        return torch.empty(0, dtype=getattr(torch, dtype))
    # Cloned, because a view as another dtype must be aligned.
    return torch.frombuffer(data, dtype=torch.uint8, count=size, offset=start).clone().view(getattr(torch, dtype))


def described(values: tuple[bytes | None, bytes | None], tensor_names: tuple[str, str], tolerance: float) -> str:
    """Describe the elements of a tensor that differ between two runs; "" if a run has no values of it.

    Args:
        values: of both runs, in the format safetensors.
        tensor_names: the name of the tensor in both.
        tolerance: relative to the root mean square of the first tensor.
    """
    if None in values or not installed():
        return ""
    import torch
    from safetensors.torch import load

    from mgpu_check.numerics.placement import Slice

    expected, actual = (
        load(data).get(name) for data, name in zip(values, tensor_names, strict=True) if data is not None
    )
    if expected is None or actual is None or expected.shape != actual.shape or not expected.numel():
        return ""
    shape = tuple(expected.shape)
    expected, actual = expected.double().reshape(-1), actual.double().reshape(-1)
    difference = (actual - expected).abs()
    off = (~(difference <= tolerance * float(expected.norm()) / math.sqrt(expected.numel()))).nonzero().flatten()
    if not len(off):
        return ""
    # Scattered elements are counted, not listed.
    location = str(Slice("", shape, off))
    worst = int(difference.nan_to_num(math.inf).argmax())
    index = list(map(int, torch.unravel_index(torch.tensor(worst), shape))) if shape else []
    return (
        f"{len(off)} of {expected.numel()} elements differ{f' ({location})' if location.startswith('dim') else ''}, "
        f"the largest difference is at {index}: {float(actual[worst]):.7g} instead of {float(expected[worst]):.7g}"
    )
