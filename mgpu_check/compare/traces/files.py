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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

from mgpu_check.compare.alignment import FIELDS, QUANTITIES, PlacedParts, Samples, of_quantity
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
class RecordedRun(PlacedParts):
    """A run of a script, with whole tensors: `record` or `read_run` makes it, for `write_run` or `compare_runs`."""

    name: str  # its name in reports: "a.trace"
    script: str  # the script and its arguments
    ranks: list[Trace]  # the trace of each rank
    environment: Mapping[str, Any] = field(default_factory=dict)  # what may change the results of the script
    moved: list[Trace] = field(default_factory=list)  # of a run that differs by rounding alone; empty if not measured
    values: bytes | None = None  # values of tensors, in the format safetensors; None without values
    limit: int | None = None  # the run was stopped at this step; None: it ran to its end

    @property
    def world(self) -> int:
        return len(self.ranks)


def whole(traces: Sequence[Trace], reference: Trace | None = None) -> Assembly:
    """Assemble the tensors of ranks. `reference`: the run on one device that placed the slices; None: only slices that
    describe themselves are assembled."""
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

    def named(entries: Mapping[str, Any]) -> Any:
        return {new_names.get(name, name): value for name, value in entries.items()}

    def entry(parameter: Parameter) -> Any:
        moved = replace(parameter, name=new_names.get(parameter.name, parameter.name))
        return replace(moved, of=new_names.get(moved.of, moved.of)) if isinstance(moved, State) else moved

    moving = (*FIELDS.values(), "options")
    return replace(
        trace,
        parameters=named({name: entry(parameter) for name, parameter in trace.parameters.items()}),
        states=named({name: entry(parameter) for name, parameter in trace.states.items()}),
        steps=[replace(step, **{key: named(getattr(step, key)) for key in moving}) for step in trace.steps],
    )


def merged(ranks: Sequence[Trace], divided: bool, but: Collection[str] = ()) -> Trace:
    """Return the trace of a run as if one device had made it, with the tensors of the first rank that holds each.
    `divided`: ranks hold parts of the model, so several ranks may see the same samples. `but`: parameters, states and
    buffers to leave out."""
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
    head = min(joint.parameters.values(), key=lambda parameter: parameter.order, default=None)
    # Later stages receive no samples.
    first_stages = [i for i, trace in enumerate(ranks) if head is None or head.name in trace.parameters]
    for steps in zip(*(trace.steps for trace in ranks), strict=False):
        joint.steps.append(_merged_step(steps, [steps[i] for i in first_stages], divided, but))
    return joint


def _merged_step(steps: Sequence[Step], first_stages: Sequence[Step], divided: bool, but: Collection[str]) -> Step:
    def together(samples: Sequence[Sequence[int]]) -> list[int]:
        return list(Samples(Counter(), tuple(map(Counter, samples)), divided).together.elements())

    # For each name its first value that is not None, or None if all are.
    merged: dict[str, Any] = {key: {} for key in (*FIELDS.values(), "options")}
    for key, values in merged.items():
        for name, value in (entry for step in steps for entry in getattr(step, key).items()):
            if values.get(name) is None and name not in but:
                values[name] = value
    # The mean loss is weighted by the samples of the ranks.
    weighted = [(len(step.seen) or 1, step.loss) for step in steps if step.loss is not None]
    loss = (
        math.fsum(count * loss for count, loss in weighted) / sum(count for count, _ in weighted) if weighted else None
    )
    sample_keys = {index: tuple(sorted(step.seen)) for index, step in enumerate(steps)}
    outputs = {
        name: whole_output({i: step.outputs[name] for i, step in enumerate(steps) if name in step.outputs}, sample_keys)
        for name in dict.fromkeys(name for step in steps for name in step.outputs)
    }
    return Step(
        steps[0].optimizer,
        [] if loss is None else [loss],
        [together([step.seen for step in first_stages])],
        [together([step.seen_columns for step in first_stages])],
        outputs=outputs,
        **merged,
    )


FORMAT = "mgpu-check run"
VERSION = 2  # raised whenever a number changes its meaning: version 1 had the bits of each element in its own dtype
_HEAD, _STEPS, _MOVED, _VALUES = "trace.json", "steps.jsonl", "rounding.jsonl", "values.safetensors"
_OF_ENTRIES = ("name", "shape", "dtype", "device", "order", "sharded", "over")


