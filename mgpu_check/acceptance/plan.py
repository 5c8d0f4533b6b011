"""The plan of an acceptance run, read from the settings and validated before anything starts.

The options that select checks belong to it, for a command that repeats the run.
"""

from __future__ import annotations

import difflib
import os
import shlex
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mgpu_check.acceptance.application import AcceptanceSettings
from mgpu_check.acceptance.dcgm.diagnostic import Diagnostic, read_diagnostic
from mgpu_check.acceptance.faults import Planted, planted_from
from mgpu_check.acceptance.findings import KINDS
from mgpu_check.acceptance.references import Baseline, read_baseline
from mgpu_check.acceptance.report.files import check_paths, check_place
from mgpu_check.devices.observations import Ruling
from mgpu_check.option_values import Level
from mgpu_check.settings import Settings, all_options

if TYPE_CHECKING:
    import pytest


@dataclass(frozen=True)
class Selection:
    """The selection of checks by the command line."""

    keyword: str = ""  # expression of ``-k``; "" selects all
    mark: str = ""  # expression of ``-m``
    left_out: tuple[str, ...] = ()  # prefixes of ``--deselect``
    # files of the acceptance, or checks in them: "test_memory.py", "test_links.py::test_speed"
    files: tuple[str, ...] = ()

    @classmethod
    def of(cls, config: pytest.Config, package: Path) -> Selection:
        """Return the selection of this run; `package` is the directory of the acceptance."""
        files = []
        for word in config.getoption("file_or_dir", None) or ():
            path, separator, test_name = os.fspath(word).partition("::")
            if path.endswith(".py") and package in Path(path).absolute().parents:
                files.append(Path(path).name + separator + test_name)
        keyword, mark, left_out = (config.getoption(name, None) for name in ("keyword", "markexpr", "deselect"))
        return cls(keyword or "", mark or "", tuple(left_out or ()), tuple(files))

    def narrowed(self, checks: Iterable[str]) -> Selection:
        wanted = " or ".join(checks)
        return replace(self, keyword=f"({self.keyword}) and ({wanted})" if self.keyword not in ("", wanted) else wanted)

    def added_to(self, command: str) -> str:
        words = [*(("-k", self.keyword) if self.keyword else ()), *(("-m", self.mark) if self.mark else ())]
        words += [f"--deselect={deselected}" for deselected in self.left_out]
        return shlex.join([*shlex.split(command), *words, *self.files])


DEFAULT_SOAK = 600.0
"""Seconds of load at the level "long" without ``--for``."""


@dataclass(frozen=True)
class Plan:
    """The validated settings of an acceptance run."""

    level: Level
    memory_share: float  # share of the free memory of each GPU to be written and read back
    soak: float | None  # seconds of load after the checks; None for no soak
    simulate: str | None  # backing device of simulated GPUs; None on real ones
    planted: tuple[Planted, ...] = ()
    baseline: Baseline | None = None
    reports: tuple[Path, ...] = ()
    # baseline file to add the facts and speeds of the GPUs to, unless something failed; None to record nothing
    record: Path | None = None
    verdict_file: Path | None = None
    # rulings on findings that differ from the defaults, by id
    policy: Mapping[str, Ruling] = field(default_factory=dict)
    evidence: bool = False  # whether JSON reports keep every observation and sample
    dcgm: Diagnostic | None = None

    @classmethod
    def of(cls, settings: Settings) -> Plan:
        """Make the plan for `settings`, or raise ValueError that names the wrong option, its value and the remedy."""
        options = settings.of(AcceptanceSettings)
        option = "accept_plant"
        try:
            planted = tuple(planted_from(text) for text in options.accept_plant)
            for planted_fault in planted:
                _check_places(planted_fault, settings.gpus or 0)
                if planted_fault.fault.defect is not None and settings.simulate != "cpu":
                    where = f"on the CPU only, not on {settings.simulate}"
                    raise ValueError(f"{planted_fault.text}: hardware is simulated {where}; give --simulate")
            option = "accept_baseline"
            baseline = read_baseline(Path(options.accept_baseline)) if options.accept_baseline else None
            option = "accept_report"
            check_paths(options.accept_report)
            option = "accept_verdict_file"
            if options.accept_verdict_file:
                check_place(Path(options.accept_verdict_file))
            option = "accept_policy"
            policy = read_policy(Path(options.accept_policy)) if options.accept_policy else {}
            option = "accept_dcgm"
            dcgm = read_diagnostic(Path(options.accept_dcgm)) if options.accept_dcgm else None
            option = "accept_record_baseline"
            record = _new_baseline(options.accept_record_baseline) if options.accept_record_baseline else None
        except ValueError as error:
            raise ValueError(f"{settings.origins.get(option, all_options()[option].flag)}: {error}") from None
        return cls(
            settings.gpu_level,
            options.accept_memory,
            soak_of(settings),
            settings.simulate,
            planted,
            baseline,
            tuple(Path(name) for name in options.accept_report),
            record,
            Path(options.accept_verdict_file) if options.accept_verdict_file else None,
            policy,
            options.accept_evidence,
            dcgm,
        )


