"""Read the curves of runs: traces, CSV files, and event files of TensorBoard.

The package tensorboard comes with the extra ``mgpu-check[curves]``, and is imported when an event file is read.
"""

from __future__ import annotations

import csv
import glob
import math
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from mgpu_check.compare.curves.judging import RunCurve, Side
from mgpu_check.compare.trace import Trace, TraceError
from mgpu_check.compare.traces.file import read_run
from mgpu_check.compare.traces.run import mean_loss
from mgpu_check.processes.rank_lists import few

INSTALL = "pip install 'mgpu-check[curves]'"
_STEPS = ("step", "steps", "global_step", "trainer/global_step", "iteration", "iter", "_step")
_NO_VALUES = ("wall time", "epoch", "_runtime", "_timestamp", " - _step", "__min", "__max")
"""Names, or ends of names, of columns that are no curves; the last three are those of Weights & Biases."""
_TABLES = (".csv", ".tsv")


def are_curves(words: Sequence[str]) -> bool:
    """Return whether the words name curves, not a script with its arguments."""
    return bool(words) and any(map(_is_curve, _paths(words[0]) or [Path(words[0])]))


def _paths(word: str) -> list[Path]:
    return [Path(word)] if Path(word).exists() else [Path(name) for name in sorted(glob.glob(word))]


def _is_curve(path: Path) -> bool:
    if path.is_dir():
        return not (path / "__main__.py").exists()
    return path.suffix in (*_TABLES, ".trace") or "tfevents" in path.name


def side_of(word: str, tag: str | None) -> Side:
    """Return the curves of one side.

    Args:
        word: a file, a directory, or a pattern such as "old/*.csv". A directory holds the event files of one run, or
            the files and directories of several runs.
        tag: name of the curve: a column, or a tag of TensorBoard; None: the only one, or the only one of a loss.

    Raises:
        ValueError: there is no curve, or a file cannot be read.
    """
    try:
        found = [curve for path in _paths(word) for curve in _read(path, tag)]
    except OSError as error:
        raise ValueError(f"{word} cannot be read: {error}; give files that you may read") from None
    if not found:
        raise ValueError(f"{word}: there is no such file, and no curve in it; give a file, a directory, or a pattern")
    return Side(word, found)


def _read(path: Path, tag: str | None) -> Iterator[RunCurve]:
    if path.is_dir() and not any("tfevents" in one.name for one in path.iterdir()):
        for one in sorted(path.iterdir()):
            if _is_curve(one):
                yield from _read(one, tag)
    elif path.suffix == ".trace":
        yield from _of_trace(path)
    elif path.suffix in _TABLES:
        yield from _of_table(path, tag)
    else:
        yield _of_events(path, tag)


def curve_of(name: str, ranks: Sequence[Trace]) -> RunCurve:
    """Return the mean loss of ranks at each step; NaN if it is unknown, or not finite on some rank."""
    values = {}
    for number, steps in enumerate(zip(*(trace.steps for trace in ranks), strict=False), 1):
        loss = None if any(step.losses and step.loss is None for step in steps) else mean_loss(steps)
        values[number] = math.nan if loss is None else loss
    return RunCurve(name, values)


def _of_trace(path: Path) -> Iterator[RunCurve]:
    try:
        run = read_run(path)
    except TraceError as error:
        raise ValueError(str(error)) from None
    yield curve_of(path.name, run.ranks)
    if run.moved:
        yield curve_of(f"{path.name}, moved by roundoffs", run.moved)


def _of_table(path: Path, tag: str | None) -> Iterator[RunCurve]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            head = file.readline()
            delimiter = next((one for one in "\t;" if one in head), ",")
            file.seek(0)
            rows = list(csv.DictReader(file, delimiter=delimiter))
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no table: {error}; give a CSV file in UTF-8 with a header") from None
    if not rows:
        raise ValueError(f"{path} has no rows below its header; give a CSV file with a header")
    columns = {name: [_number(row[name]) for row in rows] for name in rows[0] if name}
    steps = next((name for name in columns if name.lower() in _STEPS), None)
    names = _chosen([name for name, cells in columns.items() if name != steps and _has_numbers(cells)], tag, str(path))
    for name in names:
        values = {}
        for number, cell in enumerate(columns[name]):
            step = columns[steps][number] if steps else float(number + 1)
            if cell is not None and step is not None and math.isfinite(step):
                values[int(step)] = cell
        yield RunCurve(path.name if len(names) == 1 else f"{path.name}: {name}", values)


def _has_numbers(cells: Sequence[float | None]) -> bool:
    return any(cell is not None for cell in cells)


def _number(cell: str | None) -> float | None:
    try:
        return float(cell or "")
    except ValueError:
        return None  # the row has another quantity


def _chosen(names: Sequence[str], tag: str | None, where: str) -> list[str]:
    """Return the curves to read: one, or that of each run if the names are "RUN - TAG", as of Weights & Biases."""
    if tag is not None:
        found = [tag] if tag in names else [name for name in names if name.endswith(f" - {tag}")]
        if not found:
            raise ValueError(f"--tag={tag}: {where} has no such curve; it has {few(names, 8) or 'none'}")
        return found
    useful = [name for name in names if not name.lower().endswith(_NO_VALUES)]
    found = [name for name in useful if _is_training_loss(name.rpartition(" - ")[2].lower())]
    for some in (useful, found):
        if some and len({name.rpartition(" - ")[2] for name in some}) == 1:
            return some
    raise ValueError(f"{where} has several curves: {few(useful, 8)}; give one of them, as in --tag={useful[0]}"
                     if useful else f"{where} has no curve: no column or tag has numbers")  # fmt: skip


def _is_training_loss(tag: str) -> bool:
    return "loss" in tag and not any(other in tag for other in ("val", "eval", "test"))


def _of_events(path: Path, tag: str | None) -> RunCurve:
    if find_spec("tensorboard") is None:
        raise ValueError(f"{path}: event files need tensorboard, not installed here; do: {INSTALL}")
    from tensorboard.backend.event_processing.event_accumulator import SCALARS, TENSORS, EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    events = EventAccumulator(str(path), size_guidance={SCALARS: 0, TENSORS: 0})
    events.Reload()
    scalars, tensors = events.scalars.Keys(), events.tensors.Keys()
    values: Mapping[int, float]  # of a step that a resumed run repeats, the last
    names = _chosen([*scalars, *tensors], tag, str(path))
    if len(names) > 1:
        raise ValueError(f"{path} has several curves: {few(names, 8)}; give one of them, as in '--tag={names[0]}'")
    (name,) = names
    if name in scalars:
        values = {event.step: event.value for event in events.Scalars(name)}
    else:
        values = {event.step: float(make_ndarray(event.tensor_proto)) for event in events.Tensors(name)}
    return RunCurve(path.name, values)
