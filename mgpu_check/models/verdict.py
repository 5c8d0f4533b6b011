"""The verdict about a model: a row for each way to train it, a column for each kind of result."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

Status = Literal["equal", "differs", "raises", "not compared", "not applicable", "not tried"]

COLUMNS = ("loss", "gradients", "parameters", "buffers", "moments", "evaluation")

_HEAD = ("way", "devices", *COLUMNS, "memory", "sent", "options")

_WRONG = ("differs", "raises")


def _bytes(count: int) -> str:
    """Return a number of bytes with a unit, such as "3.4 MB"; "-" for none."""
    power = min(max(0, (len(str(count)) - 1) // 3), 4)
    return f"{count / 1000**power:.3g} {('B', 'kB', 'MB', 'GB', 'TB')[power]}" if count else "-"


@dataclass(frozen=True)
class OptionFailure:
    """The fewest options that make a way fail. It passes without any of them."""

    options: str
    status: Status
    reason: str


@dataclass
class WayResult:
    """The result of a way to train.

    Attributes:
        devices: number of devices; 0 if it was not run.
        memory: peak of a device in a step, in bytes; 0 if the way was not compared, or differs.
        sent: collectives of a rank in a step, in bytes; 0 also for a way in one process.
        columns: column -> "equal" or "differs"; a column is missing if there was nothing to compare.
        reason: the mistake, the error, or why nothing was run.
        base: options that the way needs to be equal, such as SyncBatchNorm.
        settings: number of settings of options that were compared.
        untried: number of settings that were not tried for lack of time.
        failures: settings that fail, shrunk.
        on_one_device: settings that fail on one device, too, each with the reason.
        not_compared: settings that ran and were not compared, each with the reason; they are among the untried.
    """

    way: str
    status: Status
    devices: int = 0
    memory: int = 0
    sent: int = 0
    columns: dict[str, str] = field(default_factory=dict)
    reason: str = ""
    site: str = ""
    base: str = ""
    settings: int = 0
    untried: int = 0
    failures: list[OptionFailure] = field(default_factory=list)
    on_one_device: list[str] = field(default_factory=list)
    not_compared: list[str] = field(default_factory=list)

    @property
    def cells(self) -> list[str]:
        """The columns before the last one; "-" where there is nothing to say."""
        results = [self.columns.get(column, "-").replace("differs", "DIFFERS") for column in COLUMNS]
        return [self.way, str(self.devices or "-"), *results, *map(_bytes, (self.memory, self.sent))]

    @property
    def options(self) -> str:
        """The column of options: how many settings are equal, fail, and were not tried."""
        parts = [f"{self.settings - len(self.failures)} equal"] if self.settings else []
        parts += [f"{len(self.failures)} FAIL"] if self.failures else []
        parts += [f"{self.untried} not tried"] if self.untried else []
        return ", ".join(parts)


@dataclass(frozen=True)
class ModelReport:
    """The table, with what was trained."""

    target: str
    model: str  # name of its class
    parameters: int  # number of elements
    recipe: str  # the batch and the loss, a line each
    gpus: str  # such as "4 SIMULATED GPUs"
    alone: WayResult  # one device: what a step costs it
    results: Sequence[WayResult]

    def lines(self) -> list[str]:
        rows = [[*_HEAD]]
        compared = [result for result in self.results if result.columns]
        rows += [[*result.cells, result.options or "-"] for result in [self.alone] * bool(self.alone.memory) + compared]
        widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
        table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        heading = f"{self.model}, {self.parameters:,} parameters, on {self.gpus}"
        return [
            heading,
            *(f"  {line}" for line in self.recipe.splitlines()),
            "",
            *table,
            "",
            *self._remarks(),
            self.sentence(),
        ]

    def _remarks(self) -> list[str]:
        lines = []
        for result in self.results:
            at = f" ({result.site})" if result.site else ""
            if result.reason:
                lines.append(f"{result.way}: {result.status}: {result.reason}{at}")
            if result.base:
                lines.append(f"{result.way}: equal with {result.base}; options are tried with it")
            lines += [f"{result.way}: {each.status} with {each.options}: {each.reason}" for each in result.failures]
            lines += [f"{result.way}: no fault of it: {setting}" for setting in result.on_one_device]
            lines += [f"{result.way}: not compared: {setting}" for setting in result.not_compared]
        return [*lines, *([""] if lines else [])]

    def sentence(self) -> str:
        """Return the verdict in one sentence."""
        clauses = []
        if equal := self._with(("equal",)):
            clauses.append(f"trains as on one device under {', '.join(equal)}")
        for status in _WRONG:
            if names := self._with((status,)):
                clauses.append(f"{status} under {', '.join(names)}")
        if failing := [result.way for result in self.results if result.failures]:
            clauses.append(f"fails with some options under {', '.join(failing)}")
        if unknown := self._with(("not compared", "not tried")):
            clauses.append(f"NOT KNOWN under {', '.join(unknown)}")
        clauses += (
            [f"{count} settings of options NOT TRIED"] if (count := sum(each.untried for each in self.results)) else []
        )
        return f"{self.target}: {'; '.join(clauses) or 'no way to train applies'}"

    def _with(self, statuses: Sequence[str]) -> list[str]:
        return [result.way for result in self.results if result.status in statuses]

    @property
    def exit_code(self) -> int:
        """1 if a way fails, 2 if the result of a way is not known or none applies, else 0."""
        if self._with(_WRONG) or any(result.failures for result in self.results):
            return 1
        return 2 if self._with(("not compared", "not tried")) or not self._with(("equal",)) else 0

    def changes(self, golden: Mapping[str, str]) -> list[str]:
        """Return a line for each way whose result is another one than in `golden`, as `read_golden` returns it."""
        now = {result.way: _summary(asdict(result)) for result in self.results}
        ways = [way for way in {**golden, **now} if golden.get(way) != now.get(way)]
        return [f"{way}: {now.get(way, 'not asked for')}; before: {golden.get(way, 'not asked for')}" for way in ways]

    def write(self, file: str) -> None:
        text = json.dumps(self.to_dict(), indent=1) if file.endswith(".json") else self.to_markdown()
        Path(file).write_text(text + "\n", encoding="utf-8")

    def to_dict(self) -> Mapping[str, Any]:
        return asdict(self) | {"sentence": self.sentence(), "exit_code": self.exit_code}

    def to_markdown(self) -> str:
        rows = [[*_HEAD], ["---"] * len(_HEAD)]
        for result in self.results:
            rows.append([*result.cells, result.options if result.columns else f"{result.status}: {result.reason}"])
        table = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
        return "\n".join([f"**{self.sentence()}**", "", *table])


def read_golden(file: str) -> dict[str, str]:
    """Return way -> summary of its result, from a report that `ModelReport.write` has written."""
    try:
        entries = json.loads(Path(file).read_text(encoding="utf-8"))["results"]
        return {entry["way"]: _summary(entry) for entry in entries}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is no report of mgpu-check model ({error!r}); remove it to write it anew") from None


def _summary(entry: Mapping[str, Any]) -> str:
    """Return what a golden report holds of a way: no numbers of tried settings, which depend on the time."""
    columns = [f"{name} {value}" for name, value in sorted(entry["columns"].items()) if value != "equal"]
    failures = [f"{failure['status']} with {failure['options']}" for failure in entry["failures"]]
    return ", ".join([entry["status"], *columns, *failures])
