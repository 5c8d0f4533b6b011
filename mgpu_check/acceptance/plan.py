"""The plan of an acceptance run: its checks in order, the properties that the verdict depends on, the least work of
each check, and the settings, validated before anything starts.

With less work a check is unknown, so a check that returns at once never passes. The options that select checks belong
to the plan, for a command that repeats the run.
"""

from __future__ import annotations

import difflib
import itertools
import os
import shlex
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from mgpu_check.acceptance.application import AcceptanceSettings
from mgpu_check.acceptance.faults import Planted, planted_from
from mgpu_check.acceptance.findings import KINDS
from mgpu_check.acceptance.references import Baseline, read_baseline
from mgpu_check.acceptance.report.files import check_paths, check_place
from mgpu_check.acceptance.run_report import CheckRun, Gpu
from mgpu_check.devices.observations import Observation, Outcome, Ruling, Subject, Work
from mgpu_check.option_values import Depth, Level, depth_of
from mgpu_check.settings import Settings, all_options

if TYPE_CHECKING:
    import pytest


@dataclass(frozen=True)
class Check:
    """Static properties of a check."""

    # least number of operations for each subject at the levels quick, standard and long; None if its floor does not
    # count operations
    least: tuple[int, int, int] | None = None
    glance: int = 0  # the same at the level glance; 0 if this level does not have the check
    alone: bool = False  # its ranks neither wait for each other nor exchange data
    # its data cross the link between host and GPU, so a bad link to the host makes it fail, too
    over_the_host: bool = False
    # it reports what the driver says; an observation of a GPU accuses that GPU, however many have one
    of_driver: bool = False
    # it compares facts; an observation of the host accuses the host, and explains no failure of another check
    of_facts: bool = False
    counts: str = ""  # what an operation of a subject is, if each is an independent chance to see a fault that is rare


CHECKLIST: Mapping[str, Check] = {
    "inventory": Check((1, 1, 1), 1, alone=True, of_driver=True, of_facts=True),
    "memory": Check(alone=True),
    "compute": Check((40, 400, 4000), 20, alone=True, over_the_host=True, counts="results of a GPU"),
    "links": Check((4, 20, 200), 4, counts="copies on a link"),
    "collectives": Check((20, 200, 2000), over_the_host=True, counts="collectives"),
    "training": Check((12, 150, 4000), over_the_host=True, counts="steps of training"),
    "soak": Check(over_the_host=True),
    "performance": Check(alone=True),
    "machine": Check(of_facts=True),
    "health": Check((2, 2, 2), 2, alone=True, of_driver=True),
}
"""All checks in the order they run. The soak runs only on request."""

CHECKS = tuple(CHECKLIST)


_SHARE_OF_MEMORY = 0.75
"""Share of the requested memory that must be tested: other programs may have allocated some since it was counted."""
_PASSES = (1, 2, 8)
_HOST_MEMORY = 1 << 20  # bytes; a host with little free memory tests little of it
_RESULTS_OF_CORES = (20, 200, 2000)  # a core has 20 results in a round


def floors(
    gpus: Sequence[Gpu], level: Level, memory_share: float, soak: float | None
) -> dict[str, dict[Subject, Work]]:
    """Return the least work that passes, by check and subject. `soak` is the requested seconds of load, None without a
    soak."""
    glance, depth_index = level == "glance", get_args(Depth).index(depth_of(level))
    each = [Subject("gpu", (gpu.number,)) for gpu in gpus]
    least_work: dict[str, dict[Subject, Work]] = {}
    for name, check in CHECKLIST.items():
        if check.least is not None:
            least = Work(operations=check.glance if glance else check.least[depth_index])
            least_work[name] = dict.fromkeys(_ways(gpus) if name == "links" else each, least)
    least_work["memory"] = {
        subject: Work(bytes=int(gpu.memory * memory_share * _SHARE_OF_MEMORY * _PASSES[depth_index]))
        for subject, gpu in zip(each, gpus, strict=True)
    }
    least_work["performance"] = dict.fromkeys(each, Work())
    hosts = [Subject("host", (host,)) for host in sorted({gpu.host for gpu in gpus})]
    least_work["machine"] = dict.fromkeys(hosts, Work(_HOST_MEMORY, _RESULTS_OF_CORES[depth_index]))
    if soak:
        least_work["soak"] = dict.fromkeys(each, Work(seconds=0.9 * soak))
    return least_work