def write_run(path: Path, run: RecordedRun) -> None:
    """Write a run. An interrupted write leaves an earlier file unchanged."""
    shard_numbers = {}  # equal for ranks with the same elements
    for name, shards in run.shard_keys.items():
        distinct = list(dict.fromkeys(shards.values()))
        shard_numbers[name] = {rank: distinct.index(shard) for rank, shard in shards.items()}
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
        "parts": shard_numbers,
    }
    draft = path.with_name(f".{path.name}.{os.getpid()}")  # replaces the file when it is complete
    try:
        with zipfile.ZipFile(draft, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as out:
            out.writestr(_HEAD, json.dumps(head, indent=1) + "\n")
            for member, ranks in ((_STEPS, run.ranks), (_MOVED, run.moved)):
                if ranks:
                    lines = (json.dumps(line, separators=(",", ":")) for line in _lines(ranks))
                    out.writestr(member, "\n".join(lines) + "\n")
            if run.values is not None:
                out.writestr(_VALUES, run.values, zipfile.ZIP_STORED)
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def _lines(ranks: Sequence[Trace]) -> Iterator[dict[str, Any]]:
    yield {"ranks": [trace.rank for trace in ranks], "world": ranks[0].world}
    for section in ("parameters", "states"):
        for _, own in _by_name({trace.rank: getattr(trace, section) for trace in ranks}, _described):
            yield {section.removesuffix("s"): own}
    modules = {t.rank: {name: {"name": name, "dtype": dtype} for name, dtype in t.modules.items()} for t in ranks}
    for _, own in _by_name(modules, dict):
        yield {"module": own}
    for trace in ranks:
        yield from ({"event": event, "rank": trace.rank} for event in trace.events)
    earlier: dict[int, dict[str, Any]] = {}
    for number in range(max(len(trace.steps) for trace in ranks)):
        steps = {trace.rank: trace.steps[number] for trace in ranks if number < len(trace.steps)}
        yield {
            "step": number + 1,
            "of": {
                rank: {key: getattr(step, key) for key in ("optimizer", "losses", "samples", "columns")}
                | _changed(earlier, rank, step)
                for rank, step in steps.items()
            },
            **{
                quantity: dict(_by_name({rank: of_quantity(step, quantity) for rank, step in steps.items()}, _numbers))
                for quantity in QUANTITIES
            },
            "output": dict(_by_name({rank: step.outputs for rank, step in steps.items()}, astuple)),
        }


def _described(entry: Parameter) -> dict[str, Any]:
    extra = ("of", "key", "constant") if isinstance(entry, State) else ()
    return {key: getattr(entry, key) for key in (*_OF_ENTRIES, *extra)}


def _numbers(summary: TensorSummary | None) -> list[float | None] | None:
    return None if summary is None else [summary.bits, summary.norm, *summary.sums, *summary.samples]


def _by_name(
    entries: Mapping[int, Mapping[str, Any]], written: Callable[[Any], Any]
) -> Iterator[tuple[str, list[tuple[list[int], Any]]]]:
    """Yield each name that some rank has, and each distinct value of it with its ranks."""
    for name in dict.fromkeys(name for own in entries.values() for name in own):
        values = {rank: written(own[name]) for rank, own in entries.items() if name in own}
        groups = grouped((json.dumps(value), rank) for rank, value in values.items())
        yield name, [(ranks, values[ranks[0]]) for _, ranks in groups]


def _changed(earlier: dict[int, dict[str, Any]], rank: int, step: Step) -> dict[str, Any]:
    """Return the options of the step's parameters, without those that equal the options at an earlier step."""
    options_by_name = earlier.setdefault(rank, {})
    fresh = {name: options for name, options in step.options.items() if options_by_name.get(name) != options}
    options_by_name.update(fresh)
    groups = grouped((json.dumps(options), name) for name, options in fresh.items())
    listed = [{"options": fresh[names[0]], "parameters": names} for _, names in groups]
    return {"groups": listed} if listed else {}


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
        remedy = "give a file that mgpu-check record has written"
        raise TraceError(f"{path} is no trace of a run, or is truncated; {remedy}") from None
    except Exception as error:  # damaged content may raise any error
        damage = f"a damaged trace ({type(error).__name__}: {error})"
        raise TraceError(f"{path} is {damage}; record it again with mgpu-check record") from None


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
        file.read(_VALUES) if _VALUES in members else None,
        head["stopped_after"],
        divided=head["divided"],
        reasons=head["not_assembled"],
        holders={name: [tuple(ranks) for ranks in holders] for name, holders in head["holders"].items()},
        shard_keys={name: {int(rank): key for rank, key in keys.items()} for name, keys in head["parts"].items()},
        partial=head["partial"],
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
            ((section, values),) = line.items()
            for trace, entry in ((traces[rank], entry) for ranks, entry in values for rank in ranks):
                if section == "module":
                    trace.modules[entry["name"]] = entry["dtype"]
                    continue
                fields = {**entry, "shape": tuple(entry["shape"]), "over": tuple(entry["over"])}
                if section == "parameter":
                    trace.parameters[entry["name"]] = Parameter(**fields)
                else:
                    trace.states[entry["name"]] = State(**fields)
    return list(traces.values())


def _add_step(line: Mapping[str, Any], traces: Mapping[int, Trace], options: Mapping[int, dict[str, Any]]) -> None:
    steps: dict[int, Step] = {}
    for rank, own in ((int(rank), own) for rank, own in line["of"].items()):
        for group in own.get("groups", ()):
            options[rank].update(dict.fromkeys(group["parameters"], group["options"]))
        steps[rank] = Step(own["optimizer"], own["losses"], own["samples"], own["columns"], {}, {}, {})
        traces[rank].steps.append(steps[rank])
    for quantity in QUANTITIES:
        for name, values in line[quantity].items():
            for ranks, numbers in values:
                summary = None if numbers is None else TensorSummary.of(numbers)
                for rank in ranks:
                    of_quantity(steps[rank], quantity)[name] = summary
    for name, values in line["output"].items():
        for ranks, numbers in values:
            for rank in ranks:
                steps[rank].outputs[name] = OutputSummary(*numbers)
    for rank, step in steps.items():
        step.options = {name: options[rank][name] for name in step.gradients if name in options[rank]}


INSTALL = "pip install 'mgpu-check[trace]'"
VALUES_OF_COMPARISON = 2**26  # most bytes of values that a comparison of two runs keeps of each, in memory


def installed() -> bool:
    """Return whether values can be written and read."""
    return find_spec("safetensors") is not None


def gathered(files: Sequence[IO[bytes]]) -> bytes:
    """Return the values that the ranks kept, whole, in the format safetensors.

    Incomplete tensors are left out.

    `files`: for each rank the file that `mgpu_check.compare.traces.attachments` has written.
    """
    import torch
    from safetensors.torch import save

    from mgpu_check.compare.in_script.placements import tensor_at
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
            value = tensor_at(data, start, own, getattr(torch, head["dtype"]))
            if at:
                places[head["name"]] = tensor_at(data, start + own, at[0], torch.int64)
            start += own + sum(at)
            slice_ = Slice(head["name"], tuple(head["shape"]), places.get(head["name"]))
            slices[f"{head['step']}/{head['kind']}/{head['name']}"].append((slice_, value))
    assembled_tensors = {name: assembled(pieces) for name, pieces in slices.items()}
    return bytes(save({name: tensor.value for name, tensor in assembled_tensors.items() if tensor.missing is None}))


def described(values: tuple[bytes | None, bytes | None], tensor_names: tuple[str, str], tolerance: float) -> str | None:
    """Describe the elements of a tensor that differ between two runs; None if a run has no values of it.

    `values`: of both runs, in the format safetensors. `tensor_names`: the name of the tensor in both. `tolerance`:
    relative to the root mean square of the first tensor.
    """
    if None in values or not installed():
        return None
    import torch
    from safetensors.torch import load

    from mgpu_check.numerics.placement import Slice

    expected, actual = (
        load(data).get(name) for data, name in zip(values, tensor_names, strict=True) if data is not None
    )
    if expected is None or actual is None or expected.shape != actual.shape or not expected.numel():
        return None
    shape = tuple(expected.shape)
    expected, actual = expected.double().reshape(-1), actual.double().reshape(-1)
    difference = (actual - expected).abs()
    off = (~(difference <= tolerance * float(expected.norm()) / math.sqrt(expected.numel()))).nonzero().flatten()
    if not len(off):
        return None
    # Scattered elements are counted, not listed.
    location = str(Slice("", shape, off))
    worst = int(difference.nan_to_num(math.inf).argmax())
    index = list(map(int, torch.unravel_index(torch.tensor(worst), shape))) if shape else []
    return (
        f"{len(off)} of {expected.numel()} elements differ{f' ({location})' if location.startswith('dim') else ''}, "
        f"the largest difference is at {index}: {float(actual[worst]):.7g} instead of {float(expected[worst]):.7g}"
    )