def soak_of(settings: Settings) -> float | None:
    """Return the seconds of load after the checks; None for no soak."""
    return settings.of(AcceptanceSettings).accept_for or (DEFAULT_SOAK if settings.gpu_level == "long" else None)


def _new_baseline(name: str) -> Path:
    path = Path(name)
    check_place(path)
    if path.exists():
        read_baseline(path)  # refuses to add to a file that is not a baseline
    return path


def _check_places(planted: Planted, gpus: int) -> None:
    """Raise ValueError for a defect on GPUs outside the run: it would have no effect, and the run would pass."""
    device, peer = (planted.parameters.get(name) for name in ("device", "peer"))
    for name, value in (("device", device), ("peer", peer)):
        if value is not None and not 0 <= int(value) < gpus:
            raise ValueError(f"{planted.text}: {name}={value} is not a GPU of this run; choose one of 0 to {gpus - 1}")
    if device is not None and device == peer:
        raise ValueError(f"{planted.text}: device and peer are the same GPU; choose two")


_RULINGS: tuple[Ruling, ...] = ("accept", "warn", "reject")
_TABLE = "findings"
_EXAMPLE = 'a table [findings] with lines such as MGPU-PERSISTENCE-MODE = "accept"'
_PAGE = "https://github.com/mgpu-check/mgpu-check/blob/main/docs/reference/findings.md lists all ids"


def read_policy(path: Path) -> dict[str, Ruling]:
    """Return the rulings of a TOML file, by id of the kind of finding."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        why = error.strerror or error
        raise ValueError(f"{path} cannot be read: {why}. Give a TOML file with {_EXAMPLE}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"{path} is not TOML: {error}. Give a TOML file with {_EXAMPLE}") from error
    if unknown_keys := sorted(set(document) - {_TABLE}):
        raise ValueError(f"{path}: {unknown_keys[0]} is not known here; give {_EXAMPLE}")
    rows = document.get(_TABLE)
    if not isinstance(rows, dict):
        raise ValueError(f"{path}: [{_TABLE}] is missing; give {_EXAMPLE}")
    rulings: dict[str, Ruling] = {}
    for name, value in rows.items():
        if name not in KINDS:
            close = difflib.get_close_matches(name.upper(), KINDS, n=3, cutoff=0.5)
            hint = f"did you mean {' or '.join(close)}?" if close else f"choose one of {', '.join(KINDS)}."
            raise ValueError(f"{path}: {_TABLE}.{name} is not the id of a finding; {hint} {_PAGE}")
        ruling = next((choice for choice in _RULINGS if choice == value), None)
        if ruling is None:
            raise ValueError(f"{path}: {_TABLE}.{name} is {value!r}; choose one of {', '.join(_RULINGS)}")
        rulings[name] = ruling
    return rulings