def _ways(gpus: Sequence[Gpu]) -> list[Subject]:
    pairs = (pair for pair in itertools.permutations(gpus, 2) if pair[0].host == pair[1].host)
    return [
        *(Subject(direction, (gpu.number,)) for gpu in gpus for direction in ("upload", "download")),
        *(Subject("copy", (source.number, target.number)) for source, target in pairs),
    ]


def check_runs(
    observations: Iterable[Observation],
    needed: Mapping[str, Mapping[Subject, Work]],
    times: Callable[[str], tuple[float, float]],
) -> dict[str, CheckRun]:
    """Return the work and the outcome of each check of `needed`. Work on a group counts for each of its GPUs. `times`
    returns when a check began, and how many seconds it took."""
    done: dict[tuple[str, Subject], Work] = {}
    outcomes: dict[str, set[Outcome]] = {check: set() for check in needed}
    reasons: dict[str, list[str]] = {}
    for entry in observations:
        outcomes.setdefault(entry.check, set()).add(entry.outcome)
        if entry.outcome == "unknown":
            reasons.setdefault(entry.check, []).append(f"{entry.subject}: {entry.seen}")
        members = entry.subject.members if entry.subject.kind == "group" else ()
        for subject in (entry.subject, *(Subject("gpu", (member,)) for member in members)):
            key = (entry.check, subject)
            done[key] = done.get(key, Work()) + entry.work
    return {
        check: _check_run(check, times(check), subjects, done, outcomes[check], reasons.get(check, []))
        for check, subjects in needed.items()
    }


def _check_run(
    check: str,
    when: tuple[float, float],
    subjects: Mapping[Subject, Work],
    done: Mapping[tuple[str, Subject], Work],
    outcomes: set[Outcome],
    reasons: Sequence[str],
) -> CheckRun:
    work_by_subject = {subject: done.get((check, subject)) for subject in subjects}
    gaps = {subject: gap for subject, floor in subjects.items() if (gap := _gap(work_by_subject[subject], floor))}
    floor = next(iter(subjects.values()), Work())
    works = (work or Work() for work in work_by_subject.values())
    least = min(works, key=lambda work: (work.operations, work.bytes), default=Work())
    if "failed" in outcomes:
        return CheckRun(check, *when, "failed", floor, least)
    explanation = reasons[0] + (f", and {len(reasons) - 1} more" if len(reasons) > 1 else "") if reasons else ""
    if gaps:
        short = [*map(str, gaps)]
        named = ", ".join(short[:3]) + (f" and {len(short) - 3} more" if len(short) > 3 else "")
        reason = f"{check} did less than its least work on {named}: {next(iter(gaps.values()))}"
        reason += f"; {explanation}" if explanation else ""
        return CheckRun(check, *when, "unknown", floor, least, reason)
    if "unknown" in outcomes:
        return CheckRun(check, *when, "unknown", floor, least, f"{check}: {explanation}")
    return CheckRun(check, *when, "passed" if "passed" in outcomes else "skipped", floor, least)


def _gap(work: Work | None, floor: Work) -> str | None:
    """Return what is missing to the floor; None if nothing is."""
    done = work or Work()
    shortfalls = [
        f"{getattr(done, name):g} of {getattr(floor, name):g} {name}"
        for name in ("bytes", "operations", "seconds")
        if getattr(done, name) < getattr(floor, name)
    ]
    return ", ".join(shortfalls) or (None if work else "nothing was checked")


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


DEFAULT_SOAK = 600.0  # seconds of load at the level "long" without ``--for``


@dataclass(frozen=True)
class Plan:
    """The validated settings of an acceptance run.
    `Plan.of` makes it before the run starts, so that a wrong option costs no time. `Run` and `Node` read it."""

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
                    backing = f"on the CPU only, not on {settings.simulate}"
                    raise ValueError(f"{planted_fault.text}: hardware is simulated {backing}; give --simulate")
            option = "accept_baseline"
            baseline = read_baseline(Path(options.accept_baseline)) if options.accept_baseline else None
            option = "accept_report"
            check_paths(options.accept_report)
            option = "accept_verdict_file"
            if options.accept_verdict_file:
                check_place(Path(options.accept_verdict_file))
            option = "accept_policy"
            policy = read_policy(Path(options.accept_policy)) if options.accept_policy else {}
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
        reason = error.strerror or error
        raise ValueError(f"{path} cannot be read: {reason}. Give a TOML file with {_EXAMPLE}") from error
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
